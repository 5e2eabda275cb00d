"""Legacy IPC of memory in the window, between two proxied processes with a vault, on the stand-in driver."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.base.model import ProcessInstance
from mpsd.core.vault import Limits, Quota
from mpsd.zones.grants import Grant
from tests.libcuda.test_vault import LIMITS, Program
from tests.support.libcudas import Libraries, run
from tests.support.site import OTHER_UID, until
from tests.support.vaulting import MemoryStore, RunningVault
from tests.support.zoning import NULL_PAGE, ZONE, LedgerView

MIB = 1 << 20
# A process that has had a window keeps the descriptor of its ledger open.
LEDGER = 1

SETUP = """
import ctypes
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]
def export(address):
    handle = Handle()
    code = cuda.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address))
    return code or bytes(handle)
def opened(data):
    pointer = ctypes.c_uint64()
    code = cuda.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), Handle.from_buffer_copy(data), 1)
    return -code or pointer.value
def close(address):
    return cuda.cuIpcCloseMemHandle(ctypes.c_uint64(address))
def read(address, size):
    data = ctypes.create_string_buffer(size)
    must(cuda.cuMemcpyDtoH_v2(data, ctypes.c_uint64(address), ctypes.c_size_t(size)))
    return data.raw
"""


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where:
        yield Path(where) / "vault.sock"


@pytest.fixture
def vault(place: Path) -> Iterator[RunningVault]:
    store = MemoryStore()
    with RunningVault(place, store, LIMITS) as running:
        yield running
    store.empty()


@pytest.fixture
def programs(libraries: Libraries) -> Iterator[list[Program]]:
    """Return a list of programs, all ended with the test."""
    started: list[Program] = []
    yield started
    for program in started:
        if program.process.returncode is None:
            program.end(signal.SIGKILL)


def start(libraries: Libraries, place: Path, programs: list[Program], **extra: str) -> Program:
    program = Program([], libraries.environment(proxied=True, MPSD_VAULT_SOCKET=str(place), **extra))
    programs.append(program)
    program.do(f"exec({SETUP!r}, globals())")
    return program


@pytest.mark.parametrize("how", ["dlsym", "getproc"])
def test_two_programs_see_no_difference(libraries: Libraries, vault: RunningVault, how: str) -> None:
    program = libraries.program("ipc")
    without = run([program, how], libraries.environment(proxied=False))
    assert (without.returncode, without.stderr) == (0, "")
    assert "cuMemcpyDtoH 0 told by B.." in without.stdout.splitlines()
    environment = libraries.environment(proxied=True, MPSD_VAULT_SOCKET=str(vault.path))
    done = run([program, how], environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == without.stdout.splitlines()
    # The first process opens both segments once, and one of them once more.
    assert vault.look(lambda: dict(vault.vault.counters))["opens"] == 3
    until(lambda: vault.look(vault.vault.ledger.is_empty), "nothing is held")


def test_an_allocation_is_shared_with_its_piece_mapped_once(
    libraries: Libraries, vault: RunningVault, programs: list[Program]
) -> None:
    exporter, opener = (start(libraries, vault.path, programs) for _ in range(2))
    addresses = exporter.do("[alloc(1000), alloc(3000)]")
    handles = [exporter.do(f"export({address})") for address in addresses]
    assert all(len(handle) == 64 for handle in handles)
    assert exporter.do(f"export({addresses[0]})") == handles[0]
    before = opener.do("files()")
    there = [opener.do(f"opened({handle!r})") for handle in handles]
    assert there[1] - there[0] == addresses[1] - addresses[0]
    assert vault.look(lambda: vault.vault.counters["opens"]) == 1
    # Opened memory is no allocation here: neither counted nor sent to the vault. The stand-in keeps a file
    # open.
    stats = opener.stats()
    assert (stats.vault_allocations, stats.vault_bytes, stats.vault_mapped) == (0, 0, 0)
    assert (stats.ipc_opened, exporter.stats().ipc_shared, stats.ipc_failed) == (2, 3, 0)
    assert opener.do("files()") == before + LEDGER + 1
    assert vault.look(lambda: len(vault.vault.ledger)) == 1
    opener.do(f"write({there[1]}, b'from afar')")
    assert exporter.do(f"read({addresses[1]}, 9)") == b"from afar"
    assert [opener.do(f"close({address})") for address in there] == [0, 0]
    assert opener.stats().ipc_opened == 0
    assert opener.do("files()") == before + LEDGER


MARKS = """
def ask(attribute, address):
    answer = ctypes.c_uint64()
    must(cuda.cuPointerGetAttribute(ctypes.byref(answer), attribute, ctypes.c_uint64(address)))
    return answer.value
def marks(address):
    before = ask(6, address)
    must(cuda.cuPointerSetAttribute(ctypes.byref(ctypes.c_uint32(1)), 6, ctypes.c_uint64(address)))
    return address, before, ask(7, address)
def begin_anew():
    context = ctypes.c_void_p()
    must(cuda.cuDevicePrimaryCtxReset_v2(0))
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    must(cuda.cuCtxSetCurrent(context))
"""


def test_nothing_is_remembered_of_what_was_closed(
    libraries: Libraries, vault: RunningVault, programs: list[Program]
) -> None:
    """Attributes of closed memory are forgotten: new memory there has its own BUFFER_ID (7) and
    SYNC_MEMOPS (6)."""
    exporter, opener = (start(libraries, vault.path, programs) for _ in range(2))
    handles = [exporter.do(f"export({exporter.do('alloc(3 << 20)')})") for _ in range(3)]
    opener.do(f"exec({MARKS!r}, globals())")
    seen = []
    for handle in handles[:2]:
        seen.append(opener.do(f"marks(opened({handle!r}))"))
        assert opener.do(f"close({seen[-1][0]})") == 0
    seen.append(opener.do(f"marks(opened({handles[2]!r}))"))
    opener.do("begin_anew()")
    seen.append(opener.do("marks(alloc(3 << 20))"))
    addresses, before, ids = zip(*seen, strict=True)
    assert (len(set(addresses)), before, len(set(ids))) == (1, (0, 0, 0, 0), 4)


def test_what_is_opened_lies_between_zones_until_it_is_closed(
    libraries: Libraries, place: Path, programs: list[Program]
) -> None:
    """Opened memory lies between guard zones once the opener has memory of its own, since it asks for its
    budget only then."""
    ledgers: dict[int, LedgerView] = {}

    async def grant(process: ProcessInstance, fd: int) -> Grant:
        ledgers[process.pid] = LedgerView(fd)
        return Grant(1 << 30, 100)

    store = MemoryStore()
    with RunningVault(place, store, LIMITS, take_ledger=grant) as vault:
        exporter, opener = (start(libraries, place, programs) for _ in range(2))
        handle = exporter.do(f"export({exporter.do('alloc(3 << 20)')})")
        there = opener.do(f"opened({handle!r})")
        assert opener.pid not in ledgers
        own = opener.do("alloc(3 << 20)")
        until(lambda: vault.look(lambda: opener.pid in ledgers), "its ledger is brought")

        def covered() -> set[tuple[int, int]]:
            found = ledgers[opener.pid].zones()
            return {(zone.start, zone.end) for zone in found if zone.role != NULL_PAGE}

        def around(base: int) -> set[tuple[int, int]]:
            return {(base - ZONE, base), (base + 4 * MIB, base + 4 * MIB + ZONE)}

        until(lambda: covered() == around(there) | around(own), "both are covered")
        assert opener.do(f"close({there})") == 0
        # Opened memory does not enter quarantine, since it was no allocation here.
        assert covered() == around(own)
        again = opener.do(f"opened({handle!r})")
        assert covered() == around(own) | around(again)
    for ledger in ledgers.values():
        ledger.close()
    store.empty()


def test_memory_lives_while_it_is_open(
    libraries: Libraries, vault: RunningVault, programs: list[Program]
) -> None:
    """Memory outlives its exporter while it is open, but cannot be opened again."""
    exporter, opener, late = (start(libraries, vault.path, programs) for _ in range(3))
    address = exporter.do("alloc(3 << 20)")
    exporter.do(f"write({address}, b'to be read')")
    handle = exporter.do(f"export({address})")
    there = opener.do(f"opened({handle!r})")
    exporter.end(signal.SIGKILL)
    until(lambda: vault.look(vault.vault.ledger.is_empty), "its end is noticed")
    assert opener.do(f"read({there}, 10)") == b"to be read"
    assert late.do(f"opened({handle!r})") == -205
    assert late.stats().ipc_failed == 1
    assert opener.do(f"close({there})") == 0


def test_a_freed_piece_is_not_opened(
    libraries: Libraries, vault: RunningVault, programs: list[Program]
) -> None:
    exporter, opener = (start(libraries, vault.path, programs) for _ in range(2))
    address = exporter.do("alloc(3 << 20)")
    handle = exporter.do(f"export({address})")
    exporter.do(f"free({address})")
    until(lambda: vault.look(vault.vault.ledger.is_empty), "the drop is delivered")
    assert opener.do(f"opened({handle!r})") == -205
    assert exporter.do("alloc(3 << 20)") == address
    again = exporter.do(f"export({address})")
    assert again != handle and opener.do(f"opened({again!r})") > 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_a_stranger_with_the_handle_opens_nothing(
    libraries: Libraries, vault: RunningVault, programs: list[Program]
) -> None:
    place = vault.path
    os.chmod(place.parent, 0o755)
    exporter = start(libraries, place, programs)
    handle = exporter.do(f"export({exporter.do('alloc(100)')})")
    stranger = start(libraries, place, programs, MPSD_VAULT_TOKEN="another owner")
    assert stranger.do(f"opened({handle!r})") == -205
    assert vault.look(lambda: vault.vault.counters["opens_denied"]) == 1
    other = start(libraries, place, programs)
    other.do(f"__import__('os').setuid({OTHER_UID})")
    assert other.do(f"opened({handle!r})") == -205
    assert vault.look(lambda: vault.vault.counters["opens_denied"]) == 2


def test_a_bad_handle_is_an_error(libraries: Libraries, vault: RunningVault, programs: list[Program]) -> None:
    """A corrupted IPC handle is an error."""
    exporter, opener = (start(libraries, vault.path, programs) for _ in range(2))
    handle = exporter.do(f"export({exporter.do('alloc(100)')})")
    before = opener.do("files()")
    for offset, size in ((0, 3 * MIB), (2 * MIB, 1), (1 << 63, 1 << 63), (0, 0), ((1 << 64) - 1, 2)):
        wrong = handle[:40] + offset.to_bytes(8, "little") + size.to_bytes(8, "little") + handle[56:]
        assert opener.do(f"opened({wrong!r})") == -400
    assert opener.do(f"opened({handle[:8] + bytes(56)!r})") == -205
    assert opener.do(f"opened({bytes(64)!r})") == -1
    # The segment was mapped for a moment, which created the window.
    assert (opener.do("files()"), opener.stats().ipc_opened) == (before + LEDGER, 0)
    assert opener.do(f"opened({handle!r})") > 0


def test_without_a_vault_it_is_an_error_that_is_counted(
    libraries: Libraries, place: Path, programs: list[Program]
) -> None:
    """An export without a vault, or beyond its quota, is an error that is counted."""
    program = start(libraries, place, programs)
    address = program.do("alloc(100)")
    assert program.do(f"export({address})") == 205
    assert program.stats().ipc_failed == 1
    none = Limits(Quota(1 << 40, 0), LIMITS.user, LIMITS.kept, 256, 3600.0)
    store = MemoryStore()
    with RunningVault(place, store, none):
        until(lambda: program.stats().vault_refused == 1, "the quota is said")
        assert program.do(f"export({address})") == 205
        assert program.stats().ipc_failed == 2
        assert program.do(f"free({address})") is None
        assert program.end() == 0


def test_the_next_daemon_knows_what_was_shared(
    libraries: Libraries, place: Path, programs: list[Program]
) -> None:
    store = MemoryStore()
    with RunningVault(place, store, LIMITS):
        exporter = start(libraries, place, programs)
        address = exporter.do("alloc(3 << 20)")
        exporter.do(f"write({address}, b'through two daemons')")
        handle = exporter.do(f"export({address})")
        until(lambda: len(store.held) == 2, "all is stored")
    with RunningVault(place, store, LIMITS):
        opener = start(libraries, place, programs)
        there = opener.do(f"opened({handle!r})")
        assert opener.do(f"read({there}, 19)") == b"through two daemons"
        assert [program.end() for program in (opener, exporter)] == [0, 0]
        until(lambda: not store.held, "nothing is held")
