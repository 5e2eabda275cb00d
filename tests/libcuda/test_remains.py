"""Release of the resources that the original driver instance leaves behind, against an imitated resource
manager."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.libcudas import run, standalone


@pytest.mark.parametrize("sanitize", ["", "address,undefined"])
def test_devices_that_are_there_are_freed_after_uvm_let_go(tmp_path: Path, sanitize: str) -> None:
    sources = ("failover/remains.c", "elfview.c", "uvm.c")
    program = standalone(tmp_path, "remains", sources, "-Wl,--wrap=ioctl", sanitize=sanitize)
    done = run([program], os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
