"""The simulated GPU: contexts, their kernels and their schedule. No sockets, an explicit clock.

`faulting` handles faults and `terminating` handles terminate_client; both work on this object.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from mpsd.gpu.simulated.machine import semantics
from mpsd.gpu.simulated.machine.faulting import Faults
from mpsd.gpu.simulated.machine.isolation import KernelModule
from mpsd.gpu.simulated.machine.memory import GRANULE, WORD, Mapping, Serviced, Violation, increment
from mpsd.gpu.simulated.machine.parts import SERVER_BYTES, Kernel, MachineOutput, Refused, Server, Space, Unit
from mpsd.gpu.simulated.machine.terminating import Terminator
from mpsd.gpu.simulated.machine.timers import Timers

# The figure of the release-615 guide, with two connections per client.
MAX_CLIENTS = 60
# Delay of a kernel's completion while another client's grid fills the GPU.
SHARED_GPU_S = 0.001


class Machine:
    """All state of one node's GPUs. Methods raise Refused with the CUDA error of the call."""

    def __init__(
        self,
        units: Sequence[Unit],
        output: MachineOutput,
        *,
        timers: Timers | None = None,
        seed: int = 0,
        process_state: Callable[[int], str] = lambda _pid: "R",
    ) -> None:
        self.units = tuple(units)
        self.output = output
        self.timers = timers or Timers()
        self.random = random.Random(seed)
        self.servers: dict[int, Server] = {}
        self.spaces: dict[int, Space] = {}
        self.faults = Faults(self)
        self.kernel_part: KernelModule | None = None
        self.terminator = Terminator(self, process_state)
        self._next_id = 1

    # -- servers and contexts ---------------------------------------------------------------------------

    def add_server(self, pid: int, uid: int, units: Sequence[Unit]) -> Server:
        """Handle the start of a server process. Refused with 46 by compute mode."""
        if not all(self._open_to_all(unit) for unit in units):
            raise Refused(semantics.DEVICES_UNAVAILABLE)
        server = Server(pid, uid, tuple(units))
        self.servers[pid] = server
        return server

    def remove_server(self, server: Server) -> None:
        """Handle the end of a server process: its clients lose their contexts."""
        self.servers.pop(server.pid, None)
        for space in list(server.spaces):
            self.fail(space, semantics.RPC_FAILURE)
        self.terminator.server_gone(server)

    def attach(
        self,
        pid: int,
        uid: int,
        command: str,
        *,
        server: Server | None,
        unit: Unit,
        limit_bytes: int | None = None,
    ) -> Space:
        """Create a context. Refused: 807 in FAULT, 808 if full, 46 by compute mode, 2 without memory."""
        if server is not None:
            if server.faulting or server.fault:
                self.output.server_notice(server, {"event": "refused", "pid": pid})
                raise Refused(semantics.SERVER_NOT_READY)
            if len(server.spaces) >= MAX_CLIENTS:
                self.output.server_notice(server, {"event": "no place", "pid": pid, "most": MAX_CLIENTS})
                raise Refused(semantics.MAX_CLIENTS)
        elif not self._open_to_all(unit):
            raise Refused(semantics.DEVICES_UNAVAILABLE)
        space = Space(self._next_id, pid, uid, command, unit, server, limit_bytes)
        self._next_id += 1
        if self.memory_used(unit) + space.bytes_used > unit.gpu.memory_bytes:
            raise Refused(semantics.OUT_OF_MEMORY)
        self.spaces[space.id] = space
        if server is not None:
            server.spaces.append(space)
            self.output.server_notice(server, {"event": "client", **_names(space), "unit": unit.gpu.index})
        return space

    def _open_to_all(self, unit: Unit) -> bool:
        if unit.compute_mode == "prohibited":
            return False
        taken = any(unit in s.units for s in self.servers.values()) or any(
            s.unit is unit for s in self.spaces.values()
        )
        return unit.compute_mode != "exclusive-process" or not taken

    def disconnect(self, space: Space) -> None:
        """Handle the end of a process's hold on a context: it was closed, or the process died or called
        exec."""
        space.connected = False
        space.waiting.clear()
        self.settle(space)
        self._leave(space)

    def settle(self, space: Space) -> None:
        """Apply the consequences of closed descriptors."""
        if space.connected or space.ended:
            return
        if space.busy and not (space.leased or space.faulting or space.terminating):
            self.faults.death(space)
        if space.va == 0 and space.trackers == 0 and not (space.held and space.busy):
            space.ended = True
            space.memory.destroy()
            self.spaces.pop(space.id, None)
            if self.kernel_part is not None:
                self.kernel_part.forget(space)

    def _leave(self, space: Space) -> None:
        server = space.server
        if server is None or space not in server.spaces:
            return
        server.spaces.remove(space)
        self.output.server_notice(server, {"event": "exit", **_names(space), "left": len(server.spaces)})
        self.faults.consider_recovery(server)

    # -- memory -----------------------------------------------------------------------------------------

    def memory_used(self, unit: Unit) -> int:
        servers = sum(SERVER_BYTES for server in self.servers.values() if unit in server.units)
        return servers + sum(space.bytes_used for space in self.spaces.values() if space.unit is unit)

    def allocate(self, space: Space, words: int, *, writable: bool = True) -> Mapping:
        self._check_error(space)
        size = words * WORD
        if words <= 0:
            raise Refused(semantics.INVALID_VALUE)
        rounded = -(-size // GRANULE) * GRANULE
        over_limit = space.limit_bytes is not None and space.bytes_used + rounded > space.limit_bytes
        if over_limit or self.memory_used(space.unit) + rounded > space.unit.gpu.memory_bytes:
            raise Refused(semantics.OUT_OF_MEMORY)
        mapping = space.memory.allocate(size, writable=writable)
        if mapping is None:
            raise Refused(semantics.INVALID_VALUE)
        return mapping

    def unmap(self, space: Space, address: int, *, keep_reservation: bool) -> None:
        self._check_error(space)
        if not space.memory.unmap(address, keep_reservation=keep_reservation):
            raise Refused(semantics.INVALID_VALUE)

    def lay(self, space: Space, kind: str, base: int, length: int) -> None:
        """Declare a range in a program's own space: managed, unmanaged, sparse or unsparse."""
        self._check_error(space)
        memory, status = space.memory, semantics.NV_OK
        if kind == "managed":
            status = memory.manage(base, length)
        elif kind == "unmanaged":
            memory.unmanage(base, length)
        elif kind == "sparse":
            status = memory.guard(base, length)
        else:
            status = memory.unguard(base, length)
        if status != semantics.NV_OK:
            raise Refused(semantics.INVALID_VALUE)

    def host_register(self, space: Space, address: int, size: int) -> None:
        """Pin host memory. Fails under a guard, because the address is taken on the GPU side."""
        self._check_error(space)
        if size <= 0 or space.memory.guarded(address, size):
            raise Refused(semantics.INVALID_VALUE)

    def _check_error(self, space: Space) -> None:
        if space.error:
            raise Refused(space.error)

    # -- kernels ----------------------------------------------------------------------------------------

    def launch(self, space: Space, kernel: Kernel) -> None:
        """Launch asynchronously: an error shows at the next request."""
        space.launched = True
        if space.error:
            return
        if space.faulting:
            self.faults.late_access(space, kernel)
        space.queue.append(kernel)
        self.advance(space)

    def when_idle(self, space: Space, request: int) -> None:
        """Answer `request` once nothing of the context is in flight, or it has failed."""
        if space.error or not space.busy:
            self.output.idle(space, request, space.error)
        else:
            space.waiting.append(request)

    def advance(self, space: Space) -> None:
        """Start the kernels that can start."""
        while space.queue and space.running is None and not self._held(space):
            kernel = space.running = space.queue.popleft()
            if kernel.name in semantics.ENDLESS:
                return
            wait = kernel.duration_s + space.unit.slowdown_s + self._contention(space)
            if wait > 0:
                self.timers.after(wait, lambda s=space, k=kernel: self._complete(s, k))  # type: ignore[misc]
            else:
                self._complete(space, kernel)
        if not space.busy:
            self._wake(space)

    def advance_all(self, spaces: Iterable[Space]) -> None:
        for space in list(spaces):
            self.advance(space)

    def _held(self, space: Space) -> bool:
        held = space.server is not None and space.server.held > 0
        return held or space.faulting or bool(space.error) or space.unit.stall_until > self.timers.now

    def _contention(self, space: Space) -> float:
        filled = any(
            other.running is not None and other.running.fill_gpu and other is not space
            for other in self.spaces.values()
            if other.unit is space.unit
        )
        return SHARED_GPU_S if filled else 0.0

    def _complete(self, space: Space, kernel: Kernel) -> None:
        if space.running is not kernel or space.faulting:
            return
        if space.server is not None and space.server.held:
            self.terminator.on_release(space.server, lambda: self._complete(space, kernel))
            return
        if space.unit.stall_until > self.timers.now:
            self.timers.at(space.unit.stall_until, lambda: self._complete(space, kernel))
            return
        if not self._execute(space, kernel):
            return
        space.running = None
        self.advance(space)
        if not space.busy:
            # This may be the end that a leased context of an exited process waited for.
            self.settle(space)

    def _execute(self, space: Space, kernel: Kernel) -> bool:
        """Execute a kernel. Return False if it cannot count as complete."""
        if kernel.name in semantics.OUTCOMES and kernel.name not in semantics.ACCESSES:
            return self.faults.strike(space, kernel, semantics.OUTCOMES[kernel.name])
        if kernel.name in semantics.ACCESSES:
            return self._access(space, kernel)
        if kernel.name == "spin" or kernel.words == 0:
            return True
        return self._compute(space, kernel)

    def _access(self, space: Space, kernel: Kernel) -> bool:
        access = semantics.ACCESSES[kernel.name]
        if kernel.address >= 1 << 47:
            return self.faults.strike(space, kernel, semantics.OUTCOMES["noncanonical"])
        found = space.memory.access(kernel.address, WORD, writes=access not in ("read", "prefetch"))
        if isinstance(found, Serviced):
            self._serviced(space, found, access)
        if isinstance(found, Violation) and access == "prefetch":
            return True
        if isinstance(found, Violation):
            outcome = semantics.OUTCOMES.get(kernel.name, semantics.STRAY)
            return self.faults.strike(space, kernel, outcome, found, access)
        if isinstance(found, Mapping) and access == "write":
            self._store(found, kernel.address, kernel.value.to_bytes(WORD, "little"))
        return True

    def _compute(self, space: Space, kernel: Kernel) -> bool:
        size = kernel.words * WORD
        found = space.memory.access(kernel.address, size, writes=True)
        if isinstance(found, Violation):
            return self.faults.strike(space, kernel, semantics.STRAY, found, "write")
        if isinstance(found, Serviced):
            self._serviced(space, found, "write")
        if not isinstance(found, Mapping):
            return True
        offset = kernel.address - found.base
        if kernel.name == "fill":
            self._store(found, kernel.address, kernel.value.to_bytes(WORD, "little") * kernel.words)
        else:
            self._store(found, kernel.address, increment(found.contents()[offset : offset + size]))
        return True

    def _serviced(self, space: Space, found: Serviced, access: str) -> None:
        if found.first:
            self.faults.serviced(space, found.address, access)

    def _store(self, mapping: Mapping, address: int, data: bytes) -> None:
        offset = address - mapping.base
        mapping.contents()[offset : offset + len(data)] = data

    def _wake(self, space: Space) -> None:
        waiting, space.waiting = space.waiting, []
        for request in waiting:
            self.output.idle(space, request, space.error)

    def fail(self, space: Space, code: int) -> None:
        """Give the context its sticky error: work in flight is lost."""
        space.error = space.error or code
        space.running = None
        space.queue.clear()
        self._wake(space)

    def end_work(self, pid: int) -> None:
        """Let the running kernels of the process end now, endless ones too."""
        for space in [s for s in self.spaces.values() if s.pid == pid and s.running is not None]:
            assert space.running is not None
            self._complete(space, space.running)

    # -- stalls -----------------------------------------------------------------------------------------

    def stall(self, unit: Unit, seconds: float) -> None:
        """Complete nothing on the GPU for this time."""
        if seconds <= 0:
            return
        unit.stall_until = max(unit.stall_until, self.timers.now + seconds)
        self.timers.at(
            unit.stall_until, lambda: self.advance_all(s for s in self.spaces.values() if s.unit is unit)
        )

    def device_xid(
        self,
        unit: Unit,
        number: int,
        text: str | None,
        error: int | None,
        names: tuple[int | None, str] = (None, ""),
    ) -> None:
        """Apply a scripted Xid. `error` (default by number) reaches every context on the device.

        `names`: pid and name of the process in the kernel log's line.
        """
        known = semantics.DEVICE_XIDS.get(number, semantics.DeviceXid("Unknown Error", 0))
        self.output.xid(unit, number, *names, text or known.text)
        self.output.nvml_xid(unit, number)
        code = known.error if error is None else error
        if code:
            self.faults.device(unit, code)


def _names(space: Space) -> dict[str, object]:
    return {"pid": space.pid, "context": space.id}
