"""Ranges mapped on a real kernel over character devices that imitate the driver's, without driver and GPU."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.support.libcudas import run, standalone

NULL, ZERO = os.makedev(1, 3), os.makedev(1, 5)
"""/dev/null refuses a mapping; /dev/zero accepts any address as offset."""


def device(path: Path, number: int) -> None:
    path.parent.mkdir()
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, number)
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        pytest.skip(f"needs a device of its own: {error.strerror}")


@pytest.mark.parametrize("sanitize", ["", "address,undefined"])
def test_managed_ranges_are_laid_and_taken_away(tmp_path: Path, sanitize: str) -> None:
    device(tmp_path / "wrong" / "nvidia-uvm", NULL)
    device(tmp_path / "right" / "nvidia-uvm", ZERO)
    program = standalone(tmp_path, "uvmrange", ("uvmrange.c", "elfview.c", "uvm.c"), sanitize=sanitize)
    done = run([program, str(tmp_path)], os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
