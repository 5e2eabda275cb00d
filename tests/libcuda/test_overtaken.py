"""Calls that a move overtakes, or nearly overtakes: objects that they created in the old driver instance
are not kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate, move, next_gate
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by, started
from tests.support import moving
from tests.support.gate import ANY, CURRENT, HOST, INIT, KERNEL, NODE, PARAMETERS, SYNC, WRITE, Gate
from tests.support.libcudas import Libraries
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "next_gate", "post", "second", "third"]

EXACT = pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact"}], indirect=True)


def begin_move(line: Line, gate: Gate) -> None:
    """Start a move with a lazy standby and hold it at this gate, where the standby is being created."""
    gate.keep(INIT)
    line.say(moving.MOVE, 1, again=1)
    until(lambda: gate.kept() == INIT)


@pytest.fixture
def moved(domain: Domain, next_gate: Gate, second: Domain, post: Post, ask: Program, copies: Path) -> Line:
    """Move the program to `second` and return its connection; another thread has called there too."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); gpu.sync(); later = Later(gpu)")
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    assert ask("later.start('gpu.now() == gpu.context'), later.result()") == "(None, True)"
    return line


@EXACT
@pytest.mark.parametrize(
    ("call", "answer"),
    [("gpu.code('cuCtxSetCurrent', gpu.context)", "0"), ("gpu.now() == gpu.context", "True")],
    ids=["set", "asked for"],
)
def test_a_threads_context_is_that_of_the_next_copy(
    next_gate: Gate,
    second: Domain,
    third: Domain,
    ask: Program,
    copies: Path,
    moved: Line,
    call: str,
    answer: str,
) -> None:
    stand_by(moved, third, copies, 2)
    next_gate.keep(CURRENT)
    ask(f"later.start({call!r})")
    until(lambda: next_gate.kept() == CURRENT)
    break_domain(second)
    move(moved, 2)
    next_gate.keep(0)
    assert ask("later.result()") == answer
    then = "gpu.now() == gpu.context, gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)"
    assert ask(f"later.start({then!r}), later.result()") == "(None, (True, 0, 0, 1))"
    assert ask.end() == ""


@EXACT
def test_a_move_that_is_about_to_come_is_no_lack_of_memory(
    domain: Domain,
    gate: Gate,
    next_gate: Gate,
    second: Domain,
    third: Domain,
    post: Post,
    ask: Program,
    copies: Path,
) -> None:
    """A call that meets an imminent move is not taken for a lack of memory.

    The first operation needs pinned memory for its completion marks while a lazy standby is being created.
    """
    line = post.greet(moving.EXACT, lazy=True)
    ask("later = Later(gpu)")
    stand_by(line, second, copies)
    gate.keep(HOST)
    ask("later.start('gpu.memory(4 << 20)')")
    until(lambda: gate.kept() == HOST)
    begin_move(line, next_gate)
    gate.keep(0)
    next_gate.keep(0)
    assert line.hear(moving.MOVED, moving.STAYED).text == ""
    ask("m = later.result()")
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
    stand_by(line, third, copies, 2)
    assert line.unsure == []
    assert ask.end() == ""


@EXACT
def test_what_is_registered_in_a_move_that_does_not_come_about_is_registered_once(
    domain: Domain, gate: Gate, post: Post, ask: Program, copies: Path, tmp_path: Path
) -> None:
    line = post.greet(moving.EXACT, lazy=True)
    ask("m = gpu.memory(4 << 20); gpu.sync(); later = Later(gpu); pages = ctypes.create_string_buffer(4096)")
    nowhere = Gate(tmp_path / "nobody")
    line.say(moving.STANDBY, 1, str(nowhere.folder), str(copies))
    assert line.hear(moving.READY).generation == 1
    gate.keep(HOST)
    ask("later.start('gpu.code(\"cuMemHostRegister_v2\", pages, 4096, 0)')")
    until(lambda: gate.kept() == HOST)
    begin_move(line, nowhere)
    gate.keep(0)
    nowhere.keep(0)
    assert line.hear(moving.STAYED).generation == 1
    assert ask("later.result(), gpu.code('cuMemHostUnregister', pages)") == "(0, 0)"
    nowhere.close()
    assert ask.end() == ""


@EXACT
def test_a_child_that_is_forked_while_calls_are_held_goes_on(
    second: Domain, third: Domain, ask: Program, copies: Path, moved: Line
) -> None:
    stand_by(moved, third, copies, 2)
    assert ask("gpu.run('late', m, 8, 1)") == "0"
    break_domain(second)
    assert move(moved, 2, again=2).values[5]
    ask("import signal; version = ctypes.byref(ctypes.c_int())")
    assert ask("in_child(\"signal.alarm(20) or gpu.code('cuDriverGetVersion', version)\")") == "0"
    moved.say(moving.TURN, 2)
    assert moved.hear(moving.DONE).text == ""
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 1)"
    assert ask.end() == ""


@EXACT
def test_the_end_of_a_stream_does_not_spoil_another_threads_capture(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Destroying a stream waits for all work by marks in all streams except the legacy one, which would
    end another thread's capture."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); s, t = (gpu.made('cuStreamCreate', f) for f in (0, 1))")
    ask("later = Later(gpu)")
    stand_by(line, second, copies)
    assert ask("gpu.run('add', m, 8, 1), gpu.code('cuStreamBeginCapture_v2', s, 2)") == "(0, 0)"
    assert ask("later.start(\"gpu.code('cuStreamDestroy_v2', t)\"), later.result()") == "(None, 0)"
    ask("g = ctypes.c_uint64()")
    assert ask("gpu.run('add', m, 8, 10, stream=s), gpu.code('cuStreamEndCapture', s, ctypes.byref(g))") == (
        "(0, 0)"
    )
    ask("x = gpu.made('cuGraphInstantiateWithFlags', g.value, 0)")
    assert ask("gpu.code('cuGraphLaunch', x, s), gpu.sync(), gpu.word(m)") == "(0, 0, 11)"
    assert ask.end() == ""


@pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "keep"}], indirect=True)
def test_a_function_with_the_handle_of_one_that_was_unloaded_has_its_own_parameters(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A function that reuses the handle of an unloaded one is recorded with its own parameters in any
    mode; an ambiguous one prevents the carry-over."""
    line = post.greet(moving.KEEP)
    ask("m = gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', 1); gpu.sync()")
    ask("def load(line): return gpu.made('cuModuleLoadData', b'standin module\\nkernel k ' + line)")
    ask("def find(module): return gpu.made('cuModuleGetFunction', module, b'k')")
    assert ask("gpu.code('cuStreamBeginCapture_v2', s, 2)") == "0"
    ask("modules = [load(b'add 0\\n') for _ in range(64)]; functions = [find(one) for one in modules]")
    ask("gpu.functions.update(enumerate(functions))")
    assert ask("{gpu.run(i, m, 8, 1, stream=s) for i in range(64)}") == "{0}"
    ask("g = ctypes.c_uint64()")
    assert ask("gpu.code('cuStreamEndCapture', s, ctypes.byref(g))") == "0"
    assert (
        ask("gpu.code('cuGraphDestroy', g), {gpu.code('cuModuleUnload', one) for one in modules}")
        == "(0, {0})"
    )
    ask("others = [find(load(b'nothing 0\\n')) for _ in range(64)]")
    assert ask("bool(set(others) & set(functions))") == "True"
    assert ask("gpu.code('cuStreamBeginCapture_v2', s, 2)") == "0"
    launch = "gpu.code('cuLaunchKernel', one, 1, 1, 1, 1, 1, 1, 0, s, None, None)"
    assert ask(f"{{{launch} for one in others}}") == "{0}"
    assert ask("gpu.code('cuStreamEndCapture', s, ctypes.byref(g)), gpu.sync()") == "(0, 0)"
    stand_by(line, second, copies)
    assert ask.end() == ""


@EXACT
def test_memory_that_another_thread_frees_is_not_saved_any_more(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Memory that another thread is freeing is not saved, although a kernel's parameter may still point
    there."""
    line = post.greet(moving.EXACT)
    ask("m, n = gpu.memory(8 << 20), gpu.memory(8 << 20); gpu.sync(); later, other = Later(gpu), Later(gpu)")
    stand_by(line, second, copies)
    assert ask("gpu.run('add', n, 8, 1), gpu.sync()") == "(0, 0)"
    gate.keep(SYNC)
    ask("later.start(\"gpu.code('cuMemFree_v2', m)\")")
    until(lambda: gate.kept() == SYNC)
    gate.let(0)
    ask("other.start(\"gpu.run('add', m, 0, 1)\")")
    gate.keep(0)
    assert ask("later.result(), other.result()") == "(0, 0)"
    gate.let(ANY)
    assert ask("gpu.sync(), gpu.word(n)") == "(0, 1)"
    assert ask.end() == ""


@pytest.mark.parametrize("mode", ["exact", "keep"])
def test_a_capture_ends_with_its_stream(
    domain: Domain,
    second: Domain,
    post: Post,
    libraries: Libraries,
    copies: Path,
    mode: str,
) -> None:
    with started(libraries, domain, post, MPSD_FAILOVER=mode) as ask:
        line = post.greet(moving.EXACT if mode == "exact" else moving.KEEP)
        ask("m = gpu.memory(4 << 20); s = gpu.made('cuStreamCreate', 1); gpu.sync()")
        stand_by(line, second, copies)
        assert ask("gpu.code('cuStreamBeginCapture_v2', s, 2), gpu.code('cuStreamDestroy_v2', s)") == "(0, 0)"
        assert move(line, planned=True).text == ""
        assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
        assert ask.end() == ""


@EXACT
def test_what_is_known_of_a_function_is_no_half_of_it(
    next_gate: Gate, second: Domain, third: Domain, ask: Program, copies: Path, moved: Line
) -> None:
    """A function's parameters are complete before its first launch, and other threads' launches do not
    wait for that."""
    ask("other = Later(gpu)")
    assert ask("gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0)"
    stand_by(moved, third, copies, 2)
    next_gate.keep(PARAMETERS)
    ask("later.start(\"gpu.run('late', m, 8, 1)\")")
    until(lambda: next_gate.kept() == PARAMETERS)
    assert ask("other.start(\"gpu.run('add', m, 8, 1), gpu.sync()\"), other.result()") == "(None, (0, 0))"
    break_domain(second)
    move(moved, 2)
    next_gate.keep(0)
    assert ask("later.result(), gpu.sync(), gpu.word(m)") == "(0, 0, 3)"
    assert ask.end() == ""


@EXACT
def test_a_library_is_not_unloaded_while_it_is_asked_for_a_function(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A library is not unloaded while it is searched for a function; one found by a private table is
    searched in all, latest first."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); gpu.sync(); later, other = Later(gpu), Later(gpu)")
    ask("own, library, found, table = (ctypes.c_void_p() for _ in range(4))")
    load = "gpu('cuLibraryLoadData', ctypes.byref(one), IMAGE, None, None, 0, None, None, 0)"
    ask(f"for one in (own, library): {load}")
    ask("gpu('cuGetExportTable', ctypes.byref(table), b's' * 16)")
    ask("find = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[1]")
    ask("find = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(find)")
    assert ask("find(ctypes.addressof(found), own, b'add')") == "0"
    ask("gpu.functions['found'] = found.value")
    gate.keep(KERNEL)
    ask("later.start(\"gpu.run('found', m, 8, 1)\")")
    until(lambda: gate.kept() == KERNEL)
    ask("other.start(\"gpu.code('cuLibraryUnload', library)\")")
    gate.keep(0)
    assert ask("later.result(), other.result(), gpu.sync(), gpu.word(m)") == "(0, 0, 0, 1)"
    stand_by(line, second, copies)
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("is_back", [False, True], ids=["still there", "back by then"])
def test_a_call_that_the_driver_refuses_spoils_nothing(
    domain: Domain, second: Domain, gate: Gate, next_gate: Gate, post: Post, ask: Program, copies: Path,
    is_back: bool,
) -> None:  # fmt: skip
    """A refused call in the old instance gets the new instance's answer, and all other work is replayed."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); later = Later(gpu); few = (ctypes.c_uint32 * 4)()")
    assert ask("gpu.run('add', m, 8, 5), gpu.sync()") == "(0, 0)"
    refused = "gpu.code('cuMemcpyHtoD_v2', 4096, few, 16)"
    assert ask(f"{refused}, gpu.sync()") == "(1, 0)"
    stand_by(line, second, copies)
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    gate.keep(WRITE)
    ask(f"later.start({refused!r})")
    until(lambda: gate.kept() == WRITE)
    break_domain(domain)
    if is_back:
        # The moving thread blocks in its first call in the new instance, which makes the context current for
        # the restore.
        # put memory back.
        next_gate.keep(CURRENT)
    line.say(moving.MOVE, 1, again=1)
    if is_back:
        until(lambda: next_gate.kept() == CURRENT)
        gate.keep(0)
        next_gate.keep(0)
    said = line.hear(moving.MOVED, moving.OWN_ERROR)
    while said.kind == moving.OWN_ERROR:
        said = line.hear(moving.MOVED, moving.OWN_ERROR)
    gate.keep(0)
    assert said.text == ""
    assert ask("later.result(), gpu.sync(), gpu.word(m)") == "(1, 0, 6)"
    assert ask.end() == ""


@EXACT
def test_a_node_that_comes_after_what_its_handle_was(
    domain: Domain, second: Domain, gate: Gate, post: Post, ask: Program, copies: Path
) -> None:
    """A call to add a node is repeated, with its arguments unchanged, in the new instance."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); gpu.sync(); g = nodes.graph(); later = Later(gpu)")
    ask("k = nodes.kernel('add', m, 8, 1); node = ctypes.c_uint64(nodes.add(g, 'add', m, 8, 10))")
    stand_by(line, second, copies)
    before = ask("mappings('mpsd-standin-vmm')")
    gate.keep(NODE)
    at = "ctypes.byref(node)"
    call = f"gpu.code('cuGraphAddKernelNode_v2', {at}, g, {at}, 1, ctypes.byref(k))"
    ask(f"later.start({call!r})")
    until(lambda: gate.kept() == NODE)
    break_domain(domain)
    line.say(moving.MOVE, 1, again=1)
    until(lambda: ask("mappings('mpsd-standin-vmm')") != before)
    gate.keep(0)
    assert line.hear(moving.MOVED).kind == moving.MOVED
    assert ask("later.result()") == "0"
    ask("x = gpu.made('cuGraphInstantiateWithFlags', g, 0)")
    assert ask("gpu.code('cuGraphLaunch', x, 0), gpu.sync(), gpu.word(m)") == "(0, 0, 11)"
    assert ask.end() == ""
