"""The paths of all domains in service, checked each second and before a path is handed out.

A domain whose path does not work is dead, whatever its processes do. mpsd.core replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpsd.api.stateconditions import clients_in
from mpsd.base.conditions import Code, Condition
from mpsd.core import events as ev
from mpsd.core.state import DomainState, State
from mpsd.mps.domains import RunningDomains
from mpsd.mps.pathhealth import Path, Trouble


class PathChecks:
    """Checks paths and posts DomainUnreachable. `state`: the daemon's present state."""

    def __init__(
        self, domains: RunningDomains, state: Callable[[], State], post: Callable[[ev.Event], None]
    ) -> None:
        self._domains = domains
        self._state = state
        self._post = post
        self._closed: dict[str, str] = {}

    async def check_all(self) -> None:
        """Check the domains in service, standby domains first: none of them takes over unseen."""
        state = self._state()
        if state.stopping or state.adopting:
            return
        paths = [_path(state, d.id, d.uid) for d in state.domains.values() if d.state is DomainState.WARM]
        paths += [_path(state, d.id, d.uid) for d in state.domains.values() if d.state is DomainState.ACTIVE]
        found = await self._check(paths)
        self._closed = {
            path.domain: trouble.text
            for path, trouble in zip(paths, found, strict=True)
            if trouble is not None and not trouble.dead
        }

    async def hand_out(self, slot: str, uid: int) -> Trouble | None:
        """Return why this user does not get to the active domain of a slot; None if it does."""
        state = self._state()
        domain = state.slots[slot].active
        if domain is None:
            return Trouble(f"slot {slot} has no domain", "", seen=False)
        (trouble,) = await self._check([_path(state, domain, uid)])
        now = self._state().slots.get(slot)
        if trouble is None and (now is None or now.active != domain):
            return Trouble(f"slot {slot} has another domain by now", "", seen=False)
        return trouble

    async def _check(self, paths: Sequence[Path]) -> list[Trouble | None]:
        found = await self._domains.paths.check(paths)
        for path, trouble in zip(paths, found, strict=True):
            domain = self._state().domains.get(path.domain)
            serving = domain is not None and domain.state in (DomainState.WARM, DomainState.ACTIVE)
            # A control daemon that ends closes its sockets first: its end is another event.
            if trouble is not None and trouble.dead and serving and self._domains.serves(path.domain):
                self._post(ev.DomainUnreachable(path.domain, trouble.text))
        return found

    def conditions(self) -> list[Condition]:
        """Return why users do not get to domains."""
        state, found = self._state(), []
        cut_off = {d.id: d.problem for d in state.domains.values() if d.state is DomainState.RETIRED}
        for domain, why in (*cut_off.items(), *self._closed.items()):
            if not why or domain not in state.domains:
                continue
            replaced = state.slots[state.domains[domain].slot].active not in (domain, None)
            if domain in cut_off and replaced:
                found.append(Condition(Code.DOMAIN_CUT_OFF, domain, why))
            else:
                clients = clients_in(state, domain)
                found.append(Condition(Code.DOMAIN_UNREACHABLE, domain, why, clients))
        if rights := self._domains.paths.problem:
            found.append(Condition(Code.PATHS_NOT_TRIED, detail=rights))
        return found


def _path(state: State, domain: str, uid: int | None) -> Path:
    found = state.domains[domain]
    slot = found.slot if state.slots[found.slot].active == domain else None
    return Path(domain, found.uid, uid, slot)
