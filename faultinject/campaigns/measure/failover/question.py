"""The base of a fail-over inside the process: driver instances, the fence, the signs of a fault.

Each case is a process of its own with a deadline (cases.py). It writes its findings as they come, so a hang
costs only the findings after it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.nvml import Nvml
from faultinject.programs.devices.instance import DriverInstances
from mpsd.gpu.nvidia.uvm import NvidiaUvm

# Case -> deadline in seconds. The faults take what is left of the whole.
CASES = {"technique": 14, "faults": 125}
WHOLE_S = 142


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the findings of a case so far; a torn last line is dropped."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def end_control(pid: int) -> None:
    """Send SIGKILL to a control daemon that a case left behind; its server ends with it."""
    try:
        if b"nvidia-cuda-mps-control" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


def run_case(name: str, out: Path, cubin: Path, folder: Path, limit_s: float) -> list[dict[str, Any]]:
    """Run one case to its end or its deadline; return its findings."""
    path = out / f"failover-{name}.jsonl"
    command = [sys.executable, "-m", "faultinject.campaigns.measure.failover.cases", name]
    command += [str(out), str(cubin), str(folder), f"{limit_s - 3:.1f}"]
    began, failure = time.monotonic(), ""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            failure = f"not finished within {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(5)
        errors.seek(0)
        tail = errors.read().decode(errors="replace")[-1500:]
    rows = read_rows(path)
    for row in rows:
        if "control" in row:
            end_control(int(row["control"]))
    rows = [{"case": name, **row} for row in rows if "control" not in row]
    if failure or process.returncode:
        rows.append({"case": name, "failed": failure or f"exit status {process.returncode}", "stderr": tail})
    rows.append({"case": name, "what": "took", "seconds": round(time.monotonic() - began, 1)})
    return rows


def measure(out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml, rows: list[Any]) -> None:
    run_cases(CASES, WHOLE_S, out, cubin, rows)


def run_cases(cases: Mapping[str, int], whole_s: float, out: Path, cubin: Path, rows: list[Any]) -> None:
    end = time.monotonic() + whole_s
    os.environ["CUDA_MODULE_LOADING"] = "LAZY"
    folder = Path(tempfile.mkdtemp(prefix="mm-copies-", dir="/tmp"))
    try:
        rows.append({"case": "file", **DriverInstances.prepare(folder)})
        for name, limit_s in cases.items():
            remaining_s = end - time.monotonic()
            if remaining_s > 5:
                rows += run_case(name, out, cubin, folder, min(limit_s, remaining_s))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
