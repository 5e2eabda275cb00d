"""Fixtures of a vault without a daemon: import `place`, `store` and `vault` into a test file."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.core.vault import Limits, Quota
from tests.support.descriptors import open_descriptors
from tests.support.site import until
from tests.support.vaulting import MemoryStore, RunningVault

LIMITS = Limits(Quota(1 << 30, 64), Quota(1 << 30, 128), Quota(1 << 20, 16), 256, 3600.0)


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where:
        os.chmod(where, 0o755)
        yield Path(where) / "vault.sock"


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    """A store; once it is emptied at the end, no new descriptor is open."""
    gc.collect()
    before = open_descriptors()
    kept = MemoryStore()
    yield kept
    kept.empty()

    def left() -> dict[int, str]:
        return {fd: target for fd, target in open_descriptors().items() if fd not in before}

    try:
        until(lambda: not left(), "no descriptor is left open")
    except AssertionError as error:
        raise AssertionError(f"{error}: {left()}") from None


@pytest.fixture
def vault(place: Path, store: MemoryStore) -> Iterator[RunningVault]:
    with RunningVault(place, store, LIMITS) as running:
        yield running


def held(vault: RunningVault) -> list[int]:
    return vault.look(lambda: sorted(h.number for h in vault.vault.ledger.holdings()))


def alone(vault: RunningVault) -> None:
    """Wait until this process is no client any more: it may be another owner's next."""
    until(lambda: vault.look(lambda: not vault.door.server.connections), "all connections have ended")


def counted(vault: RunningVault, name: str) -> int:
    return vault.look(lambda: vault.vault.counters[name])
