"""Spread of a fault over a fault domain and the GPU, in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mpsd.base.model import Access, UvmEvent, UvmFaultType, UvmReason
from mpsd.gpu.simulated.machine import semantics
from mpsd.gpu.simulated.machine.memory import Violation
from mpsd.gpu.simulated.machine.parts import Kernel, Server, Space, Unit
from mpsd.gpu.simulated.machine.semantics import Outcome, Range, XidLine

if TYPE_CHECKING:
    from mpsd.gpu.simulated.machine.machine import Machine

# From the exit of the last client of a faulted server to ACTIVE: contexts are destroyed and created again.
REBUILD_S = 0.06
# Interval of checks whether work that runs in its own process has ended.
LOOK_S = 0.0005
_FAR = Violation(0x7E00_0000_0000, UvmFaultType.INVALID_PDE)
# Location of a kernel's instructions after its space has ended under it.
_CODE_PAGE = Violation(0x7FA4_3B75_4000, UvmFaultType.INVALID_PDE)


class Faults:
    """Faults of one machine. Times come from `semantics`, drawn with the machine's random source."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def strike(
        self, space: Space, kernel: Kernel, outcome: Outcome, hit: Violation = _FAR, access: str = "write"
    ) -> bool:
        """Apply a fault of a connected context's kernel. Return whether the kernel still counts as
        complete."""
        part = self._machine.kernel_part
        seen = part is not None and outcome.event_ms is not None and not space.faulting
        engine = "host" if outcome is semantics.OUTCOMES["pbdma"] else "graphics"
        if seen and part is not None and part.absorbs(space, hit, access, engine):
            # The effect of executing zeroes was not measured: treat it as an exception.
            return outcome is not semantics.WILD_CALL or self._fetched_zeroes(space)
        if outcome.event_ms is not None:
            self._announce(space, hit, access, self._draw(outcome.event_ms))
        if not outcome.spreads:
            self._machine.stall(space.unit, self._draw(outcome.stall_ms))
            self._later(outcome.own_ms, lambda: self._machine.fail(space, outcome.own))
            return outcome.completes
        self._spread(space, outcome, hit, access)
        return outcome.completes

    def _fetched_zeroes(self, space: Space) -> bool:
        outcome = semantics.OUTCOMES["trap"]
        self._spread(space, outcome, _FAR, "read")
        return outcome.completes

    def serviced(self, space: Space, address: int, access: str) -> None:
        """Handle an access that a managed range absorbed: report it to trackers that ask for such events."""
        event = UvmEvent(
            False,
            UvmFaultType.INVALID_PTE,
            Access(access),
            UvmReason.UNKNOWN,
            address,
            int(self._machine.timers.now * 1e9),
            space.unit.gpu.index,
        )
        self._later(semantics.SERVICED_MS, lambda: self._machine.output.uvm_event(space, event))

    def death(self, space: Space) -> None:
        """Handle the death of a context's process with work in flight and without a lease."""
        self._spread(space, semantics.DEATH, _CODE_PAGE, "read")

    def late_access(self, space: Space, kernel: Kernel) -> None:
        """Handle a second offender in a faulting domain: its own tracker still sees its access."""
        if kernel.name not in semantics.ACCESSES:
            return
        access = semantics.ACCESSES[kernel.name]
        found = space.memory.access(kernel.address, 4, writes=access != "read")
        if isinstance(found, Violation):
            self._announce(space, found, access, self._draw((0.5, 1.1)))

    def device(self, unit: Unit, code: int) -> None:
        """Fail every context on the GPU with `code`; its servers are in FAULT until they are empty."""
        machine = self._machine
        for space in [s for s in machine.spaces.values() if s.unit is unit]:
            machine.fail(space, code)
        for server in [s for s in machine.servers.values() if unit in s.units]:
            self._server_fault(server, list(server.spaces), None)

    def has_company(self, space: Space) -> bool:
        """Return whether a fault of this context would reach another process's context."""
        return any(other.pid != space.pid for other in self._component(space))

    def consider_recovery(self, server: Server) -> None:
        """Make a server in FAULT recover once every client has gone."""
        if not server.fault or server.landing or server.spaces or server.recovering:
            return
        server.recovering = True
        self._machine.timers.after(REBUILD_S, lambda: self._recovered(server))

    def _recovered(self, server: Server) -> None:
        server.fault = server.faulting = server.recovering = False
        self._machine.output.server_notice(
            server, {"event": "recovered", "units": [u.gpu.index for u in server.units]}
        )
        self._machine.terminator.server_usable(server)

    # -- one fault, in order of time --------------------------------------------------------------------

    def _spread(self, space: Space, outcome: Outcome, hit: Violation, access: str) -> None:
        machine, server = self._machine, space.server
        domain = self._component(space)
        for member in domain:
            member.faulting = True
        if server is not None:
            server.faulting = True
            server.landing += 1
        machine.stall(space.unit, self._draw(outcome.stall_ms))
        innocent = next((m.pid for m in domain if m is not space and m.pid != space.pid), None)
        for line in outcome.xids:
            halted = domain if line.resets else []
            say = partial(self._print, line, space, innocent, hit, access)
            self._later(line.ms, partial(self._when_halted, halted, say))
            if line.nvml_ms is not None:
                say = partial(machine.output.nvml_xid, space.unit, line.number)
                self._later(line.nvml_ms, partial(self._when_halted, halted, say))
        landing = self._draw(outcome.others_ms)
        own = landing if outcome.completes else min(self._draw(outcome.own_ms), landing)
        machine.timers.after(own, lambda: machine.fail(space, outcome.own))
        if server is not None:
            blamed = (innocent or space.pid) if outcome.blames else None
            down = min(self._draw(outcome.server_ms), landing)
            machine.timers.after(down, lambda: self._server_fault(server, domain, blamed))
        machine.timers.after(landing, lambda: self._land(space, outcome, domain))

    def _when_halted(self, domain: Sequence[Space], action: Callable[[], None]) -> None:
        # A process that is only now halted is checked later: its count may not be visible yet.
        fresh = [member.halt.halt() for member in domain if member.halt is not None]
        if any(fresh) or any(member.writes for member in domain):
            self._machine.timers.after(LOOK_S, partial(self._when_halted, domain, action))
        else:
            action()

    def _land(self, space: Space, outcome: Outcome, domain: list[Space]) -> None:
        for member in domain:
            self._machine.fail(member, outcome.own if member is space else outcome.others)
            member.faulting = False
        if space.server is not None:
            space.server.landing -= 1
            self.consider_recovery(space.server)

    def _server_fault(self, server: Server, affected: list[Space], blamed: int | None) -> None:
        server.fault = True
        there = [s for s in affected if s in server.spaces]
        notice: dict[str, object] = {
            "event": "fault",
            "units": sorted({s.unit.gpu.index for s in affected} or {u.gpu.index for u in server.units}),
            "clients": [{"pid": s.pid, "context": s.id, "unit": s.unit.gpu.index} for s in there],
            "blamed": blamed,
        }
        self._machine.output.server_notice(server, notice)
        self.consider_recovery(server)

    def _component(self, space: Space) -> list[Space]:
        """Return the contexts that fault with `space`: of its server, on GPUs linked by common processes."""
        if space.server is None:
            return [space]
        gpus, members = {space.unit.gpu.index}, [space]
        while True:
            linked = {s.pid for s in space.server.spaces if s.unit.gpu.index in gpus} | {space.pid}
            reach = gpus | {s.unit.gpu.index for s in space.server.spaces if s.pid in linked}
            if reach == gpus:
                break
            gpus = reach
        everyone = [
            s for s in self._machine.spaces.values() if s.server is space.server and s.unit.gpu.index in gpus
        ]
        return members + [s for s in everyone if s is not space]

    def _announce(self, space: Space, hit: Violation, access: str, delay_s: float) -> None:
        timers = self._machine.timers

        def deliver() -> None:
            event = UvmEvent(
                fatal=True,
                fault_type=hit.fault,
                access=Access(access),
                reason=semantics.REASONS.get(hit.fault, UvmReason.UNKNOWN),
                address=hit.address,
                timestamp_ns=int(timers.now * 1e9),
                gpu_index=space.unit.gpu.index,
            )
            self._machine.output.uvm_event(space, event)

        timers.after(delay_s, deliver)

    def _print(self, line: XidLine, space: Space, innocent: int | None, hit: Violation, access: str) -> None:
        server = space.server
        pid: int | None = {
            "innocent": innocent or space.pid,
            "offender": space.pid,
            "server": server.pid if server else space.pid,
        }.get(line.names)
        text = line.text.format(
            channel=8 * space.id,
            high=hit.address >> 32,
            low=hit.address & 0xFFFF_FFFF,
            fault=semantics.FAULT_NAMES.get(hit.fault, "FAULT_PDE"),
            access=access.upper(),
        )
        name = "nvidia-cuda-mps" if server is not None and pid == server.pid else space.command
        self._machine.output.xid(space.unit, line.number, pid, name[:15] if pid else "", text)

    def _later(self, ms: Range, action: object) -> None:
        assert callable(action)
        self._machine.timers.after(self._draw(ms), action)

    def _draw(self, ms: Range) -> float:
        """Draw seconds from a range of milliseconds."""
        return self._machine.random.uniform(*ms) / 1000
