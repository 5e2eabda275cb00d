"""What `status` says of fail-over: for each slot how many could be survived now, and why none. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpsd.core import failover
from mpsd.core.standby import OFFERED, Member, Standing
from mpsd.core.state import SERVING, Client, Domain, DomainState, Slot, State
from mpsd.model import FailoverMode
from mpsd.usernames import user_name

EXCLUSIVE = (
    "compute mode EXCLUSIVE_PROCESS admits one server, so no second domain: nvidia-smi -c 0 changes it"
)


def slot_rows(state: State, now: float) -> list[dict[str, Any]]:
    return [_slot(state, slot, now) for slot in state.slots.values()]


def _slot(state: State, slot: Slot, now: float) -> dict[str, Any]:
    members = [m for m in state.members.values() if _slot_of(state, m) == slot.id]
    standby = state.domains.get(slot.spare or "")
    used = standby if standby is not None and failover.willing(state, slot) else None
    why = _why_none(state, slot, standby, members, now)
    return {
        "id": slot.id,
        "gpus": list(slot.gpus),
        "uid": slot.uid,
        "active": slot.active,
        "standby": used.id if used is not None else None,
        "standby_state": used.state.value if used is not None else None,
        "generation": used.generation if used is not None else 0,
        "survivable": 0 if why else 1,
        "why_none": why,
        "programs": [_program(m) for m in sorted(members, key=lambda m: m.process.pid)],
    }


def _slot_of(state: State, member: Member) -> str | None:
    home = state.domains.get(member.home or "")
    return home.slot if home is not None else None


def _why_none(state: State, slot: Slot, standby: Domain | None, members: list[Member], now: float) -> str:
    """Why a fail-over would move nobody; empty when it would move somebody."""
    active = state.domains.get(slot.active or "")
    willing = failover.willing(state, slot)
    if state.policy.failover is FailoverMode.OFF:
        return "it is off by configuration ([failover] enabled)"
    if slot.exclusive:
        return EXCLUSIVE
    if state.copies_problem:
        return state.copies_problem
    if active is None or active.state not in SERVING:
        return "there is no active domain"
    if not willing:
        return "no program here is willing" + (f" ({len(members)} are elsewhere)" if members else "")
    if standby is None:
        return "there is no standby yet"
    if standby.state is not DomainState.WARM:
        return f"the standby is {standby.state.value}"
    limit = state.policy.moves_per_minute
    ready = [m for m in willing if m.standing is Standing.READY and m.generation == standby.generation]
    if not ready:
        return "no program is ready"
    if all(sum(now - t < failover.MINUTE_S for t in m.told) >= limit for m in ready):
        return f"every program was moved {limit} times within a minute"
    return ""


def _program(member: Member) -> dict[str, Any]:
    return {
        "pid": member.process.pid,
        "start_ticks": member.process.start_ticks,
        "uid": member.uid,
        "user": user_name(member.uid),
        # So that it is hidden from other users, as all rows with a command are.
        "command": "",
        **of_member(member),
    }


def of_member(member: Member) -> dict[str, Any]:
    return {
        "mode": member.mode.value,
        "standing": member.standing.value if member.connected else "not connected",
        "reason": member.reason,
        "generation": member.generation if member.standing in OFFERED else 0,
        "home": member.home,
        "opaque": list(member.opaque),
        "unsure": list(member.unsure),
        "ready_ms": member.ready_ms,
        "standby_bytes": member.bytes,
    }


def of_client(state: State, client: Client) -> Mapping[str, Any] | None:
    """For the row of a client: how its process may fail over; None where it did not say."""
    member = state.members.get(client.id.process)
    return None if member is None else {**of_member(member), "here": state.at_home(client)}
