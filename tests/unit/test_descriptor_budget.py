from __future__ import annotations

import pytest

from mpsd.os.descriptors import DescriptorBudget, Purpose, Share


def test_the_reserve_is_never_taken() -> None:
    budget = DescriptorBudget(256, 40, reserve=64)
    assert budget.capacity == 152
    assert budget.take(Purpose.CLIENT, 152)
    assert not budget.take(Purpose.CONNECTION)
    budget.release(Purpose.CLIENT, 13)
    assert budget.left == 13 and budget.take(Purpose.CONNECTION, 13)


def test_a_take_that_does_not_fit_takes_nothing() -> None:
    budget = DescriptorBudget(100, reserve=90)
    assert not budget.take(Purpose.SEGMENT, 11)
    assert budget.taken(Purpose.SEGMENT) == 0 and budget.left == 10


def test_a_limit_below_the_reserve_leaves_nothing() -> None:
    assert not DescriptorBudget(32).take(Purpose.CLIENT)


def test_nothing_is_released_twice() -> None:
    budget = DescriptorBudget(1024)
    budget.take(Purpose.CLIENT)
    budget.release(Purpose.CLIENT)
    with pytest.raises(ValueError, match="clients"):
        budget.release(Purpose.CLIENT)


SHARED = {Purpose.LEASE: Share(spared=20), Purpose.CONNECTION: Share(percent=25, spared=20)}


def test_a_purpose_leaves_descriptors_for_more_important_ones() -> None:
    budget = DescriptorBudget(100, reserve=0, shares=SHARED)
    assert budget.take(Purpose.LEASE, 80) and not budget.fits(Purpose.LEASE)
    assert not budget.fits(Purpose.CONNECTION)
    assert budget.take(Purpose.DOMAIN, 20) and budget.left == 0


def test_a_flood_of_connections_stops_at_its_share() -> None:
    budget = DescriptorBudget(100, reserve=0, shares=SHARED)
    assert budget.take(Purpose.CONNECTION, 25) and not budget.take(Purpose.CONNECTION)
    assert budget.take(Purpose.LEASE, 55)


def test_a_charge_is_released_once_whole_or_in_parts() -> None:
    budget = DescriptorBudget(100, reserve=0)
    charge = budget.charge(Purpose.LEASE, 12)
    assert charge is not None
    part = charge.split(5)
    assert (charge.count, part.count, budget.left) == (7, 5, 88)
    for _ in range(2):
        charge.release()
    assert budget.left == 95
    part.release()
    assert budget.left == 100


def test_a_charge_grows_only_if_that_fits() -> None:
    budget = DescriptorBudget(20, reserve=0)
    charge = budget.charge(Purpose.LEASE, 12)
    assert charge is not None and budget.charge(Purpose.LEASE, 9) is None
    assert not charge.resize(21) and charge.count == 12
    assert charge.resize(20) and budget.left == 0
    assert charge.resize(3) and budget.left == 17


def test_descriptors_that_are_open_are_counted_even_beyond_the_limit() -> None:
    budget = DescriptorBudget(10, reserve=0)
    charge = budget.charge_open(Purpose.LEASE, 15)
    assert budget.left == -5 and not budget.fits(Purpose.LEASE)
    charge.release()
    assert budget.left == 10


def test_a_part_that_was_not_used_is_joined_again() -> None:
    budget = DescriptorBudget(10, reserve=0)
    charge = budget.charge_open(Purpose.SEGMENT, 2)
    part = charge.split(1)
    charge.join(part)
    part.release()
    assert (charge.count, budget.left) == (2, 8)
