"""A program takes all memory there is beside others that are ready for a fail-over.

It may have as much as beside programs that are not, for their standbys and room for copies give way; and they
get theirs again afterwards.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from faultinject.history import clock
from faultinject.proxy.library import MPSD_RUN, Libraries
from faultinject.proxy.memory_end import DEADLINE_S, LEAST_SHARE, Law, all_came_to_the_end, of_sides
from faultinject.proxy.pairs import settled
from faultinject.rig import Rig
from faultinject.verdict import Finding, Verdict, invalid, unknown, valid
from faultinject.worker import Worker
from mpsd.errors import DeadlineError, MpsdError

SIDES = ("off", "exact")
"""The mode of the others; the program that takes all is in mode keep each time."""

SILENT = "silent"
"""Beside others in mode exact it is without the proxy, and cannot ask: it grows slowly where little is left.
On a real GPU alone: what the stand-in's programs have is not the simulated node's memory."""

LEAVE = 256 << 20

NEIGHBOURS = 3
UP_S = 60.0
AGAIN_S = 90.0
"""A standby that went for its memory is offered again half a minute later."""

GAVE = "another program needed its memory"
CONTEXT_BYTES = 256 << 20
"""Of the stand-in driver's contexts."""


def run(rig: Rig, libraries: Libraries, seed: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """One side after the other. What goes wrong in the harness is told, never raised."""
    found: dict[str, Any] = {"sides": {}, "failure": ""}
    try:
        for side in SIDES if libraries.driver is not None else (*SIDES, SILENT):
            settled(rig)
            with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as folder:
                found["sides"][side] = _Side(rig, libraries, side, seed, Path(folder)).run()
            tell(f"crowded, beside programs in mode {side}: {line_of(found['sides'][side])}")
    except MpsdError as error:
        found["failure"] = f"{error.code}: {error}"
    return found


class _Side:
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
        neighbours = [self._neighbour(number) for number in range(NEIGHBOURS)]
        try:
            for one in neighbours:
                one.must("ready", timeout=UP_S)
            if self._mode != "off":
                self._await_ready(neighbours)
            facts: dict[str, Any] = {"before": self._standings(neighbours)}
            facts |= self._take_all(neighbours)
            ended = clock()
            is_back = self._mode == "off" or self._are_ready(neighbours, AGAIN_S)
            facts["again_s"] = round(clock() - ended, 3) if is_back else None
            facts["after"] = self._standings(neighbours)
            for one in neighbours:
                one.tell("stop")
            done = [one.must("done", "error", timeout=UP_S) for one in neighbours]
            for one in neighbours:
                one.must("gone", timeout=UP_S)
        finally:
            for one in neighbours:
                one.end()
        facts["wrong"] = [word.data.get("wrong", 0) for word in done]
        facts["lost"] = sum(word.what != "done" for word in done)
        return facts

    def _environment(self, mode: str) -> dict[str, str]:
        service = self._rig.mpsd
        found = self._libraries.proxied(service.environment, service.socket, vault=True)
        return {**found, **self._shared, "MPSD_FAILOVER": mode}

    def _neighbour(self, number: int) -> Worker:
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

    def _take_all(self, neighbours: Sequence[Worker]) -> dict[str, Any]:
        """Raises DeadlineError."""
        taker = self._taker()
        try:
            taker.must("ready", "error", timeout=DEADLINE_S)
            if self._side == "exact":
                # Its own standby is there, too, and goes first.
                self._await_ready([taker])
            taker.tell("go")
            full = taker.must("full", "error", timeout=DEADLINE_S)
            facts = {**full.data, "full": self._standings(neighbours)}
            if full.what == "full":
                taker.tell("free")
                last = taker.must("done", "error", timeout=DEADLINE_S).data
                facts |= {"free_s": last.get("seconds"), "errors_again": last.get("again")}
                taker.must("gone", timeout=DEADLINE_S)
        finally:
            taker.end()
        return facts

    def _taker(self) -> Worker:
        options, name = ("--seed", str(self._seed)), f"taker-{self._side}"
        if self._side != SILENT:
            environment = self._environment("keep")
            return self._rig.spawn(name, "memory_end", *options, environment=environment, through=MPSD_RUN)
        environment = self._libraries.plain(self._rig.mpsd.client_environment())
        return self._rig.spawn(name, "memory_end", *options, "--leave", str(LEAVE), environment=environment)

    def _standings(self, workers: Sequence[Worker]) -> list[Mapping[str, Any]]:
        kept = ("standing", "reason", "standby_bytes", "opaque", "unsure")
        slots = self._rig.mpsd.status()["slots"]
        known = {p["pid"]: p for slot in slots for p in slot["programs"]}
        return [{key: known.get(worker.pid, {}).get(key) for key in kept} for worker in workers]

    def _are_ready(self, workers: Sequence[Worker], limit_s: float) -> bool:
        def are_ready(_status: Mapping[str, Any]) -> bool:
            return all(one["standing"] == "ready" for one in self._standings(workers))

        return self._rig.mpsd.until(are_ready, limit_s) is not None

    def _await_ready(self, workers: Sequence[Worker]) -> None:
        """Raises DeadlineError."""
        if not self._are_ready(workers, UP_S):
            raise DeadlineError(f"not ready after {UP_S:g} s: {self._standings(workers)}")


def judge(seen: Mapping[str, Any]) -> list[Finding]:
    """What must hold of the stored facts (run's)."""
    laws: Sequence[Law] = (
        all_came_to_the_end,
        _as_much_memory,
        _others_gave,
        _standbys_came_back,
        _nobody_was_harmed,
    )
    return of_sides(laws, seen)


def _full(seen: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The sides on which the others were ready; the first reports have one of them."""
    return {side: facts for side, facts in seen["sides"].items() if side != "off"}


def _share(seen: Mapping[str, Any], side: str = "exact") -> float:
    return float(seen["sides"][side]["had"] / seen["sides"]["off"]["had"])


def _as_much_memory(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    for side, facts in _full(seen).items():
        if not sum(one["standby_bytes"] or 0 for one in facts["before"]):
            return unknown("the standbys of the others took no memory, by their own word")
        if (share := _share(seen, side)) < LEAST_SHARE:
            return invalid(
                f"beside programs in mode exact it had {share:.2%} of what it has beside others ({side})"
            )
    return valid()


def _others_gave(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    reasons = {one["reason"] for facts in _full(seen).values() for one in facts["full"]}
    return valid() if reasons == {GAVE} else invalid(f"the others' standbys: {sorted(map(str, reasons))}")


def _standbys_came_back(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    for facts in _full(seen).values():
        if facts["again_s"] is None:
            found = [(one["standing"], one["reason"]) for one in facts["after"]]
            return invalid(f"after {AGAIN_S:g} s: {found}")
    return valid()


def _nobody_was_harmed(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    for side, facts in seen["sides"].items():
        if facts["lost"] or any(facts["wrong"]):
            return invalid(f"beside {side}: {facts['lost']} lost, wrong results {facts['wrong']}")
    return valid()


def line_of(facts: Mapping[str, Any]) -> str:
    """What one side had, in words."""
    if "text" in facts:
        return str(facts["text"])
    spared = sum(one["standby_bytes"] or 0 for one in facts["before"])
    said = f"{facts['had'] / 2**30:.2f} GiB after {facts['seconds']:.1f} s"
    if spared:
        back = (
            "did not come back" if facts["again_s"] is None else f"were back after {facts['again_s']:.1f} s"
        )
        said += f", of {spared / 2**30:.2f} in others' standbys, which {back}"
    return said


def line(seen: Mapping[str, Any]) -> str:
    """Both sides."""
    if seen["failure"]:
        return str(seen["failure"])
    told = []
    for side, facts in seen["sides"].items():
        who = (
            "one without the proxy, beside programs in mode exact,"
            if side == SILENT
            else f"beside programs in mode {side}"
        )
        has_share = side != "off" and all("had" in each for each in seen["sides"].values())
        told.append(f"{who} {line_of(facts)}" + (f" ({_share(seen, side):.2%})" if has_share else ""))
    return "; ".join(told)
