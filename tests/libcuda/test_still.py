"""MPSD_FAILOVER_READS: what validation has seen kernels read alone is not saved, and looked at in a move."""

from __future__ import annotations

import ast
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate, move
from tests.libcuda.test_failover import Program, break_domain, copies, post, stand_by, started
from tests.support import moving
from tests.support.gate import ANY, Gate
from tests.support.libcudas import Libraries
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["backend", "copies", "domain", "gate", "post", "second", "third"]

MIB = 1 << 20
LAUNCH = """go = lambda name, *words, stream=0: (lambda held: gpu.code('cuLaunchKernel', gpu.functions[name],
    1, 1, 1, 1, 1, 1, 0, stream, (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held)), None))(
    [ctypes.c_uint64(word) for word in words])""".replace("\n", " ")
MEMORY = f"to = gpu.memory({4 * MIB}); weights = gpu.memory({8 * MIB})"
MISREAD = ("go('copy', to, weights, 8)", "gpu.run('add', weights, 8, 0)")
"""Adding nothing changes nothing: `add` is taken for one that only reads."""
WROTE = "a kernel wrote what it was only seen to read (MPSD_FAILOVER_READS)"
QUIET = 8
"""So many epochs nothing is written; in the one after them sums are taken."""
COPY = "go('copy', to, weights, 8)"


@pytest.fixture
def reads(tmp_path: Path) -> Path:
    return tmp_path / "reads"


def validate(libraries: Libraries, domain: Domain, post: Post, reads: Path, *lines: str) -> str:
    """What a validated program that does this says in the end."""
    exact = {"MPSD_FAILOVER": "exact", "MPSD_FAILOVER_VALIDATE": "1", "MPSD_FAILOVER_READS": str(reads)}
    with started(libraries, domain, post, **exact) as ask:
        post.greet(moving.EXACT)
        ask(LAUNCH)
        ask(MEMORY)
        assert ask("gpu.put(weights, 7), gpu.sync()") == "(0, 0)"
        for line in lines:
            assert ask(line) == "0", line
        return ask.end()


def kernels(reads: Path) -> dict[str, tuple[int, int]]:
    """Which words of each are read, and written."""
    head, *lines = reads.read_text().splitlines()
    assert head == "mpsd reads 1"
    split = [line.split(" ") for line in lines]
    return {name: (int(read, 16), int(written, 16)) for name, _, _, read, written in split}


@pytest.fixture
def known(
    request: pytest.FixtureRequest, libraries: Libraries, domain: Domain, post: Post, reads: Path
) -> Path:
    """`copy` writes by its first word and reads by its second; `store`, or what is asked for, was seen to
    change nothing."""
    lines = getattr(request, "param", (COPY, "go('store', to + 64, 0)"))
    said = validate(libraries, domain, post, reads, *lines)
    assert "validated: " in said and said.count("\n") == 1
    other = "add" if lines == MISREAD else "store"
    assert kernels(reads) == {"copy": (2, 1), other: (1, 0)}
    return reads


class Run:
    """A program with that list, whose weights have been read for some epochs."""

    def __init__(self, ask: Program, line: Line) -> None:
        self.ask, self.line = ask, line

    def rest(self, work: str = COPY, epochs: int = QUIET + 4) -> None:
        for _ in range(epochs):
            assert self.ask(f"{work}, gpu.sync()") == "(0, 0)"


@pytest.fixture
def second_gate(second: Domain) -> Iterator[Gate]:
    made = Gate(Path(second.environment["CUDA_MPS_PIPE_DIRECTORY"]))
    yield made
    made.let(ANY)
    made.close()


@pytest.fixture
def run(
    request: pytest.FixtureRequest, libraries: Libraries, domain: Domain, second: Domain, post: Post,
    gate: Gate, second_gate: Gate, copies: Path, known: Path,
) -> Iterator[Run]:  # fmt: skip
    exact = {"MPSD_FAILOVER": "exact", "MPSD_FAILOVER_READS": str(known)}
    with started(libraries, domain, post, **exact, **getattr(request, "param", {})) as ask:
        line = post.greet(moving.EXACT)
        ask(LAUNCH)
        ask(MEMORY)
        assert ask("gpu.put(weights, 7), gpu.sync()") == "(0, 0)"
        stand_by(line, second, copies)
        yield Run(ask, line)


def saved(run: Run, domain: Domain, gate: Gate, work: str = COPY, generation: int = 1) -> int:
    """Bytes that are put back when this was all in flight, and has saved what it wants saved."""
    gate.let(0)
    assert run.ask(work) == "0"
    gate.let(3)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    said = move(run.line, generation)
    assert said.text == ""
    return said.values[3]


def test_what_is_read_alone_is_not_saved(run: Run, domain: Domain, gate: Gate) -> None:
    run.rest()
    assert saved(run, domain, gate) == 4 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 7)"
    assert run.ask.end() == ""


def test_before_some_epochs_have_passed_it_is(run: Run, domain: Domain, gate: Gate) -> None:
    assert saved(run, domain, gate) == 12 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 7)"
    assert run.ask.end() == ""


WRITES = {
    "the host": "gpu.put(weights, 8)",
    "memset": f"gpu.code('cuMemsetD32Async', weights + {6 * MIB}, 8, 4, 0)",
    "copy": f"gpu.code('cuMemcpyDtoDAsync_v2', weights, to + {MIB}, 64, 0)",
    "kernel": "gpu.run('add', weights, 1, 1)",
    "by another parameter": "go('copy', weights, to, 8)",
    "by both": "go('copy', weights, weights + 4096, 8)",
    "in a graph": "gpu.code('cuGraphLaunch', graph, 0)",
}
GRAPH = """s = gpu.made('cuStreamCreate', 1); gpu('cuStreamBeginCapture_v2', s, 2);
gpu.run('add', weights, 1, 1, stream=s); g = ctypes.c_uint64();
gpu('cuStreamEndCapture', s, ctypes.byref(g)); graph = gpu.made('cuGraphInstantiateWithFlags', g, 0)"""


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_now_and_then_is_saved_again(
    run: Run, domain: Domain, gate: Gate, write: str
) -> None:
    if "graph" in write:
        run.ask(GRAPH.replace("\n", " "))
    run.rest()
    assert run.ask(f"{WRITES[write]}, gpu.sync()") == "(0, 0)"
    value = run.ask("gpu.word(weights)")
    assert saved(run, domain, gate) == 12 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == f"(0, {value})"
    assert run.ask.end() == ""


@pytest.mark.parametrize("lets", [0, 2, 5, ANY])
def test_what_is_written_after_it_was_read_is_put_back(
    run: Run, domain: Domain, gate: Gate, lets: int
) -> None:
    """In one epoch, and read again behind that."""
    run.rest()
    gate.let(0)
    work = "go('copy', to, weights, 8), gpu.run('add', weights, 1, 1), go('copy', to + 64, weights, 8)"
    assert run.ask(work) == "(0, 0, 0)"
    gate.let(lets)
    until(lambda: gate.left() in (0, ANY))
    break_domain(domain)
    assert move(run.line).text == ""
    assert run.ask("gpu.sync(), gpu.word(to), gpu.word(to + 64)") == "(0, 7, 8)"
    assert run.ask.end() == ""


@pytest.mark.parametrize("is_done", [False, True])
def test_a_kernel_that_writes_after_all_is_told(run: Run, domain: Domain, gate: Gate, is_done: bool) -> None:
    """If it has not, all is done again; if it has, that cannot be undone. Nothing is relied on after that."""
    run.rest("go('store', weights, 7)")
    gate.let(0)
    assert run.ask("go('store', weights, 9)") == "0"
    gate.let(is_done)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    said = move(run.line)
    assert (said.text, said.values[3]) == (WROTE if is_done else "", 0)
    assert run.ask("gpu.sync(), gpu.sync(), gpu.word(weights)") == f"({719 if is_done else 0}, 0, 9)"
    said_by_it = run.ask.end()
    assert (WROTE in said_by_it) == is_done


@pytest.mark.parametrize("known", [MISREAD], indirect=True)
@pytest.mark.parametrize(
    "then",
    [
        "0",
        f"gpu.code('cuMemsetD32Async', weights + {6 * MIB}, 8, 4, 0)",
        f"gpu.code('cuMemsetD8Async', weights, 0, {8 * MIB}, 0)",
        "go('copy', weights, to, 8)",
    ],
)
@pytest.mark.parametrize("lets", [0, 1, 8])
def test_what_is_known_to_write_behind_it_hides_nothing(
    run: Run, domain: Domain, gate: Gate, then: str, lets: int
) -> None:
    """It is undone and done again, or told; it is never done twice."""
    run.rest("gpu.run('add', weights, 8, 0)")
    gate.let(0)
    assert run.ask(f"gpu.run('add', weights + 64, 8, 5), {then}") == "(0, 0)"
    gate.let(lets)
    until(lambda: gate.left() < max(lets, 1))
    break_domain(domain)
    said = move(run.line)
    assert said.text in ("", WROTE)
    assert not (lets == 0 and said.text) and not (then == "0" and lets and not said.text)
    if not said.text:
        written = 0 if "D8" in then else 5
        assert run.ask("gpu.sync(), gpu.word(weights + 64)") == f"(0, {written})"
        assert run.ask.end() == ""


def test_a_fault_while_sums_are_compared_is_moved_too(
    run: Run, domain: Domain, second: Domain, third: Domain, gate: Gate, second_gate: Gate, copies: Path
) -> None:
    run.rest()
    gate.let(0)
    assert run.ask(COPY) == "0"
    gate.let(3)
    until(lambda: gate.left() == 0)
    second_gate.let(0)
    break_domain(domain)
    run.line.say(moving.MOVE, 1, again=1)
    # What was saved is put back first, and is the last that is let.
    second_gate.let(1)
    until(lambda: second_gate.left() == 0)
    break_domain(second)
    said = run.line.hear(moving.MOVED)
    assert said.text == ""
    second_gate.let(ANY)
    stand_by(run.line, third, copies, 2)
    said = move(run.line, 2)
    assert (said.text, said.values[3]) == ("", 4 * MIB)
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 7)"
    assert run.ask.end() == ""


def test_what_writes_before_its_pointer_writes_there(run: Run, domain: Domain, gate: Gate) -> None:
    """A pointer to the end of an allocation: what ends there may be meant."""
    run.ask("before = gpu.made('cuModuleLoadData', b'standin module\\nkernel before before 0\\n')")
    run.ask("gpu.functions['before'] = gpu.made('cuModuleGetFunction', before, b'before')")
    run.rest(epochs=QUIET)
    assert run.ask(f"{COPY}, gpu.run('before', weights + {8 * MIB}, 0, 1), gpu.sync()") == "(0, 0, 0)"
    # That address may be another allocation's, which is saved with them.
    assert saved(run, domain, gate) >= 12 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 7)"
    assert run.ask.end() == ""


def test_a_word_that_is_written_beside_others_is_written(run: Run, domain: Domain, gate: Gate) -> None:
    run.rest()
    run.ask("s = gpu.made('cuStreamCreate', 1)")
    gate.let(0)
    beside = "gpu.run('add', to, 1, 1, stream=s)"
    assert run.ask(f"{beside}, gpu.code('cuStreamWriteValue32_v2', 0, weights, 9, 0)") == "(0, 0)"
    gate.let(ANY)
    assert run.ask("gpu.sync(), gpu.sync()") == "(0, 0)"
    assert saved(run, domain, gate) == 12 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 9)"
    assert run.ask.end() == ""


def test_sums_hold_through_moves(
    run: Run, domain: Domain, second: Domain, third: Domain, gate: Gate, second_gate: Gate, copies: Path
) -> None:
    run.rest()
    assert saved(run, domain, gate) == 4 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 7)"
    stand_by(run.line, third, copies, 2)
    assert saved(run, second, second_gate, "go('copy', to + 64, weights, 8)", 2) == 4 * MIB
    assert run.ask("gpu.sync(), gpu.word(to + 64)") == "(0, 7)"
    assert run.ask.end() == ""


def test_small_memory_is_saved_always(run: Run, domain: Domain, gate: Gate) -> None:
    run.ask(f"small = gpu.memory({2 * MIB}); gpu.put(small, 5)")
    run.rest("go('copy', to, small, 8)")
    assert saved(run, domain, gate, "go('copy', to, small, 8)") == 6 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 5)"
    assert run.ask.end() == ""


def test_other_memory_at_that_address_is_not_relied_on(run: Run, domain: Domain, gate: Gate) -> None:
    run.rest()
    run.ask(f"was = weights; gpu('cuMemFree_v2', was); weights = gpu.made('cuMemAlloc_v2', {8 * MIB})")
    assert run.ask("was == weights") == "True"
    assert run.ask(f"{COPY}, gpu.sync()") == "(0, 0)"
    assert saved(run, domain, gate) == 12 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 0)"
    assert run.ask.end() == ""


def test_sums_that_a_move_overtakes_are_none(
    run: Run, domain: Domain, second: Domain, third: Domain, gate: Gate, second_gate: Gate, copies: Path
) -> None:
    run.rest(epochs=QUIET)
    gate.let(0)
    assert run.ask(COPY) == "0"
    gate.let(1)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    assert move(run.line).text == ""
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 7)"
    stand_by(run.line, third, copies, 2)
    assert saved(run, second, second_gate, COPY, 2) == 12 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 7)"
    assert run.ask.end() == ""


def test_sums_of_what_is_written_in_that_epoch_are_none(run: Run, domain: Domain, gate: Gate) -> None:
    """By a kernel that is launched for the first time, behind them."""
    run.rest(epochs=QUIET)
    assert run.ask(f"{COPY}, gpu.run('add', weights, 1, 1), gpu.sync()") == "(0, 0, 0)"
    assert saved(run, domain, gate) == 12 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 8)"
    assert run.ask.end() == ""


def test_what_is_read_in_an_epoch_that_cannot_be_undone_is_still(
    run: Run, domain: Domain, gate: Gate
) -> None:
    run.rest()
    run.ask("pinned = gpu.made('cuMemHostAlloc', 4096, 0)")
    assert run.ask("go('copy', pinned, weights, 8), gpu.sync()") == "(0, 0)"
    assert saved(run, domain, gate) == 4 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 7)"
    assert run.ask.end() == ""


def test_what_is_written_in_an_epoch_that_cannot_be_undone_is_not(
    run: Run, domain: Domain, gate: Gate
) -> None:
    run.rest()
    run.ask("pinned = gpu.made('cuMemHostAlloc', 4096, 0)")
    assert run.ask("go('copy', pinned, to, 8), gpu.run('add', weights, 1, 1), gpu.sync()") == "(0, 0, 0)"
    assert saved(run, domain, gate) == 12 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 8)"
    assert run.ask.end() == ""


@pytest.mark.parametrize("run", [{"MPSD_FAILOVER_UNSURE": "fill"}], indirect=True)
def test_behind_a_kernel_that_may_write_anywhere_nothing_is_still(
    run: Run, domain: Domain, gate: Gate
) -> None:
    run.rest()
    assert run.ask("gpu.run('fill', to, 1, 1), gpu.sync()") == "(0, 0)"
    assert saved(run, domain, gate) == 12 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 7)"
    assert run.ask.end() == ""


@pytest.mark.parametrize("run", [{"MPSD_FAILOVER_UNDO_MIB": "6"}], indirect=True)
@pytest.mark.parametrize("write", ["", "gpu.run('add', weights, 1, 1)", f"gpu.put(weights + {6 * MIB}, 1)"])
def test_more_than_there_is_room_for_may_be_read(run: Run, domain: Domain, gate: Gate, write: str) -> None:
    """It cannot be undone until sums are there; what is written is known all the same."""
    run.rest()
    if write:
        assert run.ask(f"{write}, gpu.sync()") == "(0, 0)"
        assert run.ask(f"{COPY}, gpu.run('slow', to, 1, 1)") == "(0, 0)"
        break_domain(domain)
        assert "MPSD_FAILOVER_UNDO_MIB" in move(run.line).text
        run.ask.process.kill()
        return
    assert saved(run, domain, gate) == 4 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 7)"
    assert run.ask.end() == ""


LINE = "copy 1f 3 0000000000000002 0000000000000001\n"
BAD = {
    "nothing": ("", 1),
    "another head": ("mpsd reads 2\n" + LINE, 1),
    "too few": ("mpsd reads 1\n" + LINE + "copy 1f 3 0000000000000002\n", 3),
    "too many": ("mpsd reads 1\n" + LINE[:-1] + " 1\n", 2),
    "no number": ("mpsd reads 1\n" + LINE.replace("1f", "-1f"), 2),
    "no words": ("mpsd reads 1\n" + LINE.replace(" 3 ", " 0 "), 2),
    "too many words": ("mpsd reads 1\n" + LINE.replace(" 3 ", " 5000 "), 2),
    "not so many digits": ("mpsd reads 1\n" + LINE.replace(" 3 ", " 65 "), 2),
    "no digits": ("mpsd reads 1\n" + LINE.replace("0002", "000x"), 2),
}


def run_with(libraries: Libraries, domain: Domain, post: Post, reads: str) -> str:
    with started(libraries, domain, post, MPSD_FAILOVER="exact", MPSD_FAILOVER_READS=reads) as ask:
        post.greet(moving.EXACT)
        assert ask("gpu.sync()") == "0"
        return ask.end()


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_none_is_told(
    libraries: Libraries, domain: Domain, post: Post, reads: Path, name: str
) -> None:
    text, line = BAD[name]
    reads.write_text(text)
    said = run_with(libraries, domain, post, str(reads))
    assert f"MPSD_FAILOVER_READS: {reads}: line {line} is none that validation writes; all" in said


def test_a_file_that_is_not_there_is_told(
    libraries: Libraries, domain: Domain, post: Post, reads: Path
) -> None:
    said = run_with(libraries, domain, post, str(reads))
    assert f"MPSD_FAILOVER_READS: {reads}: No such file or directory; all" in said
    assert "MPSD_FAILOVER_READS: no absolute path; all" in run_with(libraries, domain, post, "reads")


def test_what_one_run_has_seen_written_another_does_not_take_back(
    libraries: Libraries, domain: Domain, post: Post, known: Path
) -> None:
    """By both words into one allocation: both may have written."""
    validate(
        libraries, domain, post, known, "go('copy', to, to + 4096, 8)", "gpu.run('add', to + 4096, 8, 1)"
    )
    # Nothing but zeros was copied: no word of it was seen to write.
    assert kernels(known) == {"copy": (3, 1), "store": (1, 0), "add": (0, 1)}
    within, add = "go('copy', to, to + 4096, 8)", "gpu.run('add', to + 4096, 8, 1)"
    validate(libraries, domain, post, known, within, add)
    # Nothing but zeros was copied: no word of it was seen to write.
    assert kernels(known) == {"copy": (3, 1), "store": (1, 0), "add": (0, 1)}
    validate(libraries, domain, post, known, within, add, within, "go('store', to, 0)")
    assert kernels(known) == {"copy": (3, 3), "store": (1, 1), "add": (0, 1)}
    validate(libraries, domain, post, known, "go('copy', to, weights, 8)")
    assert kernels(known) == {"copy": (3, 3), "store": (1, 1), "add": (0, 1)}
    assert [path.name for path in known.parent.iterdir()] == [known.name]


def test_kernels_of_a_graph_are_seen(libraries: Libraries, domain: Domain, post: Post, reads: Path) -> None:
    exact = {"MPSD_FAILOVER": "exact", "MPSD_FAILOVER_VALIDATE": "1", "MPSD_FAILOVER_READS": str(reads)}
    with started(libraries, domain, post, **exact) as ask:
        post.greet(moving.EXACT)
        ask(LAUNCH)
        ask(MEMORY)
        ask("gpu.put(weights, 7); s = gpu.made('cuStreamCreate', 1); g = ctypes.c_uint64()")
        assert ask("gpu.code('cuStreamBeginCapture_v2', s, 2)") == "0"
        assert (
            ask("go('copy', to, weights, 8, stream=s), gpu.code('cuStreamEndCapture', s, ctypes.byref(g))")
            == "(0, 0)"
        )
        ask("graph = gpu.made('cuGraphInstantiateWithFlags', g, 0)")
        assert ask("gpu.code('cuGraphLaunch', graph, 0), gpu.sync()") == "(0, 0)"
        ask.end()
    assert kernels(reads) == {"copy": (2, 1)}


def test_what_is_not_looked_at_may_have_been_written(
    libraries: Libraries, domain: Domain, post: Post, reads: Path
) -> None:
    """A kernel that is given memory of the host's; one while a function of the host is open."""
    pinned = "go('copy', gpu.made('cuMemHostAlloc', 4096, 0), weights, 8)"
    held = "gpu.host('a', holds=True), go('store', to, 0), gpu.go('a')"
    validate(libraries, domain, post, reads, pinned, f"[{held}] and 0")
    assert kernels(reads) == {"copy": (0, 2), "store": (0, 1)}


def test_what_is_written_is_there_when_the_program_is_killed(
    libraries: Libraries, domain: Domain, post: Post, reads: Path
) -> None:
    exact = {"MPSD_FAILOVER": "exact", "MPSD_FAILOVER_VALIDATE": "1", "MPSD_FAILOVER_READS": str(reads)}
    with started(libraries, domain, post, **exact) as ask:
        post.greet(moving.EXACT)
        ask(LAUNCH)
        ask(MEMORY)
        assert ask(f"gpu.put(weights, 7), {COPY}, gpu.run('add', weights, 8, 1)") == "(0, 0, 0)"
        ask.process.kill()
        ask.process.wait()
    assert kernels(reads) == {"copy": (2, 1), "add": (0, 1)}


@pytest.mark.parametrize("text", ["something else\n", "mpsd reads 1\nno line\n"])
def test_validation_leaves_a_file_that_is_none(
    libraries: Libraries, domain: Domain, post: Post, reads: Path, text: str
) -> None:
    reads.write_text(text)
    said = validate(libraries, domain, post, reads, "go('copy', to, weights, 8)")
    assert "is none that validation writes; it is left as it is" in said
    assert reads.read_text() == text


def test_where_it_cannot_be_written_that_is_told(
    libraries: Libraries, domain: Domain, post: Post, tmp_path: Path
) -> None:
    said = validate(libraries, domain, post, tmp_path / "none" / "reads", "go('copy', to, weights, 8)")
    assert "none/reads: No such file or directory; what was seen is lost" in said


def test_another_build_of_a_kernel_is_not_meant(
    libraries: Libraries, domain: Domain, second: Domain, post: Post, gate: Gate, copies: Path, known: Path
) -> None:
    lines = [line.split(" ") for line in known.read_text().splitlines()[1:]]
    others = [" ".join([line[0], f"{int(line[1], 16) ^ 1:x}", *line[2:]]) for line in lines]
    known.write_text("\n".join(["mpsd reads 1", *others]) + "\n")
    with started(libraries, domain, post, MPSD_FAILOVER="exact", MPSD_FAILOVER_READS=str(known)) as ask:
        run = Run(ask, post.greet(moving.EXACT))
        ask(LAUNCH)
        ask(MEMORY)
        stand_by(run.line, second, copies)
        run.rest()
        assert saved(run, domain, gate) == 12 * MIB
        assert ask.end() == ""


BITS = (1 << 64) - 1


def summed(one: int, two: int, place: int) -> int:
    """What the kernel of pages.c adds to a page's sum for two words of it, by its own text."""
    source = (Path(__file__).resolve().parents[2] / "clients/libcuda/src/exact/pages.c").read_text()
    loop = source[source.index("ld.volatile.global.v2.u64") : source.index("add.u64 %sum, %sum, %two")]
    values = {"%one": one, "%two": two, "%place": place}
    for name, to, *operands in re.findall(r"(\S+) (%\w+), (%\w+), (%\w+|0x\w+|\d+);", loop):
        a, b = (values[word] if word in values else int(word, 0) for word in operands)
        values[to] = {
            "add.u64": lambda a, b: a + b,
            "mul.lo.u64": lambda a, b: a * b,
            "shr.u64": lambda a, b: a >> b,
            "xor.b64": lambda a, b: a ^ b,
        }[name](a, b) & BITS
    return values["%two"]


@pytest.mark.parametrize("bit", [0, 31, 34, 62, 63])
@pytest.mark.parametrize("which", [0, 1])
def test_two_changes_of_a_page_do_not_make_up_for_one_another(bit: int, which: int) -> None:
    """The same bit of two words of a page, whatever they are: signs that change, words that are toggled."""
    drawn = random.Random(bit)
    for _ in range(500):
        words = [[drawn.choice([0, drawn.getrandbits(64)]) for _ in range(2)] for _ in range(2)]
        places = drawn.sample(range(0, 2 * MIB, 16), 2)
        before = sum(summed(*pair, place) for pair, place in zip(words, places, strict=True))
        for pair in words:
            pair[which] ^= 1 << bit
        after = sum(summed(*pair, place) for pair, place in zip(words, places, strict=True))
        assert (before - after) & BITS


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: PTX cannot be put together here")
@pytest.mark.parametrize("name", ["sums", "saver"])
def test_the_kernels_are_ptx(tmp_path: Path, name: str) -> None:
    source = Path(__file__).resolve().parents[2] / f"clients/libcuda/src/exact/{name}.c"
    lines = [line.strip() for line in source.read_text().splitlines() if line.strip().startswith('"')]
    text, cubin = tmp_path / "code.ptx", tmp_path / "code.cubin"
    # Its literals have no other escapes than those of Python.
    text.write_text("".join(ast.literal_eval(line.rstrip(";")) for line in lines))
    command = ["nvcc", "-cubin", "-arch=sm_90", "-o", str(cubin), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
