"""Read list (MPSD_FAILOVER_READS): memory that validation has seen only read is not saved, and is checked
in a move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate, move
from tests.libcuda.test_failover import Program, break_domain, copies, post, stand_by, started
from tests.support import moving
from tests.support.gate import ANY, Gate, gate_of
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
"""Adding zero changes nothing, so validation takes `add` for a kernel that only reads."""
WROTE = "a kernel wrote memory that it only read during validation (MPSD_FAILOVER_READS)"
QUIET = 8
"""Number of epochs without a write after which the next epoch takes checksums."""
COPY = "go('copy', to, weights, 8)"


@pytest.fixture
def reads(tmp_path: Path) -> Path:
    return tmp_path / "reads"


@contextmanager
def validated(libraries: Libraries, domain: Domain, post: Post, reads: Path) -> Iterator[Program]:
    exact = {"MPSD_FAILOVER": "validate", "MPSD_FAILOVER_READS": str(reads)}
    with started(libraries, domain, post, **exact) as ask:
        post.greet(moving.EXACT)
        ask(LAUNCH)
        ask(MEMORY)
        assert ask("gpu.put(weights, 7), gpu.sync()") == "(0, 0)"
        yield ask


def validate(libraries: Libraries, domain: Domain, post: Post, reads: Path, *lines: str) -> str:
    """Run the lines in a validated program and return its stderr."""
    with validated(libraries, domain, post, reads) as ask:
        for line in lines:
            assert ask(line) == "0", line
        return ask.end()


def kernels(reads: Path) -> dict[str, tuple[int, int]]:
    """Return the mask of parameters that each kernel reads, and of those that it writes."""
    head, *lines = reads.read_text().splitlines()
    assert head == "mpsd reads 1"
    split = [line.split(" ") for line in lines]
    return {name: (int(read, 16), int(written, 16)) for name, _, _, read, written in split}


@pytest.fixture(scope="module")
def validations() -> dict[tuple[str, ...], bytes]:
    """Cache the read lists of this file, keyed by the program's lines."""
    return {}


@pytest.fixture
def known(
    request: pytest.FixtureRequest, libraries: Libraries, domain: Domain, post: Post, reads: Path,
    validations: dict[tuple[str, ...], bytes],
) -> Path:  # fmt: skip
    """Return a read list: `copy` writes its first parameter and reads its second, and `store` changes
    nothing.

    A parameter names other lines. The list depends on the lines alone, so each list is validated once.
    """
    lines = getattr(request, "param", (COPY, "go('store', to + 64, 0)"))
    if lines in validations:
        reads.write_bytes(validations[lines])
        return reads
    said = validate(libraries, domain, post, reads, *lines)
    assert "validated: " in said and said.count("\n") == 1
    other = "add" if lines == MISREAD else "store"
    assert kernels(reads) == {"copy": (2, 1), other: (1, 0)}
    validations[lines] = reads.read_bytes()
    return reads


class Run:
    """Run a program with that list; its weights have only been read for some epochs."""

    def __init__(self, ask: Program, line: Line) -> None:
        self.ask, self.line = ask, line

    def rest(self, work: str = COPY, epochs: int = QUIET + 4) -> None:
        for _ in range(epochs):
            assert self.ask(f"{work}, gpu.sync()") == "(0, 0)"


@pytest.fixture
def second_gate(second: Domain) -> Iterator[Gate]:
    with gate_of(second) as made:
        yield made


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
    """Lose the context with this work in flight and its snapshots done; return the number of restored
    bytes."""
    gate.let(0)
    assert run.ask(work) == "0"
    gate.let(1)
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


def test_what_was_written_once_and_is_read_alone_then_is_not(run: Run, domain: Domain, gate: Gate) -> None:
    """A buffer written once and then only read is not saved, although it was among the usually written
    buffers."""
    assert run.ask("gpu.run('add', weights, 8, 1), gpu.sync()") == "(0, 0)"
    run.rest(epochs=3 * QUIET)
    assert saved(run, domain, gate) == 4 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 8)"


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
    """A buffer written after it was read, in one epoch, is restored for the replay."""
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
    """A kernel that writes against the list is reported and the list is not used again.

    If the kernel has not written yet, all work is replayed; if it has, the write cannot be rolled back.
    """
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
    """Later work that is known to write does not hide an unlisted write: work is replayed or reported,
    never executed twice."""
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
    gate.let(1)
    until(lambda: gate.left() == 0)
    second_gate.let(0)
    break_domain(domain)
    run.line.say(moving.MOVE, 1, again=1)
    # The saved data is restored first; the gate lets only that through.
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
    """A kernel with a pointer to the end of an allocation may write below it."""
    run.ask("before = gpu.made('cuModuleLoadData', b'standin module\\nkernel before before 0\\n')")
    run.ask("gpu.functions['before'] = gpu.made('cuModuleGetFunction', before, b'before')")
    run.rest(epochs=QUIET)
    assert run.ask(f"{COPY}, gpu.run('before', weights + {8 * MIB}, 0, 1), gpu.sync()") == "(0, 0, 0)"
    # The address may also belong to the next allocation, so both are saved.
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
    """Checksums taken in an epoch that also writes the buffer are invalid, here with a new kernel behind
    them."""
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


@pytest.mark.parametrize("run", [{"MPSD_FAILOVER_KERNELS": "unsure:fill"}], indirect=True)
def test_behind_a_kernel_that_may_write_anywhere_nothing_is_still(
    run: Run, domain: Domain, gate: Gate
) -> None:
    run.rest()
    assert run.ask("gpu.run('fill', to, 1, 1), gpu.sync()") == "(0, 0)"
    assert saved(run, domain, gate) == 12 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 7)"
    assert run.ask.end() == ""


@pytest.mark.parametrize("run", [{"snapshot_mib": "6"}], indirect=True)
@pytest.mark.parametrize("write", ["", "gpu.run('add', weights, 1, 1)", f"gpu.put(weights + {6 * MIB}, 1)"])
def test_more_than_there_is_room_for_may_be_read(run: Run, domain: Domain, gate: Gate, write: str) -> None:
    """More memory than the snapshot buffer holds may be read; a write to it is recognised, but rolled back
    only with checksums."""
    run.rest()
    if write:
        assert run.ask(f"{write}, gpu.sync()") == "(0, 0)"
        assert run.ask(f"{COPY}, gpu.run('slow', to, 1, 1)") == "(0, 0)"
        break_domain(domain)
        assert move(run.line).text == "one operation may write more than the snapshot buffers may hold"
        run.ask.process.kill()
        return
    assert saved(run, domain, gate) == 4 * MIB
    assert run.ask("gpu.sync(), gpu.word(to)") == "(0, 7)"
    assert run.ask.end() == ""
