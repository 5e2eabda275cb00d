"""Fail-overs of programs that keep to the protocol come to rest, whatever comes between (support/play.py)."""

from __future__ import annotations

import pytest

from tests.support.long import of
from tests.support.play import Play

PIECE = 25


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("piece", of(range(80), range(8)))
def test_all_come_to_rest_where_they_are_taken_to_be(piece: int, restarts: bool) -> None:
    for seed in range(piece * PIECE, (piece + 1) * PIECE):
        assert Play(seed, restarts=restarts).run() == [], f"seed {seed}"
