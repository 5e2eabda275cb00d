"""The conditions that the daemon's state shows. Pure functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from mpsd.base.conditions import Code, Condition
from mpsd.clients.pins import NO_DESCRIPTOR
from mpsd.core.failover.participants import SWITCHED_OFF, Standing
from mpsd.core.state import SERVING, Client, ClientState, Domain, DomainState, State
from mpsd.core.victims import lost_clients, work_is_lost

_EXPLAINED = SERVING | {DomainState.FAILED}


def state_conditions(state: State, gpus: Sequence[str]) -> list[Condition]:
    """Return the conditions of GPUs, domains and clients. `gpus`: the UUIDs of this machine's GPUs."""
    found = [*gpu_conditions(state, gpus)]
    clients: dict[str, list[Client]] = defaultdict(list)
    for client in state.clients.values():
        clients[client.id.domain].append(client)
    for domain in state.domains.values():
        found += [*_of_domain(state, domain), *_of_clients(state, domain, clients[domain.id])]
    found += _of_standbys(state)
    if unpinned := sum(domain.unpinned for domain in state.domains.values()):
        found.append(Condition(Code.CLIENTS_NOT_SHOWN, count=unpinned))
    if dropped := state.counters.get("internal_errors", 0):
        found.append(Condition(Code.DECISION_DROPPED, count=dropped))
    return found


def gpu_conditions(state: State, gpus: Sequence[str]) -> Iterator[Condition]:
    """Yield the conditions of these GPUs, lost ones first."""
    yield from (Condition(Code.GPU_LOST, gpu, state.lost_gpus[gpu]) for gpu in gpus if gpu in state.lost_gpus)
    yield from (Condition(Code.GPU_DRAINED, gpu) for gpu in gpus if state.drained & {"*", gpu})


def _of_domain(state: State, domain: Domain) -> Iterator[Condition]:
    """Yield why the domain that a slot leads to takes no new clients.

    A failed start has its own condition (SlotPaths), and so has a path that does not work (PathChecks).
    """
    if state.slots[domain.slot].active != domain.id:
        return
    if domain.state is DomainState.FAULTED:
        yield Condition(Code.DOMAIN_FAULTED, domain.id, count=clients_in(state, domain.id))
    elif domain.state not in _EXPLAINED and not domain.problem:
        yield Condition(Code.DOMAIN_NOT_SERVING, domain.id, domain.state.value)


def clients_in(state: State, domain: str) -> int:
    """Return the number of processes that a fault of the domain would harm."""
    return _processes(state.living_of(domain))


def _of_clients(state: State, domain: Domain, here: Sequence[Client]) -> Iterator[Condition]:
    lost = lost_clients(state, domain.id) if here and (domain.bereft or work_is_lost(domain)) else ()
    if lost:
        yield Condition(Code.CLIENTS_LOST, domain.id, count=_processes(lost))
    # A client that waits for a descriptor has its own condition (Attacher).
    unprotected = [c for c in here if c.state is ClientState.UNPROTECTED and c.problem != NO_DESCRIPTOR]
    if unprotected:
        yield Condition(Code.CLIENTS_UNPROTECTED, domain.id, count=_processes(unprotected))
    if limited := _processes(c for c in here if c.living and c.leased and c.problem):
        yield Condition(Code.CLIENTS_LIMITED, domain.id, count=limited)
    yield from _of_budgets(state, domain, here)
    if held := _processes(c for c in here if c.state is ClientState.HELD):
        yield Condition(Code.MEMORY_HELD, domain.id, count=held)


def _of_budgets(state: State, domain: Domain, here: Sequence[Client]) -> Iterator[Condition]:
    """Yield how many clients have left fail-over for which budgets, without those that were switched off."""
    members = {c.id.process: state.members.get(c.id.process) for c in here if c.living and state.at_home(c)}
    left = (m.excess for m in members.values() if m and m.excess and m.excess != SWITCHED_OFF)
    budgets = Counter(excess.budget.name.lower() for excess in left)
    if budgets:
        detail = ", ".join(f"{budget}: {count}" for budget, count in sorted(budgets.items()))
        yield Condition(Code.SNAPSHOT_BUDGET, domain.id, detail, budgets.total())


def _of_standbys(state: State) -> Iterator[Condition]:
    """Yield how many participants of each GPU wait for a standby context."""
    waiting = (m for m in state.members.values() if m.connected and m.standing is Standing.WAITING)
    counts = Counter(m.capped for m in waiting if m.capped is not None)
    for gpu, count in sorted(counts.items()):
        yield Condition(Code.STANDBY_CAP, gpu, str(state.policy.standby_contexts), count)


def _processes(clients: Iterable[Client]) -> int:
    return len({client.id.process for client in clients})
