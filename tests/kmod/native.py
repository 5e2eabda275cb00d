"""The module's own files compiled for this machine: only the glue needs a kernel."""

from __future__ import annotations

import re
import select
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "kmod_patches" / "src"
PROGRAMS = ROOT / "tests" / "kmod" / "programs"
HEADER = SOURCES / "mpsd-abi.h"
POLICY = ("mpsd-policy.c", "mpsd-record.c")
DEADLINE_S = 60.0
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")

_WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion", "-Wmissing-prototypes", "-Wundef")
# The module's kernels compile with gnu89 or gnu11, and forbid declarations after statements.
_STYLE = ("-std=gnu11", "-Wdeclaration-after-statement", "-Wvla")


def compile_program(target: Path, sources: Sequence[Path], *flags: str) -> Path:
    """Link `sources` to the program `target`. Raises CalledProcessError after the compiler's message."""
    command = ["gcc", *_STYLE, *_WARNINGS, "-O1", "-g", f"-I{SOURCES}", *flags]
    command += ["-o", str(target), *map(str, sources)]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    return target


def build(folder: Path, name: str, *own: str) -> Path:
    """Build programs/NAME.c with the module's own files `own`, under the address and undefined sanitizers."""
    sources = [PROGRAMS / f"{name}.c", *(SOURCES / source for source in own)]
    return compile_program(folder / name, sources, *SANITIZE)


def run(program: Path, *arguments: object, sent: bytes = b"") -> bytes:
    """Return a program's output. The program must exit with 0 in time, and write nothing to stderr."""
    ended = subprocess.run(
        [str(program), *map(str, arguments)],
        input=sent,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b""), ended.stderr.decode(errors="replace")
    return ended.stdout


def without_comments(header: str) -> str:
    return re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)


class Pipe:
    """A program that answers each request of `words` u64 with as many. Close it after use."""

    def __init__(self, program: Path, words: int) -> None:
        self._layout = struct.Struct(f"={words}Q")
        self._process = subprocess.Popen(
            [str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def ask(self, requests: Sequence[Sequence[int]]) -> list[bytes]:
        """Return the answers, in order. Raises TimeoutError, or EOFError if the program exited."""
        answers: list[bytes] = []
        # Both pipes hold 64 KiB: a few hundred requests never block on answers that are not read yet.
        for start in range(0, len(requests), 256):
            part = requests[start : start + 256]
            words = self._layout.size // 8
            padded = (self._layout.pack(*request, *(0,) * (words - len(request))) for request in part)
            self._stdin.write(b"".join(padded))
            raw = self._read(len(part) * self._layout.size)
            answers += [raw[at : at + self._layout.size] for at in range(0, len(raw), self._layout.size)]
        return answers

    def close(self) -> None:
        """End the program. It must have reported no error, a leak for example."""
        try:
            self._stdin.close()
            assert self._process.wait(DEADLINE_S) == 0
        finally:
            self._process.kill()
            self._process.wait(DEADLINE_S)
            self._stdout.close()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _read(self, size: int) -> bytes:
        raw = b""
        while len(raw) < size:
            ready, _, _ = select.select([self._stdout], [], [], DEADLINE_S)
            if not ready:
                raise TimeoutError("the program does not answer")
            part = self._stdout.read(size - len(raw))
            if not part:
                raise EOFError("the program has ended")
            raw += part
        return raw
