"""A worker program as the rig sees it: a process in a group of its own, under a deadline, always reaped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from faultinject.history import Entry, History, clock
from mpsd.errors import DeadlineError

REPOSITORY = Path(__file__).resolve().parent.parent


def python_environment() -> dict[str, str]:
    """This environment, able to import the packages of this tree wherever it was started."""
    paths = [str(REPOSITORY), str(REPOSITORY / "clients"), os.environ.get("PYTHONPATH", "")]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MPSD_", "CUDA_MPS_"))}
    return inherited | {"PYTHONPATH": ":".join(p for p in paths if p), "PYTHONUNBUFFERED": "1"}


class Worker:
    """One program. What it says goes into the history under its name, dated by its own clock."""

    def __init__(
        self,
        name: str,
        module: str,
        args: Sequence[str],
        env: Mapping[str, str],
        history: History,
        log: Path,
        *,
        through: Sequence[str] = (),
    ) -> None:
        """`through` is a command that becomes the program, as mpsd-run does: the pid stays."""
        self.name = name
        self._history = history
        self._said: list[Entry] = []
        self._change = threading.Condition()
        self.spawned = clock()
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [*through, sys.executable, "-m", f"faultinject.programs.{module}", *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=dict(env),
                start_new_session=True,
            )
        history.add(name, "spawned", t=self.spawned, pid=self.process.pid, module=module)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._reaper = threading.Thread(target=self._reap, daemon=True)
        self._reaper.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def _note(self, what: str, t: float | None, data: Mapping[str, Any]) -> None:
        entry = self._history.add(self.name, what, t=t, **data)
        with self._change:
            self._said.append(entry)
            self._change.notify_all()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                said = json.loads(line)
                self._note(said.pop("what"), said.pop("t"), said)
            except (ValueError, KeyError, AttributeError):
                self._note("noise", None, {"text": line.decode(errors="replace").strip()[:200]})

    def _reap(self) -> None:
        # The time of death is seen before the last words are: a forked child may hold the pipe open.
        status = self.process.wait()
        self._note("gone", None, {"status": status})

    def tell(self, order: str, **more: Any) -> float:
        """Send one order; when. A program that has gone does not hear it."""
        assert self.process.stdin is not None
        sent = clock()
        try:
            self.process.stdin.write(json.dumps({"do": order, **more}).encode() + b"\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass
        return sent

    def heard(self, *whats: str) -> Entry | None:
        with self._change:
            return self._find(whats)

    def _find(self, whats: Sequence[str], after: int = 0) -> Entry | None:
        return next(islice((e for e in self._said if e.what in whats), after, None), None)

    def said(self, *whats: str) -> list[Entry]:
        """All entries of these kinds, in their order."""
        with self._change:
            return [e for e in self._said if e.what in whats]

    def count(self, *whats: str) -> int:
        """How many entries of these kinds it has said."""
        with self._change:
            return sum(e.what in whats for e in self._said)

    def wait(self, *whats: str, timeout: float, after: int = 0) -> Entry | None:
        """The first entry of one of these kinds; None at the deadline, or when it ended without.

        The first `after` of them are passed over: they were heard before.
        """
        end = clock() + timeout
        with self._change:
            while (found := self._find(whats, after)) is None:
                over = self._find(("gone",)) and not self._reader.is_alive()
                if over or (not self._change.wait(min(max(0.0, end - clock()), 0.1)) and clock() >= end):
                    return None
            return found

    def must(self, *whats: str, timeout: float, after: int = 0) -> Entry:
        """As wait. Raises DeadlineError naming the program and what it did not say."""
        found = self.wait(*whats, timeout=timeout, after=after)
        if found is None:
            raise DeadlineError(f"{self.name} (pid {self.pid}) did not say {' or '.join(whats)}")
        return found

    def signal(self, number: int) -> None:
        """Signal the program alone (never its pid after it was reaped)."""
        if self.running:
            self.process.send_signal(number)

    def end(self) -> None:
        """Kill the whole group, reap, close the pipes. Safe to call twice."""
        if self._group_alive():
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        self.process.wait()
        self._reaper.join(timeout=2)
        self._reader.join(timeout=2)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass

    def _group_alive(self) -> bool:
        # The leader's pid stays the group's id while any member lives, so it is not reused before.
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
