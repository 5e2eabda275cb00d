"""A program allocates all GPU memory beside programs with standby contexts.

It must get as much as beside programs without, because their standby contexts and snapshot buffers are
released. They are set up again afterwards.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from faultinject.campaigns.proxy.memory_end import (
    DEADLINE_S,
    LEAST_SHARE,
    Law,
    all_came_to_the_end,
    judge_sides,
)
from faultinject.campaigns.proxy.pairs import wait_for_standby
from faultinject.registry.history import clock
from faultinject.registry.verdicts import (
    Finding,
    Verdict,
    invalid,
    unknown,
    valid,
)
from faultinject.rig.libraries import MPSD_RUN, Libraries
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.base.errors import DeadlineError, MpsdError

SIDES = ("off", "exact")
"""The mode of the other programs; the program that allocates is in mode keep each time."""

SILENT = "silent"
"""Beside others in mode exact it runs without the proxy and cannot request memory.

So it grows slowly at the end. On a real GPU alone: the stand-in's memory is not that of the simulated node.
"""

LEAVE = 256 << 20

NEIGHBOURS = 3
UP_S = 60.0
AGAIN_S = 90.0
"""mpsd offers a released standby context again half a minute later."""

RELEASED_REASON = "another program needed its memory"
CONTEXT_BYTES = 256 << 20
"""Bytes of a standby context of the stand-in driver."""


def run(rig: Rig, libraries: Libraries, seed: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run one side after the other. A failure of the harness is in the result, not raised."""
    found: dict[str, Any] = {"sides": {}, "failure": ""}
    try:
        for side in SIDES if libraries.driver is not None else (*SIDES, SILENT):
            wait_for_standby(rig)
            with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as folder:
                found["sides"][side] = _Run(rig, libraries, side, seed, Path(folder)).run()
            tell(f"crowded, beside programs in mode {side}: {side_summary(found['sides'][side])}")
    except MpsdError as error:
        found["failure"] = f"{error.code}: {error}"
    return found


class _Run:
    def __init__(self, rig: Rig, libraries: Libraries, side: str, seed: int, folder: Path) -> None:
        self._rig, self._libraries, self._side, self._seed = rig, libraries, side, seed
        self._mode = side if side != SILENT else "exact"
        self._shared: dict[str, str] = {}
        if libraries.driver is not None:
            used = folder / "used"
            used.write_bytes(bytes(8))
            self._shared = {"MPSD_STANDIN_USED": str(used), "MPSD_STANDIN_CONTEXT": str(CONTEXT_BYTES)}

    def run(self) -> dict[str, Any]:
        """Raises DeadlineError."""
        neighbours = [self._start_neighbour(number) for number in range(NEIGHBOURS)]
        try:
            for neighbour in neighbours:
                neighbour.require("ready", timeout=UP_S)
            if self._mode != "off":
                self._await_ready(neighbours)
            facts: dict[str, Any] = {"before": self._standings(neighbours)}
            facts |= self._allocate_all(neighbours)
            ended = clock()
            is_back = self._mode == "off" or self._are_ready(neighbours, AGAIN_S)
            facts["again_s"] = round(clock() - ended, 3) if is_back else None
            facts["after"] = self._standings(neighbours)
            for neighbour in neighbours:
                neighbour.tell("stop")
            done = [neighbour.require("done", "error", timeout=UP_S) for neighbour in neighbours]
            for neighbour in neighbours:
                neighbour.require("gone", timeout=UP_S)
        finally:
            for neighbour in neighbours:
                neighbour.end()
        facts["wrong"] = [last_message.data.get("wrong", 0) for last_message in done]
        facts["lost"] = sum(last_message.what != "done" for last_message in done)
        return facts

    def _environment(self, mode: str) -> dict[str, str]:
        service = self._rig.mpsd
        found = self._libraries.proxied(service.environment, service.socket, vault=True)
        return {**found, **self._shared, "MPSD_FAILOVER": mode}

    def _start_neighbour(self, number: int) -> Worker:
        return self._rig.spawn(
            f"{self._side}-{number}",
            "server",
            "--seed",
            str(number),
            *self._libraries.server_options,
            environment=self._environment(self._mode),
            through=MPSD_RUN,
            device="standin" if self._libraries.driver else None,
        )

    def _allocate_all(self, neighbours: Sequence[Worker]) -> dict[str, Any]:
        """Raises DeadlineError."""
        allocator = self._start_allocator()
        try:
            allocator.require("ready", "error", timeout=DEADLINE_S)
            if self._side == "exact":
                # Its own standby context counts too, and is released first.
                self._await_ready([allocator])
            allocator.tell("go")
            full = allocator.require("full", "error", timeout=DEADLINE_S)
            facts = {**full.data, "full": self._standings(neighbours)}
            if full.what == "full":
                allocator.tell("free")
                last = allocator.require("done", "error", timeout=DEADLINE_S).data
                facts |= {"free_s": last.get("seconds"), "errors_again": last.get("again")}
                allocator.require("gone", timeout=DEADLINE_S)
        finally:
            allocator.end()
        return facts

    def _start_allocator(self) -> Worker:
        options, name = ("--seed", str(self._seed)), f"taker-{self._side}"
        if self._side != SILENT:
            environment = self._environment("keep")
            return self._rig.spawn(name, "memory_end", *options, environment=environment, through=MPSD_RUN)
        environment = self._libraries.plain(self._rig.mpsd.client_environment())
        return self._rig.spawn(name, "memory_end", *options, "--leave", str(LEAVE), environment=environment)

    def _standings(self, workers: Sequence[Worker]) -> list[Mapping[str, Any]]:
        keys = ("standing", "reason", "standby_bytes", "opaque", "unsure")
        slots = self._rig.mpsd.status()["slots"]
        known = {p["pid"]: p for slot in slots for p in slot["programs"]}
        return [{key: known.get(worker.pid, {}).get(key) for key in keys} for worker in workers]

    def _are_ready(self, workers: Sequence[Worker], limit_s: float) -> bool:
        def are_ready(_status: Mapping[str, Any]) -> bool:
            return all(one["standing"] == "ready" for one in self._standings(workers))

        return self._rig.mpsd.until(are_ready, limit_s) is not None

    def _await_ready(self, workers: Sequence[Worker]) -> None:
        """Raises DeadlineError."""
        if not self._are_ready(workers, UP_S):
            raise DeadlineError(f"not ready after {UP_S:g} s: {self._standings(workers)}")


def judge(seen: Mapping[str, Any]) -> list[Finding]:
    """Return what must hold of the stored facts (run's)."""
    laws: Sequence[Law] = (
        all_came_to_the_end,
        _as_much_memory,
        _others_released,
        _standbys_came_back,
        _others_were_unharmed,
    )
    return judge_sides(laws, seen)


def _sides_with_standby(seen: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the sides with standby contexts; older reports have one of them."""
    return {side: facts for side, facts in seen["sides"].items() if side != "off"}


def _share(seen: Mapping[str, Any], side: str = "exact") -> float:
    return float(seen["sides"][side]["had"] / seen["sides"]["off"]["had"])


def _as_much_memory(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    for side, facts in _sides_with_standby(seen).items():
        if not sum(one["standby_bytes"] or 0 for one in facts["before"]):
            return unknown("the standby contexts of the other programs took no memory, as they report")
        if (share := _share(seen, side)) < LEAST_SHARE:
            return invalid(
                f"beside programs in mode exact it allocated {share:.2%} of its memory beside others ({side})"
            )
    return valid()


def _others_released(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    reasons = {one["reason"] for facts in _sides_with_standby(seen).values() for one in facts["full"]}
    return (
        valid()
        if reasons == {RELEASED_REASON}
        else invalid(f"the standby contexts of the others: {sorted(map(str, reasons))}")
    )


def _standbys_came_back(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    for facts in _sides_with_standby(seen).values():
        if facts["again_s"] is None:
            found = [(one["standing"], one["reason"]) for one in facts["after"]]
            return invalid(f"after {AGAIN_S:g} s: {found}")
    return valid()


def _others_were_unharmed(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    for side, facts in seen["sides"].items():
        if facts["lost"] or any(facts["wrong"]):
            return invalid(f"beside {side}: {facts['lost']} lost, wrong results {facts['wrong']}")
    return valid()


def side_summary(facts: Mapping[str, Any]) -> str:
    """Return what one side allocated, in words."""
    if "text" in facts:
        return str(facts["text"])
    released = sum(one["standby_bytes"] or 0 for one in facts["before"])
    text = f"{facts['had'] / 2**30:.2f} GiB after {facts['seconds']:.1f} s"
    if released:
        back = (
            "were not set up again"
            if facts["again_s"] is None
            else f"were set up again after {facts['again_s']:.1f} s"
        )
        text += f", of {released / 2**30:.2f} from standby contexts of others, which {back}"
    return text


def summary(seen: Mapping[str, Any]) -> str:
    """Return both sides."""
    if seen["failure"]:
        return str(seen["failure"])
    parts = []
    for side, facts in seen["sides"].items():
        setting = (
            "one without the proxy, beside programs in mode exact,"
            if side == SILENT
            else f"beside programs in mode {side}"
        )
        has_share = side != "off" and all("had" in each for each in seen["sides"].values())
        parts.append(
            f"{setting} {side_summary(facts)}" + (f" ({_share(seen, side):.2%})" if has_share else "")
        )
    return "; ".join(parts)
