"""What the proxy adds to a call, on the stand-in driver: paired runs, without and with, in turn."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from libcuda_build.compile import FOLDER, build_proxy, build_standin
from libcuda_build.header import find_include

LIMIT_NS = 50.0
MODES = {
    "passed on": {"MPSD_VAULT": "0"},
    "memory in a window": {"MPSD_VAULT": "1", "MPSD_ZONE_BUDGET": str(1 << 30)},
}
"""What the library does with memory decides which functions have wrappers."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench-libcuda", description=__doc__)
    parser.add_argument("--runs", type=int, default=15, help="pairs of runs")
    parser.add_argument(
        "--calls", type=int, default=1_000_000, help="calls in a run; a hundredth of them launches"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mpsd-libcuda-bench-") as made:
        folder = Path(made)
        build_proxy(folder / "proxy")
        build_standin(folder / "standin")
        _compile(folder / "launch")
        found = {how: [_pair(folder, how, given.calls) for _ in range(given.runs)] for how in MODES}
    print(
        "on the stand-in driver; nanoseconds per call, median (and quartiles) of", given.runs, "paired runs"
    )
    worst = 0.0
    for how, pairs in found.items():
        print(f"{how + ':':<26}{'without':>10}{'with':>10}{'added':>10}   quartiles")
        worst = max(worst, *(_report(name, pairs) for name in pairs[0][0]))
    print(f"most added: {worst:.1f} ns; the aim is under {LIMIT_NS:.0f} ns")
    return 0


def _compile(target: Path) -> None:
    source = FOLDER / "bench" / "launch.c"
    command = [
        "gcc",
        "-O2",
        "-std=gnu11",
        "-isystem",
        str(find_include()),
        "-o",
        str(target),
        str(source),
        "-ldl",
    ]
    subprocess.run(command, check=True)


def _pair(folder: Path, how: str, calls: int) -> tuple[dict[str, float], dict[str, float]]:
    return _run(folder, "standin", how, calls), _run(folder, "proxy", how, calls)


def _run(folder: Path, library: str, how: str, calls: int) -> dict[str, float]:
    environment = {
        **os.environ,
        **MODES[how],
        "LD_LIBRARY_PATH": str(folder / library),
        "MPSD_REAL_LIBCUDA": str(folder / "standin" / "libcuda.so.1"),
    }
    command = [str(folder / "launch"), str(calls)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}


def _report(name: str, pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> float:
    added = [with_it[name] - without[name] for without, with_it in pairs]
    low, middle, high = statistics.quantiles(added, n=4)
    without = statistics.median(pair[0][name] for pair in pairs)
    with_it = statistics.median(pair[1][name] for pair in pairs)
    print(f"{name:<26}{without:>10.1f}{with_it:>10.1f}{middle:>10.1f}   {low:.1f} to {high:.1f}")
    return middle


if __name__ == "__main__":
    sys.exit(main())
