"""Waits for the client list of a server: a domain that may have unknown clients is not stopped before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mpsd.core.draft import Draft
from mpsd.core.effects import ArmTimer, AskServer
from mpsd.core.state import Domain, DomainState

_WAITING = (DomainState.FULL, DomainState.RETIRED, DomainState.POISONED)
"""States in which an empty domain is stopped."""

UNSURE, UNSURE_S = "unsure", 5.0
"""Name of the timer, and longest wait [s], for a client list after a log line with a process of another user.
mpsd then lists each second."""
UNSURE_MOST_S = 15.0
"""Longest wait [s] of that kind in a flood of such lines; less than the time that a stop of mpsd may take."""
QUIET_LOG = "quiet-log"
LIST_WAIT_S = 30.0
"""Longest wait [s] for a server that lists nothing: its user may have stopped it for ever."""


def is_unsure(domain: Domain, now: float) -> bool:
    """Return whether the domain may have a client that no list has shown yet."""
    return domain.foreign is not None and now < unsure_until(domain.foreign)


def unsure_until(foreign: tuple[float, float]) -> float:
    """Return the end of the wait [monotonic s]. `foreign`: see core.state.Domain."""
    first, latest = foreign
    return min(latest + UNSURE_S, first + UNSURE_MOST_S)


def await_list(draft: Draft, domain: Domain) -> None:
    """Let a domain that may lack clients wait for a later list of its server before it is stopped."""
    if domain.may_lack_clients and domain.state in _WAITING:
        await_later_list(draft, domain)


def await_later_list(draft: Draft, domain: Domain) -> None:
    """Let a domain wait for a later list of its server before it is stopped."""
    draft.put_domain(replace(domain, list_after=draft.now))
    draft.emit(ArmTimer(QUIET_LOG, domain.id, LIST_WAIT_S))


def ask_again(draft: Draft, names: Iterable[str]) -> None:
    """Ask for the clients of domains whose servers did not list them when mpsd started. They may have unknown
    ones, so they are not stopped before."""
    for domain in [draft.state.domains[name] for name in sorted(names) if name in draft.state.domains]:
        if domain.server is not None:
            await_later_list(draft, domain)
            draft.emit(AskServer(domain.id, clients=True))


def waits_for_list(draft: Draft, domain: Domain) -> bool:
    """Return whether the domain must not be stopped before a later list of its server."""
    if domain.list_after is None or domain.server is None or draft.state.stopping:
        # Without a server there are no clients, and no later list could end the wait.
        return False
    return domain.state in _WAITING and draft.now - domain.list_after < LIST_WAIT_S * 0.99
