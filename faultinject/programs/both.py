"""A client with a context on each of two GPUs: computes on both in turn, and strays on the second on order.

Every result is checked. `go`: a store to an address of the second GPU that is not mapped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from faultinject.programs.device import BACKENDS, Device, DeviceError
from faultinject.programs.survivor import Computation
from faultinject.programs.talk import Inbox, clock, identity, no_core_dumps, say

GPUS, WORDS = 2, 1024


@dataclass(frozen=True, slots=True)
class Place:
    """`use` makes the device's context this thread's."""

    device: Device
    use: Callable[[], None]


def open_places(backend: str) -> list[Place]:
    """Contexts on the first two GPUs. Raises DeviceError."""
    if backend == "simulated":
        from faultinject.programs.device_simulated import open_simulated

        # A driver has one address space for all GPUs of a process, the simulated GPU one for each context,
        # of which mpsd tracks those that are there when it attaches: that which will fault comes first.
        found = [
            open_simulated({**os.environ, "CUDA_VISIBLE_DEVICES": str(i)}) for i in reversed(range(GPUS))
        ]
        return [Place(device, lambda: None) for device in reversed(found)]
    from faultinject.programs.device_nvidia import open_nvidia

    opened = [open_nvidia(os.environ, i) for i in range(GPUS)]
    return [Place(device, device.use) for device in opened]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    no_core_dumps()
    inbox = Inbox()
    work: list[Computation] = []
    try:
        places = open_places(args.backend)
        context_at = clock()
        for number, place in enumerate(places):
            place.use()
            work.append(Computation(place.device, args.seed + number, WORDS, check=True))
            work[-1].step()
        say("ready", **identity(), context_at=context_at, on_mps=places[0].device.on_mps)
        compute(places, work, inbox)
        say("done", steps=[w.tally.steps for w in work], wrong=sum(w.tally.wrong for w in work))
        return 0
    except DeviceError as error:
        say("error", code=error.code, text=str(error), wrong=sum(w.tally.wrong for w in work))
        return 1


def compute(places: list[Place], work: list[Computation], inbox: Inbox) -> None:
    """Step on each GPU in turn until told to stop. Raises DeviceError."""
    while (order := inbox.wait(timeout=0.001)) is None or order["do"] != "stop":
        for place, computation in zip(places, work, strict=True):
            place.use()
            computation.step()
        if order is not None:
            last = places[-1].device
            last.commit("store", lambda: say("fire"))
            last.synchronize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
