"""The fail-over part of `status`: for each slot whether it is protected now, or why not. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpsd.api.usernames import user_name
from mpsd.base.errors import NotReadyError, UnsupportedError, UsageError
from mpsd.base.model import FailoverMode, ProcessInstance
from mpsd.base.protection import ProtectionLevel
from mpsd.core.failover import plan
from mpsd.core.failover.participants import OFFERED, Participant, Standing, Turn
from mpsd.core.state import SERVING, Client, Domain, DomainState, Slot, State

EXCLUSIVE = (
    "compute mode EXCLUSIVE_PROCESS admits one server, so no standby domain; nvidia-smi -c 0 admits more"
)


def slot_rows(state: State, now: float) -> list[dict[str, Any]]:
    return [_slot(state, slot, now) for slot in state.slots.values()]


def moves_programs(state: State, domain: Domain, now: float) -> bool:
    """Return whether a fault of this domain would move at least one program."""
    slot = state.slots[domain.slot]
    return slot.active == domain.id and not _why_unprotected(state, slot, _members(state, slot), now)


def _members(state: State, slot: Slot) -> list[Participant]:
    return [m for m in state.members.values() if _slot_of(state, m) == slot.id]


def _slot(state: State, slot: Slot, now: float) -> dict[str, Any]:
    members = _members(state, slot)
    standby = state.domains.get(slot.spare or "")
    used = standby if standby is not None and plan.participants_of(state, slot) else None
    why = _why_unprotected(state, slot, members, now)
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


def _slot_of(state: State, participant: Participant) -> str | None:
    home = state.domains.get(participant.home or "")
    return home.slot if home is not None else None


def _why_unprotected(state: State, slot: Slot, members: list[Participant], now: float) -> str:
    """Return why a fail-over would move no program; empty if it would move one."""
    standby = state.domains.get(slot.spare or "")
    active = state.domains.get(slot.active or "")
    willing = plan.participants_of(state, slot)
    if state.policy.failover is FailoverMode.OFF:
        return "the protection level of this node is below fail-over (mpsd-ctl doctor says why)"
    if not state.policy.gpus_without_failover.isdisjoint(slot.gpus):
        return "the protection level of this GPU is below fail-over (mpsd-ctl doctor says why)"
    if slot.exclusive:
        return EXCLUSIVE
    if state.copies_problem:
        return state.copies_problem
    if active is None or active.state not in SERVING:
        return "there is no active domain"
    if not willing:
        return "no fail-over participant" + (
            f" in its active domain ({len(members)} in another)" if members else ""
        )
    if standby is None:
        return "there is no standby domain yet"
    if standby.state is not DomainState.WARM:
        return f"the standby domain is {standby.state.value}"
    limit = state.policy.moves_per_minute
    ready = [m for m in willing if m.standing is Standing.READY and m.generation == standby.generation]
    if not ready:
        return "no program has a standby context yet"
    if all(sum(now - t < plan.MINUTE_S for t in m.told) >= limit for m in ready):
        return f"every program has moved {limit} times within a minute"
    return ""


def _program(participant: Participant) -> dict[str, Any]:
    return {
        "pid": participant.process.pid,
        "start_ticks": participant.process.start_ticks,
        "uid": participant.uid,
        "user": user_name(participant.uid),
        # A row with a command is hidden from other users (mpsd.api.privacy).
        "command": "",
        **participant_view(participant),
    }


def participant_view(participant: Participant) -> dict[str, Any]:
    return {
        "mode": participant.mode.value,
        "standing": participant.standing.value if participant.connected else "not connected",
        "reason": participant.excess.why if participant.excess is not None else participant.reason,
        "generation": participant.generation if participant.standing in OFFERED else 0,
        "home": participant.home,
        "opaque": list(participant.opaque),
        "unsure": list(participant.unsure),
        "ready_ms": participant.ready_ms,
        "standby_bytes": participant.bytes,
        **_budget_view(participant),
    }


def _budget_view(participant: Participant) -> dict[str, Any]:
    """Return what mode exact costs a participant, and the budget for which it has left fail-over."""
    limit, cost, excess = participant.limit, participant.cost, participant.excess
    return {
        "snapshot_bytes": participant.held,
        "snapshot_limit_bytes": None if limit is None else limit.bytes,
        "saved_bytes": None if cost is None else cost.bytes,
        # Time that saving adds, as a share of the time without it.
        "saving_share": None if cost is None else cost.share,
        "left": None if excess is None else excess.budget.name.lower(),
        # Whether a list of read-only parameters may bring it back under the budget.
        "list_may_help": excess is not None and excess.listable,
    }


def client_view(state: State, client: Client) -> Mapping[str, Any] | None:
    """Return the fail-over part of a client's row; None if its process is no participant."""
    participant = state.members.get(client.id.process)
    return None if participant is None else {**participant_view(participant), "here": state.at_home(client)}


def require_switchable(state: State, process: ProcessInstance, level: str) -> None:
    """Check that a program can be switched to `level`. Raise UsageError, NotReadyError, UnsupportedError."""
    if level != ProtectionLevel.GUARD:
        raise UsageError(
            f"a running program cannot get the level {level!r}",
            remedy='the one level to set is "guard"; set others in mpsd.toml, and restart the program',
        )
    pid, participant = process.pid, state.members.get(process)
    if participant is None:
        raise UsageError(
            f"process {pid} takes no part in fail-over: there is nothing to switch off",
            remedy="mpsd-ctl status shows its level",
        )
    if participant.excess is not None:
        raise UsageError(
            f"process {pid} is already at guard ({participant.excess.why})",
            remedy="to switch its fail-over on again, restart it",
        )
    if not participant.connected:
        raise NotReadyError(
            f"process {pid} has no connection for fail-over at the moment",
            remedy="repeat the command in a moment",
        )
    late = state.has_lost(participant) and participant.standing is not Standing.MOVING
    if participant.turn is not Turn.NONE or late:
        raise NotReadyError(
            f"process {pid} is in a fail-over: its work would be lost",
            remedy="repeat the command in a moment",
        )
    if not participant.switches:
        raise UnsupportedError(
            f"the proxy of process {pid} is of an earlier release and does not know this command",
            remedy="restart the program with mpsd-run --protect guard",
        )


def switch_steps(participant: Participant) -> list[str]:
    """Return what happens to a program that is switched off."""
    moving = participant.standing is Standing.MOVING
    return [
        *(["it completes the move that it was told to make"] if moving else []),
        "mpsd does not move it from now on: a fault of another client can end its GPU work",
        "it releases its standby context, and its snapshot buffers once no work needs them",
        "its guard zones stay",
    ]
