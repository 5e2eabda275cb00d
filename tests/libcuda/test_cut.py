"""The cut of a driver instance's path to its memory, tested over an imitated UVM without driver and GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.libcudas import run, standalone

SOURCES = ("failover/cut.c", "elfview.c", "uvm.c", "clock.c", "thread.c")


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_pieces_are_gone_before_those_who_freed_them_are_back(tmp_path: Path, sanitize: str) -> None:
    program = standalone(tmp_path, "cut", SOURCES, "-Wl,--wrap=ioctl,--wrap=mpsd_now_ns", sanitize=sanitize)
    done = run([program], os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
