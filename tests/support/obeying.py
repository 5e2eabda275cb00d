"""The test's end of a program that evaluates each line it reads and answers with the value's repr."""

from __future__ import annotations

import subprocess
from typing import Any


class Obeys:
    """A base class. A subclass starts `process`, with text pipes, and waits for its line `there`."""

    process: subprocess.Popen[str]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def do(self, expression: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return eval(self.line())
