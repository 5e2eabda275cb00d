"""Measure on this machine's GPU what the design rests on, and write JSON per question.

Needs root, the NVIDIA driver, MPS and cuda-bindings. Every part has its own deadline.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import shlex
import signal
import sys
import time
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from pynvml import NVMLError

from faultinject.campaigns.measure import report
from faultinject.campaigns.measure.nvml import Nvml
from faultinject.evidence import revision
from faultinject.programs.devices import kernels
from mpsd.base.errors import MpsdError
from mpsd.gpu.nvidia.uvm import NvidiaUvm

# Question -> module with measure(out, cubin, uvm, nvml), and its deadline in seconds.
QUESTIONS = {
    "end-signal": ("end_signal", 110),
    "attach": ("attach_times", 60),
    "traces": ("traces", 130),
    "control": ("controldaemon", 90),
    "standby-domain": ("standbydomain", 45),
    "guard": ("hostguard", 60),
    "work-memory": ("work_memory", 40),
    "zones": ("zones", 150),
    "far": ("farzones", 40),
    "failover": ("failover.question", 150),
    "cut": ("failover.cut", 80),
    "stall": ("stall", 110),
}


class PartDeadline(BaseException):
    """A part of the measurement did not end in time."""


def _expire(*_: object) -> None:
    raise PartDeadline


def run_part(name: str, out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml) -> dict[str, Any]:
    module, limit_s = QUESTIONS[name]
    began = time.monotonic()
    signal.alarm(limit_s)
    rows: list[Any] = []
    failed = None
    try:
        import_module(f"faultinject.campaigns.measure.{module}").measure(out, cubin, uvm, nvml, rows)
    except PartDeadline:
        failed = f"not finished within {limit_s} s"
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    return {"question": name, "seconds": round(time.monotonic() - began, 1), "failed": failed, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faultinject.campaigns.measure", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for results and logs")
    parser.add_argument("--only", default=",".join(QUESTIONS), help="questions, separated by commas")
    parser.add_argument("--report", type=Path, help="directory of the rendered report (default: OUT)")
    parser.add_argument("--revision", help="of the code (default: MPSD_REVISION, or git's)")
    options = parser.parse_args()
    with revision.override(options.revision):
        return run(parser, options)


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    out: Path = options.out
    for name in options.only.split(","):
        if name not in QUESTIONS:
            parser.error(f"--only: there is no question {name!r} (of: {', '.join(QUESTIONS)})")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {out}: cannot be made: {error.strerror}")
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _expire)
    os.environ.setdefault("PYTHONPATH", os.getcwd())
    try:
        nvml, uvm = Nvml(), NvidiaUvm()
    except (NVMLError, MpsdError) as error:
        print(f"{parser.prog}: no GPU to measure: {error}", file=sys.stderr)
        return 1
    cubin = out / "kernels.cubin"
    cubin.write_bytes(kernels.compile(nvml.arch()))
    head = {
        "schema": 1,
        "device": nvml.text("nvmlDeviceGetName", nvml.handle),
        "driver": uvm.version,
        "kernel": platform.release(),
        "revision": revision.current(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m faultinject.campaigns.measure " + shlex.join(sys.argv[1:]),
    }
    for name in options.only.split(","):
        result: dict[str, Any] = head | run_part(name, out, cubin, uvm, nvml)
        (out / f"{name}.json").write_text(json.dumps(result, indent=1, default=str))
        print(
            f"{name}: {result['seconds']} s, {len(result['rows'])} rows, {result['failed'] or 'ok'}",
            flush=True,
        )
    print(report.write(out, options.report or out), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
