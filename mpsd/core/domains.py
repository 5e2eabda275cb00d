"""Handlers for slots and domains: starting, switching, draining, stopping.

The stable path of a slot is never absent. The slot keeps leading to its old domain, whatever that domain's
state, until another domain has started. A domain is stopped only when no slot leads to it. Exception: when
mpsd is told to stop its domains, all of them end, and then the paths are removed.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mpsd.base.model import ProcessInstance, ServerState
from mpsd.core import events as ev
from mpsd.core import leases, lists, slots
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, AskServer, StartDomain, StopDomain, SwitchPath
from mpsd.core.failover import outcomes, plan, restart
from mpsd.core.faults import poisoned as endings
from mpsd.core.killing import kill_by_policy
from mpsd.core.lifecycle import DomainTrigger, next_domain_state
from mpsd.core.state import SERVING, Domain, DomainState, LogState, Slot, State
from mpsd.core.victims import arm_drain, kill_frozen, work_is_lost

ASK_AGAIN_S = 0.25
FULL_DOMAINS = 8
"""Full domains of one slot at a time. At that number a full domain with places serves again. If none has a
place, new clients meet error 808, and status says so."""
ABANDONED_STOP_S = 0.3
"""Deadline [s] to stop a faulted domain that its programs have left by fail-over.

Their old contexts delay the stop, some of them indefinitely.
"""
RECONNECT_S = 6.0
"""Time [s] after a start of mpsd in which participants connect again."""
QUIET_REPLACED_S = 60.0
"""Shortest time [s] between two replacements of a slot's domains because of a quiet log."""
_LEFTOVER = (
    DomainState.FULL,
    DomainState.FAULTED,
    DomainState.POISONED,
    DomainState.RETIRED,
    DomainState.HEADLESS,
    DomainState.FAILED,
)


def on_slot_wanted(draft: Draft, event: ev.SlotWanted) -> None:
    """Add a slot on request and start its domains. Refuse it if the limit on slots is reached."""
    slot = draft.state.slots.get(event.slot)
    if slot is None and draft.state.stopping:
        return
    if (slot is None or slot.retiring) and event.start and not slots.make_space(draft, event):
        draft.count("slots_refused")
        return
    if slot is None:
        slot = Slot(event.slot, event.gpus, event.uid, event.exclusive, joined=event.joined)
    used = draft.now if event.used is None else min(event.used, draft.now)
    paused = slot.paused and not event.start
    draft.put_slot(replace(slot, used=used, retiring=False, account=event.account, paused=paused))
    if event.start:
        ensure(draft, slot.id)


def on_adopted(draft: Draft, event: ev.DomainAdopted) -> None:
    """Take over a domain of an earlier daemon.

    No domain is emptied or reused before AdoptionDone, because its clients may not be known yet.
    """
    slot = draft.state.slots.get(event.slot)
    if slot is None or event.domain in draft.state.domains:
        draft.count("adoptions_ignored")
        return
    # The daemon that was starting or stopping it has exited: drain and replace it like any old domain.
    halfway = event.state in (DomainState.STARTING, DomainState.STOPPING)
    draft.put_domain(
        Domain(
            event.domain,
            slot.id,
            slot.gpus,
            slot.uid,
            DomainState.RETIRED if halfway else event.state,
            draft.now,
            event.control,
            event.server,
            event.server_state,
            bereft=event.bereft,
            private=event.private and slot.uid is not None,
            trial=event.trial,
        )
    )
    digits = event.domain.removeprefix("d")
    number = int(digits) if digits.isdecimal() else 0
    later = max(draft.state.next_domain, number + 1)
    draft.state = replace(draft.state, next_domain=later, adopting=True)
    role = ev.DomainRole.OLD if draft.state.stopping else event.role
    _adopt_role(draft, slot, draft.state.domains[event.domain], role)
    replaced = event.state is DomainState.RETIRED and event.server is not None
    if replaced and draft.state.policy.on_demand and not draft.state.stopping:
        # The earlier daemon may have replaced an idle domain just before its end.
        slots.hand_over(draft, event.domain)


def _adopt_role(draft: Draft, slot: Slot, domain: Domain, role: ev.DomainRole) -> None:
    standby = role is ev.DomainRole.SPARE and slot.spare is None and not slot.exclusive
    second = role is ev.DomainRole.SECOND and slot.second is None and not slot.exclusive
    if role is ev.DomainRole.ACTIVE and slot.active is None:
        draft.put_slot(replace(slot, active=domain.id))
        draft.emit(SwitchPath(slot.id, domain.id))
        # A full domain to which the path still leads: the earlier daemon had not switched the path yet.
        if domain.state in (DomainState.WARM, DomainState.FULL):
            move(draft, domain.id, DomainTrigger.ACTIVATED)
    elif standby and domain.state is DomainState.WARM:
        draft.put_slot(replace(slot, spare=domain.id))
    elif second and domain.state is DomainState.WARM:
        draft.put_slot(replace(slot, second=domain.id))
    elif domain.state in SERVING:
        move(draft, domain.id, DomainTrigger.RETIRE)


def on_adoption_done(draft: Draft, event: ev.AdoptionDone) -> None:
    draft.state = replace(draft.state, adopting=False, adopted=draft.now)
    plan.forget_absent(draft)
    restart.arm_waits(draft)
    lists.ask_again(draft, event.unlisted)
    for slot in tuple(draft.state.slots.values()):
        if slots.is_expired(draft, slot):
            slots.retire(draft, slot)
        else:
            ensure(draft, slot.id)
            plan.linger(draft, slot.id)
            slots.watch_idle(draft, slot.id)
    for domain in tuple(draft.state.domains.values()):
        arm_drain(draft, domain)
        settle(draft, domain.id)


def ensure(draft: Draft, slot_id: str) -> None:
    """Start what the slot lacks: a serving domain first, then its standby domains."""
    slot, state = draft.state.slots[slot_id], draft.state
    if state.stopping or slot.retiring:
        return
    active = state.domains[slot.active] if slot.active else None
    standby = state.domains[slot.spare] if slot.spare else None
    if active is not None and active.state in SERVING:
        _ensure_standbys(draft, slot, active)
    elif standby is not None and standby.state is DomainState.WARM:
        promote(draft, slot, standby.id)
    elif standby is None and slot.second is not None:
        draft.put_slot(slots.without_second_standby(replace(slot, spare=slot.second), draft.now))
        ensure(draft, slot_id)
    elif standby is None and not slot.paused and not _starting(draft, slot_id):
        if active is not None and slot.exclusive:
            return
        if not slots.may_start(draft, slot):
            return
        started = start(draft, slot)
        if active is None:
            draft.put_slot(replace(draft.state.slots[slot_id], active=started))
        else:
            draft.put_slot(replace(draft.state.slots[slot_id], spare=started))


def _ensure_standbys(draft: Draft, slot: Slot, active: Domain) -> None:
    if slot.spare is not None:
        wait = slots.second_standby_in(draft.state, slot, draft.now)
    elif slot.second is None and slots.wants_standby(draft.state, slot, active):
        wait = slots.settles_in(draft.state, slot.id, draft.now)
    else:
        # The second standby domain takes its place at the end of the decision.
        wait = None
    if wait is None or slot.paused or slot.exclusive:
        return
    if wait > 0:
        draft.emit(ArmTimer(slots.STANDBYS, slot.id, wait))
    elif slots.may_start(draft, slot):
        started = start(draft, slot)
        known = draft.state.slots[slot.id]
        draft.put_slot(
            replace(known, spare=started) if slot.spare is None else replace(known, second=started)
        )


def _starting(draft: Draft, slot_id: str) -> bool:
    return any(d.slot == slot_id and d.state is DomainState.STARTING for d in draft.state.domains.values())


def start(draft: Draft, slot: Slot, *, successor: bool = False) -> str:
    """Start a new domain for the slot and return its name. `successor`: it replaces an idle domain."""
    name = f"d{draft.state.next_domain}"
    draft.state = replace(draft.state, next_domain=draft.state.next_domain + 1)
    begun = Domain(name, slot.id, slot.gpus, slot.uid, DomainState.STARTING, draft.now, successor=successor)
    draft.put_domain(begun)
    slots.note_start(draft, slot.id)
    draft.emit(StartDomain(name, slot.gpus, slot.uid, slots.wants_server(draft.state, begun)))
    return name


def promote(draft: Draft, slot: Slot, name: str) -> None:
    """Let the slot lead to a warm domain, and start the next standby domain."""
    move(draft, name, DomainTrigger.ACTIVATED)
    spare = None if slot.spare == name else slot.spare
    draft.put_slot(replace(slot, active=name, spare=spare, resting=False))
    draft.emit(SwitchPath(slot.id, name))
    draft.publish("domain-active", slot.uid, domain=name, slot=slot.id)
    slots.watch_idle(draft, slot.id)
    if slot.active is not None and slot.active != name:
        lists.await_list(draft, draft.state.domains[slot.active])
        settle(draft, slot.active)
    ensure(draft, slot.id)


def on_started(draft: Draft, event: ev.DomainStarted) -> None:
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.state is DomainState.STOPPING:
        # The start was abandoned before the domain came up, so nothing else would stop this domain.
        draft.count("late_domain_starts")
        draft.emit(StopDomain(event.domain, draft.state.policy.stop_deadline_s))
        return
    if domain.control is not None:
        draft.count("late_domain_starts")
        return
    running = ServerState.ACTIVE if event.server else ServerState.GONE
    private = event.private and domain.uid is not None
    draft.put_domain(
        replace(domain, control=event.control, server=event.server, server_state=running, private=private)
    )
    if not move(draft, domain.id, DomainTrigger.STARTED):
        return
    slot = draft.put_slot(replace(draft.state.slots[domain.slot], failures=0))
    current = draft.state.domains[slot.active] if slot.active else None
    if current is None or current.id == domain.id or current.state not in SERVING:
        promote(draft, slot, domain.id)
    elif domain.successor:
        slots.replace_idle(draft, domain.id)
    else:
        stand_by(draft, domain)
    plan.refresh_all(draft, slot.id)


def stand_by(draft: Draft, domain: Domain) -> None:
    """Use a standby domain that is warm now."""
    # First: if the active domain is full, its participants keep contexts in the one that serves next.
    plan.refresh_all(draft, domain.slot)
    _replace_beside(draft, domain)
    if draft.state.slots[domain.slot].spare == domain.id:
        ensure(draft, domain.slot)


def on_start_failed(draft: Draft, event: ev.DomainStartFailed) -> None:
    """Retry the start with a growing delay, and serve from the standby domain meanwhile if it is warm."""
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.state is not DomainState.STARTING:
        return
    draft.put_domain(replace(domain, problem=event.reason))
    move(draft, domain.id, DomainTrigger.START_FAILED)
    slot = draft.state.slots[domain.slot]
    if slot.second == domain.id:
        # No client waits for it, and the GPU may have no memory for it.
        draft.put_slot(slots.without_second_standby(slot, draft.now, slots.SECOND_AGAIN_S))
        draft.count("second_standbys_failed")
        ensure(draft, slot.id)
        settle(draft, domain.id)
        return
    slot = draft.put_slot(
        replace(
            slot,
            failures=slot.failures + 1,
            active=None if slot.active == domain.id else slot.active,
            spare=None if slot.spare == domain.id else slot.spare,
        )
    )
    delay = _retry_s(draft, slot.failures)
    draft.publish("domain-start-failed", None, domain=domain.id, reason=event.reason, retry_s=delay)
    draft.emit(ArmTimer("ensure", slot.id, delay))
    if slot.active is None and slot.spare and draft.state.domains[slot.spare].state is DomainState.WARM:
        promote(draft, slot, slot.spare)
    settle(draft, domain.id)


def _retry_s(draft: Draft, failures: int) -> float:
    """Return the pause [s] after so many failures in a row."""
    policy = draft.state.policy
    return min(policy.start_retry_s * float(2 ** min(failures - 1, 16)), policy.start_retry_max_s)


def on_unreachable(draft: Draft, event: ev.DomainUnreachable) -> None:
    """Retire a domain that new clients cannot reach. Its standby domain takes over; its clients live on.

    A first such domain is replaced at once. If its successors become unreachable within start_retry_max_s
    too, the pauses grow like those after failed starts.
    """
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.state not in (DomainState.ACTIVE, DomainState.WARM):
        draft.count("ignored_domain_triggers")
        return
    slot, policy = draft.state.slots[domain.slot], draft.state.policy
    lost = 1 if draft.now - domain.since > policy.start_retry_max_s else slot.lost + 1
    if slot.second != domain.id:
        draft.put_slot(replace(slot, lost=lost, paused=lost > 1))
        if lost > 1:
            draft.emit(ArmTimer("ensure", slot.id, _retry_s(draft, lost - 1)))
    draft.put_domain(replace(domain, problem=event.reason))
    draft.count("domains_unreachable")
    users, why = draft.users_of(domain.id), event.reason
    draft.publish("domain-unreachable", domain.uid, users, domain=domain.id, slot=slot.id, reason=why)
    leave(draft, domain.id, DomainTrigger.UNREACHABLE)


def on_stopped(draft: Draft, event: ev.DomainStopped) -> None:
    """Forget a stopped domain, with the leases that it held."""
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.state is not DomainState.STOPPING:
        draft.count("late_domain_stops")
        return
    endings.server_gone(draft, event.domain)
    leases.release_exited(draft, event.domain)
    draft.drop_domain(event.domain)
    draft.publish("domain-gone", None, domain=event.domain)
    slots.drop_retired(draft, domain.slot)
    if draft.state.stopping:
        slots.remove_if_empty(draft, domain.slot)


def move(draft: Draft, name: str, trigger: DomainTrigger) -> bool:
    """Take one transition. Return False, and count it, if the trigger has no meaning in the present state."""
    domain = draft.state.domains[name]
    target = next_domain_state(domain.state, trigger)
    if target is None:
        draft.count("ignored_domain_triggers")
        return False
    lists.await_list(draft, draft.put_domain(replace(domain, state=target, since=draft.now)))
    return True


def leave(draft: Draft, name: str, trigger: DomainTrigger, *, planned: bool = False) -> bool:
    """Take a domain out of service and let its standby domain take over the slot, in one decision.

    `planned`: programs that can fail over do so, although the domain has not faulted.
    """
    was_full = draft.state.domains[name].state is DomainState.FULL
    if not move(draft, name, trigger):
        return False
    domain = draft.state.domains[name]
    slot = draft.state.slots[domain.slot]
    if slot.spare == name:
        slot = draft.put_slot(replace(slot, spare=None))
    elif slot.second == name:
        slot = draft.put_slot(slots.without_second_standby(slot, draft.now, slots.SECOND_AGAIN_S))
    state, users = domain.state.value, draft.users_of(name)
    lost = work_is_lost(domain)
    draft.publish("domain-left", domain.uid, users, domain=name, state=state, why=trigger.value, lost=lost)
    ensure(draft, slot.id)
    if was_full:
        _make_way(draft, domain)
    # First, because a program's pause lasts from the fault until it receives this command.
    drained = planned and trigger is DomainTrigger.RETIRE
    plan.domain_left(draft, name, "drain" if drained else trigger.value, planned)
    if domain.state is DomainState.FAULTED:
        # The server has no contexts any more: no work of exited clients can still run.
        leases.release_exited(draft, name)
    kill_frozen(draft, name)
    arm_drain(draft, domain)
    settle(draft, name)
    return True


def fill(draft: Draft, name: str, *, refused: bool = False) -> None:
    """Let new clients go to the standby domain once this active domain takes no more.

    `refused`: its server turned a client away. Its clients work on, and fail over like those of the active
    domain.
    """
    domain = draft.state.domains[name]
    slot = draft.state.slots[domain.slot]
    standby = draft.state.domains.get(slot.spare or "")
    if slot.active != name or domain.state is not DomainState.ACTIVE or draft.state.stopping:
        return
    if not refused and len(_places(draft, domain)) < draft.state.policy.clients_per_domain:
        return
    full = [d for d in draft.state.domains.values() if d.slot == slot.id and d.state is DomainState.FULL]
    if len(full) >= FULL_DOMAINS:
        _reopen(draft, slot, full)
        return
    if standby is None or standby.state is not DomainState.WARM:
        draft.count("full_domains_kept")
        return
    draft.count("full_domains")
    leave(draft, name, DomainTrigger.FULL)


def _reopen(draft: Draft, slot: Slot, full: list[Domain]) -> None:
    """Let the slot lead to the full domain with the fewest clients again, in place of its full active domain.

    Do nothing if none of them has a place.
    """
    clients, _, name = min((len(_places(draft, d)), d.generation, d.id) for d in full)
    if slot.active is None or clients >= draft.state.policy.clients_per_domain:
        draft.count("full_domains_kept")
        return
    draft.count("full_domains_reopened")
    move(draft, slot.active, DomainTrigger.FULL)
    promote(draft, slot, name)
    plan.refresh_all(draft, slot.id)


def _places(draft: Draft, domain: Domain) -> set[ProcessInstance]:
    """Return the processes that take a place in this domain. Standby contexts take none, although its server
    counts them: if the server turns clients away, its log says so.

    A line of a log that every user can write gives no process a place.
    """
    here = draft.state.living_of(domain.id)
    return {c.id.process for c in here if domain.private or draft.state.is_member(c)}


def _make_way(draft: Draft, domain: Domain) -> None:
    """Make the standby domain the active one, because participants of this full domain move there.

    The domain that was active until now serves its clients on. Otherwise the moved programs would stay in a
    standby domain.
    """
    slot = draft.state.slots[domain.slot]
    standby = draft.state.domains.get(slot.spare or "")
    moves = any(
        m.home == domain.id and standby is not None and m.generation == standby.generation
        for m in draft.state.members.values()
    )
    if not moves or slot.active is None or standby is None or standby.state is not DomainState.WARM:
        return
    if draft.state.domains[slot.active].state is DomainState.ACTIVE:
        move(draft, slot.active, DomainTrigger.FULL)
        promote(draft, slot, standby.id)


def on_unsure(draft: Draft, name: str) -> None:
    """End the wait for a list, unless another line has prolonged it."""
    domain = draft.state.domains[name]
    if domain.foreign is not None and lists.is_unsure(domain, draft.now):
        draft.emit(ArmTimer(lists.UNSURE, name, lists.unsure_until(domain.foreign) - draft.now))
    else:
        settle(draft, name)


def settle(draft: Draft, name: str) -> None:
    """Stop a domain that is out of service and empty, or reuse it if no other domain can exist."""
    domain = draft.state.domains.get(name)
    if domain is None or draft.state.adopting:
        return
    if domain.log is LogState.QUIET and domain.state in (DomainState.ACTIVE, DomainState.WARM):
        _replace_quiet(draft, domain)
        return
    if domain.trial is not None and domain.state is DomainState.RETIRED:
        # A suspect is to replay here, or works here until it joins the others.
        return
    if domain.state not in _LEFTOVER or lists.waits_for_list(draft, domain):
        return
    if _may_be_home(draft, domain):
        draft.emit(ArmTimer("ask", name, draft.state.adopted + RECONNECT_S - draft.now))
        return
    coming = (c for c in draft.state.clients_of(name) if outcomes.is_coming(draft.state, c))
    if any(draft.state.living_of(name)) or any(coming) or lists.is_unsure(domain, draft.now):
        return
    slot = draft.state.slots[domain.slot]
    if slot.active == name:
        if domain.state is DomainState.FAULTED:
            draft.emit(AskServer(name), ArmTimer("ask", name, ASK_AGAIN_S))
        if domain.state is DomainState.FAULTED or not slot.exclusive:
            return
        # Only one server can exist and this server does not recover: its successor starts after its end.
        draft.put_slot(replace(slot, active=None))
    # The old contexts of moved programs occupy GPU memory until the domain stops, so the deadline is short.
    held = work_is_lost(domain) and outcomes.was_moved_out_of(draft.state, name)
    poisoned = domain.state is DomainState.POISONED
    deadline_s = draft.state.policy.stop_deadline_s
    if endings.clients_with_work(draft.state, domain):
        endings.begin(draft, domain)
        leases.release_idle(draft, name)
    else:
        leases.release_exited(draft, name)
        leases.release_unused(draft, name)
    move(draft, name, DomainTrigger.EMPTY)
    draft.emit(StopDomain(name, min(ABANDONED_STOP_S, deadline_s) if held or poisoned else deadline_s))
    if slot.active == name:
        ensure(draft, slot.id)


def settle_unused(draft: Draft, before: State) -> None:
    """Stop faulted domains whose last clients have turned out to have no work, or do not move any more."""
    after = draft.state
    if after.members is before.members and after.clients is before.clients and after.slots is before.slots:
        return
    for name in sorted({c.id.domain for c in after.clients.values() if c.unused}):
        domain = draft.state.domains[name]
        if domain.state is DomainState.FAULTED and draft.state.slots[domain.slot].active != name:
            settle(draft, name)


def _may_be_home(draft: Draft, domain: Domain) -> bool:
    """Return whether a participant of an earlier daemon may have moved here unrecorded.

    It says where it lives when it connects again.
    """
    if domain.is_dead or draft.now - draft.state.adopted >= RECONNECT_S:
        return False
    idle = (c for c in draft.state.clients_of(domain.id) if draft.state.is_idle(c))
    return any(not draft.state.members[c.id.process].connected for c in idle)


def _replace_quiet(draft: Draft, domain: Domain) -> None:
    """Let a domain with a working log replace one with a quiet log that has no client."""
    slot = draft.state.slots[domain.slot]
    living = any(c.living for c in draft.state.clients_of(domain.id))
    if living or slot.exclusive or slot.retiring or draft.state.stopping:
        return
    if slot.second == domain.id:
        leave(draft, domain.id, DomainTrigger.RETIRE)
        return
    standby = draft.state.domains[slot.spare] if slot.spare else None
    if standby is not None and standby.id != domain.id and standby.log is LogState.QUIET:
        return
    due = -math.inf if slot.quiet_replaced is None else slot.quiet_replaced + QUIET_REPLACED_S
    if draft.now < due:
        draft.emit(ArmTimer(lists.QUIET_LOG, domain.id, due - draft.now))
        return
    draft.put_slot(replace(slot, quiet_replaced=draft.now))
    draft.count("quiet_domains_replaced")
    leave(draft, domain.id, DomainTrigger.RETIRE)


def _replace_beside(draft: Draft, domain: Domain) -> None:
    """Replace the active domain if its log is quiet and this standby domain of its slot can take over."""
    slot = draft.state.slots[domain.slot]
    if slot.spare != domain.id or slot.active is None:
        return
    if draft.state.domains[slot.active].log is LogState.QUIET:
        settle(draft, slot.active)
    fill(draft, slot.active)


def on_log_state(draft: Draft, event: ev.LogStateSeen) -> None:
    """Note whether the domain's log announces its clients. Replace an empty domain with a quiet log."""
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.log is event.log:
        return
    changed = draft.put_domain(replace(domain, log=event.log))
    # A list ends the wait, also of a log that works again: the same list may name an unknown client.
    if changed.list_after is None:
        lists.await_list(draft, changed)
    if event.log is LogState.QUIET:
        draft.count("domain_logs_quiet")
        draft.publish(
            "domain-log-quiet", domain.uid, draft.users_of(domain.id), domain=domain.id, reason=event.reason
        )
    elif domain.log is LogState.QUIET:
        draft.publish("domain-log-works", domain.uid, draft.users_of(domain.id), domain=domain.id)
    settle(draft, domain.id)
    _replace_beside(draft, domain)


def on_clients_listed(draft: Draft, event: ev.ClientsListed) -> None:
    """End the waits for a list if mpsd knows every listed client; otherwise the next list decides."""
    domain = draft.state.domains.get(event.domain)
    if domain is None:
        return
    complete = event.pids <= {c.id.process.pid for c in draft.state.clients_of(domain.id)}
    if complete and domain.foreign is not None and event.began > domain.foreign[1]:
        domain = draft.put_domain(replace(domain, foreign=None))
        settle(draft, domain.id)
    domain = draft.state.domains[domain.id]
    if domain.list_after is None or event.began <= domain.list_after:
        return
    if not complete:
        lists.await_later_list(draft, domain)
        return
    draft.put_domain(replace(domain, list_after=None))
    settle(draft, domain.id)


def on_stop(draft: Draft, event: ev.StopRequested) -> None:
    """Evict every client, then stop every domain. The daemon waits until every domain has ended."""
    draft.state = replace(draft.state, stopping=True)
    living = [c for c in draft.state.clients.values() if c.living]
    for client in sorted(living, key=lambda c: not draft.state.at_home(c)):
        kill_by_policy(draft, client, "the operator stopped mpsd with its domains")
    spared = {c.id.process.pid for c in draft.state.clients.values() if c.living and c.eviction is None}
    if spared:
        text = (
            "only a log line names these processes as clients: mpsd does not kill them; "
            "end them by hand if their domain does not stop"
        )
        draft.publish("clients-unproven", None, pids=sorted(spared), text=text)
    for slot in tuple(draft.state.slots.values()):
        draft.put_slot(replace(slot, active=None, spare=None, second=None))
    for domain in tuple(draft.state.domains.values()):
        if domain.state in SERVING:
            move(draft, domain.id, DomainTrigger.RETIRE)
        settle(draft, domain.id)
    for slot in tuple(draft.state.slots.values()):
        slots.remove_if_empty(draft, slot.id)
