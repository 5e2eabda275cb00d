"""The guest's first process: mount file systems, run each check in a process of its own, power off.

A check that crashes, or that a kernel oops ends, fails alone. The host keeps the deadlines.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[:0] = ["/mpsd", "/mpsd/kmod_patches"]

from emulator.guest import catalogue, system
from emulator.guest.check import Check
from emulator.lines import Line, MessageKind, encode

PORT = "/dev/ttyS1"
MOUNTS = (("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/tmp"))


def say(port: int, line: Line) -> None:
    text = encode(line).encode()
    while text:
        text = text[os.write(port, text) :]


def outcome(check: Check) -> Line:
    """Return a check's line; an exception is the reason of its failure."""
    try:
        return Line(MessageKind.PASS, check.name, check.run())
    except Exception as error:
        return Line(MessageKind.FAIL, check.name, f"{type(error).__name__}: {error}")


def run(port: int, check: Check) -> None:
    """Run a check in a process of its own, and report its end if the check could not."""
    say(port, Line(MessageKind.BEGIN, check.name))
    pid = os.fork()
    if not pid:
        try:
            say(port, outcome(check))
        finally:
            os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        say(port, Line(MessageKind.FAIL, check.name, f"its process ended with {status}"))


def main(sets: list[str]) -> None:
    for kind, target in MOUNTS:
        system.mount(kind, target)
    port = os.open(PORT, os.O_WRONLY | os.O_NOCTTY)
    for name in sets:
        for check in catalogue.SETS[name]:
            run(port, check)
    say(port, Line(MessageKind.DONE))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        system.power_off()
