"""The isolation device in a wrong state: each failure has its outcome and its message."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.base.errors import GpuError, UnsupportedError
from mpsd.base.model import KernelAction
from mpsd.gpu.nvidia import checks
from mpsd.gpu.nvidia.kernel import NvidiaIsolation
from tests.kmod.test_reader import packed


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[NvidiaIsolation, int]]:
    """A device that a test writes into, and that answers no request."""
    ours, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    monkeypatch.setattr(NvidiaIsolation, "__init__", lambda self: setattr(self, "_fd", ours))
    device = NvidiaIsolation()
    yield device, theirs
    device.close()
    os.close(theirs)


def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fails(*args: object, **kwargs: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fails)


def test_records_are_read_until_there_are_no_more(pipe: tuple[NvidiaIsolation, int]) -> None:
    device, end = pipe
    assert device.drain() == []
    os.write(end, packed() * 3)
    assert [f.action for f in device.drain()] == [KernelAction.SUNK] * 3


@pytest.mark.timeout(300)
def test_a_device_that_ends_is_lost_and_holds_nobody_up(pipe: tuple[NvidiaIsolation, int]) -> None:
    device, end = pipe
    other = os.open(os.devnull, os.O_WRONLY)
    os.dup2(other, end)
    os.close(other)
    with pytest.raises(GpuError):
        device.drain()


def test_one_that_was_closed_refuses_as_ever(pipe: tuple[NvidiaIsolation, int]) -> None:
    device, _ = pipe
    device.close()
    device.close()
    for ask in (device.state, device.drain, lambda: device.acknowledge(1), lambda: device.kill(1)):
        with pytest.raises(GpuError):
            ask()


def test_where_there_is_no_device_the_module_is_the_stock_one_or_none(tmp_path: Path) -> None:
    found = checks.kernel_isolation(str(tmp_path / "none"), str(tmp_path))
    assert found.ok is None and found.finding.startswith("off: the loaded nvidia-uvm is the stock module")
    found = checks.kernel_isolation(str(tmp_path / "none"), str(tmp_path / "none"))
    assert found.ok is None and found.finding.startswith("off: nvidia-uvm is not loaded")


def test_a_patched_module_without_a_device_is_not_called_the_stock_one(tmp_path: Path) -> None:
    """In a container without the device the module may still isolate."""
    (tmp_path / "parameters").mkdir()
    (tmp_path / "parameters/uvm_mpsd_mode").write_text("2\n")
    found = checks.kernel_isolation(str(tmp_path / "none"), str(tmp_path))
    assert found.ok is None
    assert found.finding.startswith("unknown: the loaded nvidia-uvm is patched (mode 2)")
    assert "container" in found.remedy and "of its domain" not in found.finding


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_what_may_not_be_opened_is_not_said_to_be_off(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """`doctor` of any user, without mpsd: the module may still isolate."""
    failing(monkeypatch, number)
    found = checks.kernel_isolation()
    assert found.ok is None and found.finding.startswith("unknown: ")
    assert "CAP_SYS_ADMIN" in found.remedy and "of its domain" not in found.finding


def test_a_node_that_a_module_has_left_needs_no_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, errno.ENXIO)
    with pytest.raises(UnsupportedError) as raised:
        NvidiaIsolation()
    assert "CAP_SYS_ADMIN" not in raised.value.remedy


def test_a_file_that_is_no_device_is_another_language(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = checks.kernel_isolation(str(tmp_path / "file"))
    assert found.ok is False
