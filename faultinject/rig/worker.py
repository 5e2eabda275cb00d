"""A worker program as the rig sees it: a process group under a deadline, always reaped."""

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

from faultinject.registry.history import Entry, History, clock
from mpsd.base.errors import DeadlineError

REPOSITORY = Path(__file__).resolve().parents[2]


def python_environment() -> dict[str, str]:
    """Return this environment, able to import the packages of this tree from anywhere."""
    paths = [str(REPOSITORY), str(REPOSITORY / "clients"), os.environ.get("PYTHONPATH", "")]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MPSD_", "CUDA_MPS_"))}
    return inherited | {"PYTHONPATH": ":".join(p for p in paths if p), "PYTHONUNBUFFERED": "1"}


class Worker:
    """One program. Its messages go into the history under its name, dated by its own clock."""

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
        """`through`: a command that becomes the program, as mpsd-run does; the pid stays."""
        self.name = name
        self._history = history
        self._messages: list[Entry] = []
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
            self._messages.append(entry)
            self._change.notify_all()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                message = json.loads(line)
                self._note(message.pop("what"), message.pop("t"), message)
            except (ValueError, KeyError, AttributeError):
                self._note("noise", None, {"text": line.decode(errors="replace").strip()[:200]})

    def _reap(self) -> None:
        # The time of death is taken before the last message: a forked child may keep the pipe open.
        status = self.process.wait()
        self._note("gone", None, {"status": status})

    def tell(self, order: str, **more: Any) -> float:
        """Send one order and return when. A program that has ended does not get it."""
        assert self.process.stdin is not None
        sent = clock()
        try:
            self.process.stdin.write(json.dumps({"do": order, **more}).encode() + b"\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass
        return sent

    def first_message(self, *kinds: str) -> Entry | None:
        with self._change:
            return self._find(kinds)

    def _find(self, kinds: Sequence[str], after: int = 0) -> Entry | None:
        return next(islice((e for e in self._messages if e.what in kinds), after, None), None)

    def messages(self, *kinds: str) -> list[Entry]:
        """Return all entries of these kinds, in order."""
        with self._change:
            return [e for e in self._messages if e.what in kinds]

    def count(self, *kinds: str) -> int:
        """Return how many entries of these kinds there are."""
        with self._change:
            return sum(e.what in kinds for e in self._messages)

    def wait(self, *kinds: str, timeout: float, after: int = 0) -> Entry | None:
        """Return the first entry of one of these kinds; None at the deadline, or at the program's end.

        The first `after` entries are skipped.
        """
        end = clock() + timeout
        with self._change:
            while (found := self._find(kinds, after)) is None:
                has_ended = self._find(("gone",)) and not self._reader.is_alive()
                if has_ended or (not self._change.wait(min(max(0.0, end - clock()), 0.1)) and clock() >= end):
                    return None
            return found

    def require(self, *kinds: str, timeout: float, after: int = 0) -> Entry:
        """Wait as wait() does. Raises DeadlineError naming the program and what it did not say."""
        found = self.wait(*kinds, timeout=timeout, after=after)
        if found is None:
            raise DeadlineError(f"{self.name} (pid {self.pid}) did not say {' or '.join(kinds)}")
        return found

    def signal(self, number: int) -> None:
        """Signal the program alone, and never its pid after it was reaped."""
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
        # The leader's pid stays the group's id while a process of the group lives, so it is not reused
        # before.
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
