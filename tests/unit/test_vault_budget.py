"""Segments of the vault and the budget of descriptors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpsd.os.descriptors import DescriptorBudget, Purpose
from mpsd.vault.messages import Kind, Message, Status
from tests.support.vaultfixtures import LIMITS
from tests.support.vaulting import DEADLINE_S, MemoryStore, RunningVault, VaultClient

CLIENT, SEGMENT = 2, 2


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    held = MemoryStore()
    yield held
    held.empty()


def eventually(running: RunningVault, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not running.look(holds):
        assert time.monotonic() < end


def test_a_segment_beyond_the_budget_gets_the_refusal_of_a_quota(tmp_path: Path, store: MemoryStore) -> None:
    budget = DescriptorBudget(CLIENT + 2 * SEGMENT + 1, reserve=0)
    with RunningVault(tmp_path / "v.sock", store, LIMITS, budget=budget) as running:
        with VaultClient(running.path) as client:
            assert [client.put(number).status for number in (1, 2, 3)] == [Status.OK, Status.OK, Status.QUOTA]
            assert running.look(lambda: running.vault.totals())["vault_refused_full"] == 1
            assert client.ask(Message(Kind.DROP, number=1)).status == Status.OK
            # The descriptor is closed in a thread, and the copy by the store.
            eventually(running, lambda: budget.fits(Purpose.SEGMENT, SEGMENT))
            assert client.put(3).status == Status.OK
            assert client.put(4).status == Status.QUOTA
            for number in (2, 3):
                assert client.ask(Message(Kind.DROP, number=number)).status == Status.OK
        eventually(running, lambda: budget.left == budget.capacity)


def test_segments_of_an_earlier_daemon_are_charged_and_released(tmp_path: Path, store: MemoryStore) -> None:
    with RunningVault(tmp_path / "v.sock", store, LIMITS) as running, VaultClient(running.path) as client:
        assert client.put(1).status == Status.OK
        assert client.ask(Message(Kind.KEEP, name="job")).status == Status.OK
    budget = DescriptorBudget(100, reserve=0)
    with RunningVault(tmp_path / "v.sock", store, LIMITS, budget=budget) as running:
        taken = running.look(lambda: budget.capacity - budget.left)
        # This process lives: its pin and a ledger. The segment and the notes have a copy each.
        assert taken >= CLIENT + SEGMENT
        with VaultClient(running.path) as client:
            assert client.ask(Message(Kind.RELEASE, name="job")).status == Status.OK
        eventually(running, lambda: budget.left == budget.capacity)
