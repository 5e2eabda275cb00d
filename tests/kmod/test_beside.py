"""A job beside a program: both are waited for, and an end from outside leaves neither."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
SH = ("sh", "-c")


def beside(job: str, program: str) -> subprocess.Popen[str]:
    """Two shell commands in a session of their own."""
    line = [sys.executable, "-m", "tests.kmod.beside", *SH, job, "--", *SH, program]
    return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize(
    ("job", "program", "status"),
    [("exit 0", "exit 0", 0), ("exit 5", "exit 0", 5), ("exit 5", "exit 3", 3), ("exit 0", "exit 3", 3)],
)
def test_both_count(job: str, program: str, status: int) -> None:
    with beside(f"echo told; echo twice >&2; {job}", f"echo first; {program}") as ran:
        said, _ = ran.communicate(timeout=DEADLINE_S)
    first, title, *rest = said.splitlines()
    assert (first, rest, ran.returncode) == ("first", ["told", "twice"], status)
    assert title.startswith("== sh -c")


def test_a_job_that_is_killed_is_no_success() -> None:
    with beside("kill -KILL $$", "exit 0") as ran:
        ran.communicate(timeout=DEADLINE_S)
    assert ran.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_end_from_outside_ends_both(tmp_path: Path, how: signal.Signals) -> None:
    """SIGINT comes as from a terminal: to all of the program's group. Of SIGKILL nobody is told."""
    held = tmp_path / "held"
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    # Both hold the other end of the fifo for as long as they live, and say when they do.
    waits = f"exec 3>{held}; echo here >&3; exec sleep 600"
    with beside(waits, waits) as ran:
        read_lines(reader, 2)
        end: Callable[[int, int], None] = os.killpg if how is signal.SIGINT else os.kill
        end(ran.pid, how)
        ran.communicate(timeout=DEADLINE_S)
        ended = select.poll()
        ended.register(reader, select.POLLHUP)
        assert ended.poll(DEADLINE_S * 1000)
    os.close(reader)
    assert ran.returncode == (-how if how is signal.SIGKILL else 128 + how)


def read_lines(fd: int, count: int) -> None:
    """Waits until so many lines have come."""
    found = b""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while found.count(b"\n") < count:
        assert poller.poll(DEADLINE_S * 1000), found
        found += os.read(fd, 100)
