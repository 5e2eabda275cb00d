"""Runs a job beside a program:  python -m tests.kmod.beside JOB... -- PROGRAM...

What the job prints is printed whole when both have ended. The exit status is the program's, or the job's if
that is 0. However this ends, the job ends too: told first, so that it can end its own children, then killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import FrameType
from typing import IO

TOLD_S = 20.0


class Told(BaseException):
    """A signal said that this is to end."""

    def __init__(self, number: int) -> None:
        self.number = number


def main(words: Sequence[str]) -> int:
    """The exit status. `words`: both command lines, with -- between."""
    at = words.index("--")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _told)
    with tempfile.TemporaryFile() as said:
        job = _start(words[:at], said)
        try:
            status = _in_front(words[at + 1 :])
            print(f"== {' '.join(words[:at])}", flush=True)
            job_status = job.wait()
            said.seek(0)
            shutil.copyfileobj(said, sys.stdout.buffer)
            sys.stdout.flush()
            return status or (job_status if job_status >= 0 else 128 - job_status)
        except Told as told:
            return 128 + told.number
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            _end(job)


def _told(number: int, _frame: FrameType | None) -> None:
    raise Told(number)


def _ends_with_us(words: Sequence[str]) -> list[str]:
    """The command line of a program that gets SIGTERM when this one is killed, where that can be had."""
    return [*(("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()), *words]


def _start(words: Sequence[str], out: IO[bytes]) -> subprocess.Popen[bytes]:
    """In a session of its own, so that a terminal's Ctrl-C does not reach it before us."""
    return subprocess.Popen(
        _ends_with_us(words),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _in_front(words: Sequence[str]) -> int:
    """The exit status of a program that has the terminal, and is told what we are told.

    Raises Told, KeyboardInterrupt when it has ended: what it undoes on its way out takes time.
    """
    program = subprocess.Popen(_ends_with_us(words))
    interrupted: BaseException | None = None
    while True:
        try:
            status = program.wait()
            break
        except KeyboardInterrupt as error:
            # The terminal has told it too.
            interrupted = error
        except Told as told:
            interrupted = told
            program.send_signal(told.number)
    if interrupted is not None:
        raise interrupted
    return status if status >= 0 else 128 - status


def _end(job: subprocess.Popen[bytes]) -> None:
    """Ends a job that has not ended, with all that is in its session."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if job.poll() is not None:
            return
        os.killpg(job.pid, number)
        try:
            job.wait(TOLD_S)
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
