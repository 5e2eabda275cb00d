"""The service for the clients of a run: the stock control daemon or a whole mpsd.

Its directories are under `base`, which is short enough for socket paths.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil

import mpsd_client
from faultinject.registry.history import History, clock
from faultinject.rig import leftovers
from faultinject.rig.node import Node
from faultinject.rig.stockcontrol import StockControl
from faultinject.rig.worker import Worker, python_environment
from mpsd.base.errors import DeadlineError, MpsdError, NotRunningError

POLL_S = 0.01
FOLLOW_S = 0.5
"""Within this time the follower of events notices that the run is over."""


class Service(Protocol):
    logs: Path

    def start(self) -> None:
        """Start it; it is ready for clients on return. Raises MpsdError."""
        ...

    def client_environment(self) -> Mapping[str, str]:
        """Return the environment that joins a client to the domain in service."""
        ...

    def evict(self, worker: Worker, start_ticks: int | None) -> Mapping[str, Any]:
        """Evict a client as an operator would. Raises MpsdError."""
        ...

    def part(self, name: str) -> int | None:
        """Return the pid of `server` or `control` of the domain in service."""
        ...

    def stop(self) -> list[str]:
        """End it with everything it started; return what it left behind, in words."""
        ...


class StockService:
    """Stock MPS. Its operators evict a client with SIGKILL."""

    def __init__(self, node: Node, base: Path, logs: Path) -> None:
        self.logs = logs
        environ = python_environment() | dict(node.environment)
        self._control = StockControl(node.backend.control_binary, base / "m", environ, logs)

    def start(self) -> None:
        self._control.start()

    def client_environment(self) -> Mapping[str, str]:
        return self._control.environ

    def evict(self, worker: Worker, start_ticks: int | None) -> Mapping[str, Any]:
        worker.signal(signal.SIGKILL)
        return {"outcome": "SIGKILL"}

    def part(self, name: str) -> int | None:
        return self._control.server() if name == "server" else self._control.pid

    def stop(self) -> list[str]:
        self._control.stop()
        return []


class MpsdService:
    """A real daemon, used through the client library. Its fault records go into the history."""

    def __init__(
        self, node: Node, base: Path, logs: Path, history: History, first_life: Mapping[str, str]
    ) -> None:
        """`first_life`: environment of the first daemon, not of the restarted ones."""
        self.logs, self._base, self._node, self._history = logs, base, node, history
        self._process: subprocess.Popen[bytes] | None = None
        self._watching: threading.Thread | None = None
        self._stopping = threading.Event()
        self.socket = base / "r" / "mpsd.sock"
        self._config = base / "mpsd.toml"
        self._config.write_text(self._toml(), encoding="utf-8")
        self._first_life = dict(first_life)
        self.environment = python_environment() | dict(node.environment)

    def _toml(self) -> str:
        top = {
            "schema_version": "1",
            "backend": f'"{self._node.name}"',
            "run_dir": f'"{self._base / "r"}"',
            "log_dir": f'"{self.logs}"',
            "state_dir": f'"{self._base / "s"}"',
        }
        sections: dict[str, list[str]] = {}
        for dotted, value in self._node.settings.items():
            section, _, key = dotted.partition(".")
            if not key:
                top[section] = value
                continue
            sections.setdefault(section, []).append(f"{key} = {value}")
        lines = [f"{k} = {v}" for k, v in top.items()]
        for section, keys in sections.items():
            lines += ["", f"[{section}]", *keys]
        return "\n".join(lines) + "\n"

    def setting_names(self) -> list[str]:
        """Return the keys of its configuration file, as section.key."""
        found = tomllib.loads(self._config.read_text(encoding="utf-8"))
        return [
            f"{name}.{key}" if key else name
            for name, value in found.items()
            for key in (value if isinstance(value, dict) else ("",))
        ]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def start(self) -> None:
        self.launch()
        self.wait_ready()
        self._watch()

    def launch(self, environment: Mapping[str, str] | None = None) -> None:
        """Start the process of the daemon. `environment`: more variables of this process alone."""
        extra, self._first_life = {**self._first_life, **(environment or {})}, {}
        with (self._base / "mpsd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mpsd", "run", "--config", str(self._config), "--stop-domains"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment | extra,
                start_new_session=True,
            )

    def wait_ready(self, deadline_s: float = 30.0) -> None:
        """Wait until a domain is ACTIVE for this user.

        Raises DeadlineError, NotRunningError when mpsd has ended.
        """
        end = clock() + deadline_s
        while clock() < end:
            if self._process is not None and self._process.poll() is not None:
                raise NotRunningError(
                    f"mpsd ended with status {self._process.returncode}", remedy=self.tail()
                )
            try:
                self.client_environment()
                if self.active() is not None:
                    return
            except MpsdError:
                pass
            time.sleep(POLL_S)
        raise DeadlineError("mpsd has no ACTIVE domain", remedy=self.tail())

    def tail(self) -> str:
        """Return the last lines of its log."""
        try:
            return self._base.joinpath("mpsd.log").read_text(errors="replace")[-600:]
        except OSError:
            return ""

    def client(self) -> mpsd_client.Client:
        return mpsd_client.connect(str(self.socket))

    def ask(self, op: Callable[[mpsd_client.Client], Any]) -> Any:
        """Make one request on a connection of its own. Raises MpsdError."""
        with self.client() as client:
            return op(client)

    def status(self) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self.ask(lambda c: c.status())
        return answer

    def client_environment(self) -> Mapping[str, str]:
        def joining(client: mpsd_client.Client) -> dict[str, str]:
            found = client.env()
            more = {
                "MPSD_VAULT_SOCKET": client.vault_socket,
                "MPSD_FAILOVER_SOCKET": client.failover_socket,
            }
            return found | {name: path for name, path in more.items() if path}

        more: dict[str, str] = self.ask(joining)
        return self.environment | more

    def active(self) -> Mapping[str, Any] | None:
        """Return the domain for new clients of this user, once its server is ACTIVE."""
        return next(
            (d for d in self.status()["domains"] if d["role"] == "active" and d["state"] == "active"), None
        )

    def part(self, name: str) -> int | None:
        active = self.active()
        return active[f"{name}_pid"] if active else None

    def until(self, condition: Callable[[Mapping[str, Any]], bool], deadline_s: float) -> float | None:
        """Return when `status` first showed it; None at the deadline."""
        end = clock() + deadline_s
        while clock() < end:
            try:
                if condition(self.status()):
                    return clock()
            except MpsdError:
                pass
            time.sleep(POLL_S)
        return None

    def until_standby(self, deadline_s: float) -> float | None:
        """Return when a standby domain was first warm; None at the deadline."""

        def warm(status: Mapping[str, Any]) -> bool:
            return any(d["role"] == "spare" and d["state"] == "warm" for d in status["domains"])

        return self.until(warm, deadline_s)

    def evict(self, worker: Worker, start_ticks: int | None) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self.ask(lambda c: c.kill(worker.pid, start_ticks=start_ticks))
        return answer

    def _watch(self) -> None:
        self._watching = threading.Thread(target=self._follow, daemon=True)
        self._watching.start()

    def _follow(self) -> None:
        """Copy fault records from the event stream to the history until the daemon or the run ends."""
        try:
            with self.client() as client:
                events = client.subscribe()
                while not self._stopping.is_set():
                    self._note_event(events)
        except MpsdError as error:
            if not self._stopping.is_set():
                self._history.add("mpsd", "stream_ended", text=str(error))

    def _note_event(self, events: mpsd_client.EventStream) -> None:
        try:
            event = dict(events.next(clock() + FOLLOW_S))
        except DeadlineError:
            return
        if event.pop("kind") == "fault":
            self._history.add("mpsd", "record", record=event)

    def collect(self) -> None:
        """Request every record and the counters once more: the stream may have missed some."""
        for record in self.ask(lambda c: c.faults()):
            self._history.add("mpsd", "record", record=record)
        counters = self.status()["counters"]
        self._history.add("mpsd", "counters", counters=counters)

    def kill(self) -> None:
        """Send SIGKILL to the daemon alone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> list[str]:
        self._stopping.set()
        if self._process is None:
            return []
        leftovers = []
        if self._process.poll() not in (None, 0, -signal.SIGKILL):
            leftovers.append(f"mpsd had ended with status {self._process.returncode}")
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            leftovers.append("mpsd did not stop within 20 s")
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._watching is not None:
            self._watching.join(timeout=2)
        self._end_keeper()
        return leftovers

    def _end_keeper(self) -> None:
        """The keeper outlives the daemon for a minute by design; a run does not wait for that."""
        for process in leftovers.processes_under(self._base):
            try:
                if any(word.endswith("/mpsd/fdstore/keeper.py") for word in process.cmdline()):
                    process.kill()
                    process.wait(2)
            except psutil.Error:
                continue
