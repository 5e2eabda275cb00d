"""Boots the guest in QEMU and collects what it says, with a deadline for the boot and for every check."""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from emulator.guest.check import Check
from emulator.image import GUEST_MAIN, interpreter
from emulator.lines import Line, Word, parse
from kmod.errors import KmodError, Unavailable

PROGRAM = "qemu-system-x86_64"
MEMORY_MB = 1024
BOOT_DEADLINE_S = 300.0
END_DEADLINE_S = 60.0
TAIL_LINES = 25


@dataclass(frozen=True, slots=True)
class Result:
    """How one check ended; `ended` is false for one that was not reached or not finished."""

    name: str
    passed: bool
    text: str
    seconds: float = 0.0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """What is booted: a kernel image and its root file system."""

    image: Path
    initramfs: Path

    def command(self, console: Path, sets: Sequence[str]) -> list[str]:
        """QEMU's command line: the kernel's log goes to `console`, the guest's lines to standard output.

        Every instruction is emulated ("tcg"): a machine that is a guest itself need not be a host.
        """
        # With panic=-1 and -no-reboot a panic ends the machine at once. The kernel's tests of its own
        # ciphers hung once under load, before anything of ours was there.
        kernel = ["console=ttyS0", "panic=-1", "cryptomgr.notests", f"rdinit={interpreter()}"]
        append = " ".join([*kernel, "--", "-I", "-S", GUEST_MAIN, *sets])
        return [
            *(PROGRAM, "-accel", "tcg", "-cpu", "max,la57=off", "-smp", "2"),
            *("-m", str(MEMORY_MB), "-no-user-config", "-nodefaults", "-display", "none", "-no-reboot"),
            *("-kernel", str(self.image), "-initrd", str(self.initramfs), "-append", append),
            # DMA mappings of the software GPU need a device; this one does nothing.
            *("-device", "pci-testdev"),
            *("-serial", f"file:{console}", "-serial", "stdio"),
        ]


@dataclass
class Reader:
    """Turns what comes out of a pipe into lines; waits for each with a deadline."""

    fd: int
    _rest: bytes = b""
    _lines: list[bytes] = field(default_factory=list)

    def line(self, deadline: float) -> Line | None:
        """The next line that is the guest's, None at the end of the pipe. Raises TimeoutError."""
        while True:
            while self._lines:
                found = parse(self._lines.pop(0).decode(errors="replace"))
                if found is not None:
                    return found
            if not self._fill(deadline):
                return None

    def _fill(self, deadline: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self.fd, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
        data = os.read(self.fd, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._lines += lines
        return bool(data)


def run(machine: Machine, sets: Sequence[str], checks: Sequence[Check], console: Path) -> list[Result]:
    """One result for each check, in order, whatever happens. Raises Unavailable without QEMU."""
    if shutil.which(PROGRAM) is None:
        raise Unavailable(f"{PROGRAM} is not installed")
    guest = _start(machine.command(console, sets))
    assert guest.stdout is not None
    try:
        results = collect(Reader(guest.stdout.fileno()), checks)
        if all(result.ended for result in results):
            wait_for_end(guest)
    finally:
        with _lock:
            _running.discard(guest)
        guest.kill()
        guest.wait()
        guest.stdout.close()
    return results


_lock = threading.Lock()
_running: set[subprocess.Popen[bytes]] = set()
_ending = False


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    with _lock:
        if _ending:
            raise KmodError("this program is about to end")
        guest = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        _running.add(guest)
        return guest


def end_all() -> None:
    """Those that other threads run; none is started any more."""
    global _ending
    with _lock:
        _ending = True
        for guest in _running:
            guest.kill()


def collect(reader: Reader, checks: Sequence[Check]) -> list[Result]:
    """One result for each check: after the first that did not end, all others are not reached."""
    found = list(outcomes(reader, checks))
    return found + [Result(check.name, False, "not reached") for check in checks[len(found) :]]


def outcomes(reader: Reader, checks: Sequence[Check]) -> Iterator[Result]:
    """Results as they come; ends with the guest, or with the first deadline that passes."""
    for position, check in enumerate(checks):
        limit_s = check.deadline_s if position else check.deadline_s + BOOT_DEADLINE_S
        begun = time.monotonic()
        try:
            said = next_outcome(reader, begun + limit_s)
        except TimeoutError:
            yield Result(check.name, False, f"no answer within {limit_s:g} s", time.monotonic() - begun)
            return
        if said is None or said.name != check.name:
            yield Result(check.name, False, f"the guest said {said.name if said else 'no more'} instead")
            return
        yield Result(check.name, said.word is Word.PASS, said.text, time.monotonic() - begun, True)


def next_outcome(reader: Reader, deadline: float) -> Line | None:
    """The next line that passes or fails a check; None at the end. Raises TimeoutError."""
    while True:
        said = reader.line(deadline)
        if said is None or said.word is Word.DONE:
            return None
        if said.word is not Word.BEGIN:
            return said


def wait_for_end(guest: subprocess.Popen[bytes]) -> None:
    """The guest powers itself off; one that does not is ended by the caller."""
    try:
        guest.wait(END_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise KmodError(f"the guest did not power off within {END_DEADLINE_S:g} s") from None


def tail(console: Path) -> str:
    """The last lines of the kernel's log."""
    try:
        lines = console.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"(no console: {error.strerror})"
    return "\n".join(lines[-TAIL_LINES:])
