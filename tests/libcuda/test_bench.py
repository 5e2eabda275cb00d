"""scripts/bench-libcuda measures the cost of calls and compares it with the limit."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from libcuda_build.bench import LIMIT_NS, MODES, verdict
from tests.support.libcudas import ROOT, Libraries, quick_compiler, run


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(1.0, LIMIT_NS - 1, "valid"), (1.0, LIMIT_NS + 1, "unknown"), (LIMIT_NS, 2 * LIMIT_NS, "invalid")],
)
def test_quartiles_on_both_sides_of_the_limit_say_nothing(low: float, high: float, said: str) -> None:
    assert verdict({"low": low, "median": (low + high) / 2, "high": high}) == said


def test_every_call_is_measured_in_both_modes(libraries: Libraries, tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    command = [sys.executable, "-m", "libcuda_build.bench", "--pairs", "1", "--rounds", "2"]
    command += ["--calls", "2000", "--libcuda", str(libraries.proxy), "--json", str(target)]
    variables = {"CC": quick_compiler(tmp_path), "PYTHONPATH": str(ROOT / "clients" / "libcuda")}
    done = run(command, {**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    report = json.loads(target.read_text())
    assert {row["mode"] for row in report["rows"]} == set(MODES)
    assert {row["call"] for row in report["rows"]} >= {"cuLaunchKernel", "cuStreamQuery", "cuCtxGetCurrent"}
    assert (report["backend"], report["bars"], report["device"]) == ("standin", 0, "STAND-IN")
    assert "most added: " in done.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--pairs", "0"], "'0' is not a number of at least 1"),
        (["--rounds", "-1"], "'-1' is not a number of at least 1"),
        (["--calls", "0"], "'0' is not a number of at least 50"),
        (["--json", "/nowhere/x"], "/nowhere/x cannot be written"),
        (["--libcuda", "/nowhere"], "--libcuda /nowhere has no libcuda.so.1"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(options: list[str], says: str) -> None:
    command = [sys.executable, "-m", "libcuda_build.bench", *options]
    done = run(command, {**os.environ, "PYTHONPATH": str(ROOT / "clients" / "libcuda")})
    assert (done.returncode, done.stdout) == (2, "") and says in done.stderr
    assert "Traceback" not in done.stderr
