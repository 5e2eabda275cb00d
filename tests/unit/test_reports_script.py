"""scripts/reports: steps under deadlines, a table, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def reports(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "reports", *arguments],
        env={**os.environ, "MPSD_PYTHON": python, "MPSD_REVISION": "abc1234"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["OUT"],
        ["--for", "soon", "OUT", "bench"],
        ["--backend", "other", "OUT", "bench"],
        ["OUT", "nothing"],
        ["--libcuda"],
    ],
)
def test_what_is_not_asked_rightly_is_said(arguments: list[str], tmp_path: Path) -> None:
    done = reports(*[str(tmp_path / "out") if word == "OUT" else word for word in arguments])
    assert done.returncode == 2 and "steps: matrix bench" in done.stderr
    assert not (tmp_path / "out").exists()


HISTORY = {"again", "before", "last", "more", "new", "old", "oldest"}


def test_a_step_is_named_after_what_it_measures() -> None:
    names = [line.split()[0] for line in reports("--list").stdout.splitlines()]
    assert len({*names}) == len(names)
    assert not [name for name in names if HISTORY & {*name.split("-")}]


def test_every_step_is_a_command_of_the_harness() -> None:
    from faultinject.__main__ import parser

    lines = reports("--list").stdout.splitlines()
    assert len(lines) > 30
    for line in lines:
        _, limit, *words = line.split()
        assert int(limit) < 600
        parser().parse_args([*words, "--backend", "nvidia"])


def test_a_step_that_fails_or_does_not_fit_stops_none_of_the_others(tmp_path: Path) -> None:
    """A script in place of the harness writes its own command line as the report, and fails as `bench`."""
    harness, out = tmp_path / "harness", tmp_path / "out"
    harness.write_text(
        "#!/bin/sh\nwhole=$*\n"
        f'case $whole in *faultinject.campaigns.table*) exec {sys.executable} "$@" ;; esac\n'
        "while [ $# -gt 0 ]; do case $1 in --json) echo $whole >$2 ;; esac; shift; done\n"
        'case $whole in *" bench "*) exit 1 ;; esac\n'
    )
    harness.chmod(0o755)
    asked = ("--backend", "simulated", "--libcuda", "LIB", "--for", "419", str(out))
    done = reports(*asked, "bench", "matrix", "deaths", python=str(harness))
    assert done.returncode == 1, done.stderr
    bench, matrix, deaths = done.stdout.splitlines()
    assert bench.startswith("bench: exit 1 after ") and deaths.startswith("deaths: exit 0 after ")
    assert matrix == "matrix: not started: it may take 420 s"
    assert "--libcuda" not in (out / "bench.json").read_text()
    words = (out / "deaths.json").read_text()
    assert words.startswith(
        "-m faultinject proxy --programs none --deaths 200 --libcuda LIB --backend simulated "
        "--revision abc1234 "
    )
    assert (out / "deaths.log").is_file() and not (out / "matrix.log").exists()
