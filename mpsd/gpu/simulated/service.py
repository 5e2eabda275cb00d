"""The GPU process: sockets, files and the clock around a `Machine`.

A process that connects to <dir>/gpu.sock is a client that requests a context, an MPS server, or sends queries
(the control stand-in, the adapters, tests). A context's two descriptors are ends of socket pairs; this
process keeps the other ends. The space lives until the last duplicate of its descriptors is closed.
"""

from __future__ import annotations

import os
import resource
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpsd.base.model import UvmEvent
from mpsd.gpu.simulated import node, packets, paths
from mpsd.gpu.simulated.calls import Calls
from mpsd.gpu.simulated.machine import semantics
from mpsd.gpu.simulated.machine.isolation import KernelModule
from mpsd.gpu.simulated.machine.machine import Machine
from mpsd.gpu.simulated.machine.parts import Kernel, Refused, Server, Space, Unit
from mpsd.gpu.simulated.machine.timers import Timers
from mpsd.os import procfs

if TYPE_CHECKING:
    from mpsd.gpu.simulated.packets import Message

# Interval of checks that the process's directory still exists.
_DIRECTORY_CHECK_S = 1.0


class Peer:
    """One connection to the GPU's socket. `space` or `server` is set for a client or a server."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pid, self.uid, _ = packets.peer(sock)
        self.space: Space | None = None
        self.server: Server | None = None
        self.watches = ""


@dataclass(slots=True)
class _Listening:
    """One tracker: events that did not fit, and whether it gets serviced faults too."""

    dropped: int = 0
    serviced: bool = False


class Service:
    """Serve one node until `running` is cleared."""

    def __init__(self, directory: str, config: node.NodeConfig) -> None:
        self.directory = directory
        self.running = True
        self.units = [
            Unit(node.gpu(index, config.memory_bytes), config.compute_mode) for index in range(config.gpus)
        ]
        self.machine = Machine(
            self.units, self, timers=Timers(time.monotonic()), seed=config.seed, process_state=process_state
        )
        if config.isolation:
            self.machine.kernel_part = KernelModule(self.machine, config.isolation_deadline_s)
        self.loaded_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._selector = selectors.DefaultSelector()
        self._peers: set[Peer] = set()
        self._channels: dict[Space, Peer] = {}
        self._trackers: dict[Space, dict[socket.socket, _Listening]] = {}
        self._ends: dict[Space, dict[int, str]] = {}
        self._sequence = 0
        self._calls = Calls(self)
        self._listener = packets.listen(paths.gpu_socket(directory), 0o666)
        self._identity = os.stat(paths.gpu_socket(directory)).st_ino
        self._kmsg = os.open(
            paths.kernel_log(directory), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        self._watch(self._listener, self._accept)
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._watch(self._woken, lambda: None)
        self._check_directory()

    # -- the loop ---------------------------------------------------------------------------------------

    def run(self) -> None:
        timers = self.machine.timers
        # A signal's handler runs, and the loop checks `running` at once.
        signal.set_wakeup_fd(self._waker.fileno())
        while self.running:
            due = timers.next_due
            wait = None if due is None else max(0.0, due - time.monotonic())
            for key, _ in self._selector.select(wait):
                timers.run(time.monotonic())
                # An earlier action of this round may have closed it.
                if key.fileobj.fileno() >= 0:  # type: ignore[union-attr]
                    key.data()
            timers.run(time.monotonic())
        self.close()

    def close(self) -> None:
        try:
            if os.stat(paths.gpu_socket(self.directory)).st_ino == self._identity:
                os.unlink(paths.gpu_socket(self.directory))
        except OSError:
            pass
        for space in self._channels:
            space.forget_halt()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._kmsg)

    def _watch(self, sock: socket.socket, action: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, action)

    def _forget(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()

    def _check_directory(self) -> None:
        try:
            self.running = self.running and os.stat(paths.gpu_socket(self.directory)).st_ino == self._identity
        except OSError:
            self.running = False
        self.machine.timers.after(_DIRECTORY_CHECK_S, self._check_directory)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        peer = Peer(sock)
        self._peers.add(peer)
        self._watch(sock, lambda: self._readable(peer))

    def _readable(self, peer: Peer) -> None:
        try:
            message, fds = packets.receive(peer.sock)
        except BlockingIOError:
            return
        except packets.Gone:
            self._hang_up(peer)
            return
        packets.close_all(fds)
        if peer.space is not None and message.get("op") == "launch":
            self._launch(peer.space, message)
            return
        try:
            answer, reply_fds = self._calls.handle(peer, message)
        except Refused as refused:
            answer, reply_fds = {"error": refused.code}, []
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            answer, reply_fds = (
                {"error": semantics.INVALID_VALUE, "why": f"{type(error).__name__}: {error}"},
                [],
            )
        if answer is not None:
            self.answer(peer, {"id": message.get("id"), **answer}, reply_fds)

    def _launch(self, space: Space, message: Message) -> None:
        try:
            name, address, words, value, duration, fill = message["k"]
            kernel = Kernel(
                str(name), int(address), int(words), int(value) & 0xFFFF_FFFF, float(duration), bool(fill)
            )
        except (KeyError, TypeError, ValueError):
            return
        if kernel.name in semantics.KERNELS:
            self.machine.launch(space, kernel)
        else:
            self.machine.fail(space, semantics.NO_SUCH_KERNEL)

    def answer(self, peer: Peer, message: Message, fds: Sequence[int] = ()) -> None:
        """Send to a peer. Its end of file closes the connection of a peer that does not read or has ended."""
        try:
            packets.send(peer.sock, message, fds)
        except (BlockingIOError, packets.Gone):
            return

    def _hang_up(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self._forget(peer.sock)
        if self.machine.kernel_part is not None:
            self.machine.kernel_part.abandon(peer)
        if peer.server is not None:
            self.machine.remove_server(peer.server)
        if peer.space is not None:
            self.end_channel(peer)

    # -- contexts ---------------------------------------------------------------------------------------

    def begin_channel(self, peer: Peer, space: Space) -> list[socket.socket]:
        """Make `peer` the channel of `space`. Return the process's ends of the two descriptors."""
        peer.space = space
        self._channels[space] = peer
        self._ends[space] = {}
        return [self.new_reference(space, "va"), self.new_reference(space, "mm")]

    def end_channel(self, peer: Peer) -> None:
        space, peer.space = peer.space, None
        if space is not None:
            self._channels.pop(space, None)
            space.forget_halt()
            self.machine.disconnect(space)

    def may_launch(self, space: Space) -> bool:
        """Return whether the process of a connected context lives, or has left launches to read."""
        state, peer = process_state(space.pid), self._channels.get(space)
        unread = peer is not None and bool(select.select([peer.sock], [], [], 0)[0])
        return unread or state not in ("", "Z", "X")

    def new_reference(self, space: Space, role: str) -> socket.socket:
        """Create another descriptor that keeps the space; the far end stays here."""
        near, far = packets.pair()
        inode = os.fstat(near.fileno()).st_ino
        self._ends[space][inode] = role
        self._count(space, role, 1)
        self._watch(far, lambda: self._reference_readable(space, role, far, inode))
        return near

    def _reference_readable(self, space: Space, role: str, far: socket.socket, inode: int) -> None:
        try:
            message, fds = packets.receive(far)
        except BlockingIOError:
            return
        except packets.Gone:
            self._forget(far)
            self._ends[space].pop(inode, None)
            self._count(space, role, -1)
            return
        self._ioctl(space, role, message, fds)

    def _ioctl(self, space: Space, role: str, message: Message, fds: list[int]) -> None:
        """Handle a call on a UVM descriptor. The answer goes to the socket in the message."""
        if len(fds) != 1:
            packets.close_all(fds)
            return
        with socket.socket(fileno=fds[0]) as reply:
            reply.setblocking(False)
            try:
                status, out = self._calls.uvm(space, role, message)
                packets.send(reply, {"status": status}, [s.fileno() for s in out])
            except (OSError, KeyError, TypeError, ValueError):
                return
        for sock in out:
            sock.close()

    def new_tracker(self, space: Space) -> socket.socket:
        near, far = packets.pair()
        self._trackers.setdefault(space, {})[far] = _Listening()
        self._count(space, "tracker", 1)
        self._watch(far, lambda: self._tracker_readable(space, far))
        return near

    def _tracker_readable(self, space: Space, far: socket.socket) -> None:
        try:
            message, fds = packets.receive(far)
        except BlockingIOError:
            return
        except packets.Gone:
            message, fds = {}, []
            self._forget(far)
            self._trackers[space].pop(far, None)
            self._count(space, "tracker", -1)
        if message.get("op") == "serviced" and len(fds) == 1:
            self._trackers[space][far].serviced = True
            with socket.socket(fileno=fds.pop()) as reply, suppress(OSError):
                reply.setblocking(False)
                packets.send(reply, {"status": semantics.NV_OK})
        packets.close_all(fds)

    def _count(self, space: Space, role: str, step: int) -> None:
        if role == "va":
            space.va += step
        elif role == "mm":
            space.mm += step
        else:
            space.trackers += step
        if step < 0:
            self.machine.settle(space)
        if space.ended and not (space.va or space.mm or space.trackers):
            self._ends.pop(space, None)
            self._trackers.pop(space, None)

    def references(self, pid: int) -> list[dict[str, object]]:
        """Return the spaces of a process: {"space", "ends": {inode: role}}."""
        return [
            {"space": space.id, "ends": {str(inode): role for inode, role in ends.items()}}
            for space, ends in self._ends.items()
            if space.pid == pid and not space.ended
        ]

    # -- Sink -------------------------------------------------------------------------------------------

    def uvm_event(self, space: Space, event: UvmEvent) -> None:
        trackers = self._trackers.get(space, {})
        for far, listening in list(trackers.items()):
            if not (event.fatal or listening.serviced):
                continue
            fields = (
                event.fatal,
                int(event.fault_type),
                str(event.access),
                int(event.reason),
                event.address,
                # The driver stamps events with the raw clock; the machine uses the monotonic clock.
                time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW),
                event.gpu_index,
            )
            try:
                packets.send(far, {"event": fields, "dropped": listening.dropped})
            except BlockingIOError:
                listening.dropped += 1
            except packets.Gone:
                continue

    def idle(self, space: Space, request: int, error: int) -> None:
        peer = self._channels.get(space)
        if peer is not None:
            self.answer(peer, {"id": request, "error": error})

    def server_notice(self, server: Server, notice: dict[str, object]) -> None:
        for peer in self._peers:
            if peer.server is server:
                self.answer(peer, notice)

    def xid(self, unit: Unit, number: int, pid: int | None, name: str, text: str) -> None:
        who = f", pid={pid}, name={name}" if pid else ""
        line = f"NVRM: Xid (PCI:{unit.gpu.pci.rpartition('.')[0]}): {number}{who}, {text}"
        os.write(self._kmsg, f"4,{self._sequence},{time.monotonic_ns() // 1000},-;{line}\n".encode())
        self._sequence += 1

    def nvml_xid(self, unit: Unit, number: int) -> None:
        for peer in list(self._peers):
            if peer.watches == "xid":
                self.answer(peer, {"gpu": unit.gpu.uuid, "xid": number})

    def kernel_record(self, record: Mapping[str, Any]) -> None:
        stamped = {**record, "time_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)}
        assert self.machine.kernel_part is not None
        self.machine.kernel_part.records[-1].update(stamped)
        for peer in list(self._peers):
            if peer.watches == "isolation":
                self.answer(peer, stamped)

    def kill(self, space: Space) -> None:
        # A lease keeps a space after its process, so the pid may have been reused.
        with suppress(OSError):
            if procfs.start_ticks(space.pid) == space.start_ticks:
                os.kill(space.pid, signal.SIGKILL)


def process_state(pid: int) -> str:
    """Return the state letter of /proc/PID/stat; empty if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return chr(file.read().rpartition(b") ")[2][0])
    except (OSError, IndexError):
        return ""


def serve(directory: str, config: node.NodeConfig) -> Service:
    """Bind the node's socket in an existing directory. Raises OSError if another GPU process has it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16), hard))
    return Service(directory, config)
