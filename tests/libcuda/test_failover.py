"""A program fails over to a second instance of the stand-in driver on the simulated GPU; the test plays
the daemon."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import moving
from tests.support.gate import LAY, gate_of
from tests.support.libcudas import DEADLINE_S, PATHS, PROGRAMS, Libraries
from tests.support.moving import Line, Post, open_post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain, until
from tests.support.zoning import SPARSE, LedgerView, ledger_of

__all__ = ["backend", "domain", "second"]


@pytest.fixture
def post() -> Iterator[Post]:
    # A short path: a socket's path must fit in 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="mpsd-fo-", dir="/tmp") as folder,
        open_post(Path(folder)) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def copies(libraries: Libraries, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies")
    for number in range(3):
        shutil.copyfile(libraries.real, folder / f"libcuda-{number}.so.1")
    return folder


class Program:
    def __init__(self, libraries: Libraries, home: Domain, post: Post, **extra: str) -> None:
        usual = {
            "PYTHONPATH": PATHS,
            "CUDA_MPS_PIPE_DIRECTORY": home.environment["CUDA_MPS_PIPE_DIRECTORY"],
            "MPSD_STANDIN_GPU": "simulated",
            "vault": "1",
            "MPSD_FAILOVER_SOCKET": str(post.path),
            "settle_ms": "0",
            # A test that is slow to answer is no silent daemon.
            "rescue_ms": "60000",
            # Keep the old context running for as long as the test lets it.
            "release": "0",
        }
        environment = libraries.environment(proxied=True, **usual | extra)
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "moving.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.answer() == str(self.process.pid)

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, expression: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(expression + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise AssertionError(self.process.stderr and self.process.stderr.read()) from None

    def __call__(self, expression: str) -> str:
        self.tell(expression)
        return self.answer()

    def end(self) -> str:
        """End the program and return its stderr."""
        _, said = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, said
        return said


# For waits that must time out.
IMPATIENT = {"patience_ms": "1000"}
LAZY = {"standby": "lazy"}
both = pytest.mark.parametrize("ask", [{}, LAZY], indirect=True, ids=["eager", "lazy"])


@contextmanager
def started(libraries: Libraries, home: Domain, post: Post, **extra: str) -> Iterator[Program]:
    program = Program(libraries, home, post, **extra)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.communicate()


@pytest.fixture
def ask(
    request: pytest.FixtureRequest, libraries: Libraries, domain: Domain, post: Post
) -> Iterator[Program]:
    with started(libraries, domain, post, **getattr(request, "param", {})) as program:
        yield program


def offer(line: Line, at: Domain, copies: Path, generation: int = 1) -> None:
    line.say(moving.STANDBY, generation, at.environment["CUDA_MPS_PIPE_DIRECTORY"], str(copies))


def is_ready(line: Line, generation: int = 1) -> None:
    said = line.hear(moving.READY, moving.UNREADY)
    assert (said.kind, said.generation, said.text) == (moving.READY, generation, "")


def stand_by(line: Line, at: Domain, copies: Path, generation: int = 1) -> None:
    offer(line, at, copies, generation)
    is_ready(line, generation)


def move(line: Line, generation: int = 1) -> None:
    said = line.move(generation)
    assert said.kind == moving.MOVED and said.text in ("", "mode keep"), said


def break_domain(domain: Domain) -> None:
    neighbour = domain.client().ready()
    assert neighbour.error("dev.launch('store')") is None
    until(lambda: domain.status() == "FAULT")


def test_standard_input_stays_open_whatever_a_driver_instance_closes(
    libraries: Libraries, domain: Domain, second: Domain, post: Post, copies: Path
) -> None:
    there = second.environment["CUDA_MPS_PIPE_DIRECTORY"]
    with started(libraries, domain, post, MPSD_STANDIN_CLOSES_INPUT=there) as ask:
        stand_by(post.greet(moving.KEEP), second, copies)
        # The program reads what it is asked from its standard input.
        assert [ask("1 + 1"), ask("2 + 2")] == ["2", "4"]


@both
def test_memory_names_and_threads_live_on(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    ask("m = gpu.memory(8 << 20)")
    ask("s = gpu.stream(); e = gpu.made('cuEventCreate', 0); small = gpu.memory(600)")
    assert ask("[gpu.run('add', m, 8, 1, stream=s), gpu.sync()]") == "[0, 0]"
    stand_by(line, second, copies)
    ask(
        "late = gpu.memory(4 << 20); t = gpu.stream();"
        "f = gpu.made('cuModuleGetFunction', gpu.module, b'fill')"
    )
    ask("other = Later(gpu)")
    context = ask("gpu.now()")
    assert ask("[gpu.run('add', m, 8, 1, stream=t), gpu.sync()]") == "[0, 0]"
    break_domain(domain)
    move(line)
    assert ask("gpu.now()") == context
    assert ask("[gpu.word(m), gpu.word(late), gpu.word(small)]") == "[2, 0, 0]"
    # Neither stream exists in the new driver instance yet.
    assert ask("[gpu.run('add', m, 8, 1, stream=s), gpu.sync()]") == "[0, 0]"
    assert ask("[gpu.run('add', m, 8, 1, stream=t), gpu.sync()]") == "[0, 0]"
    assert ask("gpu.code('cuEventRecord', e, s), gpu.code('cuEventSynchronize', e)") == "(0, 0)"
    assert ask("gpu.word(m)") == "4"
    assert ask("other.start('gpu.now()'), other.result()") == f"(None, {context})"
    # Create objects after the move and destroy objects from before it.
    assert ask("u = gpu.stream()") == "None"
    assert ask("[gpu.run('add', m, 8, 1, stream=u), gpu.sync(), gpu.word(m)]") == "[0, 0, 5]"
    assert ask("[gpu.code('cuStreamDestroy_v2', x) for x in (s, t, u)]") == "[0, 0, 0]"
    assert ask("[gpu.code('cuMemFree_v2', x) for x in (m, late, small)]") == "[0, 0, 0]"
    assert ask("gpu.code('cuModuleUnload', gpu.module)") == "0"
    assert (domain.status(), second.status()) == ("FAULT", "ACTIVE")
    assert ask.end() == ""


def test_a_thread_that_waits_is_carried_over_and_is_told_once(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    assert ask("gpu.run('long', m, 8, 1)") == "0"
    ask.tell("gpu.sync()")
    break_domain(domain)
    move(line)
    # Work in flight is lost, which the program is told once.
    assert ask.answer() == "719"
    assert ask("[gpu.sync(), gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)]") == "[0, 0, 0, 1]"
    assert "results of work in flight may be missing" in ask.end()


@pytest.mark.parametrize(
    "wait", ["sync()", "code('cuStreamSynchronize', s)", "code('cuEventSynchronize', e)", "word(m)"]
)
def test_a_wait_does_not_sit_in_the_copy_that_is_left(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, wait: str
) -> None:
    """A wait ends with the move, although its healthy old context still runs a kernel of half a minute."""
    line = post.greet()
    ask("m = gpu.memory(8 << 20); s = gpu.stream(); e = gpu.made('cuEventCreate', 0); gpu.sync()")
    stand_by(line, second, copies)
    stream = "s" if wait.endswith("s)") else "0"
    assert ask(f"gpu.run('long', m, 8, 1, stream={stream})") == "0"
    ask(f"gpu.code('cuEventRecord', e, {stream})")
    ask.tell(f"gpu.{wait}")
    line.say(moving.MOVE, 1)
    assert line.hear(moving.MOVED).generation == 1
    assert "719" in ask.answer()
    assert ask("[gpu.sync(), gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)]") == "[0, 0, 0, 1]"


def test_an_error_waits_for_the_daemons_word(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    ask("m = gpu.memory(8 << 20)")
    stand_by(line, second, copies)
    break_domain(domain)
    # The driver checks for errors now and then, so a single wait may still succeed.
    ask.tell("max(gpu.sync() for _ in range(50000))")
    assert line.hear(moving.OWN_ERROR).values[0] == 700
    move(line)
    assert ask.answer() in ("0", "719")
    assert ask("[gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)]") == "[0, 0, 1]"
    assert ask("gpu.sync()") == "0"


def test_without_a_standby_the_error_is_the_programs(domain: Domain, post: Post, ask: Program) -> None:
    line = post.greet()
    break_domain(domain)
    until(lambda: ask("gpu.sync()") == "700")
    assert line.hear(moving.OWN_ERROR, moving.OPAQUE).kind == moving.OWN_ERROR


@both
def test_from_copy_to_copy(domain: Domain, second: Domain, post: Post, ask: Program, copies: Path) -> None:
    line, homes = post.greet(), (domain, second)
    ask("m = gpu.memory(8 << 20); s = gpu.stream(); other = Later(gpu); gpu.sync()")
    for generation in range(1, 7):
        here, there = homes[(generation + 1) % 2], homes[generation % 2]
        stand_by(line, there, copies, generation)
        os.kill(here.server(), signal.SIGKILL)
        move(line, generation)
        # A client that connects earlier reaches the dead server.
        until(lambda here=here: here.say("get_server_list") == "")
        assert ask("[gpu.run('add', m, 8, 1, stream=s), gpu.sync(), gpu.word(m)]") == f"[0, 0, {generation}]"
        if generation % 3 == 0:
            assert ask("other.start('gpu.word(m)'), other.result()") == f"(None, {generation})"
    # The old driver instance is unloaded after the program has reported the move.
    until(lambda: ask("[mappings(f'libcuda-{number}') > 0 for number in range(3)].count(True)") == "1")
    assert ask.end() == ""


def test_what_cannot_come_along_is_said_and_stays(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    stand_by(line, second, copies)
    ask("gpu.code('cuIpcCloseMemHandle', 0)")
    assert line.hear(moving.OPAQUE).text == "cuIpcCloseMemHandle"
    line.say(moving.MOVE, 1)
    assert line.hear(moving.STAYED).generation == 1
    break_domain(domain)
    until(lambda: ask("gpu.sync()") == "700")


def test_a_forked_child_holds_no_memory(second: Domain, post: Post, ask: Program, copies: Path) -> None:
    line = post.greet()
    ask("held = [gpu.memory(8 << 20) for _ in range(9)]")
    stand_by(line, second, copies)
    # Descriptors of the original instance, of the standby and of the next standby; for an instant, those sent
    # to the vault.
    there, in_child = int(ask("memory_descriptors()")), int(ask("in_child('memory_descriptors()')"))
    assert there >= 27 and there - in_child >= 7
    assert ask.end() == ""


def test_a_function_that_came_by_two_ways(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A function found in two ways works after a move; the stand-in's kernels and functions share handles."""
    line = post.greet()
    ask("m = gpu.memory(8 << 20); k = gpu.made('cuLibraryGetKernel', gpu.module, b'add')")
    ask("gpu.functions['kernel'] = gpu.made('cuKernelGetFunction', k)")
    run = "[gpu.run('kernel', m, 8, 1), gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)]"
    assert ask(run) == "[0, 0, 0, 2]"
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    assert ask(run) == "[0, 0, 0, 4]"
    assert ask.end() == ""


def test_a_handle_that_nobody_knows_leads_nowhere(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    ask("import ctypes; never = ctypes.addressof(ctypes.create_string_buffer(64))")
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    assert ask("[gpu.code('cuStreamQuery', never), gpu.code('cuEventQuery', never)]") == "[400, 400]"
    assert ask("gpu.code('cuFuncSetAttribute', never, 8, 0), gpu.sync()") == "(400, 0)"
    assert ask.end() == ""


@both
@pytest.mark.parametrize("what", ["absent", "another"])
def test_a_copy_that_does_not_fit(
    domain: Domain, second: Domain, post: Post, ask: Program, tmp_path: Path, what: str
) -> None:
    line = post.greet()
    if what == "another":
        shutil.copyfile("/lib/x86_64-linux-gnu/libc.so.6", tmp_path / "libcuda-0.so.1")
    line.say(moving.STANDBY, 1, second.environment["CUDA_MPS_PIPE_DIRECTORY"], str(tmp_path))
    said = line.hear(moving.UNREADY)
    assert said.text.startswith({"absent": "no driver file", "another": "the second driver instance"}[what])
    assert ask("gpu.sync()") == "0"
    assert ask.end() == ""


@pytest.mark.parametrize("ask", [{"zone_budget": str(1 << 30)} | IMPATIENT], indirect=True)
def test_guard_zones_come_along(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    ask("m = gpu.memory(8 << 20); gpu.sync()")
    assert ask("[gpu.run('store', m + (8 << 20), 4, 1), gpu.sync()]") == "[0, 0]"
    stand_by(line, second, copies)
    assert ask("[gpu.run('store', m - 4, 4, 1), gpu.sync()]") == "[0, 0]"
    ask("n = gpu.memory(4 << 20); gpu.sync()")
    break_domain(domain)
    move(line)
    assert ask("[gpu.run('store', x, 4, 1) for x in (m - 4, m + (8 << 20), n + (4 << 20))]") == "[0, 0, 0]"
    assert ask("gpu.sync()") == "0"
    assert second.status() == "ACTIVE"
    assert ask("[gpu.run('store', 0x7E0000000000, 4, 1), gpu.sync()]") == "[0, 700]"


@contextmanager
def laying_again(domain: Domain, second: Domain, post: Post, ask: Program, copies: Path) -> Iterator[None]:
    """Move a program with the allocations `m`; on entry a thread is kept that is about to lay a zone again.

    It goes on at the end, and the program has moved.
    """
    with gate_of(second) as gate:
        line = post.greet(moving.EXACT)
        ask("m = [gpu.memory(8 << 20) for _ in range(4)]; gpu.sync()")
        stand_by(line, second, copies)
        break_domain(domain)
        gate.keep(LAY)
        line.say(moving.MOVE, 1, again=1)
        until(lambda: gate.kept() == LAY)
        yield
        gate.keep(0)
        line.hear(moving.MOVED)


ZONES_EXACTLY = pytest.mark.parametrize(
    "ask", [{"zone_budget": str(1 << 30), "MPSD_FAILOVER": "exact"} | IMPATIENT], indirect=True
)


@ZONES_EXACTLY
def test_a_program_goes_on_while_its_zones_are_laid_again(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A launch with a pointer to the end of an allocation looks that up with the lock of the windows."""
    with laying_again(domain, second, post, ask, copies):
        assert ask("[gpu.run('add', m[0], 2, m[0] + (8 << 20)), gpu.sync()]") == "[0, 0]"
    assert ask("[gpu.run('store', m[0] - 4, 4, 1), gpu.sync()]") == "[0, 0]"


@ZONES_EXACTLY
@pytest.mark.parametrize("which", range(4))
def test_what_is_freed_while_zones_are_laid_again_stays_covered(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, which: int
) -> None:
    """Whether or not its turn to be covered has come."""
    with laying_again(domain, second, post, ask, copies):
        ask.tell(f"gpu.code('cuMemFree_v2', m[{which}])")
    assert ask.answer() == "0"
    assert ask(f"[gpu.run('store', m[{which}], 4, 1), gpu.sync()]") == "[0, 0]"


def is_covered(ledger: LedgerView, address: int) -> bool:
    return any(zone.kind == SPARSE and zone.start <= address < zone.end for zone in ledger.zones())


@pytest.mark.parametrize(
    "ask", [{"zone_budget": str(1 << 30), "host_guard_bytes": str(4 << 30)}], indirect=True
)
def test_the_guard_over_host_memory_comes_along(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    ask("m = gpu.memory(8 << 20); gpu.sync(); import ctypes; b = ctypes.create_string_buffer(8 << 20)")
    middle = int(ask("ctypes.addressof(b)")) + (4 << 20)
    with contextlib.closing(ledger_of(ask.process.pid)) as ledger:
        until(lambda: is_covered(ledger, middle))
        assert ask(f"[gpu.run('store', {middle}, 4, 1), gpu.sync()]") == "[0, 0]"
        stand_by(line, second, copies)
        break_domain(domain)
        move(line)
        until(lambda: is_covered(ledger, middle))
    assert ask(f"[gpu.run('store', {middle}, 4, 1), gpu.sync(), any(b.raw)]") == "[0, 0, False]"
    pages = f"ctypes.c_void_p({middle}), ctypes.c_size_t(4096)"
    assert ask(f"gpu.code('cuMemHostRegister_v2', {pages}, 0)") == "0"
    assert ask(f"[gpu.run('store', {middle}, 4, 1), gpu.sync(), b.raw[4 << 20]]") == "[0, 0, 4]"
    assert second.status() == "ACTIVE"


@pytest.mark.parametrize(
    "ask", [{"zone_budget": str(16 << 30), "far_bytes": str(4 << 30)} | IMPATIENT], indirect=True
)
def test_far_zones_come_along_and_follow_the_window(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Far zones on both sides, several GiB away, move along, and later allocations take their place."""
    line = post.greet()
    ask("m = gpu.memory(8 << 20); gpu.sync()")
    strays = "[gpu.run('store', x, 4, 1) for x in (m - (2 << 30), m + (2 << 30))]"
    assert ask(f"[{strays}, gpu.sync()]") == "[[0, 0], 0]"
    stand_by(line, second, copies)
    assert ask(f"[{strays}, gpu.sync()]") == "[[0, 0], 0]"
    break_domain(domain)
    move(line)
    assert ask(f"[{strays}, gpu.sync()]") == "[[0, 0], 0]"
    ask("n = gpu.memory(8 << 20); gpu.sync()")
    assert ask("[gpu.run('store', n, 7, 1), gpu.sync(), gpu.word(n)]") == "[0, 0, 7]"
    assert ask(f"[{strays}, gpu.run('store', n + (2 << 30), 4, 1), gpu.sync()]") == "[[0, 0], 0, 0]"
    assert second.status() == "ACTIVE"
    assert ask("[gpu.run('store', 0x7E0000000000, 4, 1), gpu.sync()]") == "[0, 700]"


@both
def test_a_planned_move_loses_nothing(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    ask("m = gpu.memory(8 << 20); s = gpu.stream(); gpu.sync()")
    stand_by(line, second, copies)
    assert ask("[gpu.run('late', m, 8, 1, stream=s), gpu.run('late', m + 4096, 8, 1)]") == "[0, 0]"
    line.say(moving.MOVE, 1, planned=True)
    assert line.hear(moving.MOVED).generation == 1
    assert ask("[gpu.sync(), gpu.word(m), gpu.word(m + 4096)]") == "[0, 1, 1]"
    assert ask("[gpu.run('add', m, 8, 1, stream=s), gpu.sync(), gpu.word(m)]") == "[0, 0, 2]"
    assert domain.status() == "ACTIVE"
    # Given the command again, the program reports where it is.
    line.say(moving.MOVE, 1)
    assert line.hear(moving.MOVED).generation == 1
    assert ask.end() == ""


@both
def test_a_daemon_that_comes_back_finds_the_standby(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    ask("m = gpu.memory(8 << 20); gpu.sync()")
    stand_by(line, second, copies, 7)
    line.close()
    line = post.greet()
    stand_by(line, second, copies, 7)
    os.kill(domain.server(), signal.SIGKILL)
    move(line, 7)
    assert ask("[gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)]") == "[0, 0, 1]"
    line.close()
    assert post.accept().hear(moving.HELLO).generation == 7


def test_a_daemon_that_takes_it_hears_which_pages_are_those_of_copies_that_were_left(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """A daemon that supports the message learns which pages belong to old driver instances, here none,
    after a move and an unload."""
    line, homes = post.greet(left=True), (domain, second)
    ask("m = gpu.memory(8 << 20); gpu.sync()")

    def says_none() -> bool:
        return line.hear(moving.LEFT).values[:3] == (1, 0, 0)

    stand_by(line, second, copies, 1)
    move(line, 1)
    assert says_none()
    line.close()
    line = post.greet(left=True)
    assert says_none()
    stand_by(line, homes[0], copies, 2)
    move(line, 2)
    assert says_none() and says_none()
    # A daemon without that support gets no such message.
    line.close()
    line = post.greet()
    stand_by(line, second, copies, 3)
    move(line, 3)
    assert ask("[gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)]") == "[0, 0, 1]"
    assert line.is_silent() and ask.end() == ""


@both
def test_a_planned_move_out_of_a_lost_context_is_told(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet()
    ask("m = gpu.memory(8 << 20); gpu.sync()")
    stand_by(line, second, copies)
    assert ask("gpu.run('long', m, 8, 1)") == "0"
    os.kill(domain.server(), signal.SIGKILL)
    line.say(moving.MOVE, 1, planned=True)
    said = line.hear(moving.MOVED, moving.OWN_ERROR)
    assert said.kind == moving.MOVED or line.hear(moving.MOVED)
    assert ask("[gpu.sync(), gpu.word(m)]") == "[719, 0]"


@both
def test_what_is_asked_after_a_move(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """After a move, function pointers and retained contexts stay valid, and pinned memory outlives its
    driver instance."""
    line = post.greet()
    ask("m = gpu.memory(8 << 20); before = gpu.function('cuMemAlloc'); gpu.sync()")
    stand_by(line, second, copies)
    assert ask("gpu.made('cuDevicePrimaryCtxRetain', 0) == gpu.context") == "True"
    # Freed memory allocated again at the same address is registered with the standby too.
    assert ask("[gpu.pinned(), gpu.pinned()]") == "[0, 0]"
    move(line)
    assert ask("gpu.function('cuMemAlloc') == before, gpu.sync()") == "(True, 0)"
    ask("p = gpu.made('cuMemHostAlloc', 1 << 20, 0)")
    assert ask("gpu.code('cuDevicePrimaryCtxRelease_v2', 0), gpu.word(m)") == "(0, 0)"
    stand_by(line, domain, copies, 2)
    move(line, 2)
    assert ask("ctypes.memset(p, 1, 1 << 20) == p, gpu.code('cuMemFreeHost', p)") == "(True, 0)"
    assert ask("gpu.code('cuIpcCloseMemHandle', 0)") == "801"
    assert ask.end() == ""


@pytest.mark.parametrize(
    "ask", [{"settle_ms": "60000"}, LAZY | {"settle_ms": "60000"}], indirect=True, ids=["eager", "lazy"]
)
def test_the_next_standby_does_not_wait_for_the_copy_that_was_left(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """The next standby is ready before the old driver instance is unloaded, since a replay may fault at
    once."""
    line = post.greet()
    ask("m = gpu.memory(8 << 20); gpu.sync()")
    homes = (domain, second)
    for generation in (1, 2):
        stand_by(line, homes[generation % 2], copies, generation)
        move(line, generation)
    stand_by(line, second, copies, 3)
    assert ask("[mappings(f'libcuda-{number}') > 0 for number in range(3)].count(True) >= 2") == "True"
    move(line, 3)
    assert ask("[gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)]") == "[0, 0, 1]"
    assert ask.end() == ""


def test_where_there_are_no_more_copies_it_does(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, tmp_path: Path
) -> None:
    line, homes = post.greet(), (domain, second)
    for number in range(2):
        shutil.copyfile(copies / f"libcuda-{number}.so.1", tmp_path / f"libcuda-{number}.so.1")
    assert ask("m = gpu.memory(8 << 20); gpu.sync()") == "None"
    for generation in range(1, 5):
        stand_by(line, homes[generation % 2], tmp_path, generation)
        move(line, generation)
    assert ask("[gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)]") == "[0, 0, 1]"
    assert ask.end() == ""
