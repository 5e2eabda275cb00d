"""The limits of clients in `status`: the answers of the domains that serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpsd.base.model import Gpu
from mpsd.base.quantities import mebibytes
from mpsd.core.state import DomainState, State
from mpsd.limits.book import Owner
from mpsd.limits.keeper import LimitKeeper
from mpsd.limits.values import STOCK, Key, Kind, agrees, value_of


def of_gpus(state: State, limits: LimitKeeper, gpus: Sequence[Gpu]) -> dict[str, Mapping[str, str]]:
    """Return the limits of each GPU (UUID): name of the limit to value, without those of a new domain.

    The name has the user, unless the value is that of the configuration for all users.
    """
    return {gpu.uuid: _of_gpu(state, limits, gpu.uuid) for gpu in gpus}


def _of_gpu(state: State, limits: LimitKeeper, gpu: str) -> Mapping[str, str]:
    shown: dict[str, str] = {}
    here = (d for d in state.domains.values() if gpu in d.gpus and _is_active(state, d.id))
    # Right after a start of mpsd no domain has answered yet.
    serving = [domain for domain in here if limits.answers(domain.id)]
    for domain in serving:
        configured = limits.book.configured(Owner(domain.gpus, domain.uid))
        for key, answered in limits.answers(domain.id).items():
            stock = STOCK.get(key)
            if key.gpu not in ("", gpu) or (stock and agrees(key.kind, stock, answered)):
                continue
            common = key in configured and agrees(key.kind, configured[key], answered)
            shown[_name(key, None if common else domain.uid)] = value_of(key.kind, answered)
    # Where no domain serves, the next one starts with these.
    if not serving:
        configured = limits.book.configured(Owner((gpu,), None))
        shown |= {key.kind.value: value for key, value in configured.items()}
    served = {Owner(domain.gpus, domain.uid) for domain in serving}
    for owner, own in limits.book.by_hand().items():
        if owner not in served and gpu in owner.gpus:
            shown |= {_name(key, owner.uid): value for key, value in own.items() if key.gpu in ("", gpu)}
    return shown


def _name(key: Key, uid: int | None) -> str:
    return key.kind.value if uid is None else f"{key.kind} (user {uid})"


def _is_active(state: State, domain: str) -> bool:
    known = state.domains[domain]
    slot = state.slots.get(known.slot)
    return slot is not None and slot.active == domain and known.state is DomainState.ACTIVE


def of_domains(state: State, limits: LimitKeeper) -> dict[str, Mapping[str, Any]]:
    """Return the limits of new clients of each domain, as numbers; None where they are not known."""
    return {name: _of_domain(limits.answers(name)) for name in state.domains}


def _of_domain(answers: Mapping[Key, str]) -> Mapping[str, Any]:
    percentage, priority = answers.get(Key(Kind.PERCENTAGE)), answers.get(Key(Kind.PRIORITY))
    memory = {key.gpu: mebibytes(text) << 20 for key, text in answers.items() if key.kind is Kind.MEMORY}
    return {
        "active_thread_percentage": float(percentage) if percentage else None,
        "client_priority": int(priority) if priority else None,
        "device_memory_bytes": memory,
    }
