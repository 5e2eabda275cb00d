"""The expected duration of a replay, by the test's own clock, without driver and GPU."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.libcudas import run, standalone


def test_what_the_gpu_is_behind_with_is_what_takes_time(tmp_path: Path) -> None:
    program = standalone(tmp_path, "pace", ["exact/pace.c"])
    done = run([program], os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
