"""The proxy and the stand-in under gcc's sanitizers: any report ends the program with an error."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from mpsd.core.vault import Limits, Quota
from mpsd_libcuda.stats import read_stats
from tests.support import moving
from tests.support.libcudas import DEADLINE_S, Libraries, build_libraries, run
from tests.support.long import of
from tests.support.moving import Line, open_post
from tests.support.site import until
from tests.support.vaulting import MemoryStore, RunningVault
from tests.support.zoning import GrantingVault

LIMITS = Limits(Quota(1 << 40, 512), Quota(1 << 40, 512), Quota(1 << 20, 16), 512, 3600.0)


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def sanitized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    return build_libraries(tmp_path_factory.mktemp("sanitized"), request.param)


@pytest.fixture
def vault_socket() -> Iterator[str]:
    """Run a vault that must hold nothing after the program has ended."""
    store = MemoryStore()
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where:
        path = Path(where) / "vault.sock"
        with RunningVault(path, store, LIMITS) as running:
            yield str(path)
            until(lambda: running.look(lambda: not len(running.vault.ledger)), "nothing is held")
    store.empty()


def start() -> list[str]:
    """Return a command that disables address randomisation, where allowed: older ThreadSanitizers fail on
    newer kernels."""
    fixed = ["setarch", "-R"]
    can = shutil.which("setarch") and run([*fixed, "true"], os.environ).returncode == 0
    return fixed if can else []


VAULTS = ["0", "1", "brought", "zones", "guarded", "far"]
THREADS = of(VAULTS, ["1", "guarded"])


@pytest.mark.parametrize(
    "program, how, vault",
    [*(("sequence", "dlsym", vault) for vault in VAULTS), *(("threads", "getproc", v) for v in THREADS)],
)
def test_no_report(sanitized: Libraries, program: str, how: str, vault: str, vault_socket: str) -> None:
    chosen = {
        "brought": {"MPSD_VAULT_SOCKET": vault_socket},
        "zones": {"vault": "1", "zone_budget": str(1 << 30), "quarantine_bytes": str(8 << 20)},
        "guarded": {
            "vault": "1",
            "zone_budget": str(1 << 30),
            "host_guard_bytes": str(1 << 30),
            # An address range that ThreadSanitizer leaves to programs.
            "place_base": "0x7ea000000000",
        },
        "far": {"vault": "1", "zone_budget": str(16 << 30), "far_bytes": str(3 << 30)},
    }.get(vault, {"vault": vault})
    environment = sanitized.environment(proxied=True, **chosen)
    done = run([*start(), sanitized.program(program), how], environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] in ("ok", "cuCtxSynchronize 709")


def test_no_report_while_a_vault_grants_zones(sanitized: Libraries) -> None:
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where:
        path = Path(where) / "vault.sock"
        with GrantingVault(path, (8 << 30, 20), reads_far=True) as vault:
            environment = sanitized.environment(proxied=True, MPSD_VAULT_SOCKET=str(path))
            done = run([*start(), sanitized.program("threads"), "dlsym"], environment)
            assert (done.returncode, done.stderr) == (0, ""), done.stderr[-4000:]
            assert vault.asked.is_set()


@pytest.mark.parametrize("proxied", [False, True])
@pytest.mark.parametrize("program, how", [("ipc", "dlsym"), ("ipcthreads", "getproc")])
def test_no_report_of_two_processes(
    sanitized: Libraries, program: str, how: str, proxied: bool, vault_socket: str
) -> None:
    chosen = {"MPSD_VAULT_SOCKET": vault_socket} if proxied else {}
    environment = sanitized.environment(proxied=proxied, **chosen)
    done = run([*start(), sanitized.program(program), how], environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "ok"


ARENA = ("arena.c", "granules.c", "holds.c")


def models(
    sanitized: Libraries, program: str, sources: tuple[str, ...], cases: Iterable[Sequence[object]]
) -> None:
    """Run a program that compares the sources with its own model, once for each case.

    These programs have one thread, so under ThreadSanitizer the first case is enough.
    """
    built, environment = sanitized.program(program, sources=sources), sanitized.environment(proxied=False)
    for case in list(cases)[: 1 if sanitized.sanitize == "thread" else None]:
        done = run([built, *map(str, case)], environment)
        assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", ""), (program, case)


def test_the_arena_agrees_with_a_model(sanitized: Libraries) -> None:
    """The arena agrees with a model; a case is a seed, the guard zone size and the first allocation's
    offset."""
    models(
        sanitized,
        "arena",
        ARENA,
        [(0, 0, 0), (1, 0, 5), (2, 1, 0), (3, 1, 1), (4, 3, 9), (5, 10, 3)],
    )


def test_what_is_held_in_an_arena_agrees_with_a_model(sanitized: Libraries) -> None:
    """Reservations in an arena agree with a model; a case is a seed and the guard zone size."""
    models(sanitized, "holds", ARENA, [(0, 0), (1, 0), (2, 1), (3, 3), (4, 7)])


@pytest.mark.parametrize("driver", [(), ("holds",)])
def test_far_zones_lie_where_nobody_is(sanitized: Libraries, driver: tuple[str, ...]) -> None:
    """Far zones overlap nothing; a case is a seed and the size of the far zones in MiB."""
    cases = [(1, 8192), (2, 16384), (3, 64), (4, 2500)]
    models(sanitized, "far", ("far.c",), [(*case, *driver) for case in cases])


def test_no_report_of_several_copies(sanitized: Libraries, tmp_path: Path) -> None:
    for number in range(1, 7):
        shutil.copyfile(sanitized.real, tmp_path / f"copy-{number}.so")
    environment = sanitized.environment(proxied=False)
    done = run([*start(), sanitized.program("copies"), sanitized.real, tmp_path], environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", ""), done.stderr[-4000:]


class Moved:
    """Run programs/failover.c and move it between instances of the stand-in.

    `later`: its threads start with the first rounds().
    """

    def __init__(self, libraries: Libraries, folder: Path, *, later: bool = False, **extra: str) -> None:
        environment = libraries.environment(proxied=True, vault="1", **extra)
        self.folder = folder
        self.generation = 0
        self.process = subprocess.Popen(
            [*start(), libraries.program("failover"), "dlsym", *(["later"] if later else [])],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def rounds(self) -> tuple[int, int]:
        """Wait for more rounds; return how many rounds moves have spoilt, and how many waits reported
        that."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write("more\n")
            self.process.stdin.flush()
            spoilt, told = self.process.stdout.readline().split()
        except (OSError, ValueError):
            raise AssertionError(self.end()) from None
        return int(spoilt), int(told)

    def stand_by(self, line: Line) -> None:
        self.generation += 1
        line.say(moving.STANDBY, self.generation, "/nowhere", str(self.folder))
        said = line.hear(moving.READY)
        assert said.generation == self.generation

    def move(self, line: Line, *, planned: bool = False) -> str:
        said = line.move(self.generation, planned=planned, again=1)
        assert (said.kind, said.generation) == (moving.MOVED, self.generation)
        return said.text

    def has_left(self) -> bool:
        """Return whether the program has left fail-over because of a budget."""
        stats = read_stats(self.process.pid)
        return stats is not None and stats.snapshots.left != 0

    def end(self) -> str:
        try:
            said, wrong = self.process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            said, wrong = self.process.communicate()
        return f"{self.process.returncode} {said}{wrong[-6000:]}"


def leave_with_threads(libraries: Libraries, folder: Path, relay: str, *, by_hand: bool = False) -> None:
    """Run a program with several threads until saving exceeds its time budget, and then on.

    The stand-in's memory is so slow that each wait counts. `by_hand`: until it is told to leave.
    """
    slow = {} if by_hand else {"MPSD_STANDIN_MEMORY_CLOCK": "100", "MPSD_STANDIN_BUS_WIDTH": "100"}
    for number in range(2):
        shutil.copyfile(libraries.real, folder / f"libcuda-{number}.so.1")
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where, open_post(Path(where)) as post:
        program = Moved(
            libraries,
            folder,
            MPSD_FAILOVER_SOCKET=str(post.path),
            MPSD_FAILOVER="exact",
            settle_ms="0",
            relay=relay,
            # With a budget of time, threads at work may leave before the test has offered the standby domain.
            later=not by_hand,
            **slow,
        )
        try:
            line = post.greet(moving.EXACT, switch=True, budget=0 if by_hand else 1)
            program.stand_by(line)
            if by_hand:
                assert program.rounds() == (0, 0) and not program.has_left()
                line.say(moving.GUARD)
            until(lambda: program.rounds() == (0, 0) and program.has_left(), "it has left")
            assert line.hear(moving.LEAVES).values[0] == (3 if by_hand else 1)
            # The program saves nothing more. If it has told of no buffers before this answer, it had released
            # them before it looked.
            line.say(moving.MOVE, program.generation, again=1)
            line.hear(moving.STAYED)
            held = line.held[-1][0] if line.held else 0
            while held:
                held = line.hear(moving.HOLDS).values[0]
            for _ in range(3):
                assert program.rounds() == (0, 0)
            line.say(moving.MOVE, program.generation, again=1)
            line.hear(moving.STAYED)
            assert program.rounds() == (0, 0)
            assert program.end() == "0 ok\n"
        finally:
            program.process.kill()
            program.process.communicate()


def test_no_report_of_a_program_that_is_moved(sanitized: Libraries, tmp_path: Path) -> None:
    for number in range(2):
        shutil.copyfile(sanitized.real, tmp_path / f"libcuda-{number}.so.1")
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where, open_post(Path(where)) as post:
        program = Moved(sanitized, tmp_path, MPSD_FAILOVER_SOCKET=str(post.path), settle_ms="0")
        try:
            line = post.greet()
            for _ in range(3):
                program.stand_by(line)
                program.rounds()
                program.move(line, planned=True)
                assert program.rounds() == (0, 0)
            program.stand_by(line)
            line.say(moving.STAND_DOWN, program.generation)
            assert program.rounds() == (0, 0)
            for number in range(1, 5):
                program.stand_by(line)
                program.rounds()
                if number == 2:
                    line.close()
                    line = post.greet()
                program.move(line)
                spoilt, told = program.rounds()
                assert spoilt <= 4 * 5 * number and told <= number
            line.close()
            line = post.greet()
            program.stand_by(line)
            assert program.rounds() == (spoilt, told)
            said = program.end()
            lines = said.splitlines()
            assert lines[0] == "0 ok", said
            assert all("results of work in flight may be missing" in line for line in lines[1:]), said
        finally:
            program.process.kill()
            program.process.communicate()


@pytest.mark.parametrize("relay", ["off", "always"])
def test_no_report_of_a_program_that_loses_nothing(sanitized: Libraries, tmp_path: Path, relay: str) -> None:
    """In mode `exact`, with a working old context, no round is spoilt and no error is reported."""
    for number in range(2):
        shutil.copyfile(sanitized.real, tmp_path / f"libcuda-{number}.so.1")
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where, open_post(Path(where)) as post:
        program = Moved(
            sanitized,
            tmp_path,
            MPSD_FAILOVER_SOCKET=str(post.path),
            settle_ms="0",
            MPSD_FAILOVER="exact",
            relay=relay,
        )
        try:
            line = post.greet(moving.EXACT)
            for _ in range(4):
                program.stand_by(line)
                program.rounds()
                assert program.move(line) == ""
                assert program.rounds() == (0, 0)
            assert program.end() == "0 ok\n"
        finally:
            program.process.kill()
            program.process.communicate()


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("relay", ["off", "always"])
def test_no_report_of_a_program_that_leaves(
    sanitized: Libraries, tmp_path: Path, relay: str, by_hand: bool
) -> None:
    leave_with_threads(sanitized, tmp_path, relay, by_hand=by_hand)
