"""Memory that outlives its program: a program under mpsd-run, a real daemon, and a process that claims the
memory.

The stand-in driver's memory is memfds.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import mpsd_client
from mpsd.core.vault import Limits, Quota
from mpsd.vault.messages import Status
from mpsd_libcuda.stats import Stats, read_stats
from tests.support.libcudas import DEADLINE_S, MPSD_RUN, ROOT, Libraries
from tests.support.obeying import Obeys
from tests.support.site import OTHER_UID, Site, as_user, until
from tests.support.vaulting import MemoryStore, RunningVault, VaultClient

MIB = 1 << 20
LIMITS = Limits(Quota(1 << 40, 64), Quota(1 << 40, 128), Quota(1 << 40, 16), 256, 3600.0)
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")

# Allocate, write a pattern that depends on the place, then obey commands.
PROGRAM = """
import ctypes, os, resource, sys
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
def must(code):
    assert code == 0, code
def alloc(size):
    pointer = ctypes.c_uint64()
    must(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)))
    return pointer.value
def free(address):
    must(cuda.cuMemFree_v2(ctypes.c_uint64(address)))
def write(address, data):
    must(cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(address), data, ctypes.c_size_t(len(data))))
def files():
    return len(os.listdir("/proc/self/fd"))
must(cuda.cuInit(0))
must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
must(cuda.cuCtxSetCurrent(context))
print("there", flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""


class Program(Obeys):
    """Run a program that ends with its test at the latest."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [*command, sys.executable, "-c", PROGRAM],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        _STARTED.append(self)
        assert self.line() == "there"

    @property
    def pid(self) -> int:
        return self.process.pid

    def stats(self) -> Stats:
        found = read_stats(self.pid)
        assert found is not None
        return found

    def end(self, how: int | None = None) -> int:
        if how is not None:
            self.process.send_signal(how)
        self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode


_STARTED: list[Program] = []


@pytest.fixture(autouse=True)
def _programs() -> Iterator[None]:
    yield
    for program in _STARTED:
        if program.process.returncode is None:
            program.end(signal.SIGKILL)
    _STARTED.clear()


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(protect='"guard"') as started:
        yield started.start()


def environment(site: Site, libraries: Libraries) -> dict[str, str]:
    return {
        **libraries.environment(proxied=False),
        "PYTHONPATH": f"{ROOT / 'clients'}:{ROOT}",
        "MPSD_SOCKET": site.socket,
        "MPSD_LIBCUDA_DIR": str(libraries.proxy),
        "MPSD_STANDIN_GPU": "simulated",
    }


def ctl(site: Site, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpsd.ctl", *arguments]
    return subprocess.run(
        command,
        env={**site.environ(), "MPSD_SOCKET": site.socket},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def listed(site: Site) -> list[dict[str, Any]]:
    done = ctl(site, "vault", "list", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows: list[dict[str, Any]] = json.loads(done.stdout)["holdings"]
    return rows


def claimed(path: Path) -> bytes:
    """Return the content that a process of the same owner claims under the name, segment by segment."""
    content = b""
    with VaultClient(path) as client:
        count, index = 1, 0
        while index < count:
            answer, fds = client.claim("model", index)
            assert answer.status == Status.OK
            content += os.pread(fds[0], answer.size, 0)
            os.close(fds[0])
            count, index = answer.count, index + 1
    return content


def test_a_killed_program_s_memory_is_found_again_with_every_byte(site: Site, libraries: Libraries) -> None:
    door = site.run_dir / "vault.sock"
    program = Program(MPSD_RUN, environment(site, libraries))
    large = program.do("alloc(5 * (1 << 20))")
    small = program.do("alloc(1000)")
    freed = program.do("alloc(3 * (1 << 20))")
    pattern = "bytes((7 * i + i // 251) % 256 for i in range(5 << 20))"
    program.do(f"write({large}, {pattern})")
    program.do(f"write({small}, b'small' * 200)")
    until(lambda: program.stats().vault_taken == 3, "all is in the vault")
    program.do(f"free({freed})")
    site.until(
        lambda s: [(c["proxied"], c["vault_bytes"]) for c in s["clients"]] == [(True, 8 * MIB)],
        "status shows what the vault holds",
    )
    site.until(
        lambda s: [c["protected"]["level"] for c in s["clients"]] == ["guard"], "the client is guarded"
    )
    plan = ctl(site, "vault", "keep", str(program.pid), "model", "--dry-run")
    assert plan.stdout == f"would keep 2 segments, 8 MiB of process {program.pid} under the name model\n"
    assert [row["name"] for row in listed(site)] == [None, None]
    done = ctl(site, "vault", "keep", str(program.pid), "model")
    assert (done.returncode, done.stderr) == (0, "")
    program.end(signal.SIGKILL)
    rows = until(lambda: [r for r in listed(site) if r["died_s"] is not None], "its end is noticed")
    assert [(r["name"], r["bytes"], int(r["address"], 16) % (2 * MIB)) for r in rows] == [
        ("model", 6 * MIB, 0),
        ("model", 2 * MIB, 0),
    ]
    assert "vault: 2 segments, 8 MiB kept from exited clients" in ctl(site, "status").stdout
    # Repeat that with another daemon.
    site.kill()
    site.start()
    content = claimed(door)
    assert content[: 5 * MIB] == eval(pattern) and content[6 * MIB :][:1000] == b"small" * 200
    assert len(content) == 8 * MIB
    assert "model" in ctl(site, "vault", "list").stdout
    if os.geteuid() == 0:
        with as_user(OTHER_UID):
            stranger = VaultClient(door)
        with stranger:
            assert stranger.claim("model")[0].status == Status.DENIED
    assert ctl(site, "vault", "free", "model").stdout == "freed 2 segments, 8 MiB\n"
    assert listed(site) == []
    again = ctl(site, "vault", "free", "model")
    assert again.returncode == 1 and "holds no segment of yours" in again.stderr
    assert ctl(site, "vault", "list").stdout == "the vault holds no segment that you may see\n"


def test_who_wants_more_kept_than_is_ever_kept_is_told(libraries: Libraries) -> None:
    with Site(protect='"guard"', vault__kept_bytes=str(4 * MIB)) as small:
        program = Program(MPSD_RUN, environment(small.start(), libraries))
        program.do("alloc(3 * (1 << 20))")
        until(lambda: program.stats().vault_taken == 1, "it is in the vault")
        done = ctl(small, "vault", "keep", str(program.pid), "model")
        assert (done.returncode, done.stderr) == (0, "")
        program.do("alloc(3 * (1 << 20))")
        until(lambda: program.stats().vault_taken == 2, "it is in the vault")
        for option in ("--dry-run", "--json"):
            done = ctl(small, "vault", "keep", str(program.pid), "model", option)
            assert done.returncode == 0 and "raise [vault] kept_bytes" in done.stderr
        assert json.loads(done.stdout)["too_much"] is True
        program.end(signal.SIGKILL)
        until(lambda: not listed(small), "nothing of it has stayed")


@root_only
def test_users_see_keep_and_free_their_own(site: Site, libraries: Libraries) -> None:
    program = Program(MPSD_RUN, environment(site, libraries))
    program.do("alloc(100)")
    (row,) = until(lambda: listed(site), "it is in the vault")
    assert site.ask(lambda c: c.vault_list(), uid=OTHER_UID) == []
    answers = []
    for pid in (program.pid, os.getpid()):
        with pytest.raises(mpsd_client.NotFoundError) as refused:
            site.ask(lambda c, pid=pid: c.vault_keep(pid, "mine"), uid=OTHER_UID)  # type: ignore[misc]
        answers.append(str(refused.value).replace(str(pid), "PID"))
    assert answers[0] == answers[1]
    with pytest.raises(mpsd_client.NotFoundError, match="no segment of yours"):
        site.ask(lambda c: c.vault_free(str(row["id"])), uid=OTHER_UID)
    for name in ("12", "a b"):
        assert ctl(site, "vault", "keep", str(program.pid), name).returncode == 2
    assert ctl(site, "vault", "keep", str(os.getpid()), "mine").returncode == 1
    wrong = ctl(site, "vault", "keep", str(program.pid), "mine", "--start-ticks", "1")
    assert wrong.returncode == 13
    assert ctl(site, "vault", "free", str(row["id"])).returncode == 0
    # The program still has its memory.
    assert program.do("alloc(100)") > 0
    assert program.end() == 0


def test_nothing_is_left_of_programs_that_end(site: Site, libraries: Libraries) -> None:
    for how in (None, signal.SIGKILL, signal.SIGTERM):
        program = Program(MPSD_RUN, environment(site, libraries))
        program.do("[alloc(3 << 20) for _ in range(5)]")
        until(lambda there=program: there.stats().vault_taken == 5, "all is in the vault")
        program.end(how)
        until(lambda: not listed(site), "nothing is held")
    assert site.status()["counters"]["vault_taken"] == 15


def test_without_a_vault_nothing_is_brought(libraries: Libraries) -> None:
    with Site() as plain:
        plain.start()
        program = Program(MPSD_RUN, environment(plain, libraries))
        program.do("alloc(100)")
        given = program.do("dict(os.environ)")
        assert given["MPSD_PROTECTION"] == "observe" and "MPSD_VAULT_SOCKET" not in given
        assert str(libraries.proxy) not in given["LD_LIBRARY_PATH"]
        assert not (plain.run_dir / "vault.sock").exists()
        assert program.end() == 0


# -- the proxy's side, with a vault of the test ------------------------------------------------------------


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where:
        yield Path(where) / "vault.sock"


def alone(libraries: Libraries, place: Path) -> Program:
    return Program([], libraries.environment(proxied=True, MPSD_VAULT_SOCKET=str(place)))


def test_a_program_without_its_daemon_goes_on_and_brings_later(libraries: Libraries, place: Path) -> None:
    program = alone(libraries, place)
    addresses = program.do("[alloc(3 << 20) for _ in range(4)]")
    program.do(f"free({addresses[1]})")
    files = program.do("files()")
    store = MemoryStore()
    with RunningVault(place, store, LIMITS) as running:
        until(lambda: program.stats().vault_taken == 3, "it found the daemon")
        numbers = running.look(lambda: sorted(h.number for h in running.vault.ledger.holdings()))
        assert numbers == [addresses[0], addresses[2], addresses[3]]
        # Only the connection is open.
        assert program.do("files()") == files + 1
    # The next daemon learns of memory freed while no daemon is running.
    program.do(f"free({addresses[0]})")
    with RunningVault(place, store, LIMITS) as running:
        until(lambda: running.look(lambda: len(running.vault.ledger)) == 2, "the drop was delivered")
        assert program.end() == 0
        until(lambda: not store.held, "nothing is held")


def test_what_waits_for_a_daemon_is_no_open_file(libraries: Libraries, place: Path) -> None:
    """Memory that waits for a daemon holds no extra descriptor: as many memfds as without a vault."""
    counts = []
    for chosen in ({"vault": "1"}, {"MPSD_VAULT_SOCKET": str(place)}):
        program = Program([], libraries.environment(proxied=True, **chosen))
        program.do("[alloc((1 << 20) + 1) for _ in range(40)]")
        counts.append(program.do("files()"))
        assert program.end() == 0
    assert counts[1] <= counts[0] + 1  # The proxy may be connecting.


@pytest.mark.parametrize("there", [False, True])
def test_memory_ends_where_it_ends_without_a_vault(libraries: Libraries, place: Path, there: bool) -> None:
    """Memory runs out where it does without a vault, and freed memory is available again, with or without
    a daemon."""
    chosen = {"MPSD_VAULT_SOCKET": str(place), "MPSD_STANDIN_MEMORY": str(32 * MIB)}
    code = "cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(4 << 20))"
    store = MemoryStore()
    with RunningVault(place if there else place.with_name("other"), store, LIMITS):
        program = Program([], libraries.environment(proxied=True, **chosen))
        for _ in range(20):
            addresses = program.do("[alloc(4 << 20) for _ in range(8)]")
            assert program.do(code) == 2
            program.do(f"[free(a) for a in {addresses}]")
        assert program.end() == 0


def test_a_forked_child_brings_nothing(libraries: Libraries, place: Path) -> None:
    store = MemoryStore()
    with RunningVault(place, store, LIMITS) as running:
        program = alone(libraries, place)
        address = program.do("alloc(3 << 20)")
        until(lambda: program.stats().vault_taken == 1, "it is in the vault")
        real = "os.path.realpath('/proc/self/fd/' + f)"
        sockets = f"sum({real}.count('socket') for f in os.listdir('/proc/self/fd'))"
        calls = f"cuda.cuMemFree_v2(ctypes.c_uint64({address})), cuda.cuMemAlloc_v2(ctypes.byref(context), 1)"
        child = f"(os.fork() or ({calls}, os._exit({sockets})))"
        assert program.do(f"os.waitpid({child}, 0)[1]") == 0
        assert running.look(lambda: [h.number for h in running.vault.ledger.holdings()]) == [address]
        assert program.do(f"free({address})") is None
        until(lambda: running.look(lambda: len(running.vault.ledger)) == 0, "the parent's word is heard")
        assert program.end() == 0


def test_what_the_vault_refuses_the_program_has_all_the_same(libraries: Libraries, place: Path) -> None:
    few = Limits(Quota(1 << 40, 2), LIMITS.user, LIMITS.kept, 256, 3600.0)
    store = MemoryStore()
    with RunningVault(place, store, few):
        program = alone(libraries, place)
        addresses = program.do("[alloc(3 << 20) for _ in range(5)]")
        until(lambda: program.stats().vault_refused == 3, "the quota is said")
        assert program.stats().vault_taken == 2
        assert program.do(f"[free(a) for a in {addresses}]") == [None] * 5
        until(lambda: not store.held, "nothing is held")
        assert program.end() == 0


def test_a_daemon_that_hangs_holds_nobody_up(libraries: Libraries, place: Path) -> None:
    """A daemon that accepts connections and never answers does not block a program."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(str(place))
        deaf.listen()
        program = alone(libraries, place)
        for _ in range(20):
            addresses = program.do("[alloc(3 << 20) for _ in range(5)]")
            assert program.do(f"[free(a) for a in {addresses}]") == [None] * 5
        assert (program.stats().vault_taken, program.stats().vault_mapped) == (0, 0)
        assert program.end() == 0


def test_a_token_stands_for_the_cgroup(libraries: Libraries, place: Path) -> None:
    store = MemoryStore()
    with RunningVault(place, store, LIMITS) as running:
        chosen = {"MPSD_VAULT_SOCKET": str(place), "MPSD_VAULT_TOKEN": "secret"}
        program = Program([], libraries.environment(proxied=True, **chosen))
        program.do("alloc(100)")
        until(lambda: program.stats().vault_taken == 1, "it is in the vault")
        owner = running.look(lambda: next(running.vault.ledger.holdings()).owner)
        assert (owner.uid, owner.cgroup) == (os.geteuid(), "")
        assert owner.token == hashlib.sha256(b"secret".ljust(32, b"\0")).hexdigest()
        assert program.end() == 0
        until(lambda: not store.held, "nothing is held")


def test_a_token_that_is_too_long_is_nobodys(libraries: Libraries, place: Path) -> None:
    """A token that is too long is ignored, since a truncated one would match all tokens with that prefix."""
    store = MemoryStore()
    with RunningVault(place, store, LIMITS):
        chosen = {"MPSD_VAULT_SOCKET": str(place), "MPSD_VAULT_TOKEN": "x" * 33}
        environ = libraries.environment(proxied=True, **chosen)
        program = Program([], environ)
        program.do("alloc(100)")
        assert (program.stats().vault_taken, program.stats().vault_mapped) == (0, 0)
        assert program.end() == 0
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(
            command, env=environ, input="alloc(100)\n", capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0
        assert "vault disabled: MPSD_VAULT_TOKEN has 33 bytes, the limit is 32" in done.stderr
