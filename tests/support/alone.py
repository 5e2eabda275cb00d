"""A program on the stand-in driver, alone in its process, that a test moves from one gate to the next."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from tests.support import moving
from tests.support.gate import ANY, UNMAP, Gate
from tests.support.libcudas import DEADLINE_S, PATHS, PROGRAMS, Libraries
from tests.support.moving import Post
from tests.support.simnode import until

LOOKS, LOOK_S = 20, 0.001
MANY = 1000
"""Operations that may begin in the standby domain: more than the program has."""


class Alone:
    """programs/`name` in mode `exact`, in an empty folder of its own. Its first line is its pid.

    `extra`: variables, of which MPSD_FAILOVER may name another mode, and fields of MPSD_DEBUG.
    """

    def __init__(self, libraries: Libraries, post: Post, folder: Path, name: str, **extra: str) -> None:
        for number in range(2):
            shutil.copyfile(libraries.real, folder / f"libcuda-{number}.so.1")
        self._folder = folder
        self.generation = 0
        self._gate = Gate(folder / "0")
        environment = libraries.environment(
            proxied=True,
            PYTHONPATH=PATHS,
            CUDA_MPS_PIPE_DIRECTORY=str(self._gate.folder),
            vault="1",
            MPSD_FAILOVER_SOCKET=str(post.path),
            settle_ms="0",
            release="0",
            **{"MPSD_FAILOVER": "exact", **extra},
        )
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / name)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._line() == str(self.process.pid)
        self._line_to = post.greet(moving.EXACT)

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, self.end()
        return line

    def _tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def ask(self, expression: str) -> str:
        """Evaluate a Python expression in the program, as moving.py does. Return the value."""
        self._tell(expression)
        return self._line()

    def stand_by(self) -> Gate:
        """Offer the domain of the next move, and return its gate."""
        self.generation += 1
        there = Gate(self._folder / str(self.generation))
        self._line_to.say(moving.STANDBY, self.generation, str(there.folder), str(self._folder))
        said = self._line_to.hear(moving.READY, moving.UNREADY)
        assert (said.kind, said.text) == (moving.READY, "")
        return there

    def lose(self, there: Gate) -> moving.Said:
        """Break the program's context and move the program."""
        self._gate.break_context()
        return self._has_moved(there, self._line_to.move(self.generation, again=1))

    def leave(self, there: Gate, lets: int, *, ahead: bool = False) -> moving.Said:
        """Move the program, its context intact, and cut it off after `lets` more operations.

        `ahead`: all operations allowed before have ended first, and replayed ones are let through before any
        more.
        """
        if ahead:
            until(self._gate.is_done)
            there.let(MANY)
        self._gate.keep(UNMAP)
        self._line_to.say(moving.MOVE, self.generation, again=1)
        # Without work in flight the program does not wait.
        until(lambda: self._gate.kept() == UNMAP or not self._line_to.is_silent())
        if ahead:
            until(lambda: there.left() < MANY)
            assert self._line_to.is_silent()
            there.let(ANY)
        self._gate.let(lets)
        # The program may have fewer operations, and does not report its rest: a later message is another
        # case.
        for _ in range(LOOKS):
            if not self._gate.left() or not self._line_to.is_silent(LOOK_S):
                break
        self._gate.keep(0)
        said = self._line_to.hear(moving.MOVED)
        # The streams of the old context must not continue.
        self._gate.break_context()
        return self._has_moved(there, said)

    def _has_moved(self, there: Gate, said: moving.Said) -> moving.Said:
        assert said.kind == moving.MOVED, said
        self._gate.close()
        self._gate = there
        return said

    def end(self) -> str:
        """End the program. Return its stderr."""
        self._gate.let(ANY)
        try:
            _, said = self.process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, said = self.process.communicate()
        return said


T = TypeVar("T", bound=Alone)


class OneAtATime(Generic[T]):
    """Programs made by `start`, one at a time; a new one if the last has died of a test's request."""

    def __init__(self, folder: Path, start: Callable[[Post, Path], T]) -> None:
        self._folder, self._start = folder, start
        self._count = 0
        self._now: T | None = None
        self._post: Post | None = None

    def one(self) -> T:
        if self._now is None or self._now.process.poll() is not None:
            self.kill()
            folder = self._folder / str(self._count)
            self._count += 1
            folder.mkdir()
            self._post = Post(folder / "failover.sock")
            self._now = self._start(self._post, folder)
        return self._now

    def end(self) -> None:
        if self._now is not None:
            assert self._now.end() == ""
            assert self._now.process.returncode == 0

    def kill(self) -> None:
        if self._now is not None:
            self._now.process.kill()
            self._now.process.communicate()
        if self._post is not None:
            self._post.close()
