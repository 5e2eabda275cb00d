"""A client that keeps its data on the GPU and repeats what failed, as a server that fails over would.

It computes and checks as the survivor does. An error of a call costs it the step, never the program: constant
data is compared, data in progress is written again, and the step is repeated.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from faultinject.programs.basics.messages import (
    Inbox,
    clock,
    identity,
    no_core_dumps,
    say,
)
from faultinject.programs.devices.base import BACKENDS, DeviceError, open_device
from faultinject.programs.survivor import Computation

MAX_FAILURES_IN_A_ROW = 3


class Server:
    """The computation and its errors, each as (time, code)."""

    def __init__(self, computation: Computation) -> None:
        self.computation = computation
        self.errors: list[tuple[float, int]] = []

    def serve(self) -> None:
        """Do one step, repeated after an error. Raises DeviceError when it fails again and again."""
        start, failed = clock(), False
        for attempts_left in reversed(range(MAX_FAILURES_IN_A_ROW)):
            try:
                self.computation.step()
                if failed:
                    # Repetitions are part of the step for a client of the server.
                    self.computation.tally.timed(start, clock())
                return
            except DeviceError as error:
                failed = True
                self.errors.append((clock(), error.code))
                if not attempts_left:
                    raise
                self._restore_data()

    def _restore_data(self) -> None:
        work = self.computation
        try:
            if work.device.read(work.still_at, work.words * 4) != work.still:
                work.tally.wrong += 1
                say("wrong", step=work.tally.steps, buffer="still")
            work.device.write(work.moving_at, work.expected.tobytes())
        except DeviceError as error:
            self.errors.append((clock(), error.code))

    def report(self) -> dict[str, Any]:
        """Report since the last report."""
        tally, errors = self.computation.tally, self.errors
        report = {**tally.report(), "told": errors}
        tally.longest, self.errors = {}, []
        return report


def work(server: Server, inbox: Inbox, pause_s: float) -> None:
    """Serve until told to stop. Raises DeviceError."""
    while True:
        order = inbox.wait(0)
        if order is not None and order["do"] == "stop":
            return
        if order is not None and order["do"] == "report":
            say("report", **server.report())
        server.serve()
        if pause_s:
            time.sleep(pause_s)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--words", type=int, default=256)
    parser.add_argument("--pause-ms", type=float, default=0.0)
    parser.add_argument("--ballast-mib", type=int, default=0, help="it also keeps so much memory unused")
    parser.add_argument("--kernel-ms", type=float, default=0.0, help="it looks for results that much later")
    args = parser.parse_args(argv)
    no_core_dumps()
    inbox = Inbox()
    server = None
    try:
        device = open_device(args.backend)
        lasts_s = args.kernel_ms / 1e3
        server = Server(Computation(device, args.seed, args.words, check=True, lasts_s=lasts_s))
        if args.ballast_mib:
            device.alloc(args.ballast_mib << 20)
        server.serve()
        say("ready", **identity())
        work(server, inbox, args.pause_ms / 1e3)
        say("done", **server.report())
        device.close()
        return 0
    except DeviceError as error:
        say("error", code=error.code, text=str(error), **(server.report() if server else {}))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
