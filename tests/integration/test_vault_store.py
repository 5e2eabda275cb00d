"""The vault and what outlives it: adoption, and stores and notes that fail for a while."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from mpsd import procs
from mpsd.model import ProcessInstance
from tests.integration.test_vault_door import end, program
from tests.support.site import until
from tests.support.vaultfixtures import LIMITS, held, place, store
from tests.support.vaulting import DEADLINE_S, MemoryStore, RunningVault

__all__ = ["place", "store"]  # Fixtures are found by their names here.


def test_a_client_whose_program_cannot_be_looked_at_holds_up_no_adoption(
    place: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its executable lies on a file server that does not answer."""
    with RunningVault(place, store, LIMITS):
        living = program(place)
        until(lambda: len(store.held) == 4, "all is stored")
    answers, asked = threading.Event(), threading.Event()
    real = procs.exec_identity

    def hangs(process: ProcessInstance) -> procs.ExecIdentity:
        asked.set()
        assert answers.wait(DEADLINE_S)
        return real(process)

    monkeypatch.setattr(procs, "exec_identity", hangs)
    began = time.monotonic()
    with RunningVault(place, store, LIMITS) as second:
        try:
            assert time.monotonic() - began < 5 and asked.is_set()
            assert held(second) == [1, 2, 3]
        finally:
            answers.set()
        end(living)
        until(lambda: held(second) == [], "its end is seen")
