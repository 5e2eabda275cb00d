"""mpsd-standby, but what it kills dies only once the file named first is there. The rest is its own."""

from __future__ import annotations

import os
import sys
import time

from mpsd_client import standby
from mpsd_client.actors import Actor


def main(file: str) -> int:
    kill = Actor.kill

    def slowly(actor: Actor, patience_s: float = 5.0) -> bool:
        while not os.path.exists(file):
            time.sleep(0.005)
        return kill(actor, patience_s)

    Actor.kill = slowly  # type: ignore[method-assign]
    Actor.strike = lambda actor: None  # type: ignore[method-assign]
    return standby.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
