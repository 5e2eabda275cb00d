"""SIGKILL with the lease held: one process, all its clients, one answer to whoever asked."""

from __future__ import annotations

from dataclasses import replace

from mpsd.core import events as ev
from mpsd.core.draft import Draft
from mpsd.core.effects import Answer, ArmTimer, Kill
from mpsd.core.lifecycle import ClientTrigger, allows
from mpsd.core.proof import owner_of_kill, proven
from mpsd.core.state import POLICY, Client, ClientState, Eviction
from mpsd.model import ProcessInstance

KILL_WAIT_S = 5.0


def awaited(draft: Draft, process: ProcessInstance) -> Eviction | None:
    """The eviction of this process that somebody still waits for, if there is one."""
    evictions = (c.eviction for c in _living(draft, process) if c.eviction is not None)
    return next((e for e in evictions if e.requester != POLICY), None)


def kill(draft: Draft, grounds: Client, eviction: Eviction) -> None:
    """Kill the process of a client that is proven: every client it still is shares this eviction."""
    eviction, process = replace(eviction, killed=draft.now), grounds.id.process
    for client in _living(draft, process):
        draft.put_client(replace(client, state=ClientState.KILLING, eviction=eviction))
    owner = owner_of_kill(draft.state.domains[grounds.id.domain], grounds, eviction)
    draft.emit(Kill(grounds.id, eviction.reason, owner), ArmTimer("kill-wait", str(process), KILL_WAIT_S))


def announce(draft: Draft, clients: list[Client], why: str) -> None:
    """Tell their user, before anything is done."""
    for client in clients:
        pid, domain = client.id.process.pid, client.id.domain
        draft.publish("client-evicting", client.facts.uid, domain=domain, pid=pid, reason=why)


def kill_by_policy(draft: Draft, client: Client, why: str) -> bool:
    """Kill a living client that policy wants gone, once; who asked for its eviction before is still answered.

    False: nothing proves it a client of its domain, so it is let live.
    """
    if not proven(draft.state.domains[client.id.domain], client, asked=False):
        return False
    living = _living(draft, client.id.process)
    if any(allows(c.state, ClientTrigger.KILL) for c in living):
        begun = next((c.eviction for c in living if c.eviction is not None), None)
        if begun is None:
            announce(draft, living, why)
        kill(draft, client, begun or Eviction(POLICY, why, draft.now))
    return True


def answer_gone(draft: Draft, process: ProcessInstance, how: str) -> None:
    """Answer whoever waits for the eviction that has just come to its end.

    `evict_ms` lasts until the client could do nothing more: SIGKILL was sent, after the server had let go
    of it where it could be asked. `gone_ms` lasts until the kernel had taken its process apart.
    """
    eviction = awaited(draft, process)
    if eviction is not None:
        killed = eviction.killed if eviction.killed is not None else draft.now
        data = {
            "outcome": "evicted",
            "steps": [*eviction.steps, how],
            "evict_ms": round((killed - eviction.began) * 1e3, 3),
            "gone_ms": round((draft.now - eviction.began) * 1e3, 3),
        }
        draft.emit(Answer(eviction.requester, True, data))


def on_kill_wait(draft: Draft, subject: str) -> None:
    """SIGKILL was sent and the process is still there: say so, and let it be asked again."""
    stuck = [
        c
        for c in draft.state.clients.values()
        if str(c.id.process) == subject and c.eviction is not None and c.eviction.killed is not None
    ]
    if not stuck:
        return
    process = stuck[0].id.process
    message = f"process {subject} has not ended {KILL_WAIT_S:.0f} s after SIGKILL"
    draft.publish("kill-stuck", stuck[0].facts.uid, pid=process.pid, text=message)
    _answer_unkilled(draft, process, "deadline", message)


def on_kill_refused(draft: Draft, event: ev.KillRefused) -> None:
    """It is not its domain's user's own any more, or never was: it lives.

    It stays as it is: the domain counts it as living, and it is killed only where somebody asks again
    and a lease or a list of the server speaks for it.
    """
    sent = [c for c in _living(draft, event.process) if c.state is ClientState.KILLING]
    if not sent:
        return
    member = draft.state.members.get(event.process)
    if member is not None:
        # It may go on after all.
        draft.put_member(replace(member, named=False))
    message = f"process {event.process} is not killed: {event.reason}"
    for client in sent:
        facts = replace(client.facts, borrowed=True)
        eviction = replace(client.eviction, killed=None) if client.eviction else None
        draft.put_client(replace(client, facts=facts, problem=message, eviction=eviction))
    draft.count("kills_refused")
    draft.publish("kill-refused", sent[0].facts.uid, pid=event.process.pid, text=message)
    _answer_unkilled(draft, event.process, "unproven", message)


def _answer_unkilled(draft: Draft, process: ProcessInstance, code: str, message: str) -> None:
    """Tell whoever waits, once; what goes on is policy's."""
    eviction = awaited(draft, process)
    if eviction is not None:
        data = {"code": code, "message": message, "steps": list(eviction.steps)}
        draft.emit(Answer(eviction.requester, False, data))
    for client in _living(draft, process):
        if client.state is ClientState.KILLING and client.eviction is not None:
            draft.put_client(replace(client, eviction=replace(client.eviction, requester=POLICY)))


def _living(draft: Draft, process: ProcessInstance) -> list[Client]:
    return [c for c in draft.state.spaces_of(process) if c.living]
