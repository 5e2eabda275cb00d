"""Locks that are one word; who submits to a copy of the driver: one thread at a time, for none left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.libcudas import run, standalone


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_one_thread_at_a_time_has_the_order(tmp_path: Path, sanitize: str) -> None:
    """No driver, no GPU."""
    program = standalone(
        tmp_path,
        "order",
        ["exact/order.c", "word.c", "clock.c"],
        "-DMPSD_CARRIED=1",
        "-Wl,--wrap=syscall",
        sanitize=sanitize,
    )
    done = run([program], os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
