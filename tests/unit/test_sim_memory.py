"""The simulated GPU's address spaces: mappings, and the effect of an access."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpsd.base.model import UvmFaultType
from mpsd.gpu.simulated.machine import semantics
from mpsd.gpu.simulated.machine.memory import (
    GRANULE,
    WINDOW_BASE,
    AddressMap,
    Mapping,
    Serviced,
    Violation,
    increment,
)


@pytest.fixture
def space() -> Iterator[AddressMap]:
    made = AddressMap()
    yield made
    made.destroy()


@settings(deadline=None)
@given(st.lists(st.integers(0, 0xFFFF_FFFF), max_size=40))
def test_increment_adds_one_to_each_word_and_never_carries_into_the_next(words: list[int]) -> None:
    before = b"".join(w.to_bytes(4, "little") for w in words)
    after = b"".join(((w + 1) & 0xFFFF_FFFF).to_bytes(4, "little") for w in words)
    assert increment(before) == after


def allocated(space: AddressMap, size: int = 100, *, writable: bool = True) -> Mapping:
    mapping = space.allocate(size, writable=writable)
    assert mapping is not None
    return mapping


def test_memory_is_granted_in_granules_that_do_not_touch(space: AddressMap) -> None:
    first, second = allocated(space), allocated(space)
    assert (first.base, first.size) == (WINDOW_BASE, GRANULE)
    assert second.base > first.base + first.size
    assert space.bytes_used == 2 * GRANULE


def test_an_access_inside_a_mapping_is_served(space: AddressMap) -> None:
    mapping = allocated(space)
    assert space.access(mapping.base + mapping.size - 4, 4, writes=True) is mapping


@pytest.mark.parametrize("address", [0, 0x10, 0x7E00_0000_0008])
def test_nothing_there_is_a_fault_at_the_page(space: AddressMap, address: int) -> None:
    assert space.access(address, 4, writes=True) == Violation(address & ~0xFFF, UvmFaultType.INVALID_PDE)


def test_past_the_end_is_a_fault_behind_it(space: AddressMap) -> None:
    mapping = allocated(space)
    end = mapping.base + mapping.size
    assert space.access(end - 4, 8, writes=True) == Violation(end, UvmFaultType.INVALID_PDE)


def test_read_only_memory_can_be_read(space: AddressMap) -> None:
    mapping = allocated(space, writable=False)
    assert space.access(mapping.base, 4, writes=False) is mapping
    assert space.access(mapping.base, 4, writes=True) == Violation(mapping.base, UvmFaultType.WRITE)


def test_use_after_unmap_faults_and_the_address_is_not_given_out_again(space: AddressMap) -> None:
    mapping = allocated(space)
    assert space.unmap(mapping.base, keep_reservation=True)
    assert space.access(mapping.base, 4, writes=True) == Violation(mapping.base, UvmFaultType.INVALID_PDE)
    assert allocated(space).base != mapping.base
    assert not space.unmap(mapping.base + 4, keep_reservation=False)


def test_a_guard_absorbs_and_can_be_taken_away(space: AddressMap) -> None:
    assert space.guard(GRANULE, 2 * GRANULE) == semantics.NV_OK
    assert space.access(2 * GRANULE, 4, writes=True) is None
    assert isinstance(space.access(3 * GRANULE, 4, writes=True), Violation)
    assert space.unguard(GRANULE, GRANULE) == semantics.NV_INVALID_ADDRESS
    assert space.unguard(GRANULE, 2 * GRANULE) == semantics.NV_OK
    assert isinstance(space.access(2 * GRANULE, 4, writes=True), Violation)


@pytest.mark.parametrize(
    ("base", "length"), [(0, GRANULE), (100, GRANULE), (GRANULE, 100), (GRANULE, 0), (1 << 47, GRANULE)]
)
def test_guards_that_the_driver_refuses(space: AddressMap, base: int, length: int) -> None:
    assert space.guard(base, length) == semantics.NV_INVALID_ADDRESS


def test_guards_never_overlap_anything(space: AddressMap) -> None:
    mapping = allocated(space)
    assert space.guard(mapping.base, GRANULE) == semantics.NV_ADDRESS_IN_USE
    assert space.guard(4 * GRANULE, 4 * GRANULE) == semantics.NV_OK
    for base in (3, 5, 7):
        assert space.guard(base * GRANULE, 2 * GRANULE) == semantics.NV_ADDRESS_IN_USE
    assert space.guard(8 * GRANULE, GRANULE) == semantics.NV_OK


def test_a_reservation_that_meets_a_guard_fails(space: AddressMap) -> None:
    assert space.guard(WINDOW_BASE, GRANULE) == semantics.NV_OK
    assert space.allocate(100) is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), max_size=20), st.integers(0, 60))
def test_a_byte_is_guarded_exactly_when_an_accepted_guard_holds_it(
    wanted: list[tuple[int, int]], granule: int
) -> None:
    space = AddressMap()
    laid = [(b, n) for b, n in wanted if space.guard(b * GRANULE, n * GRANULE) == semantics.NV_OK]
    assert space.guarded(granule * GRANULE, 1) == any(b <= granule < b + n for b, n in laid)


STEP = 4096
ranges = st.tuples(st.sampled_from(["manage", "unmanage", "touch"]), st.integers(0, 40), st.integers(1, 20))


@settings(deadline=None)
@given(st.lists(ranges, max_size=40))
def test_managed_ranges_are_laid_cut_and_touched_as_a_set_of_pages_says(
    steps: list[tuple[str, int, int]],
) -> None:
    space, pages, touched = AddressMap(), set[int](), set[int]()
    for what, at, count in steps:
        wanted, base = set(range(at, at + count)), at * STEP
        granules = {page * STEP // GRANULE for page in wanted}
        if what == "manage":
            status = space.manage(base, count * STEP)
            assert (status == semantics.NV_OK) == (not wanted & pages)
            if status == semantics.NV_OK:
                pages |= wanted
                touched -= granules
        elif what == "unmanage":
            space.unmanage(base, count * STEP)
            pages -= wanted
            touched -= granules
        elif at in pages:
            granule = base // GRANULE
            assert space.access(base + 8, 4, writes=True) == Serviced(base, granule not in touched)
            touched.add(granule)
        else:
            assert isinstance(space.access(base + 8, 4, writes=True), Violation)


def test_managed_ranges_lie_over_reservations_but_never_over_memory_or_guards(space: AddressMap) -> None:
    mapping = allocated(space)
    assert space.manage(mapping.base, GRANULE) == semantics.NV_ADDRESS_IN_USE
    assert space.manage(mapping.base + GRANULE, 100) == semantics.NV_INVALID_ADDRESS
    assert space.guard(mapping.base + GRANULE, GRANULE) == semantics.NV_OK
    assert space.manage(mapping.base + GRANULE, STEP) == semantics.NV_ADDRESS_IN_USE
    space.unmap(mapping.base, keep_reservation=True)
    assert space.manage(mapping.base, GRANULE) == semantics.NV_OK
    assert space.guard(mapping.base, GRANULE) == semantics.NV_ADDRESS_IN_USE
    assert space.access(mapping.base + STEP + 4, 4, writes=True) == Serviced(mapping.base + STEP, True)
    assert space.manage(0, GRANULE) == semantics.NV_OK
    assert space.access(16, 4, writes=False) == Serviced(0, True)
