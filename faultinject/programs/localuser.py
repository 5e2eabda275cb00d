"""A local user of the node under orders: attempts, floods, and the latency of its own requests."""

from __future__ import annotations

import argparse
import sys
import time

import mpsd_client
from faultinject.programs.attacks.attempts import attempt
from faultinject.programs.attacks.floods import FLOODS
from faultinject.programs.basics.messages import Inbox, clock, identity, say

REQUEST_S = 10.0
PACE_S = 0.005


def latencies(path: str, seconds: float) -> list[float]:
    """Return the duration [ms] of each request for the state, on one connection after the other."""
    found: list[float] = []
    end = clock() + seconds
    while clock() < end:
        start = clock()
        try:
            with mpsd_client.connect(path) as client:
                client.status(REQUEST_S)
            found.append((clock() - start) * 1e3)
        except mpsd_client.MpsdError:
            # A refused or lost request counts as the longest.
            found.append(REQUEST_S * 1e3)
        time.sleep(PACE_S)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, help="not used: this program needs no GPU")
    parser.parse_args(argv)
    inbox = Inbox()
    say("ready", **identity())
    while (order := inbox.wait()) is not None:
        match order["do"]:
            case "stop":
                break
            case "env":
                with mpsd_client.connect(order["socket"]) as client:
                    say("env", environment=client.env(shared=order["shared"]))
            case "attempt":
                say("attempted", outcome=attempt(order["attempt"], order["args"]))
            case "flood":
                say("flooding")
                count = FLOODS[order["flood"]](order["path"], time.monotonic() + order["seconds"])
                say("flooded", count=count)
            case "latency":
                say("latency", ms=latencies(order["socket"], order["seconds"]))
    say("done")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
