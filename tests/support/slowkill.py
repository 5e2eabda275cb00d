"""mpsd-standby, except that a process it kills dies only once the file named first exists."""

from __future__ import annotations

import os
import sys
import time

from mpsd_client.standby import command
from mpsd_client.standby.processes import ProcessTree


def main(file: str) -> int:
    kill = ProcessTree.kill

    def slowly(actor: ProcessTree, patience_s: float = 5.0) -> bool:
        while not os.path.exists(file):
            time.sleep(0.005)
        return kill(actor, patience_s)

    ProcessTree.kill = slowly  # type: ignore[method-assign]
    ProcessTree.kill_group = lambda actor: None  # type: ignore[method-assign]
    return command.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
