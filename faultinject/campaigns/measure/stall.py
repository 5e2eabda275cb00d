"""The GPU stall at a fault: how long clients in other domains wait, and what that depends on.

A bystander in a domain of its own stands still as long as the GPU does. Contexts that were made before the
offender's have lower channel numbers, except where the offender's fills the gap of an ended one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.nvml import Nvml
from faultinject.campaigns.measure.rig import (
    Client,
    Domain,
    clients,
    domain,
)
from mpsd.gpu.nvidia.uvm import NvidiaUvm

WATCHED_S = 0.4
GONE_S = 0.7
COPIES, ALL = "CUDA_DEVICE_MAX_COPY_CONNECTIONS", "CUDA_DEVICE_MAX_CONNECTIONS"


class Case:
    """One fault, and the contexts before it. `bystander`: in another domain."""

    def __init__(self, out: Path, cubin: Path, bystander: Client, number: int) -> None:
        self._out, self._cubin, self._bystander, self._number = out, cubin, bystander, number
        self._stack = ExitStack()
        self.own_domain = self._domain("own")

    def __enter__(self) -> Case:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _domain(self, name: str) -> Domain:
        # A server's channels exist before its clients'.
        return self._stack.enter_context(domain(f"stall-{self._number}-{name}", self._out, start_server=True))

    def start_idle(
        self, count: int, name: str = "other", environment: Mapping[str, str] | None = None
    ) -> None:
        """Start this many idle clients in a domain of this name; `own` is the offender's."""
        home = self.own_domain if name == "own" else self._domain(name)
        idle_clients = [
            Client("starter", self._cubin, "0", env={**home.env, **(environment or {})}) for _ in range(count)
        ]
        self._stack.enter_context(clients(*idle_clients))
        for client in idle_clients:
            client.wait("checked", timeout_s=20)

    def short_lived(self, count: int) -> Client:
        """Start a client before the others, and end it before the fault."""
        client = self.own_domain.client("starter", self._cubin, "0")
        self._stack.enter_context(clients(client))
        client.wait("checked", timeout_s=20)
        self.start_idle(count)
        return client

    def offender(self, kind: str) -> Client:
        client = self.own_domain.client("offender", self._cubin, kind)
        self._stack.enter_context(clients(client))
        client.wait("ready", timeout_s=20)
        return client

    def stall_ms(self, offender: Client) -> float:
        """Return the bystander's longest round around the offender's fault, to 2 ms."""
        self._ask()
        offender.say("go")
        offender.wait("fired", "error")
        time.sleep(WATCHED_S)
        return self._ask()

    def _ask(self) -> float:
        self._bystander.forget()
        self._bystander.say("report")
        return float(self._bystander.wait("alive", timeout_s=20)["longest_ms"])


class Cases:
    def __init__(self, out: Path, cubin: Path, bystander: Client, rows: list[Any]) -> None:
        self._out, self._cubin, self._bystander, self._rows = out, cubin, bystander, rows

    def _new(self) -> Case:
        return Case(self._out, self._cubin, self._bystander, len(self._rows))

    def _row(self, what: str, kind: str, count: int, ms: float) -> None:
        self._rows.append({"what": what, "kind": kind, "contexts": count, "stall ms": round(ms, 1)})

    def older(
        self,
        count: int,
        kind: str = "trap",
        name: str = "other",
        what: str = "older",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with self._new() as case:
            case.start_idle(count, name, environment)
            self._row(what, kind, count, case.stall_ms(case.offender(kind)))

    def younger(self, count: int) -> None:
        with self._new() as case:
            offender = case.offender("trap")
            case.start_idle(count)
            self._row("younger", "trap", count, case.stall_ms(offender))

    def gap(self, count: int) -> None:
        with self._new() as case:
            short_lived = case.short_lived(count)
            short_lived.kill()
            short_lived.reap()
            time.sleep(GONE_S)
            self._row("older, and a gap before them", "trap", count, case.stall_ms(case.offender("trap")))


def measure(out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml, rows: list[Any]) -> None:
    with domain("stall-bystander", out, start_server=True) as bystander_domain:
        # As few channels of its own as possible.
        bystander = Client("survivor", cubin, env={**bystander_domain.env, ALL: "1"})
        with clients(bystander):
            bystander.wait("ready", timeout_s=20)
            cases = Cases(out, cubin, bystander, rows)
            for count in (0, 3, 6, 12):
                cases.older(count)
            cases.older(6, name="own", what="older, in the same domain")
            for name, value in ((COPIES, "1"), (ALL, "1"), (ALL, "8")):
                cases.older(6, what=f"older, {name}={value}", environment={name: value})
            cases.younger(6)
            cases.gap(6)
            for kind in ("misaligned", "shared_window", "stack_overflow", "store"):
                for count in (0, 12):
                    cases.older(count, kind)
