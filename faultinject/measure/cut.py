"""Whether an old context writes nothing more once its way to the memory was cut off by UVM (failover_cut)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faultinject.measure.failover import run_cases
from faultinject.measure.nvml import Nvml
from mpsd.gpu.nvidia.uvm import NvidiaUvm

WHOLE_S = 75.0


def measure(out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml, rows: list[Any]) -> None:
    run_cases({"cuts": 70}, WHOLE_S, out, cubin, rows)
