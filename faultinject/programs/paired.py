"""A program that works on order: alternating with others, to compare them round by round, or at once.

It says `imported` (or `lacking`, with what is not installed). Then it does `begin` (set up, and some steps),
`block` (timed steps, after the message `working`) as often as ordered, and `finish` (the digest of all its
results). With the proxy it also does `round`: blocks past the proxy and through it; or it says `cannot` and
why, and does nothing. Where its work consists of beats, `round` may be one step with many rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from faultinject.programs.basics.messages import (
    Inbox,
    clock,
    identity,
    no_core_dumps,
    say,
)
from faultinject.programs.devices.base import BACKENDS
from faultinject.programs.pairing import bypass
from faultinject.programs.pairing.rounds import THROUGH, beat_blocks, counted_times
from faultinject.programs.workloads import NAMES, Work, module_of
from mpsd.base.errors import UnsupportedError

CPUS = 2
OTHER_CPUS = 4


def settle() -> None:
    """Run on the same CPUs as the programs that alternate with this one: the speeds of CPUs differ by more
    than what is measured. The daemons have the rest of a large machine."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) >= CPUS + OTHER_CPUS:
        os.sched_setaffinity(0, allowed[-CPUS:])


def load(name: str) -> Any:
    """Return the module of this workload. Raises ImportError for a package that is not installed."""
    return importlib.import_module(module_of(name))


def timed(work: Work, steps: int) -> list[float]:
    """Return the seconds of each step."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        work.step()
        times.append(time.perf_counter() - start)
    return times


def take_beats(work: Work) -> list[float]:
    """Return the beats since the last call; none for a workload without beats."""
    beats: list[float] = getattr(work, "beats", [])
    taken = list(beats)
    beats.clear()
    return taken


def digest(work: Work) -> str:
    found = hashlib.sha256()
    for part in work.results():
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


class Rounds:
    """Blocks of one workload, past the proxy and through it. Raises UnsupportedError without a proxy."""

    def __init__(self, work: Work) -> None:
        self._work, self._bypass = work, bypass.find_bypass()
        self.functions = self._bypass.differing()

    def run(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Run the ordered blocks; return the times and beats of each by name, without its `warm` first steps.

        `cpu`: the processor time of each step, of all threads. All in seconds.
        """
        blocks = {}
        for name in order["blocks"]:
            self._bypass.switch(past=name != THROUGH)
            timed(self._work, int(order["warm"]))
            take_beats(self._work)
            began = time.process_time()
            times = timed(self._work, int(order["steps"]))
            cpu = (time.process_time() - began) / len(times)
            blocks[name] = {"times": times, "beats": take_beats(self._work), "cpu": cpu}
        self._bypass.switch(past=False)
        return blocks

    def run_beats(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Run one step with this many `rounds` of beats, from number `first` on.

        Returns the times and the processor times (`cpu`) of each block, in seconds.
        """
        names = beat_blocks(int(order["first"]), int(order["rounds"]))
        spent: list[float] = []
        began: float | None = None

        def between() -> None:
            nonlocal began
            if began is not None:
                spent.append(time.process_time() - began)
            at = len(spent)
            self._bypass.switch(past=at < len(names) and names[at] != THROUGH)
            began = time.process_time()

        take_beats(self._work)
        work: Any = self._work
        work.come_between(self._bypass.settle, between)
        try:
            work.step()
        finally:
            work.leave()
            self._bypass.switch(past=False)
        return {"times": counted_times(names, take_beats(self._work)), "cpu": counted_times(names, spent)}


def serve(work: Work, inbox: Inbox, steps: int) -> None:
    """Begin, then follow orders until the end."""
    times = timed(work, steps)
    beats = len(take_beats(work))
    per_step, exchanges = beats / max(1, steps), hasattr(work, "come_between")
    say("begun", digest=digest(work), times=times[len(times) // 2 :], beats=per_step, exchanges=exchanges)
    rounds: Rounds | None = None
    while True:
        order = inbox.wait()
        match order["do"] if order else "stop":
            case "block":
                say("working")
                began = clock()
                times = timed(work, int(order["steps"]) if order else 0)
                say("block", began=began, times=times, beats=take_beats(work))
            case "round" if order:
                try:
                    rounds = rounds or Rounds(work)
                except UnsupportedError as error:
                    say("cannot", text=str(error))
                    continue
                found = rounds.run_beats(order) if "rounds" in order else {"blocks": rounds.run(order)}
                say("round", **found, functions=rounds.functions)
            case "finish":
                say("finished", digest=digest(work))
            case _:
                return


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=NAMES)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", action="store_true", help="it takes no turns: on any CPU")
    args = parser.parse_args(argv)
    no_core_dumps()
    if not args.at_once:
        settle()
    inbox = Inbox()
    try:
        module = load(args.work)
    except ImportError as error:
        say("lacking", text=f"{error.name or error} is not installed")
        return 0
    facts = {"unit": module.UNIT, "per_step": module.PER_STEP, "untimed": module.UNTIMED}
    say("imported", **identity(), **facts, beat=getattr(module, "BEAT", ""))
    begin = inbox.expect("begin")
    work: Work = module.start(args.seed, args.backend)
    serve(work, inbox, int(begin["steps"]))
    work.close()
    say("closed")
    # The clean-up of some libraries at the interpreter's exit takes seconds; their work is done.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
