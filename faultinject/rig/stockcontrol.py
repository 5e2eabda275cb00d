"""The stock control daemon (or its stand-in) as the harness runs it: mode stock, and other domains."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from faultinject.registry.history import clock
from mpsd.base.errors import ControlError, DeadlineError

_POLL_S = 0.01
_SERVER_LINE = re.compile(r"^\s*(\d+)\s*$", re.MULTILINE)


class StockControl:
    """One control daemon in the foreground, with directories under `base`."""

    def __init__(self, binary: str, base: Path, environ: Mapping[str, str], logs: Path | None = None) -> None:
        self.binary = binary
        self.pipes, self.logs = base / "p", logs or base / "l"
        self.environ = {
            **environ,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, deadline_s: float = 15.0) -> None:
        """Start it with a server, ready for clients. Raises MpsdError."""
        for directory in (self.pipes, self.logs):
            directory.mkdir(parents=True, exist_ok=True)
        with (self.pipes.parent / "control.out").open("ab") as out:
            self._process = subprocess.Popen(
                [self.binary, "-f"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.environ,
                start_new_session=True,
            )
        end = clock() + deadline_s
        while not self._answers():
            if self._process.poll() is not None:
                raise ControlError(f"{self.binary} ended with status {self._process.returncode}")
            if clock() > end:
                raise DeadlineError(f"{self.binary} did not answer in {self.pipes}")
            time.sleep(_POLL_S)
        self.ask(f"start_server -uid {os.getuid()}", deadline_s)
        while self.server() is None or self.state() != "ACTIVE":
            if clock() > end:
                raise DeadlineError(f"the server of {self.pipes} did not become ACTIVE")
            time.sleep(_POLL_S)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _answers(self) -> bool:
        if not (self.pipes / "control").exists():
            return False
        try:
            self.ask("get_server_list", 2.0)
        except (ControlError, DeadlineError):
            return False
        return True

    def ask(self, command: str, deadline_s: float = 5.0) -> str:
        """Send one text command and return the reply. Raises ControlError, DeadlineError."""
        try:
            done = subprocess.run(
                [self.binary],
                input=command + "\n",
                env=self.environ,
                capture_output=True,
                text=True,
                timeout=deadline_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"{command!r} was not answered within {deadline_s:g} s") from error
        if "Cannot find MPS control daemon process" in done.stdout + done.stderr:
            raise ControlError(f"no control daemon answers in {self.pipes}")
        return done.stdout

    def server(self) -> int | None:
        found = _SERVER_LINE.search(self.ask("get_server_list"))
        return int(found[1]) if found else None

    def state(self) -> str:
        server = self.server()
        return "GONE" if server is None else self.ask(f"get_server_status {server}").strip()

    def stop(self, deadline_s: float = 5.0) -> None:
        """Ask it to quit; kill it with its servers when it does not."""
        if self._process is None:
            return
        try:
            self.ask("quit -t 1", deadline_s)
            self._process.wait(deadline_s)
        except (ControlError, DeadlineError, subprocess.TimeoutExpired):
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self._process.wait()
        self._process = None
