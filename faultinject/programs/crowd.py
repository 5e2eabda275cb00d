"""Many clients that start and end: a parent without a context forks them and replaces those that end.

Each computes and checks its results for a while. Half of them end orderly, half are killed while idle. The
parent keeps `--clients` of them alive until told to stop, then ends the rest.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import sys
import time
from dataclasses import asdict, dataclass

from faultinject.programs.basics.messages import no_core_dumps, say
from faultinject.programs.basics.processes import REFUSED, end_with_parent
from faultinject.programs.devices.base import BACKENDS, DeviceError, open_device
from faultinject.programs.survivor import Computation

WRONG, TURNED_AWAY = 9, 11
"""Exit statuses of a client with wrong results, or beyond the client limit."""

MAX_CLIENTS_REACHED = 808
"""CUDA_ERROR_MPS_MAX_CLIENTS_REACHED: a client that the server refuses tries again later."""

RETRY_S = 0.2


@dataclass(slots=True)
class Census:
    started: int = 0
    left: int = 0
    wrong: int = 0
    failed: int = 0
    turned_away: int = 0

    def ended(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        self.left += 1
        self.wrong += code == WRONG
        self.turned_away += code == TURNED_AWAY
        self.failed += code not in (0, WRONG, TURNED_AWAY, -signal.SIGKILL)


def run_client(backend: str, seed: int, steps: int, *, orderly: bool, pause_s: float) -> int:
    """Run one client in a child process; return its exit status, or die by its own signal."""
    try:
        device = open_device(backend)
        computation = Computation(device, seed, 64, check=True)
        for _ in range(steps):
            computation.step()
            time.sleep(pause_s)
    except DeviceError as error:
        if error.code == MAX_CLIENTS_REACHED:
            time.sleep(RETRY_S)
            return TURNED_AWAY
        say("member_error", code=error.code, text=str(error))
        return REFUSED
    if computation.tally.wrong:
        return WRONG
    if not orderly:
        os.kill(os.getpid(), signal.SIGKILL)
    device.close()
    return 0


def start_client(backend: str, chance: random.Random, pause_s: float) -> int:
    seed, steps, orderly = chance.getrandbits(32), chance.randrange(5, 40), chance.random() < 0.5
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    end_with_parent(parent)
    os._exit(run_client(backend, seed, steps, orderly=orderly, pause_s=pause_s))


def reap(clients: set[int], census: Census, *, block: bool) -> None:
    """Record every client that has ended."""
    while clients:
        pid, status = os.waitpid(-1, 0 if block else os.WNOHANG)
        if pid == 0:
            return
        clients.discard(pid)
        census.ended(status)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--clients", type=int, default=57)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause-ms", type=float, default=20.0)
    args = parser.parse_args(argv)
    no_core_dumps()
    chance = random.Random(args.seed)
    clients: set[int] = set()
    census = Census()
    is_reported = False
    # No thread reads orders here, because this process forks. Any order, or the end of input, means "stop".
    while not select.select([0], [], [], 0.005)[0]:
        while len(clients) < args.clients:
            clients.add(start_client(args.backend, chance, args.pause_ms / 1e3))
            census.started += 1
        if not is_reported:
            say("ready", pid=os.getpid(), members=len(clients))
            is_reported = True
        reap(clients, census, block=False)
    reap(clients, census, block=True)
    say("done", **asdict(census))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
