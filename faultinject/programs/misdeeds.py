"""How each kind is committed. GPU kinds are the device's affair; those of the process are done here."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from faultinject import kinds
from faultinject.programs.device import Device
from faultinject.programs.hostpages import HostPages
from faultinject.programs.overrun import WORD, take_aim
from faultinject.programs.stray import stray_address
from faultinject.programs.talk import UNDERWAY_S, say


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do: `fill` lets kernels occupy every SM, `busy_s` is how long a kernel runs that ends.

    `target` is the allocation next to which a zone kind strays, `pages` what it strays into instead.
    """

    kind: str
    variant: str = ""
    fill: bool = False
    busy_s: float = 0.5
    target: int = 0
    pages: HostPages | None = None


def prepare(device: Device, memory: int) -> None:
    """Hold some memory and have run a kernel, as any program would."""
    address = device.alloc(memory)
    device.write(address, bytes(64))
    device.increment(address, 16)
    device.synchronize()


def commit(device: Device, plan: Plan) -> None:
    """Commit the misdeed and wait for what the GPU says to it. Raises DeviceError."""
    if plan.kind in kinds.GPU_KINDS:
        _on_the_gpu(device, plan)
    elif plan.kind in kinds.ZONE:
        _into_a_zone(device, plan)
    else:
        _PROCESS_MISDEEDS[plan.kind](device, plan)
    device.synchronize()


def _on_the_gpu(device: Device, plan: Plan) -> None:
    stray = stray_address(plan.kind)
    device.commit(plan.kind, lambda: say("fire", stray=hex(stray) if stray else None), stray)


def _into_host_memory(device: Device, plan: Plan, pages: HostPages) -> None:
    say("fire", stray=hex(pages.middle))
    device.wild("store", pages.middle, WORD, 0.0, fill=plan.fill)
    device.synchronize()
    pages.prove_whole()


def _into_a_zone(device: Device, plan: Plan) -> None:
    if plan.pages is not None:
        _into_host_memory(device, plan, plan.pages)
        return
    aim = take_aim(device, plan.kind, plan.target, wild=plan.fill)
    say("fire", stray=hex(aim.address), aim=aim.told())
    # One stray access ends with its kernel; a grid, and `long`, go on.
    seconds = 0.0 if plan.variant in ("one", "full") else plan.busy_s
    device.wild(aim.access, aim.address, aim.span, seconds, fill=plan.fill)


def rehearse(device: Device, plan: Plan) -> None:
    """Launch the same kernel where it harms nobody: what the driver needs for it, it has from then on."""
    aim = take_aim(device, plan.kind, plan.target, wild=plan.fill)
    device.wild(aim.access, plan.target, aim.span, 0.0, fill=plan.fill)
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
        # It holds copies of the parent's descriptors and outlives the parent, as a data loader may.
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


_PROCESS_MISDEEDS: dict[str, Callable[[Device, Plan], None]] = {
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
"""Kinds that are a circumstance: what their offender does in it."""


def deed_of(kind: str) -> str | None:
    """What the offender of this kind is told to do; None where no client does anything."""
    deed = COMMITTED_AS.get(kind, kind)
    return deed if deed in _PROCESS_MISDEEDS or deed in kinds.GPU_KINDS + kinds.ZONE else None
