"""Far zones on the stand-in driver: managed ranges below and above all segments of a window."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from mpsd.base.model import Access
from mpsd.gpu.base import Backend
from mpsd.vault.messages import Status
from tests.libcuda.test_zones import heard
from tests.support.libcudas import Libraries
from tests.support.simfixtures import backend, domain
from tests.support.simnode import Domain
from tests.support.waiting import until
from tests.support.zoning import (
    FAR,
    GUARD,
    MANAGED,
    MIB,
    QUARANTINE,
    SPARSE,
    ZONE,
    GrantingVault,
    LedgerView,
    Obedient,
    Zone,
)

__all__ = ["backend", "domain"]

GIB = 1 << 30
CHUNK = GIB
NULL = 65536
PLENTY = 64 * GIB


def alone(libraries: Libraries, budget: int = PLENTY, far: int = 8 * GIB, **extra: str) -> Obedient:
    chosen = {"vault": "1", "zone_budget": str(budget), "far_bytes": str(far), **extra}
    return Obedient(libraries.environment(proxied=True, **chosen))


def far_zones(ledger: LedgerView) -> list[Zone]:
    found = [zone for zone in ledger.zones() if zone.role == FAR]
    assert (ledger.far_zones, ledger.far_bytes) == (len(found), sum(z.end - z.start for z in found))
    assert all(zone.kind == MANAGED for zone in found)
    return found


def runs(ledger: LedgerView) -> list[tuple[int, int]]:
    """Return the ranges that far zones cover, adjacent zones joined."""
    joined: list[tuple[int, int]] = []
    for zone in far_zones(ledger):
        if joined and joined[-1][1] == zone.start:
            joined[-1] = joined[-1][0], zone.end
        else:
            joined.append((zone.start, zone.end))
    return joined


def overlaps(ledger: LedgerView) -> int:
    rows = ledger.zones()
    return sum(one.end > other.start for one, other in pairwise(rows))


def test_a_store_several_gib_away_is_absorbed_on_both_sides(libraries: Libraries) -> None:
    with alone(libraries) as program:
        base = program.do("alloc(4 << 20)")
        end = base + 4 * MIB
        ledger = program.ledger()
        below, behind = runs(ledger)
        assert below == (base - ZONE - 8 * GIB, base - ZONE)
        assert behind[0] == end + ZONE and 8 * GIB <= behind[1] - behind[0] < 8 * GIB + CHUNK
        for stray in (below[0], base - 3 * GIB, end + 3 * GIB, end + 8 * GIB, behind[1] - 4):
            assert (program.do(f"hit({stray})"), program.do(f"look({stray})")) == (0, 0)
        assert program.do(f"hit({below[0] - 4})") == 700


def test_without_them_memory_lies_where_it_did(libraries: Libraries) -> None:
    places = []
    for far in (0, 8 * GIB):
        with alone(libraries, far=far) as program:
            places.append(program.do("alloc(4 << 20)"))
            assert bool(far_zones(program.ledger())) == bool(far)
    assert places[0] == places[1]


def test_they_give_way_before_anything_is_mapped_in_them(libraries: Libraries) -> None:
    """A far zone gives way before an allocation is mapped in its place; here every allocation lies in one."""
    with alone(libraries) as program:
        ledger = None
        for _ in range(6):
            before = runs(ledger) if ledger else []
            base = program.do("alloc(300 << 20)")
            ledger = ledger or program.ledger()
            below, behind = runs(ledger)
            assert not before or (below == before[0] and before[1][0] < base < before[1][1])
            assert behind[0] == base + 300 * MIB + ZONE and behind[1] - behind[0] >= 8 * GIB
            assert overlaps(ledger) == 0
            assert program.do(f"launch(b'fill', {base}, 4, 5), sync()") == (0, 0)
            assert program.do(f"word({base})") == 5
            assert program.do(f"hit({behind[0]}), hit({behind[1] - 4})") == (0, 0)


def test_what_is_left_of_a_cut_one_is_as_old_as_it_was(libraries: Libraries) -> None:
    """The remainder of a cut far zone keeps its age, so an access that nothing has read yet still counts
    as a hit."""
    with alone(libraries) as program:
        first = program.do("alloc(4 << 20)")
        ledger = program.ledger()
        tail = first + 4 * MIB + ZONE
        (born,) = (zone.born_ns for zone in far_zones(ledger) if zone.start == tail)
        second = program.do("alloc(4 << 20)")
        tail = second + 4 * MIB + ZONE
        assert [zone.born_ns for zone in far_zones(ledger) if zone.start == tail] == [born]


def test_they_come_back_to_what_is_free_again(libraries: Libraries) -> None:
    with alone(libraries, quarantine_s="0") as program:
        first = program.do("alloc(4 << 20)")
        ledger = program.ledger()
        before = runs(ledger)
        second = program.do(f"alloc({3 * GIB // 2 // 8})")
        assert runs(ledger) != before
        assert program.do(f"free({second})") == 0
        assert (runs(ledger), overlaps(ledger)) == (before, 0)
        assert program.do(f"free({first})") == 0
        assert program.do("alloc(4 << 20)") == first


def test_they_have_half_of_what_pieces_leave(libraries: Libraries) -> None:
    """Far zones get half of the remaining budget and yield chunk by chunk, furthest first, to segments and
    quarantine."""
    with alone(libraries, 2 * GIB) as program:
        pieces = [program.do("alloc(2 << 20)") for _ in range(4)]
        ledger = program.ledger()
        seen = {ledger.far_bytes}
        assert ledger.far_bytes
        while ledger.managed_bytes - ledger.far_bytes + 2 * ZONE <= 2 * GIB:
            pieces.append(program.do("alloc(2 << 20)"))
            near = ledger.managed_bytes - ledger.far_bytes
            assert ledger.far_bytes <= (2 * GIB - near) // 2
            far_zones(ledger)
            seen.add(ledger.far_bytes)
        assert len(seen) > 2 and (ledger.sparse_zones, ledger.uncovered) == (0, 0)
        guards = [zone for zone in ledger.zones() if zone.role == GUARD]
        assert len(guards) == 2 * len(pieces)
        # A zone that exceeds the budget is sparse.
        program.do("alloc(2 << 20)")
        assert ledger.sparse_zones == 1
        assert program.do(f"[free(one) for one in {pieces[4:]!r}] and 0") == 0
        assert {zone.kind for zone in ledger.zones() if zone.role == QUARANTINE} == {MANAGED}


def test_they_give_way_to_the_quarantine(libraries: Libraries) -> None:
    with alone(libraries, 2 * ZONE + NULL + 12 * MIB, 8 * MIB, quarantine_bytes=str(GIB)) as program:
        freed = program.do("alloc(10 << 20)")
        ledger = program.ledger()
        assert 0 < ledger.far_bytes <= 6 * MIB
        assert program.do(f"free({freed})") == 0
        assert Zone(MANAGED, QUARANTINE, freed, freed + 10 * MIB) in ledger.zones()
        assert (ledger.sparse_zones, far_zones(ledger)) == (0, [])


def test_a_small_one_is_one_chunk(libraries: Libraries) -> None:
    with alone(libraries, far=64 * MIB) as program:
        base = program.do("alloc(4 << 20)")
        below, behind = runs(program.ledger())
        assert below == (base - ZONE - 64 * MIB, base - ZONE)
        assert 64 * MIB <= behind[1] - behind[0] < 128 * MIB


def test_they_end_with_the_context_and_come_back_with_the_next(libraries: Libraries) -> None:
    with alone(libraries) as program:
        program.do("alloc(4 << 20)")
        ledger = program.ledger()
        before = runs(ledger)
        assert program.do("cuda.cuDevicePrimaryCtxReset_v2(0)") == 0
        assert (ledger.zones(), ledger.managed_bytes, ledger.far_bytes) == ([], 0, 0)
        program.do("start()")
        base = program.do("alloc(4 << 20)")
        assert runs(ledger) == before
        assert program.do(f"hit({base} + {3 * GIB})") == 0


def test_a_child_leaves_those_of_its_parent(libraries: Libraries) -> None:
    with alone(libraries) as program:
        address = program.do("alloc(4 << 20)")
        ledger = program.ledger()
        before = os.pread(ledger.fd, 1 << 22, 0)
        assert program.do(f"forked(lambda: free({address}) and 0)") == 0
        assert os.pread(ledger.fd, 1 << 22, 0) == before
        assert program.do(f"hit({address} + {3 * GIB})") == 0


def test_all_of_a_full_window_is_memory_s(libraries: Libraries) -> None:
    """A full window holds only memory: beyond it, allocations come from the driver, as without far zones."""
    counts = []
    for far in (0, 8 * GIB):
        chosen = {"window_bytes": str(128 * MIB), "zone_bytes": str(2 * MIB)}
        with alone(libraries, far=far, **chosen) as program:
            bases = [program.do("alloc(2 << 20)") for _ in range(25)]
            inside = [one for one in bases if 0 <= one - bases[0] < 128 * MIB]
            ledger = program.ledger()
            assert overlaps(ledger) == 0
            below = [(bases[0] - 2 * MIB - far, bases[0] - 2 * MIB)] if far else []
            assert [run for run in runs(ledger) if run[1] - run[0] > 2 * MIB] == below
            assert all(program.do(f"launch(b'fill', {one}, 4, 5), sync()") == (0, 0) for one in bases)
            counts.append((len(inside), bases[0]))
    assert counts[0] == counts[1] and counts[0][0] == 21


@pytest.mark.parametrize("below", [0, 4096])
def test_a_window_that_was_wanted_somewhere_has_its_memory_there(libraries: Libraries, below: int) -> None:
    """A window placed by window_base starts its memory there; the space below is not used."""
    base = 0x310000000000
    taken = f"""(
        setattr(libc := ctypes.CDLL(None).mmap, "restype", ctypes.c_uint64),
        libc(*map(ctypes.c_void_p, ({base - 4096}, {below} or 4096)), 3, 0x100022, -1, ctypes.c_long(0)),
    )[1]"""
    with alone(libraries, window_base=hex(base), window_bytes=str(256 * MIB)) as program:
        if below:
            assert program.do(" ".join(taken.split())) == base - below
        assert program.do("alloc(4 << 20)") == base + ZONE
        found = runs(program.ledger())
        assert [run for run in found if run[1] <= base + ZONE] == ([] if below else [(base - 8 * GIB, base)])
        assert found[-1][0] == base + ZONE + 4 * MIB + ZONE


def test_as_much_memory_can_be_had_as_without(libraries: Libraries) -> None:
    left = []
    for far in (0, 8 * GIB):
        with alone(libraries, far=far) as program:
            program.do("alloc(1000)")
            size = program.do("room()") // (2 * MIB) * (2 * MIB)
            program.do(f"alloc({size - 64 * MIB})")
            left.append((size, program.do("room()")))
    assert left[0] == left[1]


@pytest.mark.parametrize(
    ("seed", "budget", "far"), [(1, PLENTY, 8 * GIB), (2, GIB, 96 * MIB), (3, 700 * MIB, GIB)]
)
def test_whatever_comes_and_goes_they_lie_where_nobody_is(
    libraries: Libraries, seed: int, budget: int, far: int
) -> None:
    chance = random.Random(seed)
    chosen = {"quarantine_bytes": str(24 * MIB)}
    with alone(libraries, budget, far, **chosen) as program:
        living: dict[int, tuple[int, int]] = {}
        program.do("alloc(4 << 20)")
        ledger = program.ledger()
        for step in range(120):
            if living and (len(living) > 12 or chance.random() < 0.45):
                base = chance.choice(sorted(living))
                size, mark = living.pop(base)
                assert program.do(f"word({base}), free({base})") == (mark, 0)
            else:
                size = chance.choice((2, 4, 6, 12)) * MIB
                base = program.do(f"alloc({size})")
                assert program.do(f"launch(b'fill', {base}, 1, {step}), sync()") == (0, 0)
                living[base] = size, step
            assert overlaps(ledger) == 0
            last = max(base + size for base, (size, _) in living.items()) if living else 0
            assert all(zone.end <= last or zone.start >= last + ZONE for zone in far_zones(ledger) if living)
            near = ledger.managed_bytes - ledger.far_bytes
            assert ledger.far_bytes <= max(0, budget - near) // 2
        assert budget != PLENTY or len(runs(ledger)) == 2


def test_the_nearest_of_two_devices_come_first(libraries: Libraries) -> None:
    """The zones nearest to two devices come first: the first device's furthest zones yield to the second
    device's nearest."""
    other = (
        "cuda.cuDevicePrimaryCtxRetain(ctypes.byref(second := ctypes.c_void_p()), 1),"
        "cuda.cuCtxSetCurrent(second), alloc(4 << 20), cuda.cuCtxSetCurrent(context)"
    )
    with alone(libraries, 12 * GIB, MPSD_STANDIN_DEVICES="2") as program:
        first = program.do("alloc(4 << 20)")
        ledger = program.ledger()
        (below, behind) = runs(ledger)
        assert below[1] - below[0] >= 2 * GIB and behind[1] - behind[0] >= 2 * GIB
        *codes, base, _ = program.do(f"({other})")
        assert codes == [0, 0] and abs(base - first) > 64 * GIB
        assert overlaps(ledger) == 0
        found = runs(ledger)
        assert len(found) == 4 and max(end - start for start, end in found) < 2 * GIB
        assert found[3][0] == base + 4 * MIB + ZONE and found[2][1] == base - ZONE
        near = ledger.managed_bytes - ledger.far_bytes
        assert ledger.far_bytes <= (12 * GIB - near) // 2
        # After the end of one device's context the other device can use its budget.
        assert program.do("cuda.cuDevicePrimaryCtxReset_v2(1)") == 0
        assert len(runs(ledger)) == 2
        program.do("alloc(4 << 20)")
        assert runs(ledger)[0][0] == below[0]


# -- the daemon's answer -----------------------------------------------------------------------------------


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where:
        yield Path(where) / "vault.sock"


@contextlib.contextmanager
def granted(
    place: Path, program: Obedient, grant: tuple[int, int] | Status, *, reads_far: bool
) -> Iterator[int]:
    """Run a daemon that receives one more segment of the program and answers with `grant`."""
    place.unlink(missing_ok=True)
    with GrantingVault(place, grant, reads_far=reads_far) as vault:
        base = program.do("alloc(4 << 20)")
        until(lambda: vault.puts == 1, "the answer was heard")
        yield base


def client(libraries: Libraries, place: Path) -> Obedient:
    chosen = {"MPSD_VAULT_SOCKET": str(place), "far_bytes": str(8 * GIB)}
    return Obedient(libraries.environment(proxied=True, **chosen))


def test_they_are_only_for_a_daemon_that_reads_of_them(libraries: Libraries, place: Path) -> None:
    """Far zones exist only with a daemon that reads their hits; otherwise a program would continue with
    wrong results."""
    with client(libraries, place) as program:
        with granted(place, program, (PLENTY, 100), reads_far=True):
            ledger = program.ledger()
            assert len(runs(ledger)) == 2
        with granted(place, program, (PLENTY, 100), reads_far=False):
            assert far_zones(ledger) == []
        with granted(place, program, (PLENTY, 100), reads_far=True) as base:
            assert len(runs(ledger)) == 2
            assert program.do(f"hit({base} + {3 * GIB})") == 0
        with granted(place, program, Status.QUOTA, reads_far=True):
            assert far_zones(ledger) == []


def test_they_have_half_of_the_zones_that_pieces_leave(libraries: Libraries, place: Path) -> None:
    with client(libraries, place) as program, granted(place, program, (1 << 40, 12), reads_far=True):
        ledger = program.ledger()
        near = ledger.managed_zones - ledger.far_zones
        assert len(far_zones(ledger)) == (12 - near) // 2
        for _ in range(4):
            program.do("alloc(4 << 20)")
        rows = ledger.zones()
        assert (far_zones(ledger), [zone.kind for zone in rows].count(MANAGED)) == ([], 10 + ledger.null_page)
        assert SPARSE not in [zone.kind for zone in rows]


# -- the simulated GPU -------------------------------------------------------------------------------------


def test_a_hit_far_away_is_reported(libraries: Libraries, domain: Domain, backend: Backend) -> None:
    chosen = {**domain.environment, "MPSD_STANDIN_GPU": "simulated", "SCRATCH": "1"}
    with alone(libraries, **chosen) as program:
        neighbour = domain.client().ready()
        base = program.do("alloc(4 << 20)")
        with heard(program, backend) as event:
            assert program.do(f"hit({base} + {6 * GIB} + 8)") == 0
            assert event() == (False, Access.WRITE, base + 6 * GIB)
            assert program.do(f"look({base} - {6 * GIB})") == 0
            assert event() == (False, Access.READ, base - 6 * GIB)
        assert neighbour.error() is None


def test_there_are_none_unless_they_are_asked_for(libraries: Libraries) -> None:
    chosen = {"vault": "1", "zone_budget": str(PLENTY)}
    with Obedient(libraries.environment(proxied=True, **chosen)) as program:
        base = program.do("alloc(4 << 20)")
        assert far_zones(program.ledger()) == []
        assert program.do(f"hit({base} + {3 * GIB})") == 700
