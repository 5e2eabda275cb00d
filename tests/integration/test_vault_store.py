"""The vault and its memory beyond a daemon's life: adoption, and stores and notes that fail for a while."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import StoreError
from mpsd.base.model import ProcessInstance
from mpsd.fdstore.queue import LeaseStore
from mpsd.os import processes
from mpsd.os.descriptors import Charge
from mpsd.vault import holdings
from mpsd.vault.messages import Kind, Message, Status
from mpsd.vault.notes import VaultNotes
from tests.integration.test_vault_door import end, program
from tests.support.site import until
from tests.support.vaultfixtures import LIMITS, held, place, store
from tests.support.vaulting import DEADLINE_S, MemoryStore, RunningVault, VaultClient

__all__ = ["place", "store"]  # pytest finds fixtures by these names.


def conditions(vault: RunningVault) -> list[Condition]:
    return list(vault.look(vault.vault.conditions))


def stored(vault: RunningVault) -> list[bool]:
    """Return what `vault list` shows as stored, for each holding."""
    return vault.look(lambda: [vault.vault.is_stored(h) for h in vault.vault.ledger.holdings()])


def test_a_client_whose_program_cannot_be_looked_at_holds_up_no_adoption(
    place: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's executable is on a file server that does not answer."""
    with RunningVault(place, store, LIMITS):
        living = program(place)
        until(lambda: len(store.held) == 4, "all is stored")
    answers, asked = threading.Event(), threading.Event()
    real = processes.exec_identity

    def hangs(process: ProcessInstance) -> processes.ExecIdentity:
        asked.set()
        assert answers.wait(DEADLINE_S)
        return real(process)

    monkeypatch.setattr(processes, "exec_identity", hangs)
    began = time.monotonic()
    with RunningVault(place, store, LIMITS) as second:
        try:
            assert time.monotonic() - began < 5 and asked.is_set()
            assert held(second) == [1, 2, 3]
        finally:
            answers.set()
        end(living)
        until(lambda: held(second) == [], "its end is seen")


def test_what_the_store_would_not_take_is_stored_later_though_nothing_else_comes(
    place: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refusals = LeaseStore.put, 3

    def put(
        self: LeaseStore,
        name: str,
        fds: Sequence[int],
        owner: int | None = None,
        charge: Charge | None = None,
    ) -> asyncio.Future[None]:
        nonlocal refusals
        if name != "vault.notes" and refusals:
            refusals -= 1
            raise StoreError("no descriptor is left")
        return real(self, name, fds, owner, charge)

    monkeypatch.setattr(LeaseStore, "put", put)
    with RunningVault(place, store, LIMITS) as vault, VaultClient(place) as client:
        client.put(1)
        until(
            lambda: [c.key for c in conditions(vault)] == [(Code.SEGMENTS_NOT_STORED, "")],
            "said",
        )
        assert stored(vault) == [False]
        until(lambda: stored(vault) == [True], "it is stored")
        until(lambda: not conditions(vault), "and nothing is wrong any more")
        assert store.held.keys() == {"vault.notes", "vault.1"}


def test_a_store_that_fails_for_a_while_is_never_said_to_hold_it(
    place: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "STORED_DEADLINE_S", 0.2)
    real, broken = store.put, threading.Event()
    broken.set()

    def put(name: str, fds: Sequence[int]) -> None:
        if broken.is_set():
            raise StoreError("the service manager does not answer")
        real(name, fds)

    monkeypatch.setattr(store, "put", put)
    with RunningVault(place, store, LIMITS) as vault, VaultClient(place) as client:
        assert client.keep_alone("weights", 7, b"bytes").count == 0
        assert stored(vault) == [False]
        broken.clear()
        until(lambda: stored(vault) == [True], "it is stored")


@pytest.mark.parametrize("failing", ["create", "write"])
def test_what_is_not_noted_is_not_said_to_be_stored_and_is_noted_later(
    place: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setattr(holdings, "STORED_DEADLINE_S", 0.2)

    def full(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with RunningVault(place, store, LIMITS) as vault, VaultClient(place) as client:
        with monkeypatch.context() as patch:
            patch.setattr(VaultNotes, failing, full)
            assert client.keep_alone("weights", 7, b"bytes").count == 0
            assert client.keep_alone("moments", 8, b"more").count == 0
            assert stored(vault) == [False, False]
            unnoted = Condition(Code.SEGMENTS_NOT_NOTED, detail="Too many open files", count=2)
            assert unnoted in conditions(vault)
        until(lambda: stored(vault) == [True, True], "both are noted and stored")
        until(lambda: not conditions(vault), "and nothing is wrong any more")
    with RunningVault(place, store, LIMITS) as vault, VaultClient(place) as client:
        assert held(vault) == [7, 8]


def test_what_was_freed_is_not_stored_and_nothing_is_in_a_store_that_died(
    place: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def revive() -> None:
        raise StoreError("no keeper starts")

    with RunningVault(place, store, LIMITS) as vault, VaultClient(place) as client:
        assert client.keep_alone("weights", 7, b"bytes").count == 1
        (holding,) = vault.look(lambda: tuple(vault.vault.ledger.holdings()))
        with monkeypatch.context() as patch:
            patch.setattr(store, "revive", revive)
            vault.look(vault._lease_store._worker_died)
            until(lambda: stored(vault) == [False], "it is not stored while there is no store")
        until(lambda: stored(vault) == [True], "the store was replaced")
        client.put(9)
        assert client.ask(Message(Kind.DROP, number=7)).status == Status.OK
        assert not vault.look(lambda: vault.vault.is_stored(holding))


def test_a_daemon_that_ends_stores_what_was_brought_last(
    place: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "STORED_DEADLINE_S", DEADLINE_S)
    real_put, real_close, ends = store.put, holdings.Vault.close, threading.Event()

    def put(name: str, fds: Sequence[int]) -> None:
        assert ends.wait(DEADLINE_S)
        real_put(name, fds)

    async def close(vault: holdings.Vault) -> None:
        ends.set()
        await real_close(vault)

    monkeypatch.setattr(store, "put", put)
    monkeypatch.setattr(holdings.Vault, "close", close)
    with RunningVault(place, store, LIMITS) as vault, VaultClient(place) as client:
        client.put(1)
        client.put(2)
        assert stored(vault) == [False, False]
    assert store.held.keys() == {"vault.notes", "vault.1", "vault.2"}
