"""Descriptors from strangers: exported memory is accepted, and every other kind refused."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.base.errors import GpuError
from mpsd.gpu.base import ExportedMemory
from mpsd.gpu.nvidia.exported import CONTROL_DEVICE, NvidiaMemory
from mpsd.gpu.simulated.exported import NAME, SEALS, SimulatedMemory
from mpsd.os.filetype import file_type

CLAIM = ExportedMemory(1 << 20, "GPU-a")
NULL = os.makedev(1, 3)


def memory(size: int = 4096, name: str = NAME, seals: int = SEALS) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.fixture
def strangers() -> Iterator[list[int]]:
    """Yield a descriptor of each kind that is not GPU memory."""
    left, right = socket.socketpair()
    with tempfile.TemporaryFile() as plain, tempfile.NamedTemporaryFile(prefix="memfd:mpsd") as named:
        fds = [*os.pipe(), os.open("/", os.O_RDONLY), os.open("/dev/zero", os.O_RDONLY)]
        fds += [
            os.open("/", os.O_PATH),
            os.pidfd_open(os.getpid()),
            os.open("/proc/self/status", os.O_RDONLY),
        ]
        fds += [memory(name="other"), memory(seals=0), memory(seals=fcntl.F_SEAL_GROW), memory(0)]
        fds += [memory(8192), left.fileno(), right.fileno(), plain.fileno(), named.fileno()]
        # Larger than the GPU, in place of the descriptor above.
        yield fds
        for fd in fds[:-4]:
            os.close(fd)
    left.close()
    right.close()


def test_file_types_are_those_of_fstat(strangers: list[int]) -> None:
    for fd in strangers:
        known, found = os.fstat(fd), file_type(fd)
        assert (found.mode, found.size, found.device, found.on) == (
            known.st_mode,
            known.st_size,
            known.st_rdev,
            known.st_dev,
        )
    with pytest.raises(OSError):
        file_type(1 << 20)


def test_the_stand_in_s_memory_has_its_true_size(strangers: list[int]) -> None:
    inspector = SimulatedMemory({"GPU-0": 4096})
    fd = memory()
    assert inspector.identify(fd, CLAIM) == ExportedMemory(4096, "GPU-0")
    os.close(fd)
    for stranger in (*strangers, 1 << 20):
        with pytest.raises(GpuError):
            inspector.identify(stranger, CLAIM)


def test_a_file_with_the_name_is_not_the_stand_in_s(tmp_path: Path) -> None:
    path = tmp_path / f"memfd:{NAME} (deleted)"
    path.write_bytes(b"x" * 4096)
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(GpuError):
        SimulatedMemory({"GPU-0": 4096}).identify(fd, CLAIM)
    os.close(fd)


def test_nvidia_s_is_its_control_device_and_the_claim_is_bounded(strangers: list[int]) -> None:
    """The null device stands in for the control device, which does not exist here."""
    assert (os.major(CONTROL_DEVICE), os.minor(CONTROL_DEVICE)) == (195, 255)
    inspector = NvidiaMemory({"GPU-a": 1 << 20}, device=NULL)
    for stranger in strangers:
        with pytest.raises(GpuError, match="control device"):
            inspector.identify(stranger, CLAIM)
    fd = os.open("/dev/null", os.O_RDWR)
    assert stat.S_ISCHR(os.fstat(fd).st_mode)
    assert inspector.identify(fd, CLAIM) == CLAIM
    for size, gpu in ((0, "GPU-a"), ((1 << 20) + 1, "GPU-a"), (1, "GPU-b")):
        with pytest.raises(GpuError):
            inspector.identify(fd, ExportedMemory(size, gpu))
    with pytest.raises(GpuError):
        NvidiaMemory({"GPU-a": 1 << 20}).identify(fd, CLAIM)
    os.close(fd)
