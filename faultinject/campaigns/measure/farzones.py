"""The cost of zones of several GiB, laid and removed in chunks, as the proxy lays far zones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.hostguard import ask
from faultinject.campaigns.measure.nvml import Nvml
from faultinject.campaigns.measure.rig import Client, Domain, now
from faultinject.campaigns.measure.zones import (
    Rows,
    Watch,
    run_cases,
    state_of,
)
from mpsd.gpu.nvidia.uvm import NvidiaUvm

RANGES = (("managed", 1), ("managed", 4), ("managed", 8), ("sparse", 1), ("sparse", 4))


def ranges(_: Domain, survivor: Client, zone_client: Client, watch: Watch, rows: Rows) -> None:
    for kind, gib in RANGES:
        watch.clear()
        row = {"what": f"{gib} GiB {kind}", "kind": kind, "GiB": gib, **ask(zone_client, f"far {kind} {gib}")}
        rows.append(row | watch.summary(now()) | {"survivor": state_of(survivor)})


def measure(out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml, rows: list[Any]) -> None:
    run_cases({"far": ranges}, out, cubin, uvm, rows)
