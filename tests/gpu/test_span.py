"""A domain that spans two GPUs (`[domains] span`), and two clients that each use both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from faultinject.registry.history import History
from faultinject.rig.node import Node
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from tests.support.waiting import DEADLINE_S, until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def spanning(node: Node, gpus: list[str]) -> Iterator[Rig]:
    quoted = ", ".join(f'"{uuid}"' for uuid in gpus)
    with History() as history, Rig(node, "mpsd", history, settings={"domains.span": f"[[{quoted}]]"}) as rig:
        yield rig
    assert rig.leftovers == []


def both(rig: Rig, name: str, seed: int) -> Worker:
    worker = rig.spawn(name, "twogpus", "--seed", str(seed))
    said = worker.require("ready", "error", timeout=DEADLINE_S)
    assert said.what == "ready", (said.data, rig.error_text(worker))
    assert said.data["on_mps"] is not False
    return worker


def attached(rig: Rig, *workers: Worker) -> bool:
    known = {c["pid"] for c in rig.mpsd.status()["clients"] if c["state"] == "attached"}
    return {w.pid for w in workers} <= known


def record_of(rig: Rig, pid: int) -> Mapping[str, Any] | None:
    found = [f for f in rig.mpsd.ask(lambda c: c.faults()) if f["offender"] and f["offender"]["pid"] == pid]
    return found[-1] if found else None


def unharmed(worker: Worker) -> None:
    worker.tell("stop")
    said = worker.require("done", "error", timeout=DEADLINE_S)
    assert (said.what, said.data["wrong"]) == ("done", 0), said.data
    assert all(steps >= 1 for steps in said.data["steps"])


def test_two_clients_on_both_gpus_and_a_fault_of_one(spanning: Rig, gpus: list[str]) -> None:
    rig = spanning
    domain = rig.mpsd.active()
    assert domain is not None and set(domain["gpus"]) == set(gpus)
    assert domain["reach"].endswith("on 2 GPUs"), domain["reach"]
    first, second = both(rig, "both-0", 1), both(rig, "both-1", 1000)
    until(lambda: attached(rig, first, second), "both are attached")
    # Without a standby domain mpsd keeps the domain if it recovers.
    assert rig.mpsd.until_standby(DEADLINE_S) is not None
    second.tell("go")
    record = until(lambda: record_of(rig, second.pid), "the fault is named") or {}
    assert (record["class"], record["confidence"]) == ("mmu-invalid-address", "certain")
    second.require("error", timeout=DEADLINE_S)
    # Both clients share the fault: the neighbour has seen it too, with no wrong result before.
    lost = first.require("error", timeout=DEADLINE_S)
    assert lost.data["wrong"] == 0

    def fresh() -> bool:
        active = rig.mpsd.active()
        return active is not None and active["id"] != domain["id"] and set(active["gpus"]) == set(gpus)

    until(fresh, "a domain on both GPUs has taken over")
    third = both(rig, "both-2", 2000)
    until(lambda: attached(rig, third), "the newcomer is attached")
    unharmed(third)
