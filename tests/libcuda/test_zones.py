"""Guard zones, quarantine and the ledger on the stand-in driver: alone, on the simulated GPU, and with a
vault."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpsd.base.model import Access
from mpsd.gpu.base import Backend
from mpsd.vault.messages import Status
from tests.support.libcudas import Libraries, run
from tests.support.simfixtures import backend, domain
from tests.support.simnode import Domain
from tests.support.waiting import DEADLINE_S, readable, until
from tests.support.zoning import (
    GUARD,
    MANAGED,
    MIB,
    NULL_PAGE,
    QUARANTINE,
    REPORTED,
    SPARSE,
    ZONE,
    GrantingVault,
    LedgerView,
    Obedient,
    Zone,
)

__all__ = ["backend", "domain"]
FAR = 0x7E0000000000
PLENTY = str(64 << 30)


def alone(libraries: Libraries, budget: str = PLENTY, **extra: str) -> Obedient:
    chosen = {"vault": "1", "zone_budget": budget, "far_bytes": "0", **extra}
    return Obedient(libraries.environment(proxied=True, **chosen))


def around(base: int, size: int = 2 * MIB, kind: int = MANAGED) -> list[Zone]:
    return [Zone(kind, GUARD, base - ZONE, base), Zone(kind, GUARD, base + size, base + size + ZONE)]


def zones(ledger: LedgerView) -> list[Zone]:
    """Return all zones except the null page's, which some processes may not map."""
    return [zone for zone in ledger.zones() if zone.role != NULL_PAGE]


def test_stray_accesses_around_a_piece_are_absorbed(libraries: Libraries) -> None:
    with alone(libraries) as program:
        small, large = program.do("alloc(1000)"), program.do("alloc(3 << 20)")
        ledger = program.ledger()
        slab = small // (2 * MIB) * (2 * MIB)
        assert zones(ledger) == around(slab) + around(large, 4 * MIB)
        assert (ledger.managed_bytes - 65536 * ledger.null_page, ledger.uncovered) == (4 * ZONE, 0)
        program.do(f"launch(b'fill', {large}, {3 * MIB // 4}, 5)")
        end = large + 4 * MIB
        far = end + ZONE
        for stray in (end, end + ZONE // 2, far - 4, large - 4, large - ZONE, slab - 4, slab + 2 * MIB):
            assert (program.do(f"hit({stray})"), program.do(f"look({stray})")) == (0, 0)
        assert (program.do(f"word({large})"), program.do(f"word({large} + {3 * MIB - 4})")) == (5, 5)
        assert program.do(f"hit({FAR})") == 700


def test_each_zone_says_since_when_it_lies_there_by_the_driver_s_clock(libraries: Libraries) -> None:
    def now() -> int:
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)

    with alone(libraries) as program:
        times = [now()]
        first = program.do("alloc(4 << 20)")
        times.append(now())
        second = program.do("alloc(4 << 20)")
        times.append(now())
        ledger = program.ledger()
        born = {zone.start: zone.born_ns for zone in zones(ledger)}
        assert times[0] < born[first - ZONE] <= born[first + 4 * MIB] < times[1]
        assert times[1] < born[second - ZONE] <= born[second + 4 * MIB] < times[2]
        assert program.do(f"free({first})") == 0
        born = {zone.start: zone.born_ns for zone in zones(ledger)}
        assert born[first] > times[2] > born[first - ZONE]


def test_an_overrun_ends_in_the_zone(libraries: Libraries) -> None:
    """A kernel that runs past its allocation ends in the guard zone."""
    with alone(libraries) as program:
        large = program.do("alloc(4 << 20)")
        count = (4 * MIB + ZONE) // 4
        assert program.do(f"launch(b'fill', {large}, {count}, 1), sync()") == (0, 0)
        beyond = large + 4 * MIB + ZONE
        assert max(zone.end for zone in zones(program.ledger())) == beyond
        assert program.do(f"hit({beyond})") == 700


def test_without_a_budget_there_are_none(libraries: Libraries) -> None:
    with alone(libraries, "0") as program:
        first, second = program.do("alloc(2 << 20)"), program.do("alloc(2 << 20)")
        assert (second - first, program.ledger().zones()) == (2 * MIB, [])
        # Without zones there is no quarantine either: the next allocation reuses the addresses.
        assert program.do(f"free({second})") == 0
        assert program.do("alloc(2 << 20)") == second
        assert program.do(f"hit({second} + {2 * MIB})") == 700


def test_freed_memory_is_given_back_at_once_and_its_addresses_are_not(libraries: Libraries) -> None:
    with alone(libraries) as program:
        room = program.do("room()")
        freed = program.do("alloc(5 << 20)")
        assert program.do(f"free({freed}), room()") == (0, room)
        ledger = program.ledger()
        assert Zone(MANAGED, QUARANTINE, freed, freed + 6 * MIB) in ledger.zones()
        assert (ledger.quarantine_bytes, ledger.quarantine_count) == (6 * MIB, 1)
        assert program.do(f"hit({freed})") == 0
        assert program.do(f"hit({freed} + {5 * MIB})") == 0
        assert program.do("alloc(5 << 20)") != freed
        # The program no longer owns the freed address.
        assert program.do(f"free({freed})") == 1
        (old, new) = ledger.notes()
        assert (old.address, old.size, old.order, new.order) == (freed, 5 * MIB, 1, 2)
        assert old.born_ns < old.freed_ns < new.born_ns and not new.freed_ns


def test_what_can_never_be_had_empties_no_quarantine(libraries: Libraries) -> None:
    with alone(libraries) as program:
        program.do(f"free({program.do('alloc(3 << 20)')})")
        size = f"ctypes.c_size_t({(1 << 64) - 1})"
        assert program.do(f"cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), {size})") == 2
        assert program.ledger().quarantine_count == 1


def test_the_oldest_leave_a_full_quarantine_first(libraries: Libraries) -> None:
    with alone(libraries, quarantine_bytes=str(8 * MIB)) as program:
        addresses = [program.do("alloc(4 << 20)") for _ in range(3)]
        for address in addresses:
            assert program.do(f"free({address})") == 0
        ledger = program.ledger()
        held = [zone.start for zone in ledger.zones() if zone.role == QUARANTINE]
        assert held == addresses[1:]
        # The zones were removed with the segment.
        assert len(zones(ledger)) == 6
        assert program.do("alloc(4 << 20)") == addresses[0]
        # An allocation larger than the whole quarantine does not enter it.
        large = program.do("alloc(10 << 20)")
        assert program.do(f"free({large})") == 0
        assert ledger.quarantine_bytes == 8 * MIB
        assert program.do("alloc(10 << 20)") == large


def test_what_is_old_leaves_the_quarantine(libraries: Libraries) -> None:
    with alone(libraries, quarantine_s="0") as program:
        address = program.do("alloc(4 << 20)")
        assert program.do(f"free({address})") == 0
        assert (program.ledger().quarantine_count, zones(program.ledger())) == (0, [])
        assert program.do("alloc(4 << 20)") == address


def test_beyond_the_budget_zones_are_sparse_then_none(libraries: Libraries) -> None:
    with alone(libraries, str(2 * ZONE + 65536)) as program:
        first, second = program.do("alloc(4 << 20)"), program.do("alloc(4 << 20)")
        ledger = program.ledger()
        assert zones(ledger) == around(first, 4 * MIB) + around(second, 4 * MIB, SPARSE)
        assert program.do(f"hit({second} - 4)") == 0
        assert (ledger.sparse_bytes, ledger.sparse_zones, ledger.uncovered) == (2 * ZONE, 2, 0)


def test_the_quarantine_makes_room_for_the_living(libraries: Libraries) -> None:
    with alone(libraries, str(2 * ZONE + 4 * MIB + 65536)) as program:
        first = program.do("alloc(4 << 20)")
        assert program.do(f"free({first})") == 0
        ledger = program.ledger()
        assert ledger.quarantine_count == 1
        second = program.do("alloc(4 << 20)")
        assert (zones(ledger), ledger.quarantine_count) == (around(second, 4 * MIB), 0)


def test_small_allocations_have_notes_and_share_zones(libraries: Libraries) -> None:
    with alone(libraries) as program:
        first, second = program.do("alloc(100)"), program.do("alloc(200)")
        ledger = program.ledger()
        assert [(note.address, note.size) for note in ledger.notes()] == [(first, 100), (second, 200)]
        assert len(zones(ledger)) == 2
        assert program.do(f"free({first})") == 0
        assert [bool(note.freed_ns) for note in ledger.notes()] == [True, False]
        # Inside a live slab nothing can be covered, but freed addresses are not reused at once.
        assert program.do("alloc(100)") not in (first, second)


def test_the_null_page_is_covered_where_it_may_be(libraries: Libraries) -> None:
    with alone(libraries) as program:
        program.do("alloc(100)")
        ledger = program.ledger()
        if not ledger.null_page:
            assert program.do("hit(16)") == 700
            return
        assert ledger.zones()[0] == Zone(MANAGED, NULL_PAGE, 0, 65536)
        assert program.do("hit(16)") == 0
        # CPU accesses still fault as before.
        assert program.do("forked(lambda: ctypes.c_char.from_address(16).value and 0)") == signal.SIGSEGV


def test_a_child_changes_nothing_of_its_parent_s(libraries: Libraries) -> None:
    with alone(libraries) as program:
        address = program.do("alloc(4 << 20)")
        ledger = program.ledger()
        before = os.pread(ledger.fd, 1 << 22, 0)
        work = f"(free({address}), cuda.cuMemAlloc_v2(ctypes.byref(context), ctypes.c_size_t(100)))"
        assert program.do(f"forked(lambda: {work} and 0)") == 0
        assert os.pread(ledger.fd, 1 << 22, 0) == before
        assert program.do(f"hit({address} - 4)") == 0


def test_zones_end_with_the_context_and_come_back_with_the_next(libraries: Libraries) -> None:
    with alone(libraries) as program:
        first = program.do("alloc(4 << 20)")
        ledger = program.ledger()
        covered = ledger.null_page
        program.do("free(alloc(4 << 20)), cuda.cuDevicePrimaryCtxReset_v2(0)")
        assert (ledger.zones(), ledger.managed_bytes, ledger.quarantine_bytes) == ([], 0, 0)
        assert all(note.freed_ns for note in ledger.notes())
        program.do("start()")
        assert program.do("alloc(4 << 20)") == first
        assert (zones(ledger), ledger.null_page) == (around(first, 4 * MIB), covered)
        assert program.do(f"hit({first} - 4)") == 0


@pytest.mark.parametrize(
    "name, value",
    [
        ("zone_bytes", "3000000"),
        ("zone_bytes", "-1"),
        ("far_bytes", "3000000"),
        ("quarantine_bytes", "much"),
        ("quarantine_s", "1e3"),
        ("vault", "yes"),
    ],
)
def test_a_wrong_number_is_reported(libraries: Libraries, name: str, value: str) -> None:
    chosen = {"vault": "1", "zone_budget": PLENTY, name: value}
    done = run([libraries.program("threads"), "dlsym"], libraries.environment(proxied=True, **chosen))
    assert done.returncode == 0
    assert f"MPSD_DEBUG: {name}={value} is not a multiple of" in done.stderr
    assert ": using the default" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_size_of_zones_can_be_chosen(libraries: Libraries) -> None:
    with alone(libraries, zone_bytes=str(2 * MIB)) as program:
        first, second = program.do("alloc(2 << 20)"), program.do("alloc(2 << 20)")
        assert second - first == 6 * MIB
        assert [zone.end - zone.start for zone in zones(program.ledger())] == [2 * MIB] * 4
        assert program.do(f"hit({second} + {4 * MIB})") == 700
    with alone(libraries, zone_bytes="0") as program:
        first, second = program.do("alloc(2 << 20)"), program.do("alloc(2 << 20)")
        assert (second - first, program.ledger().zones()) == (2 * MIB, [])


def test_launches_are_counted_and_named(libraries: Libraries) -> None:
    with alone(libraries) as program:
        address = program.do("alloc(4 << 20)")
        ledger = program.ledger()
        assert (ledger.launched, ledger.settled) == (0, 0)
        assert program.do(f"launch(b'store', {address}, 1)") == 0
        assert (ledger.launched, ledger.settled) == (1, 0)
        store = ledger.launches()[0]
        assert (ledger.names()[store[0]], store[1]) == ("store", 0)
        assert program.do("sync()") == 0
        assert (ledger.launched, ledger.settled) == (1, 1)
        # A wait for the legacy stream proves completion only while all launches were in that stream.
        other = "cuda.cuStreamCreate(ctypes.byref(stream := ctypes.c_void_p()), 1), stream.value"
        wait = "cuda.cuStreamSynchronize(None)"
        assert program.do(f"launch(b'store', {address}, 1), {wait}") == (0, 0)
        assert ledger.settled == 2
        code, stream = program.do(f"({other})")
        assert code == 0
        ones = ", ".join("111111")
        call = f"cuda.cuLaunchKernel(function(b'sum'), {ones}, 0, ctypes.c_void_p({stream}), None, None)"
        assert program.do(f"{call}, {wait}") == (1, 0)
        assert (ledger.launched, ledger.settled, ledger.launches()[2][1]) == (3, 2, stream)
        assert program.do("sync()") == 0
        assert ledger.settled == 3
        assert sorted(ledger.names().values()) == ["store", "sum"]
        program.do(f"[launch(b'store', {address}, 1) for _ in range(70)] and sync()")
        assert (ledger.launched, ledger.settled, set(ledger.launches()[6:])) == (73, 73, {store})


def test_what_was_launched_before_the_first_allocation_is_known_too(libraries: Libraries) -> None:
    """Launches before the first allocation are in the ledger too: the ledger comes with the window, and
    programs load kernels first."""
    with alone(libraries) as program:
        fill = "launch(b'fill', 0, 0, 1)"
        assert program.do(f"{fill}, {fill}, sync(), {fill}") == (0, 0, 0, 0)
        assert program.do("function(b'sum').value and alloc(100)") > 0
        ledger = program.ledger()
        assert sorted(ledger.names().values()) == ["fill", "sum"]
        assert (ledger.launched, ledger.settled) == (3, 2)
        assert [ledger.names()[function] for function, _ in ledger.launches()[:3]] == ["fill"] * 3


# -- the daemon's answer -----------------------------------------------------------------------------------


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where:
        yield Path(where) / "vault.sock"


def client(libraries: Libraries, place: Path) -> Obedient:
    return Obedient(libraries.environment(proxied=True, MPSD_VAULT_SOCKET=str(place)))


def test_zones_are_laid_when_the_daemon_has_granted_them(libraries: Libraries, place: Path) -> None:
    with GrantingVault(place, (1 << 30, 100), answers=False) as vault, client(libraries, place) as program:
        first = program.do("alloc(4 << 20)")
        assert vault.asked.wait(DEADLINE_S)
        (ledger,) = vault.ledgers
        assert ledger.pid == program.process.pid
        assert (ledger.zones(), [note.address for note in ledger.notes()]) == ([], [first])
        vault.answer.set()
        until(lambda: zones(ledger) == around(first, 4 * MIB), "the first piece is covered")
        # From now on memory is covered before it is usable.
        second = program.do("alloc(4 << 20)")
        assert zones(ledger) == around(first, 4 * MIB) + around(second, 4 * MIB)
        assert program.do(f"hit({first} - 4), hit({second} - 4)") == (0, 0)
        until(lambda: vault.puts == 2, "the pieces are brought too")


def test_no_more_zones_are_laid_than_were_granted(libraries: Libraries, place: Path) -> None:
    with GrantingVault(place, (1 << 40, 3)) as vault, client(libraries, place) as program:
        first = program.do("alloc(4 << 20)")
        until(lambda: vault.puts == 1, "the answer was heard")
        second = program.do("alloc(4 << 20)")
        (ledger,) = vault.ledgers
        kinds = [zone.kind for zone in zones(ledger)]
        assert kinds.count(MANAGED) == 3 - ledger.null_page and kinds.count(SPARSE) == 1 + ledger.null_page
        assert program.do(f"hit({first} - 4), hit({second} + {4 * MIB})") == (0, 0)


def test_a_grant_of_nothing_leaves_sparse_zones(libraries: Libraries, place: Path) -> None:
    with GrantingVault(place, (0, 0)) as vault, client(libraries, place) as program:
        first = program.do("alloc(4 << 20)")
        until(lambda: vault.puts == 1, "the answer was heard")
        assert vault.ledgers[0].zones() == around(first, 4 * MIB, SPARSE)


def test_a_refusal_leaves_none(libraries: Libraries, place: Path) -> None:
    with GrantingVault(place, Status.QUOTA) as vault, client(libraries, place) as program:
        first = program.do("alloc(4 << 20)")
        until(lambda: vault.puts == 1, "the answer was heard")
        assert vault.ledgers[0].zones() == []
        assert program.do(f"hit({first} - 4)") == 700


def test_the_next_daemon_is_sent_the_ledger_too(libraries: Libraries, place: Path) -> None:
    with client(libraries, place) as program:
        with GrantingVault(place, (1 << 30, 100)) as vault:
            first = program.do("alloc(4 << 20)")
            until(lambda: vault.puts == 1, "it is in the vault")
        place.unlink()
        with GrantingVault(place, (1 << 30, 100)) as vault:
            second = program.do("alloc(4 << 20)")
            until(lambda: vault.puts == 1, "it is in the next one's")
            assert zones(vault.ledgers[0]) == around(first, 4 * MIB) + around(second, 4 * MIB)


def test_the_next_daemon_s_word_counts(libraries: Libraries, place: Path) -> None:
    """The current daemon's answer counts: the first refuses, the second grants, the third refuses."""
    with client(libraries, place) as program:
        bases = []
        for grant in (Status.QUOTA, (1 << 30, 100), Status.QUOTA):
            place.unlink(missing_ok=True)
            with GrantingVault(place, grant) as vault:
                bases.append(program.do("alloc(4 << 20)"))
                until(lambda there=vault: there.puts == 1, "the answer was heard")
        # Each segment existed before its daemon's answer.
        managed = [zone for base in bases for zone in around(base, 4 * MIB)]
        ledger = program.ledger()
        assert zones(ledger) == managed
        late = program.do("alloc(4 << 20)")
        assert zones(ledger) == managed + around(late, 4 * MIB, SPARSE)


def test_the_next_daemon_hears_of_a_program_that_allocates_nothing_any_more(
    libraries: Libraries, place: Path
) -> None:
    with client(libraries, place) as program:
        with GrantingVault(place, (1 << 30, 100)) as vault:
            base = program.do("alloc(4 << 20)")
            until(lambda: vault.puts == 1, "it was brought")
        place.unlink()
        with GrantingVault(place, (1 << 30, 100)) as vault:
            assert vault.asked.wait(DEADLINE_S)
            until(lambda: len(vault.ledgers) == 1, "the ledger came again")
            assert zones(vault.ledgers[0]) == around(base, 4 * MIB)
            assert vault.puts == 0


# -- the simulated GPU -------------------------------------------------------------------------------------


@contextlib.contextmanager
def heard(program: Obedient, backend: Backend) -> Iterator[Callable[[], tuple[bool, Access, int]]]:
    """Yield a function that returns the next event on the program's tracker: (fatal, access, page). Two
    events at a time fail."""
    pidfd = os.pidfd_open(program.process.pid)
    try:
        (space,) = backend.uvm.open(program.instance, pidfd)
    finally:
        os.close(pidfd)
    tracker = space.track()
    tracker.report_serviced()

    def event() -> tuple[bool, Access, int]:
        assert readable(tracker, DEADLINE_S)
        (found,) = tracker.drain().events
        return found.fatal, found.access, found.address

    try:
        yield event
    finally:
        tracker.close()
        space.close()


def simulated(libraries: Libraries, domain: Domain, budget: int) -> Obedient:
    chosen = {**domain.environment, "MPSD_STANDIN_GPU": "simulated", "SCRATCH": "1"}
    return alone(libraries, str(budget), **chosen)


def test_a_hit_is_reported_on_the_client_s_tracker(
    libraries: Libraries, domain: Domain, backend: Backend
) -> None:
    with simulated(libraries, domain, 4 * ZONE + 4 * MIB + 65536) as program:
        neighbour = domain.client().ready()
        address = program.do("alloc(4 << 20)")
        silent = program.do("alloc(4 << 20)")
        beside = [zone.kind for zone in zones(program.ledger()) if zone.end == silent]
        assert beside == [SPARSE]
        with heard(program, backend) as event:
            assert program.do(f"hit({address} + {4 * MIB + 8200})") == 0
            assert event() == (False, Access.WRITE, address + 4 * MIB + 8192)
            # A sparse zone reports nothing: the next event comes from the load.
            assert program.do(f"hit({silent} - 4)") == 0
            assert program.do(f"look({address} - 65536)") == 0
            assert event() == (False, Access.READ, address - 65536)
            assert program.do(f"free({address})") == 0
            assert program.do(f"hit({address} + 64)") == 0
            assert event() == (False, Access.WRITE, address)
            assert neighbour.error() is None
            # Addresses that have left quarantine are ordinary.
            assert program.do("[alloc(4 << 20) for _ in range(3)]")
            assert program.do(f"hit({FAR})") == 700
            assert event() == (True, Access.WRITE, FAR)


def test_of_a_large_freed_piece_the_beginning_reports(
    libraries: Libraries, domain: Domain, backend: Backend
) -> None:
    """Of a large freed segment only the beginning reports accesses; the rest absorbs them silently."""
    with simulated(libraries, domain, 1 << 30) as program:
        freed = program.do(f"alloc({REPORTED + 4 * MIB})")
        end = freed + REPORTED + 4 * MIB
        room = program.do("room()")
        assert program.do(f"free({freed}), room()") == (0, room + REPORTED + 4 * MIB)
        ledger = program.ledger()
        assert [zone for zone in ledger.zones() if zone.role == QUARANTINE] == [
            Zone(MANAGED, QUARANTINE, freed, freed + REPORTED),
            Zone(SPARSE, QUARANTINE, freed + REPORTED, end),
        ]
        assert (ledger.quarantine_bytes, ledger.quarantine_count) == (REPORTED + 4 * MIB, 1)
        assert (ledger.sparse_bytes, ledger.sparse_zones) == (4 * MIB, 1)
        with heard(program, backend) as event:
            assert program.do(f"hit({freed + REPORTED - 4})") == 0
            assert event() == (False, Access.WRITE, freed + REPORTED - 4096)
            assert program.do(f"hit({freed + REPORTED}), look({end - 4})") == (0, 0)
            # The next event comes from the zone behind.
            assert program.do(f"hit({end})") == 0
            assert event() == (False, Access.WRITE, end)


def test_a_freed_piece_of_the_reported_size_has_no_rest(libraries: Libraries) -> None:
    with alone(libraries) as program:
        freed = program.do(f"alloc({REPORTED})")
        assert program.do(f"free({freed})") == 0
        held = [zone for zone in program.ledger().zones() if zone.role == QUARANTINE]
        assert held == [Zone(MANAGED, QUARANTINE, freed, freed + REPORTED)]
