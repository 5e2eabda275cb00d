"""Where memory ends: the same program takes all there is without the proxy, through it, and with its vault.

With the proxy it may end no more than 1 % earlier, with the same errors, and all of it must come back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from faultinject.history import clock
from faultinject.proxy.library import FAR_BYTES, MPSD_RUN, Libraries, read_stats
from faultinject.proxy.pairs import settled
from faultinject.rig import Rig
from faultinject.verdict import Finding, Verdict, findings, invalid, unknown, valid
from faultinject.worker import Worker
from mpsd.errors import DeadlineError, MpsdError

Law = Callable[[Mapping[str, Any]], tuple[Verdict, str]]

SIDES = ("plain", "forward", "vault")
DEADLINE_S = 60.0
BACK_S = 15.0
ZONES_S = 10.0
POLL_S = 0.02

LEAST_SHARE = 0.99
START_SHARE = 0.0025
"""By more than this part the GPU's free memory may not differ when two sides begin."""

BACK_BOUND = 64 << 20
"""What NVML may see above the memory before a side, when the next is begun: the driver keeps some."""

MOST_MANAGED = 48 << 30
"""Bytes of addresses that zones of one program may cover: more has cost the driver of a GPU dearly."""

OUT_OF_MEMORY = 2


def run(rig: Rig, libraries: Libraries, seed: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """One side after another. What goes wrong in the harness is told, never raised."""
    found: dict[str, Any] = {"sides": {}, "failure": ""}
    try:
        settled(rig)
        for side in SIDES:
            found["sides"][side] = _side(rig, libraries, side, seed)
            tell(f"memory's end, {side}: {line_of(found['sides'][side])}")
    except MpsdError as error:
        found["failure"] = f"{error.code}: {error}"
    return found


def _side(rig: Rig, libraries: Libraries, side: str, seed: int) -> dict[str, Any]:
    """What one program found. Raises DeadlineError."""
    used = rig.node.gpu_memory_used()
    program = _spawn(rig, libraries, side, seed)
    try:
        program.must("ready", "error", timeout=DEADLINE_S)
        if side == "vault":
            rig.mpsd.until(lambda status: bool((zones_of(status, program.pid) or {}).get("managed")), ZONES_S)
        program.tell("go")
        full = program.must("full", "error", timeout=DEADLINE_S)
        facts: dict[str, Any] = dict(full.data)
        if full.what == "full":
            facts |= {"stats": read_stats(program.pid), "zones": zones_of(rig.mpsd.status(), program.pid)}
            program.tell("free")
            last = program.must("done", "error", timeout=DEADLINE_S).data
            facts |= {"free_s": last.get("seconds"), **{k: v for k, v in last.items() if k != "seconds"}}
            program.must("gone", timeout=DEADLINE_S)
    finally:
        program.end()
    _await_back(rig, used)
    return facts


def _spawn(rig: Rig, libraries: Libraries, side: str, seed: int) -> Worker:
    name, options, service = f"memory-{side}", ("--seed", str(seed)), rig.mpsd
    if side == "plain":
        environment = libraries.plain(service.client_environment())
        return rig.spawn(name, "memory_end", *options, environment=environment)
    environment = libraries.proxied(
        service.environment, service.socket, vault=side == "vault", far_bytes=FAR_BYTES
    )
    return rig.spawn(name, "memory_end", *options, environment=environment, through=MPSD_RUN)


def zones_of(status: Mapping[str, Any], pid: int) -> Mapping[str, Any] | None:
    """What `status` says of the guard zones of this process; None where it has none."""
    return next((c["guard_zones"] for c in status["clients"] if c["pid"] == pid), None)


def _await_back(rig: Rig, used: int) -> None:
    """Until the GPU has the memory of the side before. Raises DeadlineError."""
    end = clock() + BACK_S
    while rig.node.gpu_memory_used() > used + BACK_BOUND:
        if clock() > end:
            raise DeadlineError(f"{rig.node.gpu_memory_used() - used} bytes of GPU memory did not come back")
        time.sleep(POLL_S)


def judge(seen: Mapping[str, Any]) -> list[Finding]:
    """What must hold of the stored facts (run's)."""
    laws: Sequence[Law] = (
        all_came_to_the_end,
        _as_much_memory,
        _same_errors,
        _all_came_back,
        _proxy_was_there,
        _zones_were_laid,
    )
    return of_sides(laws, seen)


def of_sides(laws: Sequence[Law], seen: Mapping[str, Any]) -> list[Finding]:
    """The first law is that all sides came to their end; what others need is not there where one did not."""
    is_whole = not seen["failure"] and all("had" in facts for facts in seen["sides"].values())
    return findings(laws if is_whole else laws[:1], seen)


def all_came_to_the_end(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    if seen["failure"]:
        return unknown(seen["failure"])
    bad = [f"{side}: {facts['text']}" for side, facts in seen["sides"].items() if "text" in facts]
    return invalid("; ".join(bad)) if bad else valid()


def _proxied(seen: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(side, seen["sides"][side]) for side in SIDES[1:]]


def _as_much_memory(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    plain = seen["sides"]["plain"]
    for side, facts in _proxied(seen):
        share = facts["had"] / plain["had"]
        begun = abs(1 - facts["free_before"] / plain["free_before"])
        if begun > START_SHARE:
            return unknown(f"{side} began with {begun:.2%} more or less free memory")
        if share < LEAST_SHARE:
            return invalid(f"{side} had {share:.2%} of what there was without the proxy")
    return valid()


def _same_errors(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    told = {side: (facts["codes"], facts["again"]) for side, facts in seen["sides"].items()}
    if told["plain"] != ([OUT_OF_MEMORY], []):
        return unknown(f"without the proxy the errors were {told['plain']}")
    wrong = {side: errors for side, errors in told.items() if errors != told["plain"]}
    return invalid(f"other errors than without the proxy: {wrong}") if wrong else valid()


def _all_came_back(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    for side, facts in _proxied(seen):
        if facts["free_again"] < LEAST_SHARE * facts["free_before"]:
            return invalid(f"{side}: {facts['free_again']} of {facts['free_before']} bytes were free again")
    return valid()


def _proxy_was_there(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    for side, facts in _proxied(seen):
        stats = facts["stats"]
        if not stats or stats["state"] != "active":
            return invalid(f"{side}: the proxy stepped aside: {stats and stats.get('reason')}")
        if bool(stats["vault_allocations"]) != (side == "vault"):
            return invalid(f"{side}: {stats['vault_allocations']} allocations were in the window")
    return valid()


def _zones_were_laid(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    zones = seen["sides"]["vault"]["zones"] or {}
    if not zones.get("managed"):
        return invalid(f"no guard zones lay around the memory: {dict(zones)}")
    managed = zones["managed_bytes"]
    return invalid(f"zones covered {managed} bytes of addresses") if managed > MOST_MANAGED else valid()


def line_of(facts: Mapping[str, Any]) -> str:
    """What one side had, in words."""
    if "text" in facts:
        return str(facts["text"])
    zones = facts.get("zones") or {}
    laid = f", {zones['managed']} managed and {zones['sparse']} sparse zones" if zones else ""
    return (
        f"{facts['had'] / 2**30:.2f} GiB in {facts['pieces']} pieces, {facts['free_after'] / 2**20:.1f} MiB "
        f"free then, after {facts['seconds']:.1f} s; given back in {facts['free_s']:.1f} s{laid}"
    )


def line(seen: Mapping[str, Any]) -> str:
    """All sides, and what the proxied ones had of what there is without."""
    if seen["failure"]:
        return str(seen["failure"])
    plain = seen["sides"]["plain"].get("had")
    told = []
    for side, facts in seen["sides"].items():
        share = f" ({facts['had'] / plain:.2%})" if plain and "had" in facts and side != "plain" else ""
        told.append(f"{side} {line_of(facts)}{share}")
    return "; ".join(told)
