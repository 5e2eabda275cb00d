"""Faults of a neighbour, and what each client of the domain sees and writes, in time.

One round: a fresh domain A with a writer, a writer that ends its own work at the first sign, a client that
counts its synchronisations, and the offender. All but the offender have a second driver instance in domain B,
where a bystander runs throughout. Times are milliseconds after the order to the offender.
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from faultinject.campaigns.measure.failover.cases import Case
from faultinject.campaigns.measure.nvml import Nvml, Xids
from faultinject.campaigns.measure.rig import (
    Client,
    Domain,
    KernelMessages,
    Recorder,
    attach,
    clients,
    now,
)
from mpsd.base.errors import DeadlineError, GpuError
from mpsd.gpu.nvidia.uvm import NvidiaUvm, UvmTracker

KINDS = ("trap", "misaligned", "shared_window", "stack_overflow", "store", "pbdma")
ROUND_S = 4.0
SETTLE_S = 0.55

# The action at the first sign: only a wait (a second writer resets its context), or one action.
PLAN = [
    *[(kind, "none") for kind in KINDS],
    *[(kind, "unmap") for kind in KINDS],
    *[(kind, "kill server") for kind in KINDS],
    *[(kind, "none") for _ in range(2) for kind in KINDS],
    ("trap", "close"),
    ("store", "close"),
    *[(kind, "none") for _ in range(2) for kind in KINDS],
    *[(kind, means) for means in ("unmap", "kill server") for kind in KINDS],
]
CUT_PLAN = [(kind, "cut") for _ in range(4) for kind in KINDS]


class Signs:
    """The signs of a fault outside the clients."""

    def __init__(self, mps_domain: Domain, nvml: Nvml, xids: Xids, tracker: UvmTracker | None) -> None:
        self.xids, self.log = xids, mps_domain.log_lines
        self.kernel = KernelMessages()
        self.recorder = Recorder()
        self.uvm: list[tuple[float, str]] = []
        self._tracker = tracker
        server = mps_domain.server()
        self.server = server
        self.recorder.every(
            0.001, "server status", lambda: mps_domain.ctl(f"get_server_status {server}", 1.5)
        )
        self.recorder.every(0.012, "ps", lambda: mps_domain.ctl("ps", 1.5))
        self.recorder.every(0.004, "nvml MPS processes", nvml.mps_processes)
        self.recorder.every(0.01, "nvml utilisation", nvml.utilization)
        if tracker:
            self.recorder.every(0.0003, "uvm", self._drain)

    def _drain(self) -> int:
        assert self._tracker is not None
        batch = self._tracker.drain()
        self.uvm += [(now(), f"{e.fault_type.name} {e.access.name}") for e in batch.events]
        return len(self.uvm)

    def close(self) -> None:
        self.recorder.close()
        self.kernel.close()
        if self._tracker:
            self._tracker.close()


class Round:
    """One fault; run() fills `row`."""

    def __init__(self, case: Case, a: Domain, b: Domain, kind: str, means: str) -> None:
        self.case, self.a, self.b = case, a, b
        self.row: dict[str, Any] = {"kind": kind, "means": means}
        folder, pipe = case.folder, str(b.pipe)
        own = means if means in ("unmap", "close", "cut") else "none"
        self.writers = [case.client(a, "writer", folder, pipe, own)]
        if means == "none":
            self.writers.append(case.client(a, "writer", folder, pipe, "reset"))
        self.loop = case.client(a, "loop", folder, pipe)
        self.offender = case.client(a, "offender", kind)
        self.fired = 0.0

    @property
    def clients(self) -> list[Client]:
        return [*self.writers, self.loop, self.offender]

    def since(self, moment: float | None) -> float | None:
        return round((moment - self.fired) * 1e3, 3) if moment else None

    def prepare(self) -> None:
        for client in self.clients:
            client.wait("ready")
        for client in (*self.writers, self.loop):
            client.say("work")
        for client in (*self.writers, self.loop):
            client.wait("working", timeout_s=4)

    def fire(self, signs: Signs) -> None:
        """Inject the fault, wait for its first sign, act on it, let everything settle."""
        self.fired = now()
        self.offender.say("go")
        trigger = self._first_sign(signs)
        self.loop.say("switch")
        for writer in self.writers:
            writer.say("switch")
        self.row["trigger"] = [trigger, self.since(now())]
        if self.row["means"] == "kill server":
            self._kill_server(signs.server)
        time.sleep(max(0.0, self.fired + SETTLE_S - now()))

    def _first_sign(self, signs: Signs) -> str:
        while now() < self.fired + 0.6:
            if signs.uvm:
                return "uvm event"
            if any(event.get("said", "").startswith("error") for event in list(self.offender.events)):
                return "offender's error"
            if signs.xids.since(self.fired):
                return "nvml xid"
            time.sleep(0.0002)
        return "none"

    def _kill_server(self, server: int) -> None:
        pidfd = os.pidfd_open(server)
        try:
            sent = now()
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            has_exited = bool(select.select([pidfd], [], [], 1.0)[0])
            self.row["server killed"] = [self.since(sent), self.since(now()) if has_exited else None]
        finally:
            os.close(pidfd)

    def finish(self, signs: Signs) -> None:
        for client in (*self.writers, self.loop):
            client.say("finish")
        self.row["writers"] = [self._writer(client) for client in self.writers]
        self.row["loop"] = self._loop()
        messages = [event for event in list(self.offender.events) if event["ev"] == "said"]
        self.row["offender"] = [[self.since(event["t"]), event["said"]] for event in messages]
        self._outside(signs)

    def _writer(self, client: Client) -> dict[str, Any]:
        report = client.wait("told", timeout_s=2)
        ended = report["ended"]
        return {
            "means": ended.get("means", "none"),
            "words": {
                name: [self.since(report[key][name]) for key in ("written", "before", "after")]
                for name in report["values"]
            },
            "signs": {name: [self.since(t), code] for name, (t, code) in report["signs"].items()},
            "ended": {k: self.since(ended[k]) for k in ("began", "stopped", "ended", "freed") if k in ended}
            | {key: ended[key] for key in ("code", "threads out", "closed") if key in ended},
            "clock error ms": report["clock_error_ms"],
            "longest read ms": report["longest_read_ms"],
            "reads": report["reads"],
            "read code": report["read_code"],
        }

    def _loop(self) -> dict[str, Any]:
        report = self.loop.wait("told", timeout_s=2)
        end, switched = report["end"], report["switched"]
        return {
            "successes": report["successes"],
            "in memory": report["in_memory"],
            "wrong reads": report["wrong_reads"],
            "last success": self.since(report["last_success"]),
            "end": [self.since(end.get("at")), end.get("code"), end.get("where")],
            "first kernel": [self.since(switched.get("done")), switched.get("code")],
        }

    def _outside(self, signs: Signs) -> None:
        changes = signs.recorder.changes
        names = self._names(signs.server)
        nvml = [(t, v) for t, v in changes["nvml MPS processes"] if t > self.fired]
        self.row |= {
            "uvm": [[self.since(t), text] for t, text in signs.uvm[:2]],
            "xids": [[self.since(t), xid] for t, xid in signs.xids.since(self.fired)][:6],
            "server status": [[self.since(t), v] for t, v in changes["server status"] if t > self.fired][:8],
            "kernel log": [
                [self.since(t), names(text.split(";", 1)[-1])[:200]]
                for t, text in signs.kernel.since(self.fired)
                if "NVRM" in text
            ][:16],
            "server log": [
                [self.since(t), names(line)[:160]]
                for t, line in signs.log.since(self.fired)
                if "UI" not in line
            ][:14],
            "ps": [[self.since(t), names(v)[:500]] for t, v in changes["ps"] if t > self.fired][:4],
            "nvml MPS processes": [[self.since(t), names(str(v))[:200]] for t, v in nvml][:4],
            "nvml utilisation": len([t for t, _ in changes["nvml utilisation"] if t > self.fired]),
            "status samples": signs.recorder.samples["server status"],
        }

    def _names(self, server: int) -> Any:
        """Return a function that replaces process ids by roles."""
        roles = {str(self.offender.pid): "OFFENDER", str(self.loop.pid): "SURVIVOR", str(server): "SERVER"}
        roles |= {str(writer.pid): "SURVIVOR" for writer in self.writers}
        roles[str(os.getpid())] = "HARNESS"
        return lambda text: re.sub(r"\b\d+\b", lambda found: roles.get(found[0], found[0]), text)


def ask_bystander(bystander: Client) -> Any:
    """Return its longest round since the last report in ms, or its error."""
    event = bystander.find("error", "wrong")
    if event is None:
        bystander.forget()
        bystander.say("report")
        event = bystander.wait("alive", "error", "wrong", timeout_s=4)
    return event.get("longest_ms", event["ev"])


def run_round(
    case: Case, b: Domain, bystander: Client, nvml: Nvml, xids: Xids, kind: str, means: str
) -> None:
    uvm = NvidiaUvm()
    with ExitStack() as stack:
        a = stack.enter_context(case.domain("a"))
        fault_round = Round(case, a, b, kind, means)
        stack.enter_context(clients(*fault_round.clients))
        fault_round.prepare()
        signs = Signs(a, nvml, xids, _tracker(uvm, fault_round.offender))
        stack.callback(signs.close)
        time.sleep(0.03)
        ask_bystander(bystander)
        fault_round.fire(signs)
        fault_round.row["bystander longest"] = ask_bystander(bystander)
        fault_round.finish(signs)
        case.record(fault_round.row)


def _tracker(uvm: NvidiaUvm, client: Client) -> UvmTracker | None:
    try:
        space = attach(uvm, client)
        try:
            return space.track()
        finally:
            space.close()
    except GpuError:
        return None


def run(case: Case, plan: Sequence[tuple[str, str]] = PLAN) -> None:
    nvml = Nvml()
    xids = Xids(nvml)
    with case.domain("b") as b:
        bystander = b.client("survivor", case.cubin)
        with clients(bystander):
            bystander.wait("ready")
            for kind, means in plan:
                if case.remaining_s() < ROUND_S:
                    break
                began = now()
                try:
                    run_round(case, b, bystander, nvml, xids, kind, means)
                except (DeadlineError, GpuError, OSError, AssertionError, LookupError, TypeError) as error:
                    case.record({"kind": kind, "means": means, "failed": f"{type(error).__name__}: {error}"})
                case.record({"what": "round", "seconds": round(now() - began, 2)})
                if bystander.find("error"):
                    break
    xids.close()
