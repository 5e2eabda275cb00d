"""The other end of a program that obeys: each line that it reads is an expression, answered with its repr."""

from __future__ import annotations

import subprocess
from typing import Any


class Obeys:
    """A subclass starts `process`, with text pipes, and waits until it says that it is `there`."""

    process: subprocess.Popen[str]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def do(self, expression: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return eval(self.line())
