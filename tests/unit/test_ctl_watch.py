"""`--watch`: blocks in a pipe; on a terminal the alternate screen, which every end of the command leaves."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpsd.ctl import watch

DEADLINE_S = 20.0
SCRIPT = """
import sys
from mpsd.ctl.watch import repeat
shown = []
def lines():
    shown.append(0)
    if sys.argv[1] == "fails" and len(shown) == 2:
        raise LookupError("the answer has no such key")
    return [f"frame {len(shown)}", *["row"] * 40]
sys.exit(repeat(sys.stdout, 0.01, lines))
"""


class Terminal:
    """A command on a terminal of 10 rows. `shown`: what it wrote."""

    def __init__(self, argument: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, argument],
            env={"PYTHONPATH": os.pathsep.join(sys.path), "LINES": "10", "COLUMNS": "60"},
            stdin=slave,
            stdout=slave,
            stderr=subprocess.DEVNULL,
        )
        os.close(slave)
        self.shown = b""

    def until(self, text: bytes) -> None:
        end = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            assert select.select([self._master], [], [], max(0.0, end - time.monotonic()))[0], self.shown
            self.shown += os.read(self._master, 4096)

    def ended(self) -> int:
        """Return its exit status, once all its output is read."""
        try:
            while select.select([self._master], [], [], DEADLINE_S)[0]:
                part = os.read(self._master, 4096)
                self.shown += part
        except OSError:
            pass  # Linux answers EIO when no process has the terminal open.
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal(number: signal.Signals) -> None:
    terminal = Terminal("runs")
    try:
        terminal.until(b"frame 2")
        terminal.process.send_signal(number)
        assert terminal.ended() == 128 + number
        _restored(terminal.shown)
    finally:
        terminal.close()


def test_an_exception_restores_the_terminal() -> None:
    terminal = Terminal("fails")
    try:
        assert terminal.ended() == 1
        _restored(terminal.shown)
    finally:
        terminal.close()


def _restored(shown: bytes) -> None:
    """Check that the alternate screen was entered once and left last. The scrollback must be untouched."""
    assert shown.startswith(watch.ENTER.encode()) and shown.endswith(watch.LEAVE.encode())
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1
    assert b"\x1b[3J" not in shown and b"\x1b[2J" not in shown
    assert b"... 32 more lines" in shown


def test_a_frame_fits_the_screen() -> None:
    assert watch.frame(["a", "b"], 2) == "\x1b[Ha\x1b[K\r\nb\x1b[K\x1b[J"
    assert watch.frame(["a", "b", "c"], 2) == "\x1b[Ha\x1b[K\r\n... 2 more lines\x1b[K\x1b[J"
    assert watch.frame(["a"], 0) == "\x1b[H... 1 more line\x1b[K\x1b[J"


def test_without_a_terminal_there_are_blocks() -> None:
    out, rounds = io.StringIO(), iter(range(3))

    def lines() -> list[str]:
        return [f"frame {next(rounds)}", "row"]

    # The end of the rounds ends the command.
    with pytest.raises(StopIteration):
        watch.repeat(out, 0.001, lines)
    assert out.getvalue() == "frame 0\nrow\n\nframe 1\nrow\n\nframe 2\nrow\n\n"


def test_an_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    """nohup(1) runs the command with SIGHUP ignored."""
    out = tmp_path / "out"
    with (
        out.open("w") as file,
        subprocess.Popen(
            ["/bin/sh", "-c", 'trap "" HUP; exec "$0" -c "$1" runs', sys.executable, SCRIPT],
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=file,
        ) as process,
    ):
        try:
            _until_size(out, 1)
            process.send_signal(signal.SIGHUP)
            _until_size(out, out.stat().st_size + 100)
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
        finally:
            process.kill()


def _until_size(path: Path, size: int) -> None:
    end = time.monotonic() + DEADLINE_S
    while path.stat().st_size < size:
        assert time.monotonic() < end
        time.sleep(0.01)
