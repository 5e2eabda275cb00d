"""Memory reserved for fail-over goes to a program that has run out of memory: requests and releases.

The test plays the daemon.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, offer, post, stand_by, started
from tests.libcuda.test_vmm import PLAIN
from tests.support import moving
from tests.support.gate import Gate
from tests.support.libcudas import Libraries
from tests.support.moving import Line, Post, Said
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second"]

MIB = 1 << 20
TOO_MUCH = 4 << 30  # the whole memory
ALLOCATE = f"gpu.code('cuMemAlloc_v2', ctypes.byref(ctypes.c_uint64()), {TOO_MUCH})"
CREATE = f"gpu.code('cuMemCreate', ctypes.byref(ctypes.c_uint64()), {TOO_MUCH}, PLAIN, 0)"
SIZES = "sizes = (ctypes.c_size_t * 2)()"
FREE = "(gpu.code('cuMemGetInfo_v2', sizes, ctypes.byref(sizes, 8)), sizes[0])"
ROOM, STANDBY = 0, 1
ANOTHER = "another program needed its memory"


def give(line: Line, spared: int) -> int:
    """Ask the program to release memory; return how much it reports as released."""
    line.say(moving.GIVE, value=spared)
    return given_of(line, spared)


def given_of(line: Line, spared: int) -> int:
    said = line.hear(moving.GAVE)
    assert said.values[1] == spared
    return said.values[0]


def answer(line: Line, given: int = 0) -> Said:
    """Answer the program's request with `given` bytes, and return the request."""
    said = line.hear(moving.SHORT)
    line.say(moving.ROOM, value=given, number=said.values[2])
    return said


@pytest.mark.parametrize("ask", [{}, {"MPSD_FAILOVER": "exact"}], indirect=True, ids=["keep", "exact"])
@pytest.mark.parametrize("given", [[], [4096], [4096, 1]])
def test_a_program_that_has_run_out_asks_until_nobody_gives(
    post: Post, ask: Program, given: list[int]
) -> None:
    line = post.greet(moving.EXACT, short=True)
    ask(f"m = gpu.memory(2 << 20); {SIZES}")
    ask.tell(ALLOCATE)
    for one in (*given, 0):
        said = answer(line, one)
    assert ask.answer() == "2"
    # Its own snapshot buffer was released by then.
    assert eval(ask(FREE)) == (0, said.values[1]) and said.values[0] == TOO_MUCH
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
    assert ask.end() == ""


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """Return the file with the number of GPU bytes that other programs use."""
    path = tmp_path / "used"
    path.write_bytes(bytes(8))
    return path


def use(used: Path, more: int) -> None:
    (before,) = struct.unpack("=q", used.read_bytes())
    with used.open("r+b") as file:
        file.write(struct.pack("=q", before + more))


def test_what_others_give_is_there_for_the_allocation(
    libraries: Libraries, domain: Domain, post: Post, used: Path
) -> None:
    """Memory that other programs release during the request serves the waiting allocation."""
    known = {"MPSD_FAILOVER": "exact", "MPSD_STANDIN_USED": str(used)}
    with started(libraries, domain, post, **known) as ask:
        line = post.greet(moving.EXACT, short=True)
        ask(f"m = gpu.memory(2 << 20); {SIZES}")
        (_, free) = eval(ask(FREE))
        use(used, free - 16 * MIB)
        ask.tell(f"made = gpu.memory({256 * MIB})")
        until(lambda: not line.is_silent())
        use(used, -512 * MIB)
        assert answer(line, 512 * MIB).values[0] == 256 * MIB
        assert ask.answer() == "None"
        assert ask("gpu.run('add', made, 8, 1), gpu.sync(), gpu.word(made)") == "(0, 0, 1)"
        assert ask.end() == ""


def test_it_says_what_its_standby_takes(
    libraries: Libraries, domain: Domain, second: Domain, post: Post, copies: Path, used: Path
) -> None:
    """A program reports the size of its standby, and does not recreate a standby unless that size and a
    margin are free."""
    context = 100 * MIB
    known = {"MPSD_STANDIN_USED": str(used), "MPSD_STANDIN_CONTEXT": str(context)}
    with started(libraries, domain, post, **known) as ask:
        line = post.greet(moving.EXACT)
        ask(f"m = gpu.memory(8 << 20); gpu.sync(); {SIZES}")
        offer(line, second, copies)
        assert line.hear(moving.READY).values[1] == context
        # The size is reported to a restarted daemon too.
        offer(line, second, copies)
        assert line.hear(moving.READY).values[1] == context
        line.say(moving.GIVE, value=STANDBY)
        line.hear(moving.UNREADY)
        assert given_of(line, STANDBY) == context
        (_, free) = eval(ask(FREE))
        use(used, free - context - MIB)
        offer(line, second, copies)
        said = line.hear(moving.UNREADY)
        assert (said.text, said.values[0]) == ("too little free GPU memory for a standby context", 1)
        use(used, MIB - free + context)
        offer(line, second, copies)
        assert line.hear(moving.READY).values[1] == context
        assert ask.end() == ""


def test_a_standby_for_which_there_is_no_memory_may_come_later(
    libraries: Libraries, domain: Domain, second: Domain, post: Post, copies: Path, used: Path
) -> None:
    known = {"MPSD_STANDIN_USED": str(used), "MPSD_STANDIN_CONTEXT": str(100 * MIB)}
    with started(libraries, domain, post, **known) as ask:
        line = post.greet(moving.EXACT)
        ask(f"m = gpu.memory(8 << 20); gpu.sync(); {SIZES}")
        (_, free) = eval(ask(FREE))
        use(used, free - 16 * MIB)
        offer(line, second, copies)
        said = line.hear(moving.UNREADY)
        assert said.text.startswith("cuDevicePrimaryCtxRetain") and said.values[0] == 1
        use(used, 16 * MIB - free)
        stand_by(line, second, copies)
        assert ask.end() == ""


@EXACT
def test_its_own_standby_goes_first(second: Domain, post: Post, ask: Program, copies: Path) -> None:
    line = post.greet(moving.EXACT, short=True)
    ask("m = gpu.memory(2 << 20); gpu.sync()")
    stand_by(line, second, copies)
    ask.tell(ALLOCATE)
    said = line.hear(moving.UNREADY)
    assert (said.text, said.values[0]) == ("its memory was needed", 1)
    answer(line)
    assert ask.answer() == "2"
    assert ask.end() == ""


@EXACT
def test_nobody_is_asked_whose_daemon_does_not_say_that_it_may_be(post: Post, ask: Program) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(2 << 20)")
    assert ask(ALLOCATE) == "2"
    assert line.is_silent()
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("begins", [ALLOCATE, CREATE])
def test_who_asks_does_not_wait_for_a_daemon_that_has_gone(post: Post, ask: Program, begins: str) -> None:
    line = post.greet(moving.EXACT, short=True)
    ask(PLAIN)
    ask("m = gpu.memory(2 << 20)")
    ask.tell(begins)
    line.hear(moving.SHORT)
    line.close()
    assert ask.answer() == "2"
    assert ask(ALLOCATE) == "2"
    assert ask.end() == ""


@EXACT
def test_a_forked_child_asks_nobody(post: Post, ask: Program) -> None:
    line = post.greet(moving.EXACT, short=True)
    ask("m = gpu.memory(2 << 20); import os")
    assert ask(f"(child := os.fork()) or os._exit({ALLOCATE} == 2), os.waitpid(child, 0)[1]")
    assert line.is_silent()
    assert ask.end() == ""


@EXACT
def test_room_for_copies_is_given_and_what_is_written_next_takes_some_again(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask(f"m = gpu.memory(8 << 20); {SIZES}")
    assert ask("gpu.run('add', m, 8, 5), gpu.sync()") == "(0, 0)"
    (_, free) = eval(ask(FREE))
    given = give(line, ROOM)
    assert given > 0 and eval(ask(FREE)) == (0, free + given)
    assert give(line, ROOM) == 0
    stand_by(line, second, copies)
    gate.let(3)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 6)"
    assert ask.end() == ""


def at_work(gate: Gate, second: Domain, post: Post, ask: Program, copies: Path) -> Line:
    """Return the connection of a program with a standby: m is 5, and a kernel that adds 1 is in flight and
    does not run."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.run('add', m, 8, 5), gpu.sync()") == "(0, 0)"
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    return line


@EXACT
def test_room_is_not_given_while_what_was_given_to_the_driver_has_not_ended(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """The snapshot buffer is not released while submitted work is unfinished; the program waits briefly,
    loses nothing and can move."""
    line = at_work(gate, second, post, ask, copies)
    line.say(moving.GIVE, value=ROOM)
    # A launch meanwhile does not count as the answer.
    assert [given_of(line, ROOM), ask("gpu.run('add', m, 8, 1)")] == [0, "0"]
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 7)"
    assert ask.end() == ""


@EXACT
def test_a_move_comes_first(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = at_work(gate, second, post, ask, copies)
    break_domain(domain)
    line.say(moving.GIVE, value=ROOM)
    line.say(moving.MOVE, 1, again=1)
    heard = [line.hear(moving.MOVED, moving.GAVE, moving.OWN_ERROR) for _ in range(2)]
    heard += [line.hear(moving.MOVED, moving.GAVE) for said in heard if said.kind == moving.OWN_ERROR]
    assert {said.kind for said in heard} >= {moving.MOVED, moving.GAVE}
    assert all(said.text == "" for said in heard if said.kind == moving.MOVED)
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 6)"
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize("mode", [0, 2])
def test_a_capture_is_not_lost_by_what_is_given(post: Post, ask: Program, mode: int) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); s = gpu.made('cuStreamCreate', 1); g = ctypes.c_uint64()")
    assert ask("gpu.run('add', m, 8, 5), gpu.sync()") == "(0, 0)"
    assert ask(f"gpu.code('cuStreamBeginCapture_v2', s, {mode})") == "0"
    assert give(line, ROOM) == 0
    assert ask("gpu.code('cuStreamEndCapture', s, ctypes.byref(g))") == "0"
    assert give(line, ROOM) > 0
    assert ask.end() == ""


@EXACT
def test_a_standby_goes_though_room_is_not_given_yet(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = at_work(gate, second, post, ask, copies)
    line.say(moving.GIVE, value=ROOM)
    line.say(moving.GIVE, value=STANDBY)
    kinds = {
        said.values[1]: said.values[0]
        for said in (line.hear(moving.GAVE, moving.UNREADY) for _ in range(3))
        if said.kind == moving.GAVE
    }
    assert kinds[ROOM] == 0 and kinds[STANDBY] > 0
    gate.let(2**40)
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 6)"
    assert ask.end() == ""


@EXACT
def test_a_late_answer_is_none(post: Post, ask: Program) -> None:
    line = post.greet(moving.EXACT, short=True)
    ask("m = gpu.memory(2 << 20)")
    ask.tell(ALLOCATE)
    first = line.hear(moving.SHORT)
    # An answer to another request.
    line.say(moving.ROOM, value=MIB, number=first.values[2] + 1)
    until(line.is_read)
    assert line.is_silent()
    line.say(moving.ROOM, number=first.values[2])
    assert ask.answer() == "2"
    assert ask.end() == ""


@EXACT
def test_a_program_that_was_lost_without_a_standby_gets_one_still(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A program that faulted without a standby still gets one, whatever its lost context reports about
    free memory."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); gpu.sync()")
    stand_by(line, second, copies)
    line.say(moving.GIVE, value=STANDBY)
    line.hear(moving.UNREADY)
    given_of(line, STANDBY)
    break_domain(domain)
    stand_by(line, second, copies)
    assert move(line).text == ""
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
    assert ask.end() == ""


@EXACT
def test_a_program_ends_though_it_is_about_to_give(
    domain: Domain, gate: Gate, post: Post, ask: Program
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20)")
    assert ask("gpu.run('add', m, 8, 5), gpu.sync()") == "(0, 0)"
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    line.say(moving.GIVE, value=ROOM)
    until(line.is_read)
    gate.let(2**40)
    assert ask.end() == ""


@EXACT
def test_a_standby_is_given_and_made_again(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); gpu.sync()")
    assert give(line, STANDBY) == 0
    stand_by(line, second, copies)
    line.say(moving.GIVE, value=STANDBY)
    said = line.hear(moving.UNREADY)
    assert (said.text, said.values[0], said.generation) == (ANOTHER, 1, 1)
    assert given_of(line, STANDBY) > 0
    assert give(line, STANDBY) == 0
    stand_by(line, second, copies)
    assert ask("gpu.run('add', m, 8, 5), gpu.sync()") == "(0, 0)"
    gate.let(3)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 6)"
    assert ask.end() == ""


SMALL = f"gpu.code('cuMemAlloc_v2', ctypes.byref(ctypes.c_uint64()), {MIB})"


def test_others_are_asked_before_something_is_allocated_that_cannot_come_along(
    libraries: Libraries, domain: Domain, post: Post, used: Path
) -> None:
    """A program asks others for memory before an allocation outside the window, which cannot be carried
    over.

    The driver has a little memory free, in blocks smaller than the window's granule.
    """
    known = {"MPSD_FAILOVER": "exact", "MPSD_STANDIN_USED": str(used)}
    with started(libraries, domain, post, **known) as ask:
        line = post.greet(moving.EXACT, short=True)
        ask(f"m = gpu.made('cuMemAlloc_v2', {2 * MIB}); gpu.sync(); {SIZES}")
        (_, free) = eval(ask(FREE))
        use(used, free - 3 * MIB // 2)
        ask.tell(SMALL)
        until(lambda: not line.is_silent())
        use(used, -8 * MIB)
        answer(line, 8 * MIB)
        assert ask.answer() == "0"
        assert line.is_silent()
        (_, free) = eval(ask(FREE))
        use(used, free - 3 * MIB // 2)
        ask.tell(f"[{SMALL} for _ in range(2)]")
        answer(line)
        assert line.hear(moving.OPAQUE).text == "cuMemAlloc outside the window"
        assert ask.answer() == "[0, 0]"
        assert ask.end() == ""


def test_room_for_copies_is_never_where_it_cannot_come_along(
    libraries: Libraries, domain: Domain, post: Post, used: Path
) -> None:
    known = {"MPSD_FAILOVER": "exact", "snapshot_mib": "1", "MPSD_STANDIN_USED": str(used)}
    with started(libraries, domain, post, **known) as ask:
        line = post.greet(moving.EXACT)
        ask(f"m = gpu.made('cuMemAlloc_v2', {2 * MIB}); gpu.sync(); {SIZES}")
        (_, free) = eval(ask(FREE))
        use(used, free - 3 * MIB // 2)
        assert ask("gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0)"
        assert line.why_unsure() == "too little free GPU memory for the snapshot of one operation"
        assert line.is_silent()
        assert ask.end() == ""


@EXACT
def test_stream_ordered_allocations_are_given_way_to(post: Post, ask: Program) -> None:
    line = post.greet(moving.EXACT, short=True)
    ask(f"m = gpu.memory(2 << 20); gpu.sync(); {SIZES}")
    assert ask("gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0)"
    (_, free) = eval(ask(FREE))
    ask.tell(f"gpu.code('cuMemAllocAsync', ctypes.byref(ctypes.c_uint64()), {TOO_MUCH}, None)")
    short = line.hear(moving.SHORT)
    # Its own snapshot buffer is released by then.
    assert short.values[1] > free
    line.say(moving.ROOM, number=short.values[2])
    assert ask.answer() == "2"
    assert line.is_silent()
    assert ask.end() == ""
