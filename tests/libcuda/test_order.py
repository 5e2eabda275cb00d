"""Futex locks, and the submission order: one thread at a time submits to a driver instance, none to an old
one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.libcudas import run, standalone


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_one_thread_at_a_time_has_the_order(tmp_path: Path, sanitize: str) -> None:
    """One thread at a time holds the order, tested without driver and GPU."""
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
