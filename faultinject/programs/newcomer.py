"""A client that starts after the fault: when does its first kernel run, and was it refused?

A refused attempt starts again in a fresh process image under the same pid, because the state of a driver
after a failed initialisation is not documented. `spawned`: the rig's clock at the start.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from faultinject.programs.basics.messages import (
    clock,
    identity,
    no_core_dumps,
    say,
)
from faultinject.programs.devices.base import BACKENDS, DeviceError, open_device
from faultinject.programs.survivor import Computation

RETRY_S = 0.02


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--spawned", type=float, required=True)
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds from the spawn")
    args = parser.parse_args(argv)
    no_core_dumps()
    try:
        device = open_device(args.backend)
        computation = Computation(device, os.getpid(), 64, check=True)
        computation.step()
    except DeviceError as error:
        say("refused", **identity(), code=error.code, text=str(error))
        if clock() > args.spawned + args.deadline:
            return 1
        time.sleep(RETRY_S)
        os.execv(sys.executable, [sys.executable, "-m", "faultinject.programs.newcomer", *argv])
    say("first_kernel", **identity(), wrong=computation.tally.wrong, on_mps=device.on_mps)
    device.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
