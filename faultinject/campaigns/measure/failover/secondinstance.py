"""A client that loads a second driver instance into its process and uses both, in two domains."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.clients.roles import emit
from faultinject.programs.devices.instance import (
    Driver,
    DriverError,
    DriverInstances,
    Shared,
    original_driver,
)


def try_technique(cubin: str, folder: str, pipe: str, how: str) -> None:
    """Make the second driver instance in this way (`nothing`: unchanged) and use both; report the result."""
    a = original_driver()
    row: dict[str, Any] = {"how": how, "A": a.start(Path(cubin))}
    copies = DriverInstances(Path(folder))
    try:
        b: Driver = copies.load(1, Path(pipe), how)
        row |= copies.notes | {"counts after dlopen": copies.helper.counts()}
        row |= copies.helper.within(Path(pipe), 1, lambda: b.start(Path(cubin)))
        shared = Shared(a, b)
        b.current()
        b.launch("increment", shared.other, 1)
        b.sync()
        a.current()
        a.launch("increment", shared.one, 1)
        a.sync()
        row["both wrote"] = a.read_u64(shared.one) == 2
    except (DriverError, OSError) as error:
        row["failed"] = str(error)
    row["counts"] = copies.helper.counts()
    sockets = Path("/proc/net/unix").read_text().splitlines()
    row["sockets"] = [line.split()[-1] for line in sockets if f"-{os.getpid()}" in line and "@" in line]
    emit("told", **row, pid=os.getpid())
    sys.stdin.readline()
    os._exit(0)
