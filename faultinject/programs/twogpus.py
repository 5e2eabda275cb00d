"""A client with a context on each of two GPUs, which computes on both and faults on the second on order.

Every result is checked. `go`: a store to an address of the second GPU that is not mapped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from faultinject.programs.basics.messages import (
    Inbox,
    clock,
    identity,
    no_core_dumps,
    say,
)
from faultinject.programs.devices.base import BACKENDS, Device, DeviceError
from faultinject.programs.survivor import Computation

GPUS, WORDS = 2, 1024


@dataclass(frozen=True, slots=True)
class GpuContext:
    """`use` makes the device's context current in this thread."""

    device: Device
    use: Callable[[], None]


def open_contexts(backend: str) -> list[GpuContext]:
    """Open contexts on the first two GPUs. Raises DeviceError."""
    if backend == "simulated":
        from faultinject.programs.devices.simulated import open_simulated

        # A driver has one address space for all GPUs of a process, the simulated GPU one for each context.
        # mpsd tracks those that exist when it attaches, so the context that will fault comes first.
        found = [
            open_simulated({**os.environ, "CUDA_VISIBLE_DEVICES": str(i)}) for i in reversed(range(GPUS))
        ]
        return [GpuContext(device, lambda: None) for device in reversed(found)]
    from faultinject.programs.devices.nvidia import open_nvidia

    opened = [open_nvidia(os.environ, i) for i in range(GPUS)]
    return [GpuContext(device, device.use) for device in opened]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    no_core_dumps()
    inbox = Inbox()
    work: list[Computation] = []
    try:
        contexts = open_contexts(args.backend)
        context_at = clock()
        for number, gpu in enumerate(contexts):
            gpu.use()
            work.append(Computation(gpu.device, args.seed + number, WORDS, check=True))
            work[-1].step()
        say("ready", **identity(), context_at=context_at, on_mps=contexts[0].device.on_mps)
        compute(contexts, work, inbox)
        say("done", steps=[w.tally.steps for w in work], wrong=sum(w.tally.wrong for w in work))
        return 0
    except DeviceError as error:
        say("error", code=error.code, text=str(error), wrong=sum(w.tally.wrong for w in work))
        return 1


def compute(contexts: list[GpuContext], work: list[Computation], inbox: Inbox) -> None:
    """Step on each GPU in turn until told to stop. Raises DeviceError."""
    while (order := inbox.wait(timeout=0.001)) is None or order["do"] != "stop":
        for gpu, computation in zip(contexts, work, strict=True):
            gpu.use()
            computation.step()
        if order is not None:
            last = contexts[-1].device
            last.commit("store", lambda: say("fire"))
            last.synchronize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
