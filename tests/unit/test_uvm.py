"""The UVM adapter against a stand-in driver: same calls, same descriptors, no GPU."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpsd.base.errors import GpuError, NotFoundError, NotReadyError, UnsupportedError
from mpsd.base.model import ProcessInstance
from mpsd.gpu.nvidia import uvm, uvm_abi

GPU = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


class StandIn:
    """Answer UVM ioctls as a driver of one branch would; `spaces` selects the address spaces."""

    def __init__(self, layout: uvm_abi.TrackerLayout) -> None:
        self.layout = layout
        self.is_space: Callable[[int], bool] = lambda fd: True
        self.ranges: dict[int, int] = {}
        self.refuse_sparse = 0
        self.queue = self.control = 0
        self.enabled = 0

    def __call__(self, fd: int, request: int, buffer: bytearray, _mutate: bool) -> int:
        handlers = {
            self.layout.request: self._init,
            57: lambda b: self._status(b, 4, 0),
            58: self._enable,
            73: self._create,
            74: lambda b: self._status(b, 32, self.refuse_sparse),
            34: self._free,
        }
        if request not in handlers:
            raise OSError(25, "Inappropriate ioctl for device")
        handlers[request](buffer)
        return 0

    @staticmethod
    def _status(buffer: bytearray, at: int, status: int) -> None:
        struct.pack_into("<I", buffer, at, status)

    def _init(self, buffer: bytearray) -> None:
        buffer.extend(bytes(max(0, self.layout.status_at + 4 - len(buffer))))
        accepted = self.is_space(struct.unpack_from("<I", buffer, 44)[0])
        if accepted:
            self.queue, _, self.control = struct.unpack_from("<QQQ", buffer)
        self._status(buffer, self.layout.status_at, 0 if accepted else 0x16)
        if self.layout.granted_at is not None and len(buffer) >= 60:
            struct.pack_into("<I", buffer, self.layout.granted_at, 1)

    def _enable(self, buffer: bytearray) -> None:
        self.enabled = struct.unpack_from("<Q", buffer)[0]
        self._status(buffer, 8, 0)

    def _create(self, buffer: bytearray) -> None:
        base, length = struct.unpack_from("<QQ", buffer)
        taken = any(base < b + n and b < base + length for b, n in self.ranges.items())
        self._status(buffer, 16, 0x68 if taken else 0)
        if not taken:
            self.ranges[base] = length

    def _free(self, buffer: bytearray) -> None:
        base, length = struct.unpack_from("<QQ", buffer)
        known = self.ranges.get(base) == length
        if known:
            del self.ranges[base]
        self._status(buffer, 16, 0 if known else 0x1E)

    def fault(self, address: int) -> None:
        """Write one fatal fault into the queue of the last tracker."""
        entry = bytearray(64)
        entry[0:5] = bytes((6, 2, 1, 1, 1))
        struct.pack_into("<QQ", entry, 8, address, 77)
        ctypes.memmove(self.queue, bytes(entry), 64)
        ctypes.memmove(self.control + 8, struct.pack("<II", 1, 1), 8)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn(uvm_abi.tracker_layouts(580)[0])
    real = fcntl.ioctl
    monkeypatch.setattr(
        fcntl,
        "ioctl",
        lambda fd, request, *rest: stand_in(fd, request, *rest) if rest else real(fd, request),
    )
    monkeypatch.setattr(uvm, "UVM_DEVICE", "/dev/zero")
    monkeypatch.setattr(uvm, "TOOLS_DEVICE", "/dev/null")
    return stand_in


def instance(pid: int) -> ProcessInstance:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ProcessInstance(pid, int(fields[19]))


@pytest.fixture
def client() -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds two files of the stand-in device, one of them twice."""
    script = (
        "import os,sys\n"
        "a=os.open('/dev/zero',os.O_RDWR); b=os.open('/dev/zero',os.O_RDWR|os.O_APPEND); c=os.dup(a)\n"
        "print(a,b,c,flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def appends(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND)


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_roles_are_found_by_trying(driver: StandIn, client: subprocess.Popen[bytes]) -> None:
    driver.is_space = lambda fd: not appends(fd)
    before = open_files()
    pidfd = os.pidfd_open(client.pid)
    (space,) = uvm.NvidiaUvm("580.1").open(instance(client.pid), pidfd)
    fds = space.fds
    assert set(fds) == {"va", "mm"}
    assert not appends(fds["va"])
    assert appends(fds["mm"])
    assert not any(os.get_inheritable(fd) for fd in fds.values())
    space.close()
    space.close()
    os.close(pidfd)
    assert open_files() == before


def test_not_ready_without_an_address_space_or_without_its_second_file(
    driver: StandIn, client: subprocess.Popen[bytes]
) -> None:
    adapter = uvm.NvidiaUvm("580.1")
    pidfd = os.pidfd_open(client.pid)
    before = open_files()
    for answer in (False, True):
        driver.is_space = lambda fd, answer=answer: answer  # type: ignore[misc]
        with pytest.raises(NotReadyError, match=str(client.pid)):
            adapter.open(instance(client.pid), pidfd)
    with pytest.raises(NotReadyError):
        own = os.pidfd_open(os.getpid())
        try:
            adapter.open(instance(os.getpid()), own)
        finally:
            os.close(own)
    assert open_files() == before
    os.close(pidfd)


def test_a_process_that_is_gone(driver: StandIn, client: subprocess.Popen[bytes]) -> None:
    process = instance(client.pid)
    pidfd = os.pidfd_open(client.pid)
    client.kill()
    client.wait()
    with pytest.raises(NotFoundError, match="has ended"):
        uvm.NvidiaUvm("580.1").open(process, pidfd)
    os.close(pidfd)


def test_what_was_taken_before_a_failure_is_closed(
    driver: StandIn, client: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = uvm._take, []

    def take(pid: int, pidfd: int, number: int) -> int:
        if len(taken) == 2:
            raise UnsupportedError("Too many open files")
        taken.append(real(pid, pidfd, number))
        return taken[-1]

    monkeypatch.setattr(uvm, "_take", take)
    pidfd = os.pidfd_open(client.pid)
    before = open_files()
    with pytest.raises(UnsupportedError, match="Too many"):
        uvm.NvidiaUvm("580.1").open(instance(client.pid), pidfd)
    assert len(taken) == 2
    assert open_files() == before
    os.close(pidfd)


def test_a_tracker_that_fails_takes_the_earlier_ones_along(
    driver: StandIn, client: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = uvm.NvidiaUvm("580.1")
    real, laid = adapter.try_tracker, []

    def second_fails(fd: int) -> tuple[uvm.UvmTracker | None, int]:
        if laid:
            raise UnsupportedError("Too many open files")
        laid.append(fd)
        return real(fd)

    monkeypatch.setattr(adapter, "try_tracker", second_fails)
    pidfd = os.pidfd_open(client.pid)
    before = open_files()
    with pytest.raises(UnsupportedError, match="Too many"):
        adapter.open(instance(client.pid), pidfd)
    assert open_files() == before
    os.close(pidfd)


def test_a_process_with_countless_uvm_files_is_refused(
    driver: StandIn, client: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvm, "UVM_FILES_LIMIT", 2)
    monkeypatch.setattr(uvm, "_take", None)
    pidfd = os.pidfd_open(client.pid)
    with pytest.raises(UnsupportedError, match=f"process {client.pid} has 3 UVM files"):
        uvm.NvidiaUvm("580.1").open(instance(client.pid), pidfd)
    os.close(pidfd)


def test_a_process_that_would_take_countless_duplicates_is_refused(
    driver: StandIn, client: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvm, "DUPLICATES_LIMIT", 0)
    driver.is_space = lambda fd: not appends(fd)
    before = open_files()
    pidfd = os.pidfd_open(client.pid)
    with pytest.raises(UnsupportedError, match="mpsd holds at most 0 duplicates"):
        uvm.NvidiaUvm("580.1").open(instance(client.pid), pidfd)
    os.close(pidfd)
    assert open_files() == before


def test_events_arrive_and_the_tracker_closes_cleanly(
    driver: StandIn, client: subprocess.Popen[bytes]
) -> None:
    driver.is_space = lambda fd: not appends(fd)
    pidfd = os.pidfd_open(client.pid)
    (space,) = uvm.NvidiaUvm("580.1").open(instance(client.pid), pidfd)
    before = open_files()
    tracker = space.track()
    assert driver.enabled == 1 << 6
    assert tracker.drain().events == ()
    driver.fault(0x7E00_0000_0000)
    (event,) = tracker.drain().events
    assert (event.address, event.timestamp_ns) == (0x7E00_0000_0000, 77)
    tracker.close()
    tracker.close()
    again = space.track()
    again.close()
    assert len(open_files()) <= len(before)
    space.close()
    os.close(pidfd)


@pytest.mark.parametrize("loaded", [535, 550, 560, 580])
@pytest.mark.parametrize("assumed", ["", "535.1", "550.1", "560.1", "580.1"])
def test_the_layout_is_proven_by_trying(
    driver: StandIn, client: subprocess.Popen[bytes], loaded: int, assumed: str
) -> None:
    driver.layout = uvm_abi.tracker_layouts(loaded)[0]
    adapter = uvm.NvidiaUvm(assumed)
    tracker, status = adapter.try_tracker(0)
    assert tracker is not None
    assert status == 0
    assert tracker.layout.status_at == driver.layout.status_at
    tracker.close()


def test_an_unknown_driver_is_a_capability_loss(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "ioctl", lambda *_: 0)
    with pytest.raises(UnsupportedError, match=r"700\.1"):
        uvm.NvidiaUvm("700.1").try_tracker(0)


def test_guards_come_and_go(driver: StandIn) -> None:
    adapter = uvm.NvidiaUvm("580.1")
    space = adapter.adopt({"va": os.open("/dev/zero", os.O_RDWR)})
    space.map_sparse(0x10000, 0x20000, GPU)
    with pytest.raises(GpuError, match="UVM_ADDRESS_IN_USE") as caught:
        space.map_sparse(0x20000, 0x10000, GPU)
    assert caught.value.status == 0x68
    space.unmap_sparse(0x10000, 0x20000)
    with pytest.raises(GpuError, match="INVALID_ADDRESS"):
        space.unmap_sparse(0x10000, 0x20000)
    driver.refuse_sparse = 0x1F
    with pytest.raises(GpuError, match="INVALID_ARGUMENT"):
        space.map_sparse(0x10000, 0x20000, GPU)
    assert driver.ranges == {}
    space.close()


def test_adoption_needs_the_address_space(driver: StandIn) -> None:
    with pytest.raises(GpuError, match="va"):
        uvm.NvidiaUvm("580.1").adopt({"mm": 5})


def test_a_node_without_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(uvm, "UVM_DEVICE", str(tmp_path / "nvidia-uvm"))
    with pytest.raises(UnsupportedError, match="nvidia-uvm"):
        uvm.NvidiaUvm("580.1")
    monkeypatch.setattr(uvm, "UVM_DEVICE", "/dev/zero")
    monkeypatch.setattr(uvm, "TOOLS_DEVICE", str(tmp_path / "tools"))
    with pytest.raises(UnsupportedError, match="tools"):
        uvm.NvidiaUvm("580.1").try_tracker(0)


def test_driver_version_of_both_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain, wordy = tmp_path / "version", tmp_path / "proc"
    plain.write_text("580.159.04\n")
    wordy.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.163.01  Release\n")
    for path, version in ((plain, "580.159.04"), (wordy, "550.163.01"), (tmp_path / "none", "")):
        monkeypatch.setattr(uvm, "_VERSION_FILES", (str(path),))
        assert uvm.driver_version() == version
