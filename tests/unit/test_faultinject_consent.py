"""No fault is injected into a GPU that is in use, or that was not offered."""

from __future__ import annotations

import os
import subprocess

import pytest

from faultinject.__main__ import main
from faultinject.rig import consent
from mpsd.base.errors import BusyError, DeniedError, UsageError
from mpsd.base.model import GpuProcess
from tests.support.devices import OneGpu


class Machine(OneGpu):
    """One GPU with these processes on it."""

    def __init__(self, *pids: int) -> None:
        super().__init__(*(GpuProcess(pid, 5 << 20, False) for pid in pids))


def answer(text: str) -> consent.Ask:
    return lambda question: text


def never(question: str) -> str:
    raise AssertionError("asked")


def test_a_gpu_in_use_is_refused_and_its_users_are_shown() -> None:
    said: list[str] = []
    with pytest.raises(BusyError) as refused:
        consent.require(Machine(os.getpid()), yes=False, ask=never, tell=said.append)
    assert "1 process uses" in str(refused.value)
    assert "--backend simulated" in refused.value.remedy
    assert "--yes" in refused.value.remedy
    assert str(os.getpid()) in "\n".join(said)


def test_what_a_process_calls_itself_cannot_write_to_the_terminal() -> None:
    escape = "\x1b]0;owned\x07"
    with subprocess.Popen(["/bin/cat", escape, "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as rogue:
        assert rogue.stderr is not None
        rogue.stderr.readline()
        rows = consent.users_of(Machine(rogue.pid))
    assert rows[0][-1] == "/bin/cat \\x1b]0;owned\\x07 -"


def test_a_process_that_cannot_be_looked_at_counts() -> None:
    said: list[str] = []
    with pytest.raises(BusyError):
        consent.require(Machine((1 << 22) + 1), yes=False, ask=never, tell=said.append)
    assert "not visible" in "\n".join(said)


def test_yes_goes_ahead_and_still_shows_who_is_there() -> None:
    said: list[str] = []
    consent.require(Machine(os.getpid()), yes=True, ask=None, tell=said.append)
    assert str(os.getpid()) in "\n".join(said)


def test_an_idle_gpu_needs_a_word() -> None:
    with pytest.raises(UsageError, match="there is no terminal to ask on"):
        consent.require(Machine(), yes=False, ask=None, tell=lambda line: None)
    for no in ("", "n\n", "\n", "what\n"):
        with pytest.raises(DeniedError, match="no fault was injected"):
            consent.require(Machine(), yes=False, ask=answer(no), tell=lambda line: None)
    for yes in ("y\n", "YES\n"):
        consent.require(Machine(), yes=False, ask=answer(yes), tell=lambda line: None)


def test_the_demo_asks_before_it_touches_a_real_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mpsd.gpu.nvidia.nvml.Nvml", lambda: Machine(os.getpid()))
    monkeypatch.setattr("faultinject.campaigns.demo.Matrix", None)
    assert main(["demo", "--backend", "nvidia"]) == 1
    assert "1 process uses" in capsys.readouterr().err
