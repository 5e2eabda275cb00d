"""Fail-over as text: protection now, and the history. Pure functions; texts from programs are escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpsd.base.text import printable


def slots(view: Mapping[str, Any]) -> list[str]:
    """Return the lines of `status`; none if fail-over is off."""
    place = view.get("failover") or {}
    if not place.get("enabled"):
        return []
    lines = []
    if place.get("copies_bytes"):
        lines.append(f"driver files: {place['copies_bytes'] / (1 << 20):.1f} MiB in {place['copies']}")
    for slot in view.get("slots", ()):
        lines += _slot(slot)
    return ["", *lines] if lines else []


def _slot(slot: Mapping[str, Any]) -> list[str]:
    state = "protected" if slot["survivable"] else "not protected"
    why = f" ({printable(slot['why_none'], 200)})" if slot["why_none"] else ""
    standby = "no standby domain"
    if slot["standby"]:
        standby = f"standby domain {slot['standby']} {slot['standby_state']}, generation {slot['generation']}"
    programs = slot["programs"]
    ready = sum(1 for p in programs if p["standing"] == "ready")
    lines = [
        f"fail-over of {slot['id']}: {state}{why}; {standby}; protected programs {ready}/{len(programs)}"
    ]
    return lines + [f"  {_program(p)}" for p in programs]


STANDINGS = {
    "ready": "protected",
    "no standby": "not protected (no standby context)",
    "preparing": "not protected yet (its standby context is in preparation)",
    "not ready": "not protected",
    "left behind": "not protected (stayed in a domain that faulted)",
    "not connected": "not protected (its proxy is not connected)",
}
"""Text of a program's `standing`; any other standing is shown as it is."""


def _program(program: Mapping[str, Any]) -> str:
    name = "another user's program" if program["pid"] is None else f"pid {program['pid']}"
    standing = STANDINGS.get(program["standing"], program["standing"])
    # A daemon of an earlier release does not send this key.
    if program.get("left"):
        left = "" if program["left"] == "by_hand" else f" (left fail-over, {program['left']} budget)"
        standing = f"not protected{left}"
    text = f"{name} {standing}, mode {program['mode']}, domain {program['home']}"
    if program["standby_bytes"]:
        text += f", standby context {program['standby_bytes'] / (1 << 20):.0f} MiB"
    if program["reason"]:
        text += f": {printable(program['reason'], 200)}"
    if program["opaque"]:
        text += f"; cannot be carried over: {printable(', '.join(program['opaque']), 400)}"
    if program["unsure"]:
        text += f"; cannot be rolled back: {printable(', '.join(program['unsure']), 400)}"
    return text


def record(shown: Mapping[str, Any]) -> list[str]:
    """Return the lines of one fail-over: head, times, outcome of each program."""
    where = f"to {shown['to']} (generation {shown['generation']})" if shown["to"] else "to no domain"
    fault = f", fault #{shown['fault']}" if shown["fault"] is not None else ""
    kind = KINDS.get(shown["trigger"], "planned" if shown["planned"] else f"after {shown['trigger']}")
    lines = [f"#{shown['id']} {shown['time']} from {shown['domain']} {where}, {kind}{fault}"]
    if shown["trigger"] == UNSEEN:
        # mpsd neither saw the fault nor ordered the move.
        return [*lines, *[f"  {_outcome(fate)}" for fate in shown["clients"]]]
    times = f"  decided   {shown['decision_ms']:.3f} ms after the first sign of the fault"
    if shown["sent_ms"] is not None:
        times += f"; order sent {shown['sent_ms']:.3f} ms after the driver's timestamp"
    return [*lines, times, *[f"  {_outcome(fate)}" for fate in shown["clients"]]]


UNSEEN = "moved without mpsd"
KINDS = {
    UNSEEN: "while mpsd did not run",
    "poison": "planned: the kernel of an exited client does not end in it",
    "trial": "to replay the work of a suspect where no other client works",
    "trial over": "planned: the replay of the suspect ended without a fault",
}

FAULT_ORIGINS = {
    "own": "found the faulting instruction in its own code",
    "others": "found the faulting instruction outside its own code",
    "first": "got its error as early as the offender of a trap does",
    "no_sign": "got its error later than the offender of a trap does",
}


def _outcome(fate: Mapping[str, Any]) -> str:
    name = "another user's client" if fate["pid"] is None else f"pid {fate['pid']}"
    text = f"{fate['outcome']:<9} {name} ({printable(fate['command'], 60)})"
    if fate["suspect"]:
        text += ", a suspect"
    # Records that an earlier version wrote lack this key and those of turns.
    if fate.get("whose", "unknown") in FAULT_ORIGINS:
        text += f", {FAULT_ORIGINS[fate['whose']]}"
    if fate["why"]:
        text += f": {printable(fate['why'], 200)}"
    if fate["held_ms"] is not None:
        text += (
            f": calls held {fate['held_ms']:.3f} ms, fence {fate['fence_ms']:.3f} ms, first call "
            f"{fate['first_ms']:.3f} ms after the order to move; {fate['restored_bytes']} bytes restored, "
            f"{fate['replayed']} launches replayed"
        )
    if fate.get("turn_ms") is not None:
        text += f"; its turn began after {fate['turn_ms']:.3f} ms"
    if fate.get("done_ms") is not None:
        text += f"; its replay ended after {fate['done_ms']:.3f} ms"
    return text


def records(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the fail-over history."""
    lines: list[str] = []
    for row in rows:
        lines += [*record(row), ""]
    return lines or ["no fail-overs"]
