"""Slots of users who have long been away: given up where they are in the way, and never in use.

While a slot is there its path never is absent, for a client that finds no socket runs outside MPS without
a word. So a slot is retired only when there is no room for another one, or when an earlier daemon left
nothing of it running; then its path goes first, and whoever came by it before is served to the end.
"""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import domains
from mpsd.core.draft import Draft
from mpsd.core.effects import DropPath
from mpsd.core.lifecycle import DomainTrigger
from mpsd.core.state import SERVING, Slot


def touch(draft: Draft, domain: str) -> None:
    """A client of this domain comes or goes."""
    slot = draft.state.slots[draft.state.domains[domain].slot]
    draft.put_slot(replace(slot, used=draft.now))


def room(draft: Draft) -> bool:
    """Whether one more slot may be; where there are too many, the longest unused one makes room."""
    serving = [s for s in draft.state.slots.values() if not s.retiring]
    policy = draft.state.policy
    if len(serving) < policy.max_slots:
        return True
    idle = [s for s in serving if draft.now - s.used > policy.slot_idle_s and _may_go(draft, s)]
    if idle:
        retire(draft, min(idle, key=lambda s: (s.used, s.id)))
    return bool(idle)


def forgotten(draft: Draft, slot: Slot) -> bool:
    """Whether a restored slot is not to be started again: nothing of it runs, and its user is long away."""
    runs = any(d.slot == slot.id for d in draft.state.domains.values())
    return slot.uid is not None and not runs and draft.now - slot.used > draft.state.policy.slot_forget_s


def retire(draft: Draft, slot: Slot) -> None:
    """Give a slot up. Its domains drain by themselves, should somebody be in them all the same."""
    draft.put_slot(replace(slot, active=None, spare=None, retiring=True))
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


def end(draft: Draft, name: str) -> None:
    """mpsd stops its domains for good: with its last one a slot goes, and its path, which leads nowhere now.

    The next mpsd starts a domain for whoever asks it, and not for everybody who ever did.
    """
    if name in draft.state.slots and all(d.slot != name for d in draft.state.domains.values()):
        draft.drop_slot(name)
        draft.emit(DropPath(name))


def _may_go(draft: Draft, slot: Slot) -> bool:
    """Everybody's slot never goes, nor one that has a client, living or dead."""
    clients = draft.state.clients.values()
    return slot.uid is not None and all(draft.state.domains[c.id.domain].slot != slot.id for c in clients)
