"""Many idle clients with a context each, to measure what mpsd spends on them.

A parent without a context forks them. Each opens the device, computes one step and waits. The parent says
ready, with the pid of every client and the time of its context, and ends them all on any order. A client
without a context says why, and ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys

from faultinject.programs.basics.messages import (
    clock,
    no_core_dumps,
    say,
    start_ticks,
)
from faultinject.programs.basics.processes import REFUSED, end_with_parent
from faultinject.programs.devices.base import BACKENDS, DeviceError, open_device
from faultinject.programs.survivor import Computation

MAX_CLIENTS = 1000
_REMEDY = "is the environment of mpsd-ctl env set, and the backend the daemon's?"


def run_client(backend: str, report: int) -> int:
    """Run one client: report to the parent, then wait to be killed."""
    try:
        device = open_device(backend)
        context_at = clock()
        Computation(device, os.getpid(), 64, check=True).step()
    except DeviceError as error:
        os.write(report, json.dumps({"code": error.code, "text": str(error)}).encode() + b"\n")
        return REFUSED
    facts = {"pid": os.getpid(), "start_ticks": start_ticks(), "context_at": context_at}
    os.write(report, json.dumps(facts).encode() + b"\n")
    while True:
        signal.pause()


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text) <= MAX_CLIENTS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to {MAX_CLIENTS}")
    return int(text)


def start_client(backend: str, report: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        end_with_parent(parent)
        os._exit(run_client(backend, report))
    return pid


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--clients", type=_count, default=10)
    args = parser.parse_args(argv)
    no_core_dumps()
    read, write = os.pipe()
    clients = [start_client(args.backend, write) for _ in range(args.clients)]
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as lines:
        reports = [json.loads(lines.readline()) for _ in clients]
        refused = [m["code"] for m in reports if "code" in m]
        if reports and len(refused) == len(reports):
            say("error", text=reports[0]["text"], pid=os.getpid())
            print(f"idlers: no client got a context: {reports[0]['text']} ({_REMEDY})", file=sys.stderr)
            return 1
        say("ready", pid=os.getpid(), members=[m for m in reports if "pid" in m], refused=refused)
        select.select([0], [], [])
        for pid in clients:
            # A refused member is a zombie until it is waited for, so its pid is still its own.
            os.kill(pid, signal.SIGKILL)
        for pid in clients:
            os.waitpid(pid, 0)
    say("done")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
