"""Checks that fail on purpose, to test the host's handling."""

from __future__ import annotations

import os
import signal
import threading

from emulator.guest.check import Check, CheckError


def right() -> str:
    return 'said "all of it"\nin two lines'


def wrong() -> str:
    raise CheckError("not what it has to be")


def dead() -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise CheckError("survived a fault")


def silent() -> str:
    threading.Event().wait()
    raise CheckError("woke up")


RIG = (
    Check("right", right),
    Check("wrong", wrong),
    Check("dead", dead),
    Check("silent", silent, 5.0),
    Check("behind-silent", right),
)
