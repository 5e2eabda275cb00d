"""Does an old context write after UVM has unmapped its memory? (cutoff.py)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.failover.question import run_cases
from faultinject.campaigns.measure.nvml import Nvml
from mpsd.gpu.nvidia.uvm import NvidiaUvm

WHOLE_S = 75.0


def measure(out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml, rows: list[Any]) -> None:
    run_cases({"cuts": 70}, WHOLE_S, out, cubin, rows)
