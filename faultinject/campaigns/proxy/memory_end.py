"""The end of GPU memory: the same program allocates all of it without the proxy, through it, and with the
vault.

With the proxy it may get at most 1 % less, must get the same errors, and all of it must be free again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from faultinject.campaigns.proxy.pairs import wait_for_standby
from faultinject.programs.basics.statistics import read_stats
from faultinject.registry.history import clock
from faultinject.registry.verdicts import (
    Finding,
    Verdict,
    findings,
    invalid,
    unknown,
    valid,
)
from faultinject.rig.libraries import FAR_BYTES, MPSD_RUN, Libraries
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.base.errors import DeadlineError, MpsdError

Law = Callable[[Mapping[str, Any]], tuple[Verdict, str]]

SIDES = ("plain", "forward", "vault")
DEADLINE_S = 60.0
BACK_S = 15.0
ZONES_S = 10.0
POLL_S = 0.02

LEAST_SHARE = 0.99
START_SHARE = 0.0025
"""The largest difference of free memory at the start of two sides, as a share."""

BACK_BOUND = 64 << 20
"""Memory that NVML may show above the memory before a side when the next begins: the driver keeps some."""

MAX_MANAGED_BYTES = 48 << 30
"""Bytes of addresses that the zones of one program may cover: more slows the driver down."""

OUT_OF_MEMORY = 2


def run(rig: Rig, libraries: Libraries, seed: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run one side after another. A failure of the harness is in the result, not raised."""
    found: dict[str, Any] = {"sides": {}, "failure": ""}
    try:
        wait_for_standby(rig)
        for side in SIDES:
            found["sides"][side] = _side(rig, libraries, side, seed)
            tell(f"all GPU memory, {side}: {side_summary(found['sides'][side])}")
    except MpsdError as error:
        found["failure"] = f"{error.code}: {error}"
    return found


def _side(rig: Rig, libraries: Libraries, side: str, seed: int) -> dict[str, Any]:
    """Run one program and return its findings. Raises DeadlineError."""
    used = rig.node.gpu_memory_used()
    program = _spawn(rig, libraries, side, seed)
    try:
        program.require("ready", "error", timeout=DEADLINE_S)
        if side == "vault":
            rig.mpsd.until(lambda status: bool((zones_of(status, program.pid) or {}).get("managed")), ZONES_S)
        program.tell("go")
        full = program.require("full", "error", timeout=DEADLINE_S)
        facts: dict[str, Any] = dict(full.data)
        if full.what == "full":
            facts |= {"stats": read_stats(program.pid), "zones": zones_of(rig.mpsd.status(), program.pid)}
            program.tell("free")
            last = program.require("done", "error", timeout=DEADLINE_S).data
            facts |= {"free_s": last.get("seconds"), **{k: v for k, v in last.items() if k != "seconds"}}
            program.require("gone", timeout=DEADLINE_S)
    finally:
        program.end()
    _await_memory_release(rig, used)
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
    """Return what `status` says of the guard zones of this process; None without any."""
    return next((c["guard_zones"] for c in status["clients"] if c["pid"] == pid), None)


def _await_memory_release(rig: Rig, used: int) -> None:
    """Wait until the memory of the last side is free. Raises DeadlineError."""
    end = clock() + BACK_S
    while rig.node.gpu_memory_used() > used + BACK_BOUND:
        if clock() > end:
            raise DeadlineError(f"{rig.node.gpu_memory_used() - used} bytes of GPU memory were not released")
        time.sleep(POLL_S)


def judge(seen: Mapping[str, Any]) -> list[Finding]:
    """Return what must hold of the stored facts (run's)."""
    laws: Sequence[Law] = (
        all_came_to_the_end,
        _as_much_memory,
        _same_errors,
        _all_came_back,
        _proxy_was_there,
        _zones_were_laid,
    )
    return judge_sides(laws, seen)


def judge_sides(laws: Sequence[Law], seen: Mapping[str, Any]) -> list[Finding]:
    """The first law says that all sides finished; the others need their figures."""
    is_complete = not seen["failure"] and all("had" in facts for facts in seen["sides"].values())
    return findings(laws if is_complete else laws[:1], seen)


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
        difference = abs(1 - facts["free_before"] / plain["free_before"])
        if difference > START_SHARE:
            return unknown(f"{side} began with {difference:.2%} more or less free memory")
        if share < LEAST_SHARE:
            return invalid(f"{side} had {share:.2%} of what there was without the proxy")
    return valid()


def _same_errors(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    errors_by_side = {side: (facts["codes"], facts["again"]) for side, facts in seen["sides"].items()}
    if errors_by_side["plain"] != ([OUT_OF_MEMORY], []):
        return unknown(f"without the proxy the errors were {errors_by_side['plain']}")
    wrong = {side: errors for side, errors in errors_by_side.items() if errors != errors_by_side["plain"]}
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
            return invalid(f"{side}: the proxy passes calls through: {stats and stats.get('reason')}")
        if bool(stats["vault_allocations"]) != (side == "vault"):
            return invalid(f"{side}: {stats['vault_allocations']} allocations were in the window")
    return valid()


def _zones_were_laid(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    zones = seen["sides"]["vault"]["zones"] or {}
    if not zones.get("managed"):
        return invalid(f"the memory had no guard zones: {dict(zones)}")
    managed = zones["managed_bytes"]
    return invalid(f"zones covered {managed} bytes of addresses") if managed > MAX_MANAGED_BYTES else valid()


def side_summary(facts: Mapping[str, Any]) -> str:
    """Return what one side allocated, in words."""
    if "text" in facts:
        return str(facts["text"])
    zones = facts.get("zones") or {}
    zones_text = f", {zones['managed']} managed and {zones['sparse']} sparse zones" if zones else ""
    return (
        f"{facts['had'] / 2**30:.2f} GiB in {facts['pieces']} allocations, {facts['free_after'] / 2**20:.1f} "
        f"MiB left free, after {facts['seconds']:.1f} s; freed in {facts['free_s']:.1f} s{zones_text}"
    )


def summary(seen: Mapping[str, Any]) -> str:
    """Return all sides, and the shares of the proxied ones of the plain one."""
    if seen["failure"]:
        return str(seen["failure"])
    plain = seen["sides"]["plain"].get("had")
    parts = []
    for side, facts in seen["sides"].items():
        share = f" ({facts['had'] / plain:.2%})" if plain and "had" in facts and side != "plain" else ""
        parts.append(f"{side} {side_summary(facts)}{share}")
    return "; ".join(parts)
