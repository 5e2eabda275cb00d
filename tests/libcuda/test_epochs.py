"""When an epoch ends: work of a finished epoch is never replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_budget import SLOW, limit, wish
from tests.libcuda.test_exact import EXACT, gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.gate import ANY, Gate
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]

MANY = 300
MADE = "m = gpu.memory(8 << 20); one, two = (gpu.made('cuStreamCreate', 1) for _ in range(2)); \
e = gpu.made('cuEventCreate', 2)"
WORK = f"""set([gpu.run('add', m, 8, 1, stream=two) for _ in range({MANY})] + [
    gpu.code('cuEventRecord', e, two), gpu.code('cuStreamWaitEvent', one, e, 0),
    gpu.run('add', m, 8, 1, stream=one), gpu.code('cuStreamSynchronize', one)])""".replace("\n", " ")


@EXACT
def test_a_wait_for_one_stream_ends_an_epoch_of_several(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A wait for one stream completes work in other streams too, which the wait itself does not prove."""
    line = post.greet(moving.EXACT)
    assert ask(MADE) == "None"
    rounds = 0

    def done_again() -> int:
        nonlocal rounds
        rounds += 1
        stand_by(line, second if rounds % 2 else domain, copies, rounds)
        assert ask(WORK) == "{0}"
        return move(line, rounds).values[4]

    # The other stream's completion mark may come too late for a single wait.
    until(lambda: done_again() < MANY)
    assert ask("[gpu.sync(), gpu.word(m)]") == f"[0, {rounds * (MANY + 1)}]"
    assert ask.end() == ""


BY_CALLBACK = WORK.replace("gpu.code('cuStreamSynchronize', one)", "gpu.host(name, stream=one)")


def work_until_called_back(ask: Program, name: str, work: str = BY_CALLBACK) -> None:
    """Submit work in two streams that ends with a callback, and wait only for the callback."""
    assert ask(work.replace("name", repr(name))) == "{0}"
    until(lambda: f"('{name}', 0)" in ask("gpu.ran"))


@EXACT
def test_a_callback_behind_everything_ends_the_epoch(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """One stream ends with an event and the other with the callback: neither is marked afterwards."""
    line = post.greet(moving.EXACT)
    assert ask(MADE) == "None"
    stand_by(line, second, copies)
    for name in ("a", "b", "c"):
        work_until_called_back(ask, name)
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 1, stream=one)") == "0"
    break_domain(domain)
    # The callback is in the record, and has run.
    assert move(line).values[4] == 1
    gate.let(ANY)
    assert ask("gpu.sync(), gpu.word(m), len(gpu.ran)") == f"(0, {3 * (MANY + 1) + 1}, 3)"
    assert line.unsure == [] and ask.end() == ""


@pytest.mark.parametrize("ask", [SLOW], indirect=True)
def test_an_epoch_of_costly_copies_goes_on_past_a_callback(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """To save as much for each callback would slow a program that waits only by callbacks."""
    line = post.greet(moving.EXACT, budget=1)
    assert ask(MADE) == "None"
    stand_by(line, second, copies)
    for name in ("a", "b"):
        work_until_called_back(ask, name)
    assert ask("gpu.run('late', m, 8, 1, stream=one)") == "0"
    break_domain(domain)
    assert move(line).values[4] > 2 * MANY
    assert ask("gpu.sync(), gpu.word(m), len(gpu.ran)") == f"(0, {2 * (MANY + 1) + 1}, 2)"
    assert line.unsure == [] and ask.end() == ""


@EXACT
def test_a_callback_ends_an_unsure_epoch(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A callback that runs during the move is in the record, so the work behind it waits."""
    line = post.greet(moving.EXACT, budget=0)
    limit(line, 8 << 20)
    assert ask(f"{MADE}; large = gpu.made('cuMemAlloc_v2', 16 << 20)") == "None"
    stand_by(line, second, copies)
    refuse = "set([gpu.run('add', large, 8, 1, stream=one), gpu.host(name, stream=one)])"
    work_until_called_back(ask, "a", refuse)
    limit(line, 8 << 20, wish(line, 8 << 20))
    assert ask("gpu.run('add', large, 8, 1, stream=one), gpu.host('b', stream=one, holds=True)") == "(0, 0)"
    until(lambda: ask("gpu.began") == str(["a", "b"]))
    assert ask("gpu.run('add', m, 8, 1, stream=one), gpu.host('c', stream=one)") == "(0, 0)"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("len(gpu.ran)") == "1"
    ask("gpu.go('b')")
    assert ask("gpu.sync(), gpu.word(m), gpu.word(large), gpu.ran") == (
        f"(0, 1, 2, {[('a', 0), ('b', 0), ('c', 0)]})"
    )
    assert ask.end() == ""


@EXACT
def test_what_is_captured_is_left_alone(post: Post, ask: Program) -> None:
    """A wait of any thread leaves a capture valid; a mark in the legacy stream would end one in a blocking
    stream."""
    post.greet(moving.EXACT)
    assert ask(MADE + "; s = gpu.made('cuStreamCreate', 0)") == "None"
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    assert ask("gpu.code('cuStreamBeginCapture_v2', s, 2)") == "0"
    assert ask(WORK) == "{0}"
    assert ask("gpu.run('add', m, 8, 1, stream=s)") == "0"
    assert ask("gpu.code('cuStreamEndCapture', s, ctypes.byref(ctypes.c_uint64()))") == "0"
    assert ask("gpu.sync(), gpu.word(m)") == f"(0, {MANY + 2})"
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize(
    ("mib", "operations"),
    # Two operations: the snapshot and the kernel. The completion mark does not run.
    # A large snapshot takes more operations in its own stream; the kernel's stream waits for the last of
    # them.
    [(8, 2), (80, 4)],
)
def test_a_planned_move_takes_the_gpus_word_that_work_has_ended(
    domain: Domain,
    gate: Gate,
    second: Domain,
    third: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    mib: int,
    operations: int,
) -> None:
    """A planned move trusts the completion mark that the GPU wrote, since the driver's answer may be early
    or wrong."""
    line = post.greet(moving.EXACT)
    ask(f"m = gpu.memory({mib} << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.sync()") == "0"
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 3)") == "0"
    gate.let(operations)
    until(lambda: gate.left() == 0)
    said = line.move(1, planned=True)
    assert (said.kind, said.text) == (moving.STAYED, "its work did not end in time")
    gate.let(ANY)
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 3)"
    stand_by(line, third, copies, 2)
    assert move(line, 2, planned=True).text == ""
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 3)"
    assert ask.end() == ""


@EXACT
def test_what_is_saved_waits_for_nothing_that_runs(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Snapshots do not wait for running work, since no work was open when the epoch began."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); n = gpu.memory(4 << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.run('add', m, 8, 5), gpu.run('add', n, 8, 6), gpu.sync()") == "(0, 0, 0)"
    # Buffers saved in the last epoch are saved first: make that m alone.
    assert ask("[gpu.run('add', m, 8, 1) for _ in range(2)], gpu.sync()") == "([0, 0], 0)"
    # A snapshot that is not known to be complete is waited for.
    gate.let(0)
    assert ask("gpu.run('long', m, 8, 1), gpu.run('add', n, 8, 1)") == "(0, 0)"
    # Run the snapshot, the kernel after it, and the second snapshot.
    gate.let(3)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    said = move(line)
    assert (said.text, said.values[3], said.values[4]) == ("", 12 << 20, 2)
    assert ask.end() == ""


@EXACT
def test_what_epochs_write_again_and_again_is_saved_at_once(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("several = [gpu.memory(2 << 20) for _ in range(3)]; gpu.sync()")
    stand_by(line, second, copies)
    add = "[gpu.run('add', m, 8, 1) for m in several], gpu.sync()"
    assert ask(add) == "([0, 0, 0], 0)"
    gate.let(0)
    assert ask("gpu.run('add', several[0], 8, 1)") == "0"
    # Run the kernel that saves all buffers; none of the program's kernels has begun.
    gate.let(1)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    said = move(line)
    assert (said.text, said.values[3], said.values[4]) == ("", 6 << 20, 1)
    # A freed buffer is not saved any more, and new memory in its place has its own record.
    assert ask("gpu.code('cuMemFree_v2', several.pop(1)), gpu.sync()") == "(0, 0)"
    assert ask(add.replace("8, 1", "8, 2")) == "([0, 0], 0)"
    assert ask("[gpu.word(m) for m in several]") == "[4, 3]"
    assert ask.end() == ""


@EXACT
def test_who_finds_all_saved_waits_for_the_copies(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A kernel in another stream than the snapshot's does not begin before the snapshot is complete."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); streams = [gpu.made('cuStreamCreate', 1) for _ in range(12)]")
    stand_by(line, second, copies)
    add = "set(gpu.run('add', m, 8, 1, stream=s) for s in streams)"
    assert ask(f"{add}, gpu.sync()") == "({0}, 0)"
    gate.let(0)
    # From the third launch on, the proxy only checks in which epoch the buffer was saved.
    assert ask("{gpu.run('add', m, 8, 1, stream=streams[0]) for _ in range(3)}, " + add) == "({0}, {0})"
    gate.let(1)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    said = move(line)
    assert (said.text, said.values[4]) == ("", 15)
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 27)"
    assert ask.end() == ""
