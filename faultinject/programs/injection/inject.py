"""How each kind is committed: on the GPU by the device, in the process here."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from faultinject.programs.basics.messages import UNDERWAY_S, say
from faultinject.programs.devices.base import Device
from faultinject.programs.injection.addresses import target_address
from faultinject.programs.injection.hostpages import HostPages
from faultinject.programs.injection.overrun import WORD, take_aim
from faultinject.registry import kinds


@dataclass(frozen=True, slots=True)
class Plan:
    """The fault to commit. `fill`: kernels occupy every SM; `busy_s`: the duration of a kernel that ends.

    `target`: the allocation beside which a zone kind accesses memory; `pages`: host pages to access instead.
    """

    kind: str
    variant: str = ""
    fill: bool = False
    busy_s: float = 0.5
    target: int = 0
    pages: HostPages | None = None


def prepare(device: Device, memory: int) -> None:
    """Hold some memory and run a kernel, as any program would."""
    address = device.alloc(memory)
    device.write(address, bytes(64))
    device.increment(address, 16)
    device.synchronize()


def commit(device: Device, plan: Plan) -> None:
    """Commit the fault and wait for the answer of the GPU. Raises DeviceError."""
    if plan.kind in kinds.GPU_KINDS:
        _on_the_gpu(device, plan)
    elif plan.kind in kinds.ZONE:
        _into_a_zone(device, plan)
    else:
        _PROCESS_FAULTS[plan.kind](device, plan)
    device.synchronize()


def _on_the_gpu(device: Device, plan: Plan) -> None:
    stray = target_address(plan.kind)
    device.commit(plan.kind, lambda: say("fire", stray=hex(stray) if stray else None), stray)


def _into_host_memory(device: Device, plan: Plan, pages: HostPages) -> None:
    say("fire", stray=hex(pages.middle))
    device.access_range("store", pages.middle, WORD, 0.0, fill=plan.fill)
    device.synchronize()
    pages.prove_whole()


def _into_a_zone(device: Device, plan: Plan) -> None:
    if plan.pages is not None:
        _into_host_memory(device, plan, plan.pages)
        return
    aim = take_aim(device, plan.kind, plan.target, full_grid=plan.fill)
    say("fire", stray=hex(aim.address), aim=aim.record_fields())
    # One access ends with its kernel; a grid, and `long`, continue.
    seconds = 0.0 if plan.variant in ("one", "full") else plan.busy_s
    device.access_range(aim.access, aim.address, aim.span, seconds, fill=plan.fill)


def rehearse(device: Device, plan: Plan) -> None:
    """Launch the same kernel where it harms no client, so that the driver sets up all it needs."""
    aim = take_aim(device, plan.kind, plan.target, full_grid=plan.fill)
    device.access_range(aim.access, plan.target, aim.span, 0.0, fill=plan.fill)
    device.synchronize()


def _run_kernel(device: Device, plan: Plan) -> None:
    if plan.variant == "endless":
        device.endless(fill=plan.fill)
    else:
        device.busy(plan.busy_s, fill=plan.fill)
    time.sleep(UNDERWAY_S)


def _sigkill_running(device: Device, plan: Plan) -> None:
    _run_kernel(device, plan)
    say("fire")
    os.kill(os.getpid(), signal.SIGKILL)


def _exit_running(device: Device, plan: Plan) -> None:
    _run_kernel(device, plan)
    say("fire")
    os._exit(7)


def _segfault_running(device: Device, plan: Plan) -> None:
    _run_kernel(device, plan)
    say("fire")
    ctypes.string_at(8)


def _sigkill_idle(device: Device, plan: Plan) -> None:
    say("fire")
    os.kill(os.getpid(), signal.SIGKILL)


def _clean_exit(device: Device, plan: Plan) -> None:
    say("fire")
    device.close()
    os._exit(0)


def _endless(device: Device, plan: Plan) -> None:
    say("fire")
    device.endless(fill=plan.fill)


def _sigstop(device: Device, plan: Plan) -> None:
    say("fire")
    device.busy(plan.busy_s, fill=plan.fill)


def _fork_using(device: Device, plan: Plan) -> None:
    _run_kernel(device, plan)
    say("fire")
    child = os.fork()
    if child == 0:
        # It holds the parent's descriptors and outlives the parent, as a data loader may.
        time.sleep(plan.busy_s + 3 * UNDERWAY_S)
        os._exit(0)
    say("forked", child=child)
    device.synchronize()
    device.close()
    os._exit(0)


def _exec_using(device: Device, plan: Plan) -> None:
    _run_kernel(device, plan)
    say("fire")
    sleep = f"import time; time.sleep({plan.busy_s + 3 * UNDERWAY_S})"
    os.execv(sys.executable, [sys.executable, "-S", "-c", sleep])


_PROCESS_FAULTS: dict[str, Callable[[Device, Plan], None]] = {
    "sigkill_running": _sigkill_running,
    "exit_running": _exit_running,
    "segfault_running": _segfault_running,
    "sigkill_idle": _sigkill_idle,
    "clean_exit": _clean_exit,
    "endless": _endless,
    "sigstop": _sigstop,
    "fork_using": _fork_using,
    "exec_using": _exec_using,
}

COMMITTED_AS = {
    "mpsd_death": "sigkill_running",
    "full_log_disk": "sigkill_running",
    "two_offenders": "store",
    "dies_while_evicted": "endless",
    "other_domain": "store",
    "outside_mps": "store",
    "pid_reuse": "clean_exit",
}
"""Kinds that are a circumstance, and what their offender does in it."""


def action_of(kind: str) -> str | None:
    """Return what the offender of this kind does; None where no client does anything."""
    action = COMMITTED_AS.get(kind, kind)
    return action if action in _PROCESS_FAULTS or action in kinds.GPU_KINDS + kinds.ZONE else None
