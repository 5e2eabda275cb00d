"""A program that takes part with mpsd_client, under a test's command: Python, line by line, on the stand-in.

As a file it is that program: each line of its input is an expression or a statement on `m` (mpsd_client) and
`cuda` (the driver by ctypes); the answer is the repr of its value, or of an MpsdError's code and text.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

DEADLINE_S = 60.0


class Attacher:
    """A context: the program is ended at its end at the latest."""

    def __init__(self, environment: dict[str, str], command: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*command, sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        assert self._line() == "there", self.process.communicate(timeout=DEADLINE_S)[1]

    @property
    def pid(self) -> int:
        return self.process.pid

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def do(self, line: str) -> Any:
        assert self.process.stdin is not None and "\n" not in line
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self._line()
        assert answer, f"{line}: {self.process.communicate(timeout=DEADLINE_S)[1]}"
        return eval(answer)

    def become(self, line: str) -> None:
        """Run a line that replaces the program by another one like it (exec)."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self._line() == "there"

    def end(self, how: int | None = None) -> int:
        """End the program by the end of its input, or by signal `how`. `said` is then its stderr."""
        if how is not None:
            self.process.send_signal(how)
        _, self.said = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode

    def __enter__(self) -> Attacher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.returncode is None:
            self.end(signal.SIGKILL)


def obey() -> None:
    import ctypes

    import mpsd_client

    names: dict[str, Any] = {"m": mpsd_client, "ctypes": ctypes, "os": os, "sys": sys}
    print("there", flush=True)
    # Not sys.stdin: its read-ahead would be lost to a program that this one execs.
    with open(0, "rb", buffering=0, closefd=False) as orders:
        for order in orders:
            line = order.decode().rstrip("\n")
            try:
                try:
                    code = compile(line, "order", "eval")
                except SyntaxError:
                    exec(line, names)
                    value: Any = None
                else:
                    value = eval(code, names)
            except (mpsd_client.MpsdError, BufferError, ValueError, AttributeError) as error:
                value = (getattr(error, "code", type(error).__name__), str(error))
            print(repr(value), flush=True)


if __name__ == "__main__":
    obey()
