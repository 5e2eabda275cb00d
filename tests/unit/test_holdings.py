"""Which memory a process releases, in which order, and what it reports as held. The driver is a list."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace, TracebackType
from typing import Any, cast

import pytest

from mpsd_client import MpsdError, _cuda, holdings, turns
from mpsd_client.buffer import Buffer, Mapping, Range
from mpsd_client.vault import InUseError
from tests.support.waiting import DEADLINE_S, until

SIZE = 4096


class Device:
    """Memory that the first caller unmaps, as in the driver; `stuck` addresses are never unmapped."""

    def __init__(self, did: list[tuple[str, int]]) -> None:
        self._did = did
        self.ordinal = 0
        self.lost = False
        self.stuck: set[int] = set()
        self._unmapped: set[int] = set()

    def unmap(self, address: int, _size: int) -> bool:
        if address in self.stuck or address in self._unmapped:
            return False
        self._unmapped.add(address)
        self._did.append(("unmap", address))
        return True

    def finish_work(self) -> None:
        self._did.append(("finish", 0))

    def free_addresses(self, address: int, _size: int) -> None:
        self._did.append(("free", address))

    def has_faulted(self) -> bool:
        return self.lost

    def close(self) -> None:
        self._did.append(("close", 0))


class Here:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[tuple[str, int]] = []
        self.device = Device(self.did)
        self.answers = True
        self.exits: list[Callable[[], object]] = []
        monkeypatch.setattr(holdings, "_released", threading.Event())
        monkeypatch.setattr(holdings, "_held", {})
        monkeypatch.setattr(holdings, "Vault", self._vault)
        # Not the module's own register(): weakref's first finalizer registers there too.
        monkeypatch.setattr(holdings, "atexit", SimpleNamespace(register=self.exits.append))
        monkeypatch.setattr(_cuda.Device, "found_fault", False)

    def _vault(self, _path: str, _token: bytes) -> Vault:
        if not self.answers:
            raise MpsdError("nobody is there")
        return Vault(self.did)

    def has(self, number: int, address: int) -> Range:
        where = Range(cast(_cuda.Device, self.device), address, SIZE)
        with holdings.attaching:
            holdings.check_open()
            holdings.note(number, "vault", where)
        return where


class Vault:
    def __init__(self, did: list[tuple[str, int]]) -> None:
        self._did = did

    def leave_segment(self, number: int) -> None:
        self._did.append(("leave", number))

    def __enter__(self) -> Vault:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    yield Here(monkeypatch)


def test_all_is_unmapped_before_the_vault_is_told_and_no_work_is_waited_for(here: Here) -> None:
    ranges = [here.has(1, 0x1000), here.has(3, 0x2000)]
    assert holdings.release_all()
    assert here.did == [("unmap", 0x1000), ("unmap", 0x2000), ("leave", 1), ("leave", 3)]
    assert not any(where.mapped for where in ranges)
    assert holdings.release_all() and len(here.did) == 4, "once"
    with pytest.raises(InUseError, match="another process has taken over"):
        here.has(5, 0x3000)


def test_what_stays_mapped_is_nobody_else_s(here: Here) -> None:
    here.has(1, 0x1000)
    here.has(3, 0x2000)
    here.device.stuck = {0x1000}
    assert not holdings.release_all()
    assert here.did == [("unmap", 0x2000)], "the vault is told nothing"
    here.device.stuck = set()
    assert holdings.release_all()
    assert here.did[-2:] == [("leave", 1), ("leave", 3)]


def test_what_the_vault_does_not_hear_is_not_said(here: Here) -> None:
    here.has(1, 0x1000)
    here.answers = False
    assert not holdings.release_all()
    here.answers = True
    assert holdings.release_all() and here.did == [("unmap", 0x1000), ("leave", 1)]


def test_what_is_just_being_attached_is_let_go_of_too(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "ATTACHED_S", DEADLINE_S)
    said: list[bool] = []
    with holdings.attaching:
        holdings.check_open()
        thread = threading.Thread(target=lambda: said.append(holdings.release_all()))
        thread.start()
        until(holdings._released.is_set, "it is told to let go")
        holdings.note(1, "vault", Range(cast(_cuda.Device, here.device), 0x1000, SIZE))
        assert not here.did
    thread.join(DEADLINE_S)
    assert said == [True] and here.did == [("unmap", 0x1000), ("leave", 1)]


def test_an_attaching_that_does_not_end_is_not_waited_for(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "ATTACHED_S", 0.001)
    here.has(1, 0x1000)
    with holdings.attaching:
        assert not holdings.release_all()
    assert not here.did


def test_who_waits_for_a_buffer_gives_up_when_it_is_told_to_let_go(here: Here) -> None:
    holdings.wait(0.0)
    assert holdings.release_all()
    with pytest.raises(InUseError):
        holdings.wait(DEADLINE_S)


def buffer(here: Here, number: int, address: int) -> Buffer:
    mapping = Mapping(cast(_cuda.Device, here.device), address, SIZE)
    holdings.note(number, "vault", mapping.range)

    def closed(leaves: bool) -> None:
        holdings.closed(number, leaves)

    return Buffer(mapping, "name", SIZE, found=False, persistent=True, forget=lambda: None, closed=closed)


def test_a_buffer_is_as_closed_then_and_to_close_it_is_harmless(here: Here) -> None:
    one = buffer(here, 1, 0x1000)
    view = one.view("float32")
    assert holdings.release_all()
    before = len(here.did)
    uses: tuple[Callable[[], Any], ...] = (lambda: one.pointer, view.__dlpack_device__, one.read, one.view)
    for use in uses:
        with pytest.raises(MpsdError, match="the buffer is closed"):
            use()
    assert not hasattr(view, "__cuda_array_interface__") and "closed" in repr(one) and "closed" in repr(view)
    one.close()
    del view, use, uses
    assert here.did[before:] == [("finish", 0), ("close", 0)], "neither unmapped nor left again"


def test_a_close_leaves_only_what_is_unmapped(here: Here) -> None:
    buffer(here, 1, 0x1000).close()
    done = [("finish", 0), ("unmap", 0x1000), ("free", 0x1000), ("close", 0), ("leave", 1)]
    assert here.did == done
    here.device.stuck = {0x2000}
    buffer(here, 3, 0x2000).close()
    assert here.did[len(done) :] == [("finish", 0), ("close", 0)]
    assert not holdings.release_all()


def test_at_the_end_of_a_lost_process_it_is_let_go_of_and_said_and_not_at_another_s(here: Here) -> None:
    said: list[str] = []
    holdings.release_at_exit(lambda: said.append("left"))
    here.has(1, 0x1000)
    (at_exit,) = here.exits
    _cuda.Device.found_fault = True
    at_exit()
    assert not here.did and not said, "its work may be running, and end in a fault of its neighbours"
    here.device.lost = True
    here.device.stuck = {0x1000}
    at_exit()
    assert not said
    here.device.stuck = set()
    at_exit()
    assert here.did == [("unmap", 0x1000), ("leave", 1)] and said == ["left"]


@pytest.mark.parametrize("lost", [False, True])
def test_one_that_has_closed_all_says_so_at_its_end_where_its_context_was_lost(
    here: Here, lost: bool
) -> None:
    said: list[str] = []
    holdings.release_at_exit(lambda: said.append("left"))
    buffer(here, 1, 0x1000).close()
    _cuda.Device.found_fault = lost
    (at_exit,) = here.exits
    at_exit()
    assert said == ["left"] * lost


@pytest.mark.parametrize(("done", "word"), [(True, turns.RELEASED), (False, turns.CANNOT_RELEASE)])
def test_what_came_of_it_is_said_after_the_deed(done: bool, word: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(DEADLINE_S)
        turn = turns.Turn(theirs.detach(), "first")
        did = list[str]()

        def let_go() -> bool:
            did.append("let go")
            return done

        assert turn.listen(let_go) and not turn.listen(let_go)
        assert ours.recv(64) == turns.CAN_RELEASE
        ours.sendall(b"some word\n" + turns.RELEASE)
        assert ours.recv(64) == word and did == ["let go"]
        turn._socket.close()
