"""Boot of the guest in QEMU, with a deadline for the boot and for every check."""

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
from emulator.lines import Line, MessageKind, parse
from kmod.errors import KmodError, Unavailable

PROGRAM = "qemu-system-x86_64"
MEMORY_MB = 1024
BOOT_DEADLINE_S = 300.0
END_DEADLINE_S = 60.0
TAIL_LINES = 25


@dataclass(frozen=True, slots=True)
class Result:
    """The end of one check; `ended` is false if it was not reached or not finished."""

    name: str
    passed: bool
    text: str
    seconds: float = 0.0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine to boot: a kernel image and its root file system."""

    image: Path
    initramfs: Path

    def command(self, console: Path, sets: Sequence[str]) -> list[str]:
        """Return QEMU's command line: kernel log to `console`, the guest's lines to standard output.

        Every instruction is emulated ("tcg"), because the host may be a guest itself.
        """
        # With panic=-1 and -no-reboot a panic ends the machine at once. The kernel's cipher self-tests hung
        # once under load, before any module was loaded.
        kernel = ["console=ttyS0", "panic=-1", "cryptomgr.notests", f"rdinit={interpreter()}"]
        append = " ".join([*kernel, "--", "-I", "-S", GUEST_MAIN, *sets])
        return [
            *(PROGRAM, "-accel", "tcg", "-cpu", "max,la57=off", "-smp", "2"),
            *("-m", str(MEMORY_MB), "-no-user-config", "-nodefaults", "-display", "none", "-no-reboot"),
            *("-kernel", str(self.image), "-initrd", str(self.initramfs), "-append", append),
            # DMA mappings of the software GPU need a device; this device does nothing.
            *("-device", "pci-testdev"),
            *("-serial", f"file:{console}", "-serial", "stdio"),
        ]


@dataclass
class Reader:
    """Splits the output of a pipe into lines; waits for each with a deadline."""

    fd: int
    _rest: bytes = b""
    _lines: list[bytes] = field(default_factory=list)

    def line(self, deadline: float) -> Line | None:
        """Return the next line of the guest, or None at the end of the pipe. Raises TimeoutError."""
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
    """Return one result for each check, in order, in all cases. Raises Unavailable without QEMU."""
    if shutil.which(PROGRAM) is None:
        raise Unavailable(f"{PROGRAM} is not installed: apt-get install qemu-system-x86")
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
            raise KmodError("this program is ending")
        guest = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        _running.add(guest)
        return guest


def end_all() -> None:
    """End the machines of other threads, and start no more."""
    global _ending
    with _lock:
        _ending = True
        for guest in _running:
            guest.kill()


def collect(reader: Reader, checks: Sequence[Check]) -> list[Result]:
    """Return one result for each check; after the first that did not end, all others are not reached."""
    found = list(outcomes(reader, checks))
    return found + [Result(check.name, False, "not reached") for check in checks[len(found) :]]


def outcomes(reader: Reader, checks: Sequence[Check]) -> Iterator[Result]:
    """Yield results as they come. Ends with the guest, or at the first missed deadline."""
    for position, check in enumerate(checks):
        limit_s = check.deadline_s if position else check.deadline_s + BOOT_DEADLINE_S
        begun = time.monotonic()
        try:
            said = next_outcome(reader, begun + limit_s)
        except TimeoutError:
            yield Result(check.name, False, f"no answer within {limit_s:g} s", time.monotonic() - begun)
            return
        if said is None or said.name != check.name:
            yield Result(check.name, False, f"the guest sent {said.name if said else 'nothing'} instead")
            return
        yield Result(check.name, said.word is MessageKind.PASS, said.text, time.monotonic() - begun, True)


def next_outcome(reader: Reader, deadline: float) -> Line | None:
    """Return the next line that passes or fails a check; None at the end. Raises TimeoutError."""
    while True:
        said = reader.line(deadline)
        if said is None or said.word is MessageKind.DONE:
            return None
        if said.word is not MessageKind.BEGIN:
            return said


def wait_for_end(guest: subprocess.Popen[bytes]) -> None:
    """Wait until the guest has powered itself off. The caller ends a guest that does not."""
    try:
        guest.wait(END_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise KmodError(f"the guest did not power off within {END_DEADLINE_S:g} s") from None


def log_tail(console: Path) -> str:
    """Return the last lines of the kernel's log."""
    try:
        lines = console.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"(no console: {error.strerror})"
    return "\n".join(lines[-TAIL_LINES:])
