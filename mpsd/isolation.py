"""The kernel part on the loop: its mode, its records to core, and what is shown of it.

Where it isolates, no silent guard is laid around clients: a guard would absorb what the kernel part
absorbs too, and hide who did it. Where it is absent, guards are what is left; one that is lost while mpsd
runs sinks on, and kills at its own deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog

from mpsd import procs
from mpsd.core import events as ev
from mpsd.errors import GpuError
from mpsd.gpu.base import Check, Isolation, IsolationState, NoIsolation, isolation_check
from mpsd.model import IsolationMode, KernelAction, KernelFault, Liveness, ProcessInstance

log = structlog.get_logger("mpsd.isolation")

# Done with as they are told: after a restart they would be taken for signs of another fault.
_ANSWERED = (KernelAction.REPORTED, KernelAction.REFUSED, KernelAction.ORPHAN)
# Processes that faulted before they were leased; more of them at once are left to the module's deadline.
EARLY_KEPT = 64
# The module's deadlines until even a client that somebody said he would put out is killed.
DEADLINES_LEFT = 11


class IsolationDesk:
    """Lives on the event loop. `isolation`: None where the kernel part is not there, for the reason
    `absent`. `holds` and `idle`: as the trackers ask them; `leased`: whether core knows that this process may
    be put out. `fresh_s`: a fault that the stock driver answered
    longer ago than this, before mpsd began, was an earlier mpsd's affair."""

    def __init__(
        self,
        isolation: Isolation | None,
        absent: NoIsolation,
        wanted: IsolationMode,
        post: Callable[[ev.Event], None],
        holds: Callable[[ProcessInstance, Sequence[int]], Sequence[bool]],
        idle: Callable[[ProcessInstance], bool],
        leased: Callable[[ProcessInstance], bool],
        fresh_s: float,
    ) -> None:
        self._isolation = isolation
        self._problem = "" if isolation is not None else absent.why
        self._absent = absent
        self._wanted = wanted
        self._post = post
        self._holds = holds
        self._idle = idle
        self._leased = leased
        self._early: dict[ProcessInstance, KernelFault] = {}
        self._fresh_s = fresh_s
        self._last = 0
        self._reading = self._lost = False
        self._state: IsolationState | None = None
        if self._isolation is not None:
            self._set_mode(self._isolation)

    def _set_mode(self, isolation: Isolation) -> None:
        try:
            isolation.set_mode(self._wanted)
            self._state = isolation.state()
        except GpuError as error:
            self._lost, self._problem = True, str(error)

    def _look(self) -> None:
        """What it is now: an administrator, or another mpsd, may have set the mode since."""
        if self._isolation is None or self._lost:
            return
        try:
            self._state = self._isolation.state()
        except GpuError as error:
            self._problem = str(error)
            return
        mode, wanted = self._state.mode, self._wanted
        self._problem = (
            "" if mode is wanted else f"mode {mode} was set, and not by mpsd, which wants {wanted}"
        )

    @property
    def on(self) -> bool:
        """Whether memory faults stay with their clients."""
        mode = self._state.mode if self._state is not None and not self._lost else None
        return mode is IsolationMode.ISOLATE

    def start(self) -> None:
        """Read from now on; to be called once clients of an earlier mpsd are known again."""
        if self._isolation is None or self._state is None or self._lost:
            return
        asyncio.get_running_loop().add_reader(self._isolation.fileno(), self._drain)
        self._reading = True
        log.info("kernel isolation", mode=self._state.mode.value, driver=self._state.driver)

    def attached(self, process: ProcessInstance) -> None:
        """It is leased now: what it did before is told once more."""
        record = self._early.pop(process, None)
        # Past the deadline the module has killed whoever still had that space: this is a later life.
        if record is not None and _age_s(record) <= self._deadlines_s(1):
            self._tell(record)

    def acknowledge(self, space: int) -> None:
        """Let the module wait for the eviction that has begun. Failing that, it kills at its deadline."""
        if self._isolation is None:
            return
        try:
            self._isolation.acknowledge(space)
        except GpuError as error:
            log.warning("the kernel part does not wait", space=space, reason=str(error))

    def shown(self) -> Mapping[str, Any]:
        """For `status`. No mode but a driver: it is there, and nothing is heard of it."""
        self._look()
        state = self._state
        return {
            "mode": state.mode.value if state is not None and not self._lost else None,
            "wanted": self._wanted.value,
            "driver": state.driver if state is not None else None,
            "deadline_ms": state.deadline_ms if state is not None else None,
            "why_not": self._problem,
        }

    def check(self) -> Check:
        """For `doctor`; in a thread, while the loop may close it."""
        isolation = self._isolation
        if isolation is None:
            return replace(self._absent, why=self._problem).check()
        try:
            if self._lost:
                raise GpuError(self._problem)
            found = isolation.state()
        except GpuError as error:
            return Check("kernel isolation", False, str(error), "restart mpsd")
        if found.mode is self._wanted:
            return isolation_check(found)
        remedy = f"restart mpsd, which wants mode {self._wanted}: [kernel] isolation"
        return replace(isolation_check(found), ok=False, remedy=remedy)

    def problems(self, *, look: bool = True) -> list[str]:
        """Nothing where it was never there: that is no loss. `look`: the kernel part is asked, which takes
        its time; else it is as it was found the last time.
        """
        if look:
            self._look()
        lost = (self._isolation is not None or not self._absent.known) and self._problem
        return [f"kernel isolation: {self._problem}"] if lost else []

    def close(self) -> None:
        """The mode stays: without mpsd the module kills at its deadline. Idempotent."""
        isolation, self._isolation = self._isolation, None
        if isolation is None:
            return
        if self._reading:
            asyncio.get_running_loop().remove_reader(isolation.fileno())
            self._reading = False
        self._lost, self._problem = True, "mpsd is ending"
        isolation.close()

    def _stop_reading(self) -> None:
        if self._reading and self._isolation is not None:
            asyncio.get_running_loop().remove_reader(self._isolation.fileno())
            self._reading = False

    def _drain(self) -> None:
        assert self._isolation is not None
        try:
            records = self._isolation.drain()
        except GpuError as error:
            # It would stay readable for ever.
            self._stop_reading()
            self._lost, self._problem = True, f"lost: {error}; whom it sinks it kills at its own deadline"
            log.error("the kernel part is not read any more", reason=str(error))
            return
        for record in records:
            if record.seq > self._last + 1 and self._last:
                self._post(ev.Counted({"kernel_records_missed": record.seq - self._last - 1}))
            self._last = record.seq
            self._tell(record)

    def _tell(self, record: KernelFault) -> None:
        age_s = _age_s(record)
        if self._is_over(record, age_s):
            self._post(ev.Counted({"kernel_records_old": 1}))
            return
        process, own, idle, liveness = record.process, False, False, Liveness.DEAD
        if process is not None:
            if record.action is KernelAction.SUNK and not self._leased(process):
                self._keep(process, record)
            (own,) = self._holds(process, [record.event.address])
            idle, liveness = self._idle(process), procs.liveness(process)
        self._post(ev.KernelFaultSeen(record, liveness, own, age_s, idle))

    def _is_over(self, record: KernelFault, age_s: float) -> bool:
        """Whether this was an earlier mpsd's affair, or the module's own: a process that has replaced its
        program since is still the same pid, and has done nothing."""
        if record.action in _ANSWERED:
            return age_s > self._fresh_s
        return record.action is KernelAction.SUNK and age_s > self._deadlines_s(DEADLINES_LEFT)

    def _deadlines_s(self, many: int) -> float:
        return many * self._state.deadline_ms / 1e3 if self._state is not None else 0.0

    def _keep(self, process: ProcessInstance, record: KernelFault) -> None:
        self._early[process] = record
        if len(self._early) > EARLY_KEPT:
            del self._early[next(iter(self._early))]


def _age_s(record: KernelFault) -> float:
    now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    return max(0.0, (now_ns - record.event.timestamp_ns) / 1e9)
