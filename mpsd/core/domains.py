"""Handlers for slots and domains: starting, switching, draining, stopping.

The stable path is never absent: a slot keeps leading to its old domain, whatever became of it, until
another one has started; and a domain is stopped only when no slot leads to it. Where mpsd is told to stop
its domains all of them end, and then the paths go too.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import endings, failover, fates, leases, slots
from mpsd.core import events as ev
from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, AskServer, StartDomain, StopDomain, SwitchPath
from mpsd.core.killing import kill_by_policy
from mpsd.core.lifecycle import DomainTrigger, next_domain_state
from mpsd.core.state import SERVING, Domain, DomainState, Slot
from mpsd.core.victims import arm_drain, kill_frozen, work_is_lost
from mpsd.model import ServerState

ASK_AGAIN_S = 0.25
LEFT_STOP_S = 0.3
"""For a lost domain that programs have moved out of: what they have left there holds it up, some for good."""
_LEFTOVER = (
    DomainState.FAULTED,
    DomainState.POISONED,
    DomainState.RETIRED,
    DomainState.HEADLESS,
    DomainState.FAILED,
)


def on_slot_wanted(draft: Draft, event: ev.SlotWanted) -> None:
    slot = draft.state.slots.get(event.slot)
    if slot is None:
        if draft.state.stopping:
            return
        if event.start and not slots.room(draft):
            draft.count("slots_refused")
            return
        slot = Slot(event.slot, event.gpus, event.uid, event.exclusive)
    used = draft.now if event.used is None else min(event.used, draft.now)
    draft.put_slot(replace(slot, used=used, retiring=False))
    if event.start:
        ensure(draft, slot.id)


def on_adopted(draft: Draft, event: ev.DomainAdopted) -> None:
    """Until AdoptionDone nothing is emptied or used again: its clients may not be known yet."""
    slot = draft.state.slots.get(event.slot)
    if slot is None or event.domain in draft.state.domains:
        draft.count("adoptions_ignored")
        return
    # Whoever was starting or stopping it has gone: it is emptied and replaced like any old domain.
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
        )
    )
    digits = event.domain.removeprefix("d")
    number = int(digits) if digits.isdecimal() else 0
    later = max(draft.state.next_domain, number + 1)
    draft.state = replace(draft.state, next_domain=later, adopting=True)
    role = ev.DomainRole.OLD if draft.state.stopping else event.role
    _adopt_role(draft, slot, draft.state.domains[event.domain], role)


def _adopt_role(draft: Draft, slot: Slot, domain: Domain, role: ev.DomainRole) -> None:
    spare = role is ev.DomainRole.SPARE and slot.spare is None and not slot.exclusive
    if role is ev.DomainRole.ACTIVE and slot.active is None:
        draft.put_slot(replace(slot, active=domain.id))
        draft.emit(SwitchPath(slot.id, domain.id))
        if domain.state is DomainState.WARM:
            move(draft, domain.id, DomainTrigger.ACTIVATED)
    elif spare and domain.state is DomainState.WARM:
        draft.put_slot(replace(slot, spare=domain.id))
    elif domain.state in SERVING:
        move(draft, domain.id, DomainTrigger.RETIRE)


def on_adoption_done(draft: Draft, event: ev.AdoptionDone) -> None:
    draft.state = replace(draft.state, adopting=False)
    failover.forget_absent(draft)
    for slot in tuple(draft.state.slots.values()):
        if slots.forgotten(draft, slot):
            slots.retire(draft, slot)
        else:
            ensure(draft, slot.id)
            failover.linger(draft, slot.id)
    for domain in tuple(draft.state.domains.values()):
        arm_drain(draft, domain)
        settle(draft, domain.id)


def ensure(draft: Draft, slot_id: str) -> None:
    """Start whatever the slot lacks: a serving domain first, then a spare."""
    slot, state = draft.state.slots[slot_id], draft.state
    if state.stopping or slot.retiring:
        return
    active = state.domains[slot.active] if slot.active else None
    spare = state.domains[slot.spare] if slot.spare else None
    if active is not None and active.state in SERVING:
        wanted = state.policy.spare or failover.willing(state, slot)
        if spare is None and wanted and not slot.exclusive:
            started = start(draft, slot)
            draft.put_slot(replace(draft.state.slots[slot_id], spare=started))
    elif spare is not None and spare.state is DomainState.WARM:
        promote(draft, slot, spare.id)
    elif spare is None and not _starting(draft, slot_id):
        if active is not None and slot.exclusive:
            return
        started = start(draft, slot)
        if active is None:
            draft.put_slot(replace(draft.state.slots[slot_id], active=started))
        else:
            draft.put_slot(replace(draft.state.slots[slot_id], spare=started))


def _starting(draft: Draft, slot_id: str) -> bool:
    return any(d.slot == slot_id and d.state is DomainState.STARTING for d in draft.state.domains.values())


def start(draft: Draft, slot: Slot) -> str:
    name = f"d{draft.state.next_domain}"
    draft.state = replace(draft.state, next_domain=draft.state.next_domain + 1)
    draft.put_domain(Domain(name, slot.id, slot.gpus, slot.uid, DomainState.STARTING, draft.now))
    draft.emit(StartDomain(name, slot.gpus, slot.uid))
    return name


def promote(draft: Draft, slot: Slot, name: str) -> None:
    """Let the slot lead to a warm domain, and prepare the next spare."""
    move(draft, name, DomainTrigger.ACTIVATED)
    draft.put_slot(replace(slot, active=name, spare=None if slot.spare == name else slot.spare))
    draft.emit(SwitchPath(slot.id, name))
    draft.publish("domain-active", slot.uid, domain=name, slot=slot.id)
    if slot.active is not None and slot.active != name:
        settle(draft, slot.active)
    ensure(draft, slot.id)


def on_started(draft: Draft, event: ev.DomainStarted) -> None:
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.state is DomainState.STOPPING:
        # It came up after it had been given up: it is ended, or nobody ever would.
        draft.count("late_domain_starts")
        draft.emit(StopDomain(event.domain, draft.state.policy.stop_deadline_s))
        return
    if domain.control is not None:
        draft.count("late_domain_starts")
        return
    running = ServerState.ACTIVE if event.server else ServerState.GONE
    draft.put_domain(replace(domain, control=event.control, server=event.server, server_state=running))
    if not move(draft, domain.id, DomainTrigger.STARTED):
        return
    slot = draft.put_slot(replace(draft.state.slots[domain.slot], failures=0))
    current = draft.state.domains[slot.active] if slot.active else None
    if current is None or current.id == domain.id or current.state not in SERVING:
        promote(draft, slot, domain.id)
    failover.refresh_all(draft, slot.id)


def on_start_failed(draft: Draft, event: ev.DomainStartFailed) -> None:
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.state is not DomainState.STARTING:
        return
    draft.put_domain(replace(domain, problem=event.reason))
    move(draft, domain.id, DomainTrigger.START_FAILED)
    slot = draft.state.slots[domain.slot]
    slot = draft.put_slot(
        replace(
            slot,
            failures=slot.failures + 1,
            active=None if slot.active == domain.id else slot.active,
            spare=None if slot.spare == domain.id else slot.spare,
        )
    )
    policy = draft.state.policy
    delay = min(policy.start_retry_s * 2 ** min(slot.failures - 1, 16), policy.start_retry_max_s)
    draft.publish("domain-start-failed", None, domain=domain.id, reason=event.reason, retry_s=delay)
    draft.emit(ArmTimer("ensure", slot.id, delay))
    if slot.active is None and slot.spare and draft.state.domains[slot.spare].state is DomainState.WARM:
        promote(draft, slot, slot.spare)
    settle(draft, domain.id)


def on_stopped(draft: Draft, event: ev.DomainStopped) -> None:
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.state is not DomainState.STOPPING:
        draft.count("late_domain_stops")
        return
    endings.over(draft, event.domain)
    leases.release_dead(draft, event.domain)
    draft.drop_domain(event.domain)
    draft.publish("domain-gone", None, domain=event.domain)
    slots.drop_retired(draft, domain.slot)
    if draft.state.stopping:
        slots.end(draft, domain.slot)


def move(draft: Draft, name: str, trigger: DomainTrigger) -> bool:
    """Take one transition; False (and counted) when it means nothing in the present state."""
    domain = draft.state.domains[name]
    target = next_domain_state(domain.state, trigger)
    if target is None:
        draft.count("ignored_domain_triggers")
        return False
    draft.put_domain(replace(domain, state=target, since=draft.now))
    return True


def leave(draft: Draft, name: str, trigger: DomainTrigger, *, planned: bool = False) -> bool:
    """Take a domain out of service and let the spare take over its slot, in one decision.

    `planned`: the programs that can are to go on elsewhere, though nothing is lost.
    """
    if not move(draft, name, trigger):
        return False
    domain = draft.state.domains[name]
    slot = draft.state.slots[domain.slot]
    if slot.spare == name:
        slot = draft.put_slot(replace(slot, spare=None))
    state, users = domain.state.value, draft.users_of(name)
    lost = work_is_lost(domain)
    draft.publish("domain-left", domain.uid, users, domain=name, state=state, why=trigger.value, lost=lost)
    ensure(draft, slot.id)
    # First of what follows: from here to the program is all that lies between a fault and its next kernel.
    drained = planned and trigger is DomainTrigger.RETIRE
    failover.domain_left(draft, name, "drain" if drained else trigger.value, planned)
    if domain.state is DomainState.FAULTED:
        # The server has lost its contexts: nothing that the dead left there can still run.
        leases.release_dead(draft, name)
    kill_frozen(draft, name)
    arm_drain(draft, domain)
    settle(draft, name)
    return True


def settle(draft: Draft, name: str) -> None:
    """Stop a domain that is out of service and empty, or use it again where no other can exist."""
    domain = draft.state.domains.get(name)
    if domain is None or domain.state not in _LEFTOVER or draft.state.adopting:
        return
    coming = (c for c in draft.state.clients_of(name) if fates.comes(draft.state, c))
    if any(draft.state.living_of(name)) or any(coming):
        return
    slot = draft.state.slots[domain.slot]
    if slot.active == name:
        if domain.state is DomainState.FAULTED:
            draft.emit(AskServer(name), ArmTimer("ask", name, ASK_AGAIN_S))
        if domain.state is DomainState.FAULTED or not slot.exclusive:
            return
        # Only one server can exist and this one does not come back: its successor starts after it.
        draft.put_slot(replace(slot, active=None))
    # Their memory is the GPU's until then.
    held = work_is_lost(domain) and fates.was_left(draft.state, name)
    poisoned = domain.state is DomainState.POISONED
    deadline_s = draft.state.policy.stop_deadline_s
    if endings.held(draft.state, domain):
        endings.begin(draft, domain)
        leases.release_idle(draft, name)
    else:
        leases.release_dead(draft, name)
    move(draft, name, DomainTrigger.EMPTY)
    draft.emit(StopDomain(name, min(LEFT_STOP_S, deadline_s) if held or poisoned else deadline_s))
    if slot.active == name:
        ensure(draft, slot.id)


def on_control_died(draft: Draft, event: ev.ControlDied) -> bool:
    """True when it was a death to be recorded: the control daemon of a domain in use."""
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.control != event.process:
        return False
    used = domain.state not in (DomainState.STOPPING, DomainState.STARTING, DomainState.FAILED)
    return used and leave(draft, domain.id, DomainTrigger.CONTROL_DIED)


def on_server_seen(draft: Draft, event: ev.ServerSeen) -> None:
    domain = draft.state.domains.get(event.domain)
    if domain is not None and domain.server != event.server:
        draft.put_domain(replace(domain, server=event.server, former_server=domain.server))


def on_server_died(draft: Draft, event: ev.ServerDied) -> bool:
    """True when it was a death to be recorded: the server of a domain in service."""
    domain = draft.state.domains.get(event.domain)
    if domain is None or domain.server != event.server:
        return False
    if endings.held(draft.state, domain):
        endings.begin(draft, domain)
        endings.over(draft, domain.id)
    # A daemon that was started since has its lists of the next one, if there is one.
    here = [
        c for c in draft.state.clients_of(domain.id) if c.living and not (draft.state.adopting and c.listed)
    ]
    bereft = domain.bereft | {c.id.process for c in here}
    gone = replace(
        domain, server=None, former_server=event.server, server_state=ServerState.GONE, bereft=bereft
    )
    draft.put_domain(gone)
    used = domain.state in (DomainState.ACTIVE, DomainState.WARM, DomainState.POISONED)
    # Who was not ready when it was to be left is in it still.
    if domain.state is DomainState.RETIRED:
        failover.domain_left(draft, domain.id, DomainTrigger.SERVER_DIED.value)
        kill_frozen(draft, domain.id)
    return leave(draft, domain.id, DomainTrigger.SERVER_DIED) and used


def recovered(draft: Draft, domain: Domain) -> None:
    """A faulted domain whose server is ACTIVE again serves on where its slot still leads to it."""
    slot = draft.state.slots[domain.slot]
    idle = not draft.state.adopting and not any(draft.state.living_of(domain.id))
    if idle and slot.active == domain.id:
        move(draft, domain.id, DomainTrigger.RECOVERED)
        draft.publish("domain-active", domain.uid, domain=domain.id, slot=slot.id)
        ensure(draft, slot.id)


def on_mode_seen(draft: Draft, event: ev.ModeSeen) -> None:
    slot = draft.state.slots.get(event.slot)
    if slot is None or slot.exclusive == event.exclusive:
        return
    spare = slot.spare if event.exclusive else None
    slot = draft.put_slot(replace(slot, exclusive=event.exclusive, spare=None if spare else slot.spare))
    if spare is not None:
        move(draft, spare, DomainTrigger.RETIRE)
        failover.refresh_all(draft, slot.id)
        settle(draft, spare)
    ensure(draft, slot.id)
    if slot.active is not None:
        arm_drain(draft, draft.state.domains[slot.active])
        settle(draft, slot.active)


def on_drain(draft: Draft, event: ev.DrainRequested) -> None:
    gpus = frozenset(event.gpus or ("*",))
    drained = draft.state.drained
    left = drained - gpus if event.gpus else frozenset[str]()
    draft.state = replace(draft.state, drained=drained | gpus if event.on else left)
    draft.publish("drain" if event.on else "undrain", None, gpus=sorted(gpus))


def on_stop(draft: Draft, event: ev.StopRequested) -> None:
    """Evict every client, then stop every domain; the daemon waits until none is left."""
    draft.state = replace(draft.state, stopping=True)
    living = [c for c in draft.state.clients.values() if c.living]
    for client in sorted(living, key=lambda c: not draft.state.at_home(c)):
        kill_by_policy(draft, client, "mpsd was told to stop its domains")
    spared = {c.id.process.pid for c in draft.state.clients.values() if c.living and c.eviction is None}
    if spared:
        text = "nothing proves that these are clients of the domains whose logs name them: they are let live"
        draft.publish("clients-unproven", None, pids=sorted(spared), text=text)
    for slot in tuple(draft.state.slots.values()):
        draft.put_slot(replace(slot, active=None, spare=None))
    for domain in tuple(draft.state.domains.values()):
        if domain.state in SERVING:
            move(draft, domain.id, DomainTrigger.RETIRE)
        settle(draft, domain.id)
    for slot in tuple(draft.state.slots.values()):
        slots.end(draft, slot.id)
