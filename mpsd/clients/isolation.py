"""The kernel module (patched nvidia-uvm) on the event loop: its mode, its fault records, its status.

In mode isolate, mpsd lays no silent guards around clients: a guard would absorb the accesses that the module
absorbs too, and hide the offender. Without the module, guards are the remaining protection. If mpsd loses the
module while running, the module keeps absorbing and kills at its own deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import GpuError
from mpsd.base.model import IsolationMode, KernelAction, KernelFault, Liveness, ProcessInstance
from mpsd.core import events as ev
from mpsd.gpu.base import Check, Isolation, IsolationState, NoIsolation, isolation_check
from mpsd.os import processes

log = structlog.get_logger("mpsd.isolation")

# These actions are complete when they are reported. After a restart they would look like a new fault.
_ANSWERED = (KernelAction.REPORTED, KernelAction.REFUSED, KernelAction.ORPHAN)
# Processes that faulted before they were leased. Beyond this number the module's deadline handles them.
EARLY_KEPT = 64
# The module's deadlines until it kills even a client with an acknowledged eviction.
DEADLINES_LEFT = 11


class KernelIsolation:
    """The kernel module on the event loop. `isolation`: None without the module, for the reason `absent`.

    `holds` and `idle`: as the trackers use them. `leased`: whether core knows this process and may evict it.
    `fresh_s`: older faults from before mpsd began, answered by the stock driver, belong to an earlier mpsd.
    """

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

    def _check_mode(self) -> None:
        """Read the present mode: an administrator, or another mpsd, may have changed it."""
        if self._isolation is None or self._lost:
            return
        try:
            self._state = self._isolation.state()
        except GpuError as error:
            self._problem = str(error)
            return
        mode, wanted = self._state.mode, self._wanted
        self._problem = "" if mode is wanted else f"the mode is {mode}, but mpsd is configured for {wanted}"

    @property
    def on(self) -> bool:
        """Return whether memory faults stay with the offending client."""
        mode = self._state.mode if self._state is not None and not self._lost else None
        return mode is IsolationMode.ISOLATE

    def start(self) -> None:
        """Read records from now on; call it once the clients of an earlier mpsd are known again."""
        if self._isolation is None or self._state is None or self._lost:
            return
        asyncio.get_running_loop().add_reader(self._isolation.fileno(), self._drain)
        self._reading = True
        log.info("kernel isolation", mode=self._state.mode.value, driver=self._state.driver)

    def attached(self, process: ProcessInstance) -> None:
        """Report the earlier fault of a process again, now that it is leased."""
        record = self._early.pop(process, None)
        # By this deadline the module has killed the process with that space: this is a later program.
        if record is not None and _age_s(record) <= self._deadlines_s(1):
            self._tell(record)

    def acknowledge(self, space: int) -> None:
        """Have the module wait for the eviction under way. Without this it kills at its deadline."""
        if self._isolation is None:
            return
        try:
            self._isolation.acknowledge(space)
        except GpuError as error:
            log.warning(
                "the kernel module does not accept an acknowledgement", space=space, reason=str(error)
            )

    def shown(self) -> Mapping[str, Any]:
        """Return the rows for `status`. A driver without a mode: the module exists but cannot be read."""
        self._check_mode()
        state = self._state
        return {
            "mode": state.mode.value if state is not None and not self._lost else None,
            "wanted": self._wanted.value,
            "driver": state.driver if state is not None else None,
            "deadline_ms": state.deadline_ms if state is not None else None,
            "why_not": self._problem,
        }

    def check(self) -> Check:
        """Return the check for `doctor`. Runs in a thread, while the loop may close the module."""
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
        remedy = f"restart mpsd to set the configured mode {self._wanted} ([kernel] isolation)"
        return replace(isolation_check(found), ok=False, remedy=remedy)

    def conditions(self, *, refresh: bool = True) -> list[Condition]:
        """Return a condition if isolation is lost, none for a module that never existed: that is no loss.

        `refresh`: read the state of the module, which takes time; else use the last one read.
        """
        if refresh:
            self._check_mode()
        lost = (self._isolation is not None or not self._absent.known) and self._problem
        return [Condition(Code.KERNEL_ISOLATION, detail=self._problem)] if lost else []

    def close(self) -> None:
        """Stop reading. The mode stays: without mpsd the module kills at its deadline. Idempotent."""
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
            # The descriptor would stay readable without end.
            self._stop_reading()
            self._lost, self._problem = (
                True,
                f"lost: {error}; the module kills the clients it condemns at its own deadline",
            )
            log.error("cannot read the kernel module any more", reason=str(error))
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
            idle, liveness = self._idle(process), processes.liveness(process)
        self._post(ev.KernelFaultSeen(record, liveness, own, age_s, idle))

    def _is_over(self, record: KernelFault, age_s: float) -> bool:
        """Return whether an earlier mpsd, or the module itself, has dealt with this fault.

        A process that has replaced its program since has the same pid and is innocent.
        """
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
