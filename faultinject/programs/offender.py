"""A client that faults on order: it sets up, says ready, faults on `go`, and reports what it saw."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import replace
from typing import NoReturn

from faultinject.programs.basics.messages import (
    Inbox,
    clock,
    identity,
    no_core_dumps,
    say,
)
from faultinject.programs.devices.base import (
    BACKENDS,
    Device,
    DeviceError,
    open_device,
)
from faultinject.programs.injection import overrun
from faultinject.programs.injection.hostpages import HostPages
from faultinject.programs.injection.inject import (
    Plan,
    commit,
    prepare,
    rehearse,
)
from faultinject.programs.survivor import Computation
from faultinject.registry import kinds

TERMINATED = 810
PROOF_STEPS, PROOF_WORDS = 32, 4096


def continue_working(device: Device, inbox: Inbox) -> NoReturn:
    """Compute and check the results on request, as a program would that has noticed nothing."""
    while True:
        inbox.expect("prove")
        computation = Computation(device, os.getpid(), PROOF_WORDS, check=True)
        for _ in range(PROOF_STEPS):
            computation.step()
        say("lived", steps=computation.tally.steps, wrong=computation.tally.wrong)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--variant", default="")
    parser.add_argument("--fill", action="store_true", help="kernels occupy every SM")
    parser.add_argument("--busy-s", type=float, default=0.5, help="duration of a kernel that ends")
    parser.add_argument("--memory", type=int, default=1 << 20, help="bytes of device memory it holds")
    parser.add_argument("--known", action="store_true", help="its kernel is known when it faults")
    parser.add_argument("--stay", action="store_true", help="continue after an access that was absorbed")
    late = "it joins a domain, and faults at once, on go"
    parser.add_argument("--join-late", action="store_true", help=late)
    args = parser.parse_args(argv)
    no_core_dumps()
    inbox = Inbox()
    if args.join_late:
        say("ready", **identity())
        inbox.expect("go")
    plan = Plan(args.kind, args.variant, args.fill, args.busy_s)
    try:
        device = open_device(args.backend)
        context_at = clock()
        prepare(device, args.memory)
        if args.known:
            device.preload_kernel(plan.kind)
        if plan.kind in kinds.ZONE:
            # Before it says ready, so that its zones exist when the rig checks them.
            plan = replace(plan, target=device.alloc(overrun.SIZE))
            if plan.variant.startswith("full"):
                rehearse(device, plan)
            if plan.kind == "zone_host":
                pages = HostPages()
                pages.await_guard()
                plan = replace(plan, pages=pages)
        if not args.join_late:
            say("ready", **identity(), context_at=context_at, on_mps=device.on_mps)
            inbox.expect("go")
        commit(device, plan)
        say("outcome", code=0)
        if args.stay or plan.kind in kinds.ZONE:
            # The absorbed access does not end the program: mpsd has to.
            continue_working(device, inbox)
    except DeviceError as error:
        say("outcome", code=error.code, text=str(error))
        if error.code == TERMINATED:
            # A program notices the error later than its eviction. One that exits at this moment blocks
            # the server, and so the other clients, until the kernel has ended the process.
            signal.pause()
    # Not through the interpreter's exit: after a sticky error clean-up calls may hang.
    os._exit(5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
