"""Two users on one node with mpsd: the victim's programs and agent, and the agent of the intruder."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from faultinject.registry.history import clock
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker

VICTIM, INTRUDER = 2001, 2002
"""User ids that no machine needs to know."""
UP_S, ANSWER_S = 60.0, 20.0
SETTINGS = {
    "protect": '"failover"',
    "domains.kill_victims_after_s": "1.0",
}
"""With `kill_victims_after_s` a decision about a domain kills its clients, so a wrong one shows."""


def as_user(uid: int) -> list[str]:
    """Return the command that runs another command as this user."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]


@dataclass(frozen=True, slots=True)
class Decisions:
    """The state of mpsd that only a decision changes. `domains`: name to role."""

    faults: int
    evictions: int
    moved: int
    domains: Mapping[str, str]


class Scene:
    """A running rig with the two agents. Methods raise DeadlineError for a program that does not answer."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._answers: dict[str, int] = {}
        self.programs: dict[str, Worker] = {}

    def open(self) -> None:
        """Let other users enter the directories of the run, and start the agents."""
        self.rig.base.chmod(0o755)
        environment = self.rig.environment()
        self.victim = self._agent("victim", VICTIM, environment)
        self.intruder = self._agent("intruder", INTRUDER, environment)

    def _agent(self, name: str, uid: int, environment: Mapping[str, str]) -> Worker:
        agent = self.rig.spawn(name, "localuser", environment=environment, through=as_user(uid))
        agent.require("ready", timeout=UP_S)
        return agent

    def ask(self, agent: Worker, answer: str, order: str, *, timeout: float = ANSWER_S, **more: Any) -> Any:
        """Send an order and return the data of the answer to it."""
        seen = agent.count(answer)
        agent.tell(order, **more)
        return agent.require(answer, timeout=timeout, after=seen).data

    def environment(self, agent: Worker, *, shared: bool) -> dict[str, str]:
        """Return the environment with which programs of this user join their domain."""
        socket = str(self.rig.mpsd.socket)
        found: dict[str, str] = self.ask(agent, "env", "env", socket=socket, shared=shared, timeout=UP_S)[
            "environment"
        ]
        return {**self.rig.mpsd.environment, **found}

    def program(self, name: str, uid: int, environment: Mapping[str, str], *words: str) -> Worker:
        """Start a client (a survivor, if `words` names no other program) and wait until it works."""
        words = words or ("survivor", "--seed", str(len(self.programs)))
        worker = self.rig.spawn(name, *words, environment=environment, through=as_user(uid))
        worker.require("ready", timeout=UP_S)
        self.programs[name] = worker
        return worker

    def decisions(self, *, apart: str = "") -> Decisions:
        """Return the decisions so far.

        `apart`: a domain of the intruder. Faults there do not count, nor the roles of that user's domains.
        """
        status, faults = self.rig.mpsd.status(), self.rig.mpsd.ask(lambda c: c.faults())
        counters = status["counters"]
        counted = [d for d in status["domains"] if not (apart and d["uid"] == INTRUDER)]
        return Decisions(
            sum(not apart or fault["domain"] != apart for fault in faults),
            int(counters.get("evictions", 0)),
            int(counters.get("failover_moves", 0)),
            {d["id"]: d["role"] for d in counted if d["role"] != "old"},
        )

    def rss(self) -> float:
        """Return the resident memory of mpsd [MB]."""
        return float(psutil.Process(self.rig.mpsd.pid).memory_info().rss) / 1e6

    def listed(self, pid: int, deadline_s: float) -> float | None:
        """Return after how many seconds `status` lists this process as a client; None at the deadline."""
        start = clock()
        at = self.rig.mpsd.until(lambda s: any(c["pid"] == pid for c in s["clients"]), deadline_s)
        return None if at is None else at - start

    def forgotten(self, pid: int, deadline_s: float) -> bool:
        """Return whether `status` stops to list this process within so many seconds."""
        at = self.rig.mpsd.until(lambda s: all(c["pid"] != pid for c in s["clients"]), deadline_s)
        return at is not None

    def finish(self, names: Sequence[str]) -> list[str]:
        """Stop these programs. Return what went wrong in them, in words."""
        problems = []
        for name in names:
            worker = self.programs.pop(name)
            worker.tell("stop")
            end = worker.wait("done", "error", "gone", timeout=ANSWER_S)
            if end is None or end.what != "done" or end.data["wrong"]:
                seen = "no answer" if end is None else f"{end.what} {dict(end.data)}"
                problems.append(f"{name}: {seen[:200]}")
                worker.signal(signal.SIGKILL)
        return problems


def socket_of(directory: str, name: str) -> str:
    return os.path.join(directory, name)


def real(directory: str) -> str:
    """Return the domain's own directory behind a stable path."""
    return str(Path(directory).resolve())
