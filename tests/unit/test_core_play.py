"""Random fail-overs of clients that keep to the protocol reach a stable state (support/play.py)."""

from __future__ import annotations

import pytest

from tests.support.long import of
from tests.support.play import Play

PIECE = 25


def seeds(piece: int) -> range:
    return range(piece * PIECE, (piece + 1) * PIECE)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("piece", of(range(80), range(3)))
def test_all_come_to_rest_where_they_are_taken_to_be(piece: int, restarts: bool) -> None:
    for seed in seeds(piece):
        assert Play(seed, restarts=restarts).run() == [], f"seed {seed}"


@pytest.mark.parametrize("piece", of(range(80), range(4)))
def test_no_innocent_program_is_named_in_a_burst_of_faults(piece: int) -> None:
    """Faults, replays, joins and deaths come in any order. Among these plays are trials, and names."""
    plays = [Play(seed, bursts=True) for seed in seeds(piece)]
    for play in plays:
        assert play.run() == [], f"seed {seeds(piece)[plays.index(play)]}"
    assert any(play.trials for play in plays) and any(play.named for play in plays)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("piece", of(range(40), range(1)))
def test_on_demand_no_client_is_without_a_domain_and_no_idle_slot_keeps_a_server(
    piece: int, restarts: bool
) -> None:
    for seed in seeds(piece):
        assert Play(seed, restarts=restarts, on_demand=True).run() == [], f"seed {seed}"


@pytest.mark.parametrize("piece", of(range(40), range(3)))
def test_ended_programs_leave_no_lease_and_idle_ones_no_faulted_domain(piece: int) -> None:
    for seed in seeds(piece):
        assert Play(seed, ends=True).run() == [], f"seed {seed}"


@pytest.mark.parametrize("seed", of(range(3, 43), range(3, 8)))
def test_a_daemon_that_dies_before_any_effect_with_a_fault_in_flight_costs_no_program(seed: int) -> None:
    deaths = 0
    for number in range(0, 60, of(1, 3)):
        play = Play(seed, dies_before=number)
        assert play.run() == [], f"seed {seed}, before effect {number}"
        deaths += play.deaths
    assert deaths
