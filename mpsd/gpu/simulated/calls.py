"""Requests to the GPU process: contexts, UVM descriptors, queries, scripted faults."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from mpsd.base.model import Access, UvmEvent, UvmFaultType, UvmReason
from mpsd.gpu.simulated import node
from mpsd.gpu.simulated.machine import semantics
from mpsd.gpu.simulated.machine.halts import Halt
from mpsd.gpu.simulated.machine.isolation import MODES, KernelModule
from mpsd.gpu.simulated.machine.parts import SERVER_BYTES, Refused, Server, Unit
from mpsd.os import procfs

if TYPE_CHECKING:
    from mpsd.gpu.simulated.machine.parts import Space
    from mpsd.gpu.simulated.packets import Message
    from mpsd.gpu.simulated.service import Peer, Service

Answer = tuple["Message | None", list[int]]


class Calls:
    """handle() answers messages on a connection, uvm() calls on a context's descriptor.

    Raises Refused with a CUDA error; KeyError, TypeError and ValueError mean a malformed message.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def handle(self, peer: Peer, message: Message) -> Answer:
        name = str(message["op"])
        if peer.space is not None:
            method = getattr(self, f"_context_{name}", None)
            if method is None:
                raise ValueError(f"no context call {name!r}")
            return method(peer, peer.space, message)  # type: ignore[no-any-return]
        method = getattr(self, f"_node_{name}", None)
        if method is None:
            raise ValueError(f"no call {name!r}")
        return method(peer, message)  # type: ignore[no-any-return]

    # -- connections that become a client, a server or a watcher ----------------------------------------

    def _node_attach(self, peer: Peer, message: Message) -> Answer:
        machine = self._service.machine
        server = None
        if message.get("server") is not None:
            server = machine.servers.get(int(message["server"]))
            if server is None:
                raise Refused(semantics.CONNECTION_FAILED)
        units = list(server.units) if server else self._service.units
        unit = self._choose(units, message.get("gpu"))
        limit = message.get("limit")
        space = machine.attach(
            peer.pid,
            peer.uid,
            str(message.get("command", ""))[:15],
            server=server,
            unit=unit,
            limit_bytes=None if limit is None else int(limit),
        )
        with suppress(OSError):
            space.start_ticks = procfs.start_ticks(peer.pid)
        ends = self._service.begin_channel(peer, space)
        fds = [end.detach() for end in ends]
        self._service.answer(
            peer, {"id": message.get("id"), "error": 0, "space": space.id, "uuid": unit.gpu.uuid}, fds
        )
        for fd in fds:
            os.close(fd)
        return None, []

    def _node_server(self, peer: Peer, message: Message) -> Answer:
        units = [self._service.units[int(index)] for index in message["gpus"]]
        peer.server = self._service.machine.add_server(peer.pid, int(message["uid"]), units)
        return {"error": 0}, []

    def _node_watch(self, peer: Peer, message: Message) -> Answer:
        if message["what"] not in ("xid", "node", "isolation"):
            raise ValueError(message["what"])
        peer.watches = message["what"]
        if peer.watches == "isolation":
            part = self._kernel_part(peer)
            self._service.answer(peer, {"id": message.get("id"), "error": 0})
            for record in part.records:
                self._service.answer(peer, record)
            return None, []
        return {"error": 0}, []

    # -- the device of the kernel module ----------------------------------------------------------------

    def _kernel_part(self, peer: Peer) -> KernelModule:
        part = self._service.machine.kernel_part
        if part is None:
            raise Refused(semantics.NOT_SUPPORTED)
        self._check_owner(peer)
        return part

    def _node_isolation(self, peer: Peer, message: Message) -> Answer:
        part = self._kernel_part(peer)
        said = {"mode": part.mode, "driver": node.DRIVER_VERSION, "deadline_ms": round(part.deadline_s * 1e3)}
        return {"error": 0, **said, "loaded_ns": self._service.loaded_ns, "written": part.written}, []

    def _node_isolation_mode(self, peer: Peer, message: Message) -> Answer:
        part = self._kernel_part(peer)
        part.mode = MODES[MODES.index(message["mode"])]
        return {"error": 0}, []

    def _node_acknowledge(self, peer: Peer, message: Message) -> Answer:
        return {"error": 0, "done": self._kernel_part(peer).acknowledge(int(message["space"]), peer)}, []

    def _node_kill_now(self, peer: Peer, message: Message) -> Answer:
        return {"error": 0, "done": self._kernel_part(peer).kill(int(message["space"]))}, []

    # -- calls of a context -----------------------------------------------------------------------------

    def _context_sync(self, peer: Peer, space: Space, message: Message) -> Answer:
        self._service.machine.when_idle(space, int(message["id"]))
        return None, []

    def _context_alloc(self, peer: Peer, space: Space, message: Message) -> Answer:
        machine = self._service.machine
        mapping = machine.allocate(space, int(message["words"]), writable=bool(message.get("writable", True)))
        fds = [mapping.fd]
        self._service.answer(
            peer, {"id": message.get("id"), "error": 0, "address": mapping.base, "size": mapping.size}, fds
        )
        return None, []

    def _context_unmap(self, peer: Peer, space: Space, message: Message) -> Answer:
        keep = bool(message.get("keep", False))
        self._service.machine.unmap(space, int(message["address"]), keep_reservation=keep)
        return {"error": 0}, []

    def _context_host_register(self, peer: Peer, space: Space, message: Message) -> Answer:
        self._service.machine.host_register(space, int(message["address"]), int(message["size"]))
        return {"error": 0}, []

    def _context_managed(self, peer: Peer, space: Space, message: Message) -> Answer:
        machine = self._service.machine
        machine.lay(space, str(message["op"]), int(message["base"]), int(message["length"]))
        return {"error": 0}, []

    _context_unmanaged = _context_sparse = _context_unsparse = _context_managed

    def _context_halt(self, peer: Peer, space: Space, message: Message) -> Answer:
        """Hand the two shared values of halts.py to a client that runs its work in its own process."""
        if space.halt is None:
            space.halt, space.launched = Halt(), True
        return {"error": 0}, [space.halt.fd]

    def _context_close(self, peer: Peer, space: Space, message: Message) -> Answer:
        self._service.end_channel(peer)
        return {"error": 0}, []

    # -- calls on a UVM descriptor ----------------------------------------------------------------------

    def uvm(self, space: Space, role: str, message: Message) -> tuple[int, list[socket.socket]]:
        """Return (NV_STATUS, sockets to hand over)."""
        call = message["op"]
        if role != "va":
            return semantics.NV_ILLEGAL_ACTION, []
        if call == "track":
            return semantics.NV_OK, [self._service.new_tracker(space)]
        base, length = int(message["base"]), int(message["length"])
        if call == "sparse":
            wrong_gpu = message.get("gpu") != space.unit.gpu.uuid
            return (semantics.NV_INVALID_ADDRESS if wrong_gpu else space.memory.guard(base, length)), []
        if call == "unsparse":
            return space.memory.unguard(base, length), []
        raise ValueError(call)

    # -- queries ----------------------------------------------------------------------------------------

    def _node_node(self, peer: Peer, message: Message) -> Answer:
        machine = self._service.machine
        gpus = [
            {
                "index": u.gpu.index,
                "uuid": u.gpu.uuid,
                "name": u.gpu.name,
                "pci": u.gpu.pci,
                "memory": u.gpu.memory_bytes,
                "used": machine.memory_used(u),
                "mode": u.compute_mode,
            }
            for u in self._service.units
        ]
        return {"error": 0, "driver": node.DRIVER_VERSION, "pid": os.getpid(), "gpus": gpus}, []

    def _node_processes(self, peer: Peer, message: Message) -> Answer:
        """Return [pid, bytes, is an MPS client] for each context and server on a GPU, as NVML lists them."""
        unit = self._choose(self._service.units, message["gpu"])
        machine = self._service.machine
        used: dict[tuple[int, bool], int] = {}
        for server in machine.servers.values():
            if unit in server.units:
                used[server.pid, False] = SERVER_BYTES
        for space in machine.spaces.values():
            if space.unit is unit and space.connected:
                key = (space.pid, space.server is not None)
                used[key] = used.get(key, 0) + space.bytes_used
        return {"error": 0, "processes": [[pid, size, mps] for (pid, mps), size in used.items()]}, []

    def _node_server_info(self, peer: Peer, message: Message) -> Answer:
        server = self._service.machine.servers.get(int(message["server"]))
        if server is None:
            return {"error": 0, "status": None, "faulting": False, "clients": []}, []
        clients = [
            {
                "pid": s.pid,
                "context": s.id,
                "gpu": s.unit.gpu.index,
                "uuid": s.unit.gpu.uuid,
                "command": s.command,
            }
            for s in server.spaces
        ]
        status = {"status": server.status, "faulting": server.faulting}
        return {"error": 0, **status, "clients": clients}, []

    def _node_terminate(self, peer: Peer, message: Message) -> Answer:
        """Answer at the end: {"result": 0}, or {"result": null} if the process is not a client."""
        server = self._service.machine.servers.get(int(message["server"]))
        if server is None:
            return {"error": 0, "result": None}, []

        def done(result: int | None) -> None:
            self._service.answer(peer, {"id": message.get("id"), "error": 0, "result": result})

        self._service.machine.terminator.request(server, int(message["pid"]), done)
        return None, []

    def _node_spaces(self, peer: Peer, message: Message) -> Answer:
        return {"error": 0, "spaces": self._service.references(int(message["pid"]))}, []

    def _node_work(self, peer: Peer, message: Message) -> Answer:
        """Return the number of an exited process's contexts that still have kernels to run.

        An unread connection may contain launches. A forked child may keep it open, and launches nothing.
        `launched`: whether the process has launched any kernel.
        """
        spaces = [s for s in self._service.machine.spaces.values() if s.pid == int(message["pid"])]
        remaining = [s for s in spaces if s.busy or (s.connected and self._service.may_launch(s))]
        return {"error": 0, "busy": len(remaining), "launched": any(s.launched for s in spaces)}, []

    def _node_duplicate(self, peer: Peer, message: Message) -> Answer:
        """Return new descriptors for a space if pidfd_getfd is refused; for its user and root only."""
        space = self._service.machine.spaces.get(int(message["space"]))
        if space is None or peer.uid not in (0, space.uid):
            return {"error": semantics.INVALID_VALUE}, []
        fds = [self._service.new_reference(space, role).detach() for role in ("va", "mm")]
        self._service.answer(peer, {"id": message.get("id"), "error": 0, "roles": ["va", "mm"]}, fds)
        for fd in fds:
            os.close(fd)
        return None, []

    # -- scripted faults and the end --------------------------------------------------------------------

    def _node_inject(self, peer: Peer, message: Message) -> Answer:
        """Inject a fault: xid (number, text, error, pid and name), stall, slow (seconds), server_crash
        (server), mode (mode), end (pid): its running kernels end; or events (pid, count): failed prefetches
        without effect, on that process's trackers."""
        self._check_owner(peer)
        unit = self._choose(self._service.units, message.get("gpu"))
        machine, fault = self._service.machine, message["fault"]
        if fault == "xid":
            error = message.get("error")
            machine.device_xid(
                unit,
                int(message["number"]),
                message.get("text"),
                None if error is None else int(error),
                (message.get("pid"), str(message.get("name", ""))),
            )
        elif fault == "stall":
            machine.stall(unit, float(message["seconds"]))
        elif fault == "slow":
            unit.slowdown_s = max(0.0, float(message["seconds"]))
        elif fault == "mode":
            unit.compute_mode = str(message["mode"])
        elif fault == "end":
            machine.end_work(int(message["pid"]))
        elif fault == "events":
            self._prefetch(int(message["pid"]), int(message["count"]))
        elif fault == "server_crash":
            self._crash(machine.servers[int(message["server"])])
        else:
            raise ValueError(fault)
        return {"error": 0}, []

    def _prefetch(self, pid: int, count: int) -> None:
        for space in [s for s in self._service.machine.spaces.values() if s.pid == pid]:
            event = UvmEvent(
                True,
                UvmFaultType.INVALID_PTE,
                Access.PREFETCH,
                UvmReason.INVALID_ADDRESS,
                0,
                0,
                space.unit.gpu.index,
            )
            for _ in range(count):
                self._service.uvm_event(space, event)

    def _crash(self, server: Server) -> None:
        self._service.server_notice(server, {"event": "crash"})

    def _node_stop(self, peer: Peer, message: Message) -> Answer:
        self._check_owner(peer)
        self._service.running = False
        return {"error": 0}, []

    def _check_owner(self, peer: Peer) -> None:
        if peer.uid not in (0, os.getuid()):
            raise Refused(semantics.NOT_PERMITTED)

    def _choose(self, units: list[Unit], wanted: object) -> Unit:
        """Return a GPU among `units` by ordinal or UUID; the first one by default."""
        if wanted is None:
            return units[0]
        for position, unit in enumerate(units):
            if wanted in (unit.gpu.uuid, position, str(position)):
                return unit
        raise Refused(100)
