"""A program that works when it is told: in turns, so that a pair of them can be compared round by round, or
at once with others.

It says `imported` (or `lacking`, with what is not installed), does `begin` (set up and so many steps),
`block` (so many timed steps, after the word `working`) as often as it is told, and `finish`: the digest of
all its results. Where it has the proxy it does `round`, too: blocks past the proxy and through it; or it says
`cannot`, and why, and has done nothing. Where its work consists of beats, `round` may be one step with many
rounds of these.
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

from faultinject.programs.device import BACKENDS
from faultinject.programs.talk import Inbox, clock, identity, no_core_dumps, say
from faultinject.proxy import past
from faultinject.proxy.within import THROUGH, counted, turns
from faultinject.proxy.work import NAMES, Work
from mpsd.errors import UnsupportedError

CPUS = 2
SPARE_CPUS = 4


def settle() -> None:
    """On the same CPUs as the others that take turns with this one: their speeds differ by far more than what
    is measured. The rest of a large machine is left to the daemons."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) >= CPUS + SPARE_CPUS:
        os.sched_setaffinity(0, allowed[-CPUS:])


def load(name: str) -> Any:
    """The module of this work. Raises ImportError for a package that is not installed."""
    return importlib.import_module(f"faultinject.proxy.work.{name}")


def timed(work: Work, steps: int) -> list[float]:
    """Seconds of each step."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        work.step()
        times.append(time.perf_counter() - start)
    return times


def take_beats(work: Work) -> list[float]:
    """Those since the last time; none of a work that has none."""
    beats: list[float] = getattr(work, "beats", [])
    taken = list(beats)
    beats.clear()
    return taken


def digest(work: Work) -> str:
    found = hashlib.sha256()
    for piece in work.results():
        found.update(len(piece).to_bytes(8, "little"))
        found.update(piece)
    return found.hexdigest()


class Rounds:
    """Blocks past the proxy and through it, of one work. Raises UnsupportedError where there is no proxy."""

    def __init__(self, work: Work) -> None:
        self._work, self._past = work, past.find()
        self.functions = self._past.differing()

    def run(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Times and beats of each of the `blocks` ordered, by its name, without its `warm` first steps; and
        how long, for each step, processors worked for this process, in any thread (`cpu`): all in seconds."""
        blocks = {}
        for name in order["blocks"]:
            self._past.go(past=name != THROUGH)
            timed(self._work, int(order["warm"]))
            take_beats(self._work)
            began = time.process_time()
            times = timed(self._work, int(order["steps"]))
            cpu = (time.process_time() - began) / len(times)
            blocks[name] = {"times": times, "beats": take_beats(self._work), "cpu": cpu}
        self._past.go(past=False)
        return blocks

    def run_beats(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """One step, with so many `rounds` of beats in it, from number `first` on: what each block of these
        took, and how long processors worked for it (`cpu`), in seconds."""
        names = turns(int(order["first"]), int(order["rounds"]))
        spent: list[float] = []
        began: float | None = None

        def between() -> None:
            nonlocal began
            if began is not None:
                spent.append(time.process_time() - began)
            at = len(spent)
            self._past.go(past=at < len(names) and names[at] != THROUGH)
            began = time.process_time()

        take_beats(self._work)
        work: Any = self._work
        work.come_between(self._past.settle, between)
        try:
            work.step()
        finally:
            work.leave()
            self._past.go(past=False)
        return {"times": counted(names, take_beats(self._work)), "cpu": counted(names, spent)}


def serve(work: Work, inbox: Inbox, steps: int) -> None:
    """Begin, then do what is ordered until the end."""
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
    # Some libraries' clean-up at the interpreter's exit takes seconds; their work is over.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
