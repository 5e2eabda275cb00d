"""mpsd.gpu.base over a simulated node: address spaces, the stand-in of NVML, Xids.

A client's two descriptors are sockets among its open files; the GPU process knows their inodes. mpsd
duplicates them with pidfd_getfd(2), like the real ones. If the kernel refuses that, the GPU process hands out
new ones on request.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading
from collections.abc import Mapping, Sequence

from mpsd.base.errors import GpuError, NotFoundError, NotReadyError, UnsupportedError
from mpsd.base.model import (
    Access,
    ComputeMode,
    Gpu,
    GpuProcess,
    NvmlXid,
    ProcessInstance,
    TrackerBatch,
    UvmEvent,
    UvmFaultType,
    UvmReason,
)
from mpsd.gpu.simulated import packets, paths
from mpsd.gpu.simulated.machine import semantics

CALL_DEADLINE_S = 5.0
_SYS_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def _gone(directory: str) -> GpuError:
    return GpuError(
        f"the simulated GPU in {directory} does not answer",
        remedy="start it with python -m mpsd.gpu.simulated gpu",
        status=semantics.UNKNOWN_ERROR,
    )


class NodeLink:
    """A thread-safe query connection to the GPU process, reconnected when that process was replaced."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._turn = threading.Lock()
        self._sock: socket.socket | None = None

    def ask(self, message: packets.Message) -> tuple[packets.Message, list[int]]:
        """Send one query. Raises GpuError without an answer, or if the answer is an error."""
        with self._turn:
            answer, fds = self._exchange(message)
        if answer.get("error"):
            packets.close_all(fds)
            raise GpuError(
                f"the simulated GPU refused {message['op']}: {answer.get('why', answer['error'])}",
                status=int(answer["error"]),
            )
        return answer, fds

    def _exchange(self, message: packets.Message) -> tuple[packets.Message, list[int]]:
        for fresh in (self._sock is None, True):
            try:
                if self._sock is None:
                    self._sock = packets.connect(paths.gpu_socket(self.directory), CALL_DEADLINE_S)
                return packets.call(self._sock, message)
            except (packets.Gone, TimeoutError) as error:
                self.close()
                if fresh:
                    raise _gone(self.directory) from error
        raise _gone(self.directory)

    def watch(self, what: str) -> socket.socket:
        """Return a separate connection on which the GPU process reports. Raises GpuError."""
        try:
            sock = packets.connect(paths.gpu_socket(self.directory), CALL_DEADLINE_S)
            packets.call(sock, {"op": "watch", "what": what})
        except (packets.Gone, TimeoutError) as error:
            raise _gone(self.directory) from error
        sock.setblocking(False)
        return sock

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _ioctl(fd: int, message: packets.Message) -> tuple[int, list[int]]:
    """Make a call on a UVM descriptor. Return its NV_STATUS and descriptors. Raises GpuError."""
    mine, theirs = packets.pair()
    with mine, theirs, socket.socket(fileno=os.dup(fd)) as descriptor:
        os.set_inheritable(descriptor.fileno(), False)
        mine.settimeout(CALL_DEADLINE_S)
        try:
            packets.send(descriptor, message, [theirs.fileno()])
            theirs.close()
            answer, fds = packets.receive(mine)
        except (OSError, TimeoutError) as error:
            raise GpuError(f"the simulated GPU did not answer {message['op']}: {error}") from error
    return int(answer["status"]), fds


def drained(sock: socket.socket, gone: str) -> list[packets.Message]:
    """Return all waiting packets of a connection on which the GPU process reports.

    Raises GpuError with the text `gone` if there is none and the GPU process has ended."""
    found: list[packets.Message] = []
    while True:
        try:
            message, fds = packets.receive(sock)
        except BlockingIOError:
            return found
        except packets.Gone as error:
            if found:
                return found
            raise GpuError(gone) from error
        packets.close_all(fds)
        found.append(message)


class SimulatedTracker:
    """mpsd.gpu.base.Tracker: events arrive as packets on a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._dropped = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def report_serviced(self) -> None:
        """Report serviced faults too from now on. Raises GpuError."""
        _ioctl(self._sock.fileno(), {"op": "serviced"})

    def drain(self) -> TrackerBatch:
        """Return all queued events. Raises GpuError if the GPU process has ended."""
        events: list[UvmEvent] = []
        for message in drained(self._sock, "the simulated GPU of this tracker has ended"):
            self._dropped = int(message["dropped"])
            fatal, fault, access, reason, address, stamp, gpu = message["event"]
            events.append(
                UvmEvent(
                    bool(fatal), UvmFaultType(fault), Access(access), UvmReason(reason), address, stamp, gpu
                )
            )
        return TrackerBatch(tuple(events), self._dropped)

    def close(self) -> None:
        """End the tracker. Idempotent."""
        self._sock.close()


class SimulatedSpace:
    """mpsd.gpu.base.AddressSpace: duplicates of a client's two sockets.

    `on_request`: the GPU process handed them out, instead of pidfd_getfd."""

    def __init__(self, fds: Mapping[str, int], *, on_request: bool = False) -> None:
        self._fds = dict(fds)
        self.on_request = on_request

    @property
    def fds(self) -> Mapping[str, int]:
        return dict(self._fds)

    def track(self) -> SimulatedTracker:
        """Return a new tracker. Raises GpuError."""
        sock = socket.socket(fileno=self._call({"op": "track"}, "a tracker")[0])
        sock.setblocking(False)
        return SimulatedTracker(sock)

    def map_sparse(self, base: int, length: int, gpu_uuid: str) -> None:
        """Make reads return 0 and discard writes in [base, base+length). Raises GpuError."""
        span = f"a guard on [{base:#x}, {base + length:#x})"
        self._call({"op": "sparse", "base": base, "length": length, "gpu": gpu_uuid}, span)

    def unmap_sparse(self, base: int, length: int) -> None:
        """Remove a guard. Raises GpuError."""
        span = f"to free [{base:#x}, {base + length:#x})"
        self._call({"op": "unsparse", "base": base, "length": length}, span)

    def close(self) -> None:
        """Close the duplicates. Idempotent."""
        fds, self._fds = self._fds, {}
        packets.close_all(list(fds.values()))

    def _call(self, message: packets.Message, what: str) -> list[int]:
        if "va" not in self._fds:
            raise GpuError(f"the simulated GPU refused {what}: the address space was closed")
        status, fds = _ioctl(self._fds["va"], message)
        if status != semantics.NV_OK:
            packets.close_all(fds)
            raise GpuError(f"the simulated GPU refused {what}: status {status:#x}", status=status)
        return fds


class SimulatedUvm:
    """mpsd.gpu.base.Uvm. `duplication`: the last way to get descriptors, "pidfd_getfd" or "request"."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        self.duplication = ""

    def open(self, process: ProcessInstance, pidfd: int) -> Sequence[SimulatedSpace]:
        """Duplicate the UVM descriptors of a process.

        Raises NotReadyError while it has no context, NotFoundError if it has ended, UnsupportedError if
        neither the kernel nor the GPU process gives descriptors.
        """
        known = self._link.ask({"op": "spaces", "pid": process.pid})[0]["spaces"]
        opened: list[SimulatedSpace] = []
        try:
            inodes = _socket_inodes(process.pid) if known else {}
            for space in known:
                if found := self._open_space(process, pidfd, space, inodes):
                    opened.append(found)
        except BaseException:
            for done in opened:
                done.close()
            raise
        if not opened:
            _check_alive(process.pid)
            raise NotReadyError(
                f"process {process.pid} has no GPU address space yet", remedy="try again in a moment"
            )
        return opened

    def adopt(self, fds: Mapping[str, int]) -> SimulatedSpace:
        """Rebuild an address space from kept descriptors. Raises GpuError if "va" is missing."""
        if "va" not in fds:
            raise GpuError(f"descriptors {sorted(fds)} contain no GPU address space ('va')")
        for fd in fds.values():
            os.set_inheritable(fd, False)
        return SimulatedSpace(fds)

    def _open_space(
        self, process: ProcessInstance, pidfd: int, space: packets.Message, inodes: Mapping[int, int] | None
    ) -> SimulatedSpace | None:
        if inodes is not None:
            numbers = [inodes[int(inode)] for inode in space["ends"] if int(inode) in inodes]
            if not numbers:
                return None
            try:
                return self._duplicate(pidfd, numbers)
            except PermissionError:
                pass
        return self._request(process, int(space["space"]))

    def _duplicate(self, pidfd: int, numbers: Sequence[int]) -> SimulatedSpace | None:
        """Duplicate the descriptors and tell them apart: only an address space accepts a tracker."""
        roles: dict[str, int] = {}
        try:
            for number in numbers:
                fd = _pidfd_getfd(pidfd, number)
                role = "va" if _accepts_tracker(fd) else "mm"
                if role in roles:
                    os.close(fd)
                else:
                    roles[role] = fd
        except OSError as error:
            packets.close_all(list(roles.values()))
            if error.errno in (errno.EBADF, errno.ESRCH):
                return None
            raise
        if len(roles) < 2:
            packets.close_all(list(roles.values()))
            return None
        self.duplication = "pidfd_getfd"
        return SimulatedSpace(roles)

    def _request(self, process: ProcessInstance, space: int) -> SimulatedSpace:
        try:
            answer, fds = self._link.ask({"op": "duplicate", "space": space})
        except GpuError as error:
            raise UnsupportedError(
                f"cannot duplicate the descriptors of process {process.pid}",
                remedy="run as root or as the client's user, with ptrace rights",
                status=errno.EPERM,
            ) from error
        self.duplication = "request"
        return SimulatedSpace(dict(zip(answer["roles"], fds, strict=True)), on_request=True)


def _check_alive(pid: int) -> None:
    if not os.path.exists(f"/proc/{pid}"):
        raise NotFoundError(f"there is no process {pid}")


def _socket_inodes(pid: int) -> dict[int, int] | None:
    """Return {inode: descriptor} of a process's sockets; None if access is denied."""
    found: dict[int, int] = {}
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(name)
    except PermissionError:
        return None
    except (FileNotFoundError, ProcessLookupError):
        raise NotFoundError(f"there is no process {pid}") from None
    return found


def _pidfd_getfd(pidfd: int, number: int) -> int:
    """Duplicate a descriptor, close-on-exec. Raises OSError."""
    result = int(_libc.syscall(_SYS_PIDFD_GETFD, pidfd, number, 0))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _accepts_tracker(fd: int) -> bool:
    status, fds = _ioctl(fd, {"op": "track"})
    packets.close_all(fds)
    return status == semantics.NV_OK


class SimulatedXids:
    """mpsd.gpu.base.XidSource."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def drain(self) -> list[NvmlXid]:
        """Return Xids since the last call. Raises GpuError if the GPU process has ended."""
        told = drained(self._sock, "the simulated GPU that reported Xids has ended")
        return [NvmlXid(str(message["gpu"]), int(message["xid"])) for message in told]

    def close(self) -> None:
        self._sock.close()


class SimulatedDevices:
    """mpsd.gpu.base.DeviceManager."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link

    def gpus(self) -> list[Gpu]:
        return [Gpu(g["index"], g["uuid"], g["name"], g["pci"], g["memory"]) for g in self._node()["gpus"]]

    def driver_version(self) -> str:
        return str(self._node()["driver"])

    def compute_mode(self, gpu_uuid: str) -> ComputeMode:
        return ComputeMode(self._gpu(gpu_uuid)["mode"])

    def memory_used(self, gpu_uuid: str) -> int:
        return int(self._gpu(gpu_uuid)["used"])

    def processes(self, gpu_uuid: str) -> list[GpuProcess]:
        """List processes as NVML does: MPS clients with mps True, servers and processes outside MPS False."""
        self._gpu(gpu_uuid)
        rows = self._link.ask({"op": "processes", "gpu": gpu_uuid})[0]["processes"]
        return [GpuProcess(pid, size, bool(mps)) for pid, size, mps in sorted(rows)]

    def watch_xids(self) -> SimulatedXids:
        return SimulatedXids(self._link.watch("xid"))

    def inject(self, fault: str, **arguments: object) -> None:
        """Inject a scripted fault: see Calls._node_inject."""
        self._link.ask({"op": "inject", "fault": fault, **arguments})

    def close(self) -> None:
        self._link.close()

    def _node(self) -> packets.Message:
        return self._link.ask({"op": "node"})[0]

    def _gpu(self, uuid: str) -> packets.Message:
        for gpu in self._node()["gpus"]:
            if gpu["uuid"] == uuid:
                return gpu  # type: ignore[no-any-return]
        raise NotFoundError(f"there is no GPU {uuid}", remedy="mpsd-ctl status lists them")
