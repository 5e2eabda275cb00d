"""The UVM driver as a root process sees it: duplicate, track and guard the clients' descriptors.

A CUDA process has two files of /dev/nvidia-uvm open: one is its GPU address space, the other pins its memory
map. Both are needed to keep the address space alive after the process. To tell them apart, mpsd asks each
for an event tracker: only the address space accepts one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from mpsd.base.errors import GpuError, NotFoundError, NotReadyError, UnsupportedError
from mpsd.base.model import ProcessInstance, TrackerBatch
from mpsd.gpu.nvidia import uvm_abi as abi
from mpsd.os.samefile import same_file

UVM_DEVICE = "/dev/nvidia-uvm"
TOOLS_DEVICE = "/dev/nvidia-uvm-tools"
# Descriptors of one process that are searched for UVM files.
FILES_LIMIT = 1 << 16
# A CUDA process has two, and two more for each further driver instance. Telling them apart is quadratic.
UVM_FILES_LIMIT = 64
# Every address space gets a duplicate of every other file: with 64 files, a thousand for one process.
DUPLICATES_LIMIT = 64

# 2048 entries fill 128 KiB; the driver drops and counts entries beyond that. Fatal faults need few entries,
# but the driver services faults by the hundred, and a queue of serviced faults is read at intervals.
_QUEUE_ENTRIES = 2048
_VERSION_FILES = ("/sys/module/nvidia/version", "/proc/driver/nvidia/version")
_SYS_PIDFD_GETFD = 438

_libc = ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: int) -> int:
    """Make a raw system call and return its result. Raises OSError."""
    result = int(_libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def driver_version() -> str:
    """Return the version of the loaded driver, or "" without one."""
    for path in _VERSION_FILES:
        with suppress(OSError):
            for word in Path(path).read_text().split():
                if abi.branch_of(word) >= 300 and "." in word:
                    return word
    return ""


def _ask(fd: int, request: int, buffer: bytearray, status_at: int) -> int:
    """Make one ioctl and return its status field. Raises GpuError if the kernel refuses the call itself."""
    try:
        fcntl.ioctl(fd, request, buffer, True)
    except OSError as error:
        code = error.errno or 0
        raise GpuError(f"UVM ioctl {request}: {error.strerror}", status=code) from error
    return abi.read_u32(buffer, status_at)


class UvmTracker:
    """An event queue on one address space. See mpsd.gpu.base.Tracker."""

    def __init__(self, tools_fd: int, layout: abi.TrackerLayout) -> None:
        self._fd = tools_fd
        # Shared anonymous pages: the driver pins them, and a fork must not copy them on write.
        self._queue = mmap.mmap(-1, _QUEUE_ENTRIES * layout.entry.size)
        self._control = mmap.mmap(-1, mmap.PAGESIZE)
        self._views = (memoryview(self._queue), memoryview(self._control))
        self._ring = abi.Ring(*self._views, _QUEUE_ENTRIES, layout.entry, layout.control)
        self.layout = layout

    def attach(self, uvm_fd: int) -> int:
        """Request events of the address space `uvm_fd` and return the driver's status."""
        buffer = abi.encode_tracker(
            self.layout, _address(self._queue), _QUEUE_ENTRIES, _address(self._control), uvm_fd
        )
        _ask(self._fd, self.layout.request, buffer, self.layout.status_at)
        return abi.tracker_status(self.layout, buffer)

    def enable(self, mask: int) -> None:
        """Wake on every event of the types in `mask` (bits 1 << event type). Raises GpuError."""
        calls = (
            ("notification threshold", abi.UVM_SET_NOTIFICATION_THRESHOLD, abi.encode_threshold(1), 4),
            ("event mask", abi.UVM_EVENT_QUEUE_ENABLE_EVENTS, abi.encode_enable(mask), 8),
        )
        for what, request, buffer, status_at in calls:
            status = _ask(self._fd, request, buffer, status_at)
            if status != abi.STATUS_OK:
                raise GpuError(f"UVM refused the {what}: {abi.status_name(status)}", status=status)

    def fileno(self) -> int:
        return self._fd

    def report_serviced(self) -> None:
        """Report serviced faults too, such as those in managed memory. Raises GpuError."""
        self.enable(1 << abi.EVENT_GPU_FAULT)

    def drain(self) -> TrackerBatch:
        """Return all queued events. Never blocks."""
        return TrackerBatch(tuple(self._ring.take()), self._ring.dropped())

    def close(self) -> None:
        """End the tracker. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            for view in self._views:
                view.release()
            self._queue.close()
            self._control.close()


def _address(pages: mmap.mmap) -> int:
    """Return the address of a mapping. The temporary export ends here, so that the mapping can be closed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


class UvmAddressSpace:
    """Duplicates of one client's UVM files. See mpsd.gpu.base.AddressSpace."""

    def __init__(self, uvm: NvidiaUvm, fds: Mapping[str, int], tracker: UvmTracker | None = None) -> None:
        self._uvm = uvm
        self._fds = dict(fds)
        self._unclaimed = tracker

    @property
    def fds(self) -> Mapping[str, int]:
        return dict(self._fds)

    def track(self, mask: int = 1 << abi.EVENT_FATAL_FAULT) -> UvmTracker:
        """Return a tracker for the event types in `mask`. Raises GpuError."""
        tracker, self._unclaimed = self._unclaimed, None
        if tracker is None:
            tracker, status = self._uvm.try_tracker(self._fds["va"])
            if tracker is None:
                raise GpuError(f"UVM refused a tracker: {abi.status_name(status)}", status=status)
        try:
            tracker.enable(mask)
        except GpuError:
            tracker.close()
            raise
        return tracker

    def map_sparse(self, base: int, length: int, gpu_uuid: str) -> None:
        """Make reads return 0 and discard writes in [base, base+length). Raises GpuError."""
        gpu = abi.uuid_bytes(gpu_uuid)
        span = f"[{base:#x}, {base + length:#x})"
        create = abi.encode_external_range(base, length)
        status = _ask(self._fds["va"], abi.UVM_CREATE_EXTERNAL_RANGE, create, 16)
        if status != abi.STATUS_OK:
            raise GpuError(f"UVM refused the range {span}: {abi.status_name(status)}", status=status)
        sparse = abi.encode_map_sparse(base, length, gpu)
        status = _ask(self._fds["va"], abi.UVM_MAP_EXTERNAL_SPARSE, sparse, 32)
        if status != abi.STATUS_OK:
            with suppress(GpuError):
                self.unmap_sparse(base, length)
            raise GpuError(f"UVM refused a guard on {span}: {abi.status_name(status)}", status=status)

    def unmap_sparse(self, base: int, length: int) -> None:
        """Remove a guard. Raises GpuError, or NotFoundError if no such range exists."""
        status = self._uvm.free(self._fds["va"], base, length)
        if status != abi.STATUS_OK:
            text = f"UVM did not free [{base:#x}, {base + length:#x}): {abi.status_name(status)}"
            raise GpuError(text, status=status)

    def close(self) -> None:
        """Close the duplicates. Idempotent."""
        if self._unclaimed is not None:
            self._unclaimed.close()
            self._unclaimed = None
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)


class NvidiaUvm:
    """The real mpsd.gpu.base.Uvm."""

    def __init__(self, version: str | None = None) -> None:
        self.version = driver_version() if version is None else version
        branch = abi.branch_of(self.version)
        self._trackers = abi.tracker_layouts(branch)
        self._proven = False
        self._frees = abi.free_layouts(branch)
        self._device = _character_device(UVM_DEVICE)

    def open(self, process: ProcessInstance, pidfd: int) -> Sequence[UvmAddressSpace]:
        """Duplicate the address spaces that a process holds now.

        Raises NotReadyError while no address space is initialised, NotFoundError if the process has ended,
        UnsupportedError if the kernel or the driver does not allow it.
        """
        held = self._duplicate(process.pid, pidfd)
        try:
            _drop_repeated(held)
            return self._sort(process, held)
        except BaseException:
            for fd in held:
                os.close(fd)
            raise

    def adopt(self, fds: Mapping[str, int]) -> UvmAddressSpace:
        """Rebuild an address space from kept descriptors. Raises GpuError if "va" is missing."""
        if "va" not in fds:
            raise GpuError(f"descriptors {sorted(fds)} contain no GPU address space ('va')")
        for fd in fds.values():
            os.set_inheritable(fd, False)
        return UvmAddressSpace(self, fds)

    def _sort(self, process: ProcessInstance, held: list[int]) -> list[UvmAddressSpace]:
        """Separate address spaces from the files that pin memory; every space holds all of the latter."""
        spaces: dict[int, UvmTracker] = {}
        try:
            for fd in tuple(held):
                tracker = self.try_tracker(fd)[0]
                if tracker is not None:
                    spaces[fd] = tracker
            pins = [fd for fd in held if fd not in spaces]
            if not spaces or not pins:
                raise NotReadyError(
                    f"process {process.pid} has no GPU address space yet", remedy="try again in a moment"
                )
            if len(spaces) * len(pins) > DUPLICATES_LIMIT:
                raise UnsupportedError(
                    f"process {process.pid} has {len(spaces)} GPU address spaces and {len(pins)} other UVM "
                    f"files; mpsd holds at most {DUPLICATES_LIMIT} duplicates"
                )
            opened = []
            for index, (fd, tracker) in enumerate(spaces.items()):
                own = pins if index == 0 else [_again(pin, held) for pin in pins]
                roles = {"va": fd} | {f"mm{n or ''}": pin for n, pin in enumerate(own)}
                opened.append(UvmAddressSpace(self, roles, tracker))
        except BaseException:
            for tracker in spaces.values():
                tracker.close()
            raise
        return opened

    def try_tracker(self, uvm_fd: int) -> tuple[UvmTracker | None, int]:
        """Return a tracker on an address space, or None and the refusal. Determines the layout on the way.

        Raises UnsupportedError if this driver understands no known layout.
        """
        for layout in self._trackers:
            tracker = UvmTracker(self._open_tools(), layout)
            try:
                status = tracker.attach(uvm_fd)
            except GpuError:
                tracker.close()
                continue
            if status == abi.STATUS_OK:
                self._trackers, self._proven = (layout,), True
                return tracker, status
            tracker.close()
            # The descriptor is the reason if a layout is known to work, or if the refusal has nothing to do
            # with the layout.
            if self._proven or status not in (abi.UNWRITTEN, 0x1E, 0x1F):
                return None, status
        raise UnsupportedError(
            f"driver {self.version or '(unknown)'} supports no known layout of the UVM event tracker",
            remedy="attribution and leases need driver branch 535 to 595; report this driver version",
        )

    def free(self, uvm_fd: int, base: int, length: int) -> int:
        """Call UVM_FREE with the layout of this driver and return its status."""
        status = abi.UNWRITTEN
        for layout in self._frees:
            buffer = abi.encode_free(layout, base, length)
            status = _ask(uvm_fd, abi.UVM_FREE, buffer, layout.status_at)
            if status != abi.UNWRITTEN:
                self._frees = (layout,)
                return status
        return status

    def _open_tools(self) -> int:
        try:
            return os.open(TOOLS_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise UnsupportedError(
                f"cannot open {TOOLS_DEVICE}: {error.strerror}",
                remedy="run as root on a node with the NVIDIA driver (nvidia-modprobe -u creates the node)",
                status=error.errno or 0,
            ) from error

    def _duplicate(self, pid: int, pidfd: int) -> list[int]:
        """Return duplicates of every UVM file that the process has open.

        Raises UnsupportedError, and keeps none, if there are more than UVM_FILES_LIMIT.
        """
        numbers = self._numbers(pid)
        found: list[int] = []
        try:
            for number in numbers:
                with suppress(_Vanished):
                    found.append(_take(pid, pidfd, number))
        except BaseException:
            for fd in found:
                os.close(fd)
            raise
        return found

    def _numbers(self, pid: int) -> list[int]:
        """Return the numbers of the process's descriptors that are UVM files."""
        try:
            with os.scandir(f"/proc/{pid}/fd") as entries:
                numbers = sorted(int(entry.name) for entry in islice(entries, FILES_LIMIT))
        except OSError as error:
            raise _cannot_look(pid, error) from error
        found: list[int] = []
        for number in numbers:
            path = f"/proc/{pid}/fd/{number}"
            try:
                # Check the name first: stat() of a file on a dead file server would block forever.
                if not os.path.basename(os.readlink(path)).startswith(os.path.basename(UVM_DEVICE)):
                    continue
                status = os.stat(path)
            except OSError:
                continue
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == self._device:
                found.append(number)
        if len(found) > UVM_FILES_LIMIT:
            raise UnsupportedError(
                f"process {pid} has {len(found)} UVM files open; mpsd holds at most {UVM_FILES_LIMIT}"
            )
        return found


class _Vanished(Exception):
    """The descriptor was closed between listing and duplication."""


def _take(pid: int, pidfd: int, number: int) -> int:
    """Duplicate a descriptor with pidfd_getfd(2), close-on-exec. Raises _Vanished, UnsupportedError."""
    try:
        return _syscall(_SYS_PIDFD_GETFD, pidfd, number, 0)
    except OSError as error:
        if error.errno == errno.EBADF:
            raise _Vanished from error
        raise _cannot_look(pid, error) from error


def _cannot_look(pid: int, error: OSError) -> GpuError | NotFoundError:
    if error.errno in (errno.ENOENT, errno.ESRCH):
        return NotFoundError(f"process {pid} has ended")
    return UnsupportedError(
        f"cannot take descriptors of process {pid}: {error.strerror}",
        remedy="mpsd needs CAP_SYS_PTRACE in the process's user namespace, kernel 5.6 and Yama scope below 3",
        status=error.errno or 0,
    )


def _again(fd: int, held: list[int]) -> int:
    """Return one more duplicate; `held` closes it if anything fails."""
    held.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
    return held[-1]


def _drop_repeated(fds: list[int]) -> None:
    """Keep one descriptor per open file and close the other duplicates."""
    unique: list[int] = []
    for fd in tuple(fds):
        if any(same_file(fd, other) for other in unique):
            fds.remove(fd)
            os.close(fd)
        else:
            unique.append(fd)


def _character_device(path: str) -> int:
    """Return the device number of a character device. Raises UnsupportedError."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise UnsupportedError(
            f"no {path}: {error.strerror}",
            remedy="load the NVIDIA driver's nvidia-uvm module and create its device node here",
            status=error.errno or 0,
        ) from error
    return found.st_rdev
