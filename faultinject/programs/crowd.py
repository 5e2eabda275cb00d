"""Many clients that come and go: a parent without a context forks them and replaces those that leave.

Each computes and checks its results for a while; half of them leave in order, half are killed while
idle. The parent keeps `--clients` of them alive until told to stop, then ends the rest.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import select
import signal
import sys
import time
from dataclasses import asdict, dataclass

from faultinject.programs.device import BACKENDS, DeviceError, open_device
from faultinject.programs.survivor import Computation
from faultinject.programs.talk import no_core_dumps, say

WRONG, REFUSED, TURNED_AWAY = 9, 10, 11
"""Exit statuses of a member whose results were wrong, that the driver refused, or that was one too many."""

MAX_CLIENTS_REACHED = 808
"""A server takes 48 clients (driver 580), later ones 60: who is turned away comes again later."""

COME_AGAIN_S = 0.2


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


def member(backend: str, seed: int, steps: int, *, orderly: bool, pause_s: float) -> int:
    """One client, in a child process: the exit status, or death by its own hand."""
    try:
        device = open_device(backend)
        computation = Computation(device, seed, 64, check=True)
        for _ in range(steps):
            computation.step()
            time.sleep(pause_s)
    except DeviceError as error:
        if error.code == MAX_CLIENTS_REACHED:
            time.sleep(COME_AGAIN_S)
            return TURNED_AWAY
        say("member_error", code=error.code, text=str(error))
        return REFUSED
    if computation.tally.wrong:
        return WRONG
    if not orderly:
        os.kill(os.getpid(), signal.SIGKILL)
    device.close()
    return 0


def start_member(backend: str, chance: random.Random, pause_s: float) -> int:
    seed, steps, orderly = chance.getrandbits(32), chance.randrange(5, 40), chance.random() < 0.5
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    end_with_parent(parent)
    os._exit(member(backend, seed, steps, orderly=orderly, pause_s=pause_s))


def end_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent dies (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(REFUSED)


def reap(members: set[int], census: Census, *, block: bool) -> None:
    """Take note of every member that has ended."""
    while members:
        pid, status = os.waitpid(-1, 0 if block else os.WNOHANG)
        if pid == 0:
            return
        members.discard(pid)
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
    members: set[int] = set()
    census = Census()
    said = False
    # No thread reads the orders here: a process that forks has none. Any order, or the end, is "stop".
    while not select.select([0], [], [], 0.005)[0]:
        while len(members) < args.clients:
            members.add(start_member(args.backend, chance, args.pause_ms / 1e3))
            census.started += 1
        if not said:
            say("ready", pid=os.getpid(), members=len(members))
            said = True
        reap(members, census, block=False)
    reap(members, census, block=True)
    say("done", **asdict(census))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
