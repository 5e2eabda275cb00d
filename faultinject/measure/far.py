"""What zones of several GiB cost, laid and taken away in chunks, as the proxy lays them far off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faultinject.measure.guard import ask
from faultinject.measure.nvml import Nvml
from faultinject.measure.rig import Client, Domain, now
from faultinject.measure.zones import Rows, Watch, run_cases, state_of
from mpsd.gpu.nvidia.uvm import NvidiaUvm

RANGES = (("managed", 1), ("managed", 4), ("managed", 8), ("sparse", 1), ("sparse", 4))


def ranges(_: Domain, survivor: Client, strayer: Client, watch: Watch, rows: Rows) -> None:
    for kind, gib in RANGES:
        watch.clear()
        row = {"what": f"{gib} GiB {kind}", "kind": kind, "GiB": gib, **ask(strayer, f"far {kind} {gib}")}
        rows.append(row | watch.summary(now()) | {"survivor": state_of(survivor)})


def measure(out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml, rows: list[Any]) -> None:
    run_cases({"far": ranges}, out, cubin, uvm, rows)
