"""Admission of slots, and retirement of slots that make way for others. A slot with clients is never retired.

While a slot exists, its path is never absent: a client that finds no socket silently runs outside MPS. So a
slot is retired only if a limit on slots is reached, or if an earlier daemon left nothing of it running. Its
path is removed first, and clients that used the path before are served to their end.

Shares count by account: the subordinate uids of a user count as that user. A newcomer displaces a slot that
was unused for long, then a slot of the largest account. A slot that no client has ever used goes first.
Administrators have a reserve at every limit. Shared slots are few, and no limit refuses them.

On demand (Policy.on_demand) a slot begins with a control daemon alone. That starts the server for its first
client, and mpsd then starts the standby domain. An idle slot gives both back: its standby domain ends, and a
fresh control daemon takes over the path before the old one ends. A server is never told to shut down,
because a client could be on its way to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from enum import StrEnum

from mpsd.base.model import FailoverMode, ServerState
from mpsd.core import domains, lists
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, DropPath
from mpsd.core.events import DrainRequested, ModeSeen, SlotWanted
from mpsd.core.failover import plan
from mpsd.core.failover.participants import Standing
from mpsd.core.lifecycle import DomainTrigger
from mpsd.core.state import SERVING, Domain, DomainState, Slot, State
from mpsd.core.victims import arm_drain

ADMIN_RESERVE = 4
"""Slots beyond the limit that only administrators get."""
USED_GRACE_S = 60.0
"""Time [s] after the last use of a slot in which fair shares leave it alone, if a client has ever used it."""
START_WINDOW_S = 60.0
STARTS, STARTS_PER_ACCOUNT = 96, 16
"""Limits on new slots within START_WINDOW_S of accounts without a client: of all of them, and of each.

At STARTS an account without its equal share may still start one. Twice as many is the limit for all.
"""


IDLE = "idle"
"""Name of the timer of a slot that may be idle."""
HANDOVER_S = 2.0
"""Shortest time [s] for which a replaced idle domain still serves clients that took its path before."""


class SlotRefusal(StrEnum):
    """Reason for refusing a slot: the limit on slots, the account's share, or the limit on starts."""

    FULL = "full"
    SHARE = "share"
    RATE = "rate"
    ACCOUNT_RATE = "account-rate"


MINUTE_S = 60.0
STANDBYS = "failover-standbys"
"""Name of the timer that starts the standby domains that a slot lacks."""
SETTLE_S = 1.0
"""Longest time [s] after an order to move in which nothing starts for the slot: starts delay a move."""
SECOND_AFTER_S = 5.0
"""Time [s] after the first program that would replay, or after the use of a second standby domain, until the
next one starts. A series of short programs then starts none, and none starts beside replays."""
SECOND_AGAIN_S = 60.0
"""Time [s] until a second standby domain starts again after one that failed, ended or made way."""
STARTS_PER_MINUTE = 40
"""Starts of domains of one slot within a minute before the next one is delayed. Faults of its own clients at
the rate of `failover.per_minute` stay far below."""


def may_start(draft: Draft, slot: Slot) -> bool:
    """Return whether a domain may be started for this slot now; otherwise start it after a growing delay."""
    recent = [at for at in slot.starts if draft.now - at < MINUTE_S]
    excess, policy = len(recent) - STARTS_PER_MINUTE, draft.state.policy
    if excess < 0:
        return True
    delay = min(policy.start_retry_s * 2 ** min(excess, 16), policy.start_retry_max_s)
    wait = recent[-1] + delay - draft.now
    if wait <= 0:
        return True
    draft.emit(ArmTimer("ensure", slot.id, wait))
    if not slot.delayed:
        draft.put_slot(replace(slot, delayed=True))
        draft.count("domain_starts_delayed")
        draft.publish("domain-start-delayed", slot.uid, slot=slot.id, starts=len(recent), retry_s=wait)
    return False


def note_start(draft: Draft, slot: str) -> None:
    """Note the start of a domain of this slot."""
    known = draft.state.slots[slot]
    recent = (at for at in known.starts if draft.now - at < MINUTE_S)
    draft.put_slot(replace(known, starts=(*recent, draft.now), delayed=False))


def touch(draft: Draft, domain: str) -> None:
    """Note the time at which a client of this domain started or ended."""
    slot = draft.state.slots[draft.state.domains[domain].slot]
    draft.put_slot(replace(slot, used=draft.now, joined=True, resting=False))
    if slot.resting:
        domains.ensure(draft, slot.id)


def wants_standby(state: State, slot: Slot, active: Domain) -> bool:
    """Return whether the slot, which this domain serves, is to have a standby domain."""
    in_use = active.server is not None and active.server_state is ServerState.ACTIVE and not slot.resting
    kept = state.policy.spare and (in_use or not state.policy.on_demand)
    return kept or bool(plan.participants_of(state, slot))


def settles_in(state: State, slot: str, now: float) -> float:
    """Return how long nothing starts for the slot, because participants are moving [s]; 0 if none is."""
    moving = (m for m in state.members.values() if m.standing is Standing.MOVING and m.connected and m.told)
    here = [m for m in moving if (home := state.domains.get(m.home or "")) and home.slot == slot]
    return max((SETTLE_S - (now - m.told[-1]) for m in here), default=0.0)


def second_standby_in(state: State, slot: Slot, now: float) -> float | None:
    """Return in how many seconds the slot wants a second standby domain; None: it wants none.

    Not after many starts: the next ones of that minute are for standby domains, which matter more.
    """
    standby = state.domains.get(slot.spare or "")
    is_warm = standby is not None and standby.state is DomainState.WARM
    if slot.second is not None or slot.second_from is None or not is_warm:
        return None
    waits = [0.0, settles_in(state, slot.id, now), slot.second_from - now]
    recent, most = [at for at in slot.starts if now - at < MINUTE_S], STARTS_PER_MINUTE // 2
    if len(recent) >= most:
        waits.append(recent[-most] + MINUTE_S - now)
    return max(waits)


def would_replay(state: State, slot: str) -> bool:
    """Return whether a participant of this slot, connected or not, would replay after a fault."""
    able = (m for m in state.members.values() if m.mode is FailoverMode.EXACT and m.excess is None)
    able = (m for m in able if m.standing is not Standing.LEFT_BEHIND)
    return any((home := state.domains.get(m.home or "")) and home.slot == slot for m in able)


def without_second_standby(slot: Slot, now: float, after_s: float = SECOND_AFTER_S) -> Slot:
    """Return the slot without its second standby domain. The next one may start so much later."""
    return replace(slot, second=None, second_from=now + after_s)


def drop_second_standby(draft: Draft, name: str) -> None:
    """End the second standby domain of a slot, if it has one."""
    second = draft.state.slots[name].second
    if second is None:
        return
    draft.put_slot(replace(draft.state.slots[name], second=None))
    domains.move(draft, second, DomainTrigger.RETIRE)
    domains.settle(draft, second)


def give_up_second_standbys(draft: Draft, gpus: Collection[str]) -> None:
    """End the second standby domains on these GPUs for a while: their memory is needed."""
    for slot in [s for s in draft.state.slots.values() if s.second is not None and {*s.gpus} & {*gpus}]:
        drop_second_standby(draft, slot.id)
        draft.put_slot(without_second_standby(draft.state.slots[slot.id], draft.now, SECOND_AGAIN_S))
        # Its timer brings the next one.
        domains.ensure(draft, slot.id)


def wants_server(state: State, begun: Domain) -> bool:
    """Return whether a domain that is about to start needs a server before its first client.

    After a failed start it does: then a further failure is known before a client meets it.
    """
    if begun.successor:
        return False
    if not state.policy.on_demand:
        return True
    has_server = any(d.slot == begun.slot and d.server is not None for d in state.domains.values())
    return has_server or state.slots[begun.slot].failures > 0 or _has_clients(state, begun.slot)


def has_server(state: State, slot: Slot) -> bool:
    """Return whether the active domain of a slot has a server."""
    active = state.domains.get(slot.active or "")
    return active is not None and active.server is not None


def _has_clients(state: State, slot: str) -> bool:
    """Return whether a domain of the slot has a client, living or exited."""
    return any(state.domains[c.id.domain].slot == slot for c in state.clients.values())


def watch_idle(draft: Draft, name: str) -> None:
    """Arm the timer that ends the server and the standby domain of a slot once it is idle."""
    if draft.state.policy.on_demand and _has_unused(draft.state, draft.state.slots[name]):
        draft.emit(ArmTimer(IDLE, name, draft.state.policy.idle_s))


def _has_unused(state: State, slot: Slot) -> bool:
    """Return whether the slot has a server or a standby domain, which an idle slot does not need."""
    return slot.spare is not None or slot.second is not None or has_server(state, slot)


def _may_rest(state: State, slot: Slot) -> bool:
    """Return whether the slot has no client, not even one that mpsd may not know.

    In compute mode EXCLUSIVE_PROCESS no second domain can take over the path, so its server stays.
    """
    active = state.domains.get(slot.active or "")
    if active is None or active.state is not DomainState.ACTIVE or slot.exclusive or slot.retiring:
        return False
    standbys = [state.domains.get(name or "") for name in (slot.spare, slot.second)]
    here = [d for d in (active, *standbys) if d is not None]
    unsure = any(d.may_lack_clients or d.foreign is not None for d in here)
    used = unsure or _has_clients(state, slot.id) or bool(plan.participants_of(state, slot))
    return not (used or state.stopping or state.adopting)


def on_idle(draft: Draft, name: str) -> None:
    """End the standby domain of an idle slot, and start a control daemon that replaces the idle server."""
    slot = draft.state.slots.get(name)
    if slot is None or slot.active is None or not _has_unused(draft.state, slot):
        return
    active = draft.state.domains[slot.active]
    idle_s = draft.state.policy.idle_s
    due = slot.used + idle_s - draft.now
    rests = due <= idle_s / 1000 and _may_rest(draft.state, slot)
    draft.emit(ArmTimer(IDLE, name, due if 0 < due <= idle_s and not rests else idle_s))
    if not rests:
        return
    if slot.spare is not None and draft.state.domains[slot.spare].successor:
        # It is starting.
        return
    if not slot.resting:
        draft.count("slots_idle")
        draft.publish("slot-idle", slot.uid, slot=name)
    drop_second_standby(draft, name)
    slot = draft.state.slots[name]
    draft.put_slot(replace(slot, spare=None, resting=True))
    if slot.spare is not None:
        domains.move(draft, slot.spare, DomainTrigger.RETIRE)
        domains.settle(draft, slot.spare)
    if active.server is not None and may_start(draft, draft.state.slots[name]):
        successor = domains.start(draft, draft.state.slots[name], successor=True)
        draft.put_slot(replace(draft.state.slots[name], spare=successor))


def replace_idle(draft: Draft, name: str) -> None:
    """Let a new domain without a server replace the idle one; end the new one if a client has come."""
    slot = draft.state.slots[draft.state.domains[name].slot]
    assert slot.active is not None
    if not _may_rest(draft.state, slot):
        draft.put_slot(replace(slot, spare=None))
        domains.move(draft, name, DomainTrigger.RETIRE)
        domains.settle(draft, name)
        domains.ensure(draft, slot.id)
        return
    # A client may have taken the old path just before the switch: the old domain waits for a later list.
    hand_over(draft, slot.active)
    domains.leave(draft, slot.active, DomainTrigger.RETIRE)


def hand_over(draft: Draft, name: str) -> None:
    """Let a domain serve clients that took its path before; it is not stopped before a later list."""
    domain = draft.state.domains[name]
    draft.put_domain(replace(domain, foreign=(draft.now, draft.now + HANDOVER_S)))
    draft.emit(ArmTimer(lists.UNSURE, name, lists.UNSURE_S))


def on_mode_seen(draft: Draft, event: ModeSeen) -> None:
    """Follow a change of the GPUs' compute mode. In EXCLUSIVE_PROCESS a standby domain cannot exist."""
    slot = draft.state.slots.get(event.slot)
    if slot is None or slot.exclusive == event.exclusive:
        return
    if event.exclusive:
        drop_second_standby(draft, slot.id)
    slot = draft.state.slots[slot.id]
    standby = slot.spare if event.exclusive else None
    slot = draft.put_slot(replace(slot, exclusive=event.exclusive, spare=None if standby else slot.spare))
    if standby is not None:
        domains.move(draft, standby, DomainTrigger.RETIRE)
        plan.refresh_all(draft, slot.id)
        domains.settle(draft, standby)
    domains.ensure(draft, slot.id)
    if slot.active is not None:
        arm_drain(draft, draft.state.domains[slot.active])
        domains.settle(draft, slot.active)


def on_drain(draft: Draft, event: DrainRequested) -> None:
    """Stop or resume new slots on these GPUs. An empty list means all GPUs."""
    gpus = frozenset(event.gpus or ("*",))
    drained = draft.state.drained
    remaining = drained - gpus if event.gpus else frozenset[str]()
    draft.state = replace(draft.state, drained=drained | gpus if event.on else remaining)
    draft.publish("drain" if event.on else "undrain", None, gpus=sorted(gpus))


def refusal(state: State, wanted: SlotWanted, now: float) -> SlotRefusal | None:
    """Return why this slot would be refused now; None if it exists or would be admitted."""
    slot = state.slots.get(wanted.slot)
    return _admission(state, wanted, now)[0] if slot is None or slot.retiring else None


def make_space(draft: Draft, wanted: SlotWanted) -> bool:
    """Return whether another slot may exist. Retire the slot that it displaces, if any."""
    refused, displaced = _admission(draft.state, wanted, draft.now)
    if refused is not None:
        return False
    if displaced is not None:
        retire(draft, displaced)
    account = _account(wanted)
    if account is not None and _is_limited(draft.state, wanted):
        recent = _recent_starts(draft.state, draft.now)
        draft.state = replace(draft.state, slot_starts=(*recent, (draft.now, account)))
    return True


def _admission(state: State, wanted: SlotWanted, now: float) -> tuple[SlotRefusal | None, Slot | None]:
    """Return why a new slot is refused, or which slot it displaces."""
    account = _account(wanted)
    if account is None:
        return None, None
    if _is_limited(state, wanted):
        recent = [by for _, by in _recent_starts(state, now)]
        if recent.count(account) >= STARTS_PER_ACCOUNT:
            return SlotRefusal.ACCOUNT_RATE, None
        share = max(1, STARTS // (len(set(recent)) + 1))
        if len(recent) >= 2 * STARTS or (len(recent) >= STARTS and recent.count(account) >= share):
            return SlotRefusal.RATE, None
    serving = [s for s in state.slots.values() if not s.retiring]
    limit = state.policy.max_slots
    if not wanted.admin and _has_its_share(state, account, serving, now):
        own = [s for s in serving if s.accountable == account and not s.joined and _may_go(state, s)]
        return (None, min(own, key=_age)) if own else (SlotRefusal.SHARE, None)
    if len(serving) < limit + (ADMIN_RESERVE if wanted.admin else 0):
        return None, None
    displaced = _displaced(state, account, serving, now)
    return (None, displaced) if displaced is not None else (SlotRefusal.FULL, None)


def _has_its_share(state: State, account: int, serving: list[Slot], now: float) -> bool:
    """Return whether an account has half of the slots, or a quarter while no more than a quarter is free."""
    limit = state.policy.max_slots
    held = sum(1 for s in serving if s.accountable == account)
    quarter = max(1, limit // 4)
    if held < quarter or held >= max(1, limit // 2):
        return held >= quarter
    free = limit - len(serving) + len(_long_idle(state, [s for s in serving if _may_go(state, s)], now))
    return free <= quarter


def _long_idle(state: State, idle: list[Slot], now: float) -> list[Slot]:
    return [s for s in idle if now - s.used > state.policy.slot_idle_s]


def _displaced(state: State, account: int, serving: list[Slot], now: float) -> Slot | None:
    """Return the slot that makes way for a new one of this account, if any."""
    idle = [s for s in serving if _may_go(state, s)]
    if long_idle := _long_idle(state, idle, now):
        return min(long_idle, key=_age)
    held = Counter(s.accountable for s in serving)

    def gives_way(slot: Slot) -> bool:
        if slot.joined:
            return held[slot.accountable] > held[account] + 1 and now - slot.used > USED_GRACE_S
        return held[slot.accountable] > held[account] or slot.accountable == account

    candidates = [s for s in idle if gives_way(s)]
    return min(candidates, key=lambda s: (-held[s.accountable], s.joined, *_age(s)), default=None)


def _age(slot: Slot) -> tuple[float, str]:
    return slot.used, slot.id


def _account(wanted: SlotWanted) -> int | None:
    """Return the user that answers for a slot; None for a shared slot."""
    return wanted.uid if wanted.uid is None or wanted.account is None else wanted.account


def _is_limited(state: State, wanted: SlotWanted) -> bool:
    """Return whether the limits on starts apply: not to administrators, nor to accounts with clients."""
    account = _account(wanted)
    living = (c for c in state.clients.values() if c.living)
    with_clients = {state.slots[state.domains[c.id.domain].slot].accountable for c in living}
    return not wanted.admin and account not in with_clients


def _recent_starts(state: State, now: float) -> tuple[tuple[float, int], ...]:
    return tuple(start for start in state.slot_starts if now - start[0] < START_WINDOW_S)


def is_expired(draft: Draft, slot: Slot) -> bool:
    """Return whether a restored slot stays stopped: nothing of it runs, and its last use is long ago."""
    runs = any(d.slot == slot.id for d in draft.state.domains.values())
    return slot.uid is not None and not runs and draft.now - slot.used > draft.state.policy.slot_forget_s


def retire(draft: Draft, slot: Slot) -> None:
    """Retire a slot. Domains of it that still have clients drain."""
    draft.put_slot(replace(slot, active=None, spare=None, second=None, retiring=True))
    draft.emit(DropPath(slot.id))
    draft.count("slots_retired")
    draft.publish("slot-retired", slot.uid, slot=slot.id)
    for domain in [d for d in draft.state.domains.values() if d.slot == slot.id]:
        if domain.state in SERVING:
            domains.move(draft, domain.id, DomainTrigger.RETIRE)
        domains.settle(draft, domain.id)
    drop_retired(draft, slot.id)


def drop_retired(draft: Draft, name: str) -> None:
    """Forget a retired slot with its last domain."""
    if draft.state.slots[name].retiring and all(d.slot != name for d in draft.state.domains.values()):
        draft.drop_slot(name)


def remove_if_empty(draft: Draft, name: str) -> None:
    """Remove a slot and its path with its last domain, when mpsd stops its domains for good.

    The next mpsd then starts domains only for users that ask for one.
    """
    if name in draft.state.slots and all(d.slot != name for d in draft.state.domains.values()):
        draft.drop_slot(name)
        draft.emit(DropPath(name))


def _may_go(state: State, slot: Slot) -> bool:
    """Return whether a slot may be retired: it is not shared, and has no client, living or exited."""
    clients = state.clients.values()
    return slot.uid is not None and all(state.domains[c.id.domain].slot != slot.id for c in clients)
