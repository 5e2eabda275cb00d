"""The wait for a daemon that may be restarting, with a clock that the pauses move."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd_client import MpsdError, NotRunningError
from mpsd_client.joining import restart
from mpsd_client.joining.restart import until_answered


class Clock:
    """Time that passes only in pauses [s]."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(restart, "time", made)
    return made


@pytest.fixture
def left(tmp_path: Path) -> Iterator[str]:
    """Yield the path of a socket without a listener, as a killed daemon leaves it."""
    path = str(tmp_path / "mpsd.sock")
    with socket.socket(socket.AF_UNIX) as former:
        former.bind(path)
    yield path


class Daemon:
    """A daemon that answers from a moment on."""

    def __init__(self, clock: Clock, back_at: float, error: type[MpsdError] = NotRunningError) -> None:
        self.clock, self.back_at, self.error = clock, back_at, error
        self.asked: list[str | None] = []

    def ask(self, path: str | None) -> str:
        self.asked.append(path)
        if self.clock.now < self.back_at:
            raise self.error("no answer")
        return "answer"


def test_a_short_wait_is_silent(clock: Clock, left: str) -> None:
    told: list[str] = []
    assert (
        until_answered(Daemon(clock, 100.0).ask, left, 10.0, told.append) == "answer" and clock.now == 100.0
    )
    assert until_answered(Daemon(clock, 100.5).ask, left, 10.0, told.append) == "answer"
    assert 100.5 <= clock.now < 101.0 and told == []


def test_a_long_wait_is_told_once(clock: Clock, left: str) -> None:
    told: list[str] = []
    assert until_answered(Daemon(clock, 109.0).ask, left, 10.0, told.append) == "answer"
    (line,) = told
    assert line == f"no daemon answers on {left}: waiting up to 10 s, because mpsd may be restarting"


def test_the_wait_ends(clock: Clock, left: str) -> None:
    with pytest.raises(NotRunningError):
        until_answered(Daemon(clock, 1e9).ask, left, 10.0, lambda line: None)
    assert 110.0 <= clock.now < 110.5


def test_a_socket_that_is_replaced_meanwhile_is_waited_for(clock: Clock, left: str) -> None:
    daemon = Daemon(clock, 102.0)

    def ask(path: str | None) -> str:
        if daemon.asked:  # The daemon removes the file between the first request and the second one.
            Path(left).unlink(missing_ok=True)
        return daemon.ask(path)

    assert until_answered(ask, left, 10.0, lambda line: None) == "answer"
    assert {*daemon.asked} == {left} and not Path(left).exists()


def test_a_path_without_a_socket_refuses_at_once(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("none", "file"):
        daemon = Daemon(clock, 1e9)
        with pytest.raises(NotRunningError):
            until_answered(daemon.ask, str(tmp_path / name), 10.0, lambda line: None)
        assert len(daemon.asked) == 1 and clock.now == 100.0


def test_other_errors_and_no_wait_refuse_at_once(clock: Clock, left: str) -> None:
    for error, wait_s in ((MpsdError, 10.0), (NotRunningError, 0.0)):
        with pytest.raises(error):
            until_answered(Daemon(clock, 1e9, error).ask, left, wait_s, lambda line: None)
        assert clock.now == 100.0


def test_the_socket_is_the_environment_s_by_default(
    clock: Clock, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPSD_SOCKET", left)
    daemon = Daemon(clock, 101.0)
    assert until_answered(daemon.ask, None, 10.0, lambda line: None) == "answer"
    assert daemon.asked[0] is None and {*daemon.asked[1:]} == {left}
