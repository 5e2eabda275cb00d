"""Start a process with a thread that stays in a driver call (tests/support/intodriver.py)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mpsd.base.model import ProcessInstance
from mpsd.os import procfs
from tests.support.waiting import until


@contextmanager
def process_in_ioctl(*about: int) -> Iterator[ProcessInstance]:
    """Yield the process once its thread is in the ioctl. `about`: none, or the request and the command.

    Skips the test where the machine has no filters of system calls (seccomp): nothing else keeps a thread in
    an ioctl without a driver.
    """
    program = [sys.executable, "-m", "tests.support.intodriver", *map(str, about)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as made:
        assert made.stdout is not None
        said = made.stdout.readline().strip().decode()
        if said != "ready":
            pytest.skip(f"this machine cannot filter system calls: {said}")
        until(lambda: any(call[0] == procfs.IOCTL for _, call in procfs.calls(made.pid)), "the ioctl")
        yield ProcessInstance(made.pid, procfs.start_ticks(made.pid))
        made.kill()
