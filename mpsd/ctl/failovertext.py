"""Fail-over as text: what could be survived, and what was. Pure; texts from programs are escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpsd.text import printable


def slots(view: Mapping[str, Any]) -> list[str]:
    """Lines of `status`; none where fail-over is off."""
    place = view.get("failover") or {}
    if not place.get("enabled"):
        return []
    lines = []
    if place.get("copies_bytes"):
        lines.append(f"driver copies: {place['copies_bytes'] / (1 << 20):.1f} MiB in {place['copies']}")
    for slot in view.get("slots", ()):
        lines += _slot(slot)
    return ["", *lines] if lines else []


def _slot(slot: Mapping[str, Any]) -> list[str]:
    many = f"{slot['survivable']} can be survived now"
    why = f" ({printable(slot['why_none'], 200)})" if slot["why_none"] else ""
    standby = "no standby"
    if slot["standby"]:
        standby = f"standby {slot['standby']} {slot['standby_state']}, generation {slot['generation']}"
    programs = slot["programs"]
    ready = sum(1 for p in programs if p["standing"] == "ready")
    lines = [f"fail-over of {slot['id']}: {many}{why}; {standby}; programs ready {ready}/{len(programs)}"]
    return lines + [f"  {_program(p)}" for p in programs]


def _program(program: Mapping[str, Any]) -> str:
    who = "another user's" if program["pid"] is None else f"pid {program['pid']}"
    text = f"{who} {program['standing']}, mode {program['mode']}, in {program['home']}"
    if program["standby_bytes"]:
        text += f", standby takes {program['standby_bytes'] / (1 << 20):.0f} MiB"
    if program["reason"]:
        text += f": {printable(program['reason'], 200)}"
    if program["opaque"]:
        text += f"; cannot be carried over: {printable(', '.join(program['opaque']), 400)}"
    if program["unsure"]:
        text += f"; cannot be undone: {printable(', '.join(program['unsure']), 400)}"
    return text


def record(shown: Mapping[str, Any]) -> list[str]:
    """One fail-over and what became of each program."""
    where = f"to {shown['to']} (generation {shown['generation']})" if shown["to"] else "to nowhere"
    fault = f", fault #{shown['fault']}" if shown["fault"] is not None else ""
    kind = PLANNED.get(shown["trigger"], "planned") if shown["planned"] else f"after {shown['trigger']}"
    lines = [f"#{shown['id']} {shown['time']} from {shown['domain']} {where}, {kind}{fault}"]
    times = f"  decided   {shown['decision_ms']:.3f} ms after the first sign"
    if shown["sent_ms"] is not None:
        times += f", told {shown['sent_ms']:.3f} ms after the driver's own stamp"
    return [*lines, times, *[f"  {_fate(fate)}" for fate in shown["clients"]]]


PLANNED = {"poison": "planned: a dead client's kernel does not end there"}

FOUND = {
    "own": "found that the exception was in its own code",
    "others": "found that the exception was in somebody else's code",
    "first": "had its error as who made a trap has",
}


def _fate(fate: Mapping[str, Any]) -> str:
    who = "another user's client" if fate["pid"] is None else f"pid {fate['pid']}"
    text = f"{fate['outcome']:<9} {who} ({printable(fate['command'], 60)})"
    if fate["suspect"]:
        text += ", a suspect"
    # Records of an earlier mpsd, in the same journal, know neither this nor turns.
    if fate.get("whose", "unknown") in FOUND:
        text += f", {FOUND[fate['whose']]}"
    if fate["why"]:
        text += f": {printable(fate['why'], 200)}"
    if fate["held_ms"] is not None:
        text += (
            f": held {fate['held_ms']:.3f} ms, fence {fate['fence_ms']:.3f} ms, first call "
            f"{fate['first_ms']:.3f} ms after it was told; {fate['restored_bytes']} bytes restored, "
            f"{fate['replayed']} launches done again"
        )
    if fate.get("turn_ms") is not None:
        text += f"; its turn came after {fate['turn_ms']:.3f} ms"
    if fate.get("done_ms") is not None:
        text += f", and was over after {fate['done_ms']:.3f}"
    return text


def records(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines: list[str] = []
    for row in rows:
        lines += [*record(row), ""]
    return lines or ["no fail-overs"]
