"""Adoption of what an earlier daemon left: domains, servers, living clients, and leases of exited clients.

The state file says what there should be. mpsd believes none of it until the living process proves it. If the
file and the stable path disagree, the path is right, because clients use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import structlog

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import MpsdError
from mpsd.base.model import (
    ClientId,
    FailoverMode,
    ProcessFacts,
    ProcessInstance,
    ServerState,
    SnapshotBudget,
    ZonePolicy,
)
from mpsd.clients.attach import Attacher
from mpsd.clients.lease import RetainedLease, domain_named, is_current, stored_lease
from mpsd.clients.orphans import Orphans, pin_domain
from mpsd.config.layout import Layout
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import (
    SWITCHED_OFF,
    Excess,
    FailoverRecord,
    Outcome,
    Participant,
    SnapshotLimit,
    Standing,
)
from mpsd.core.state import Client, Domain, DomainState, State
from mpsd.daemon import unrecorded
from mpsd.daemon.slotpaths import slot_name
from mpsd.fdstore.queue import LeaseStore
from mpsd.gpu.base import DeviceManager
from mpsd.mps import pipedir
from mpsd.mps.domains import Post, RunningDomains
from mpsd.os import processes as procs

log = structlog.get_logger("mpsd.adoption")

LEVEL = 1
KIND = "mpsd-state"
ANSWER_S = 5.0
"""Time [s] in which a GPU that was lost must answer NVML to count as reset."""
LIST_S = 1.0
"""Time [s] in which a server must list its clients. mpsd orders no move meanwhile. A control daemon that is
about to quit answers nothing before its clients have ended."""
_GONE = (DomainState.STOPPING, DomainState.FAILED)
# States in which clients have contexts, as long as the server is the one that made them.
_HELD = (
    DomainState.ACTIVE,
    DomainState.FULL,
    DomainState.WARM,
    DomainState.POISONED,
    DomainState.RETIRED,
)


def to_file(
    state: State, limits: Mapping[str, Any], old_limits: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> dict[str, Any]:
    """Return what a later daemon needs of this state, as plain values.

    `old_limits`: LimitBook.old_rows().
    """
    living = {c.id.process for c in state.clients.values() if c.living}
    return {
        "next_domain": state.next_domain,
        "drained": sorted(state.drained),
        "lost_gpus": dict(state.lost_gpus),
        # Read by earlier versions alone.
        "settings": dict(old_limits),
        "limits": dict(limits),
        "slots": [
            {
                "id": s.id,
                "gpus": list(s.gpus),
                "uid": s.uid,
                "exclusive": s.exclusive,
                "active": s.active,
                "spare": s.spare,
                "second": s.second,
                "used": s.used,
                "account": s.account,
                "joined": s.joined,
            }
            for s in state.slots.values()
        ],
        "domains": [_domain_row(d, living) for d in state.domains.values()],
        "clients": [_client_row(c) for c in state.clients.values() if c.leased or c.living],
        "members": [_member_row(m) for m in state.members.values() if m.home is not None],
        "zone_policies": [
            _policy_row(c)
            for c in state.clients.values()
            if c.living and (c.zone_policy is not None or c.frozen is not None)
        ],
    }


async def still_lost(devices: DeviceManager, lost: Mapping[str, str]) -> dict[str, str]:
    """Return those of the lost GPUs, each with the reason, that do not answer NVML in time."""

    async def answers(gpu: str) -> bool:
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.to_thread(devices.memory_used, gpu)
        except (MpsdError, TimeoutError):
            return False
        return True

    found = await asyncio.gather(*map(answers, lost))
    return {gpu: why for (gpu, why), lives in zip(lost.items(), found, strict=True) if not lives}


def _policy_row(client: Client) -> dict[str, Any]:
    return {
        "process": _instance_row(client.id.process),
        "policy": client.zone_policy,
        "frozen": client.frozen is not None,
    }


def _member_row(participant: Participant) -> dict[str, Any]:
    """Return a participant with its home: it may be a client of two domains."""
    left = participant.reason if participant.standing is Standing.LEFT_BEHIND else ""
    limit, excess = participant.limit, participant.excess
    switched_off = excess == SWITCHED_OFF
    return {
        "process": _instance_row(participant.process),
        "uid": participant.uid,
        "mode": participant.mode,
        "home": participant.home,
        "left_behind": left,
        "limit": None if limit is None else {"bytes": limit.bytes, "gpus": sorted(limit.gpus)},
        # An mpsd of an earlier release does not read a row with another budget.
        "excess": None if excess is None or switched_off else asdict(excess),
        **({"switched_off": True} if switched_off else {}),
    }


def _domain_row(domain: Domain, living: Set[ProcessInstance]) -> dict[str, Any]:
    full = domain.state is DomainState.FULL
    return {
        "id": domain.id,
        "slot": domain.slot,
        # Earlier versions know no full domains. For them it is a domain without new clients.
        "state": DomainState.RETIRED.value if full else domain.state.value,
        "full": full,
        "control": _instance_row(domain.control),
        "server": _instance_row(domain.server),
        "bereft": sorted(map(_instance_row, living & domain.bereft)),
        "trial": _instance_row(domain.trial),
    }


def _domain_state(row: Mapping[str, Any]) -> DomainState:
    state = DomainState(row["state"])
    # Files of an earlier version lack the key.
    return DomainState.FULL if state is DomainState.RETIRED and row.get("full") else state


def _instance_row(instance: ProcessInstance | None) -> list[int] | None:
    return [instance.pid, instance.start_ticks] if instance else None


def _client_row(client: Client) -> dict[str, Any]:
    facts = client.facts
    return {
        "domain": client.id.domain,
        "pid": client.id.process.pid,
        "start_ticks": client.id.process.start_ticks,
        "ppid": facts.ppid,
        "uid": facts.uid,
        "gid": facts.gid,
        "command": facts.command,
        "exe": facts.exe,
        "cgroup": facts.cgroup,
        "listed": client.listed,
    }


def _instance(row: Sequence[int] | None) -> ProcessInstance | None:
    return ProcessInstance(int(row[0]), int(row[1])) if row else None


@dataclass(slots=True)
class Adoption:
    """One take-over, at the start of a daemon, before it starts anything new."""

    layout: Layout
    domains: RunningDomains
    attacher: Attacher
    store: LeaseStore
    orphans: Orphans
    post: Post
    # Returns whether another part of mpsd owns a stored set, and has taken it.
    take_other_set: Callable[[str, Sequence[int]], bool] = lambda name, fds: False
    unknown: list[Condition] = field(default_factory=list)
    rows: Sequence[Mapping[str, Any]] = ()
    policies: Sequence[Mapping[str, Any]] = ()
    dead_servers: list[ev.ServerDied] = field(default_factory=list)
    members: Sequence[mev.MemberRestored] = ()
    # Of the journal: those that programs may still report on.
    failovers: Sequence[FailoverRecord] = ()
    # Domains whose control daemons were about to quit.
    stopping: set[str] = field(default_factory=set)
    # Domains whose servers did not list their clients.
    unlisted: set[str] = field(default_factory=set)
    # The GPUs of this machine, and the known slots: names by GPUs and user.
    gpus: Collection[str] = ()
    slots: dict[tuple[tuple[str, ...], int | None], str] = field(default_factory=dict)

    def run(self, saved: Mapping[str, Any] | None) -> None:
        """Post the events that rebuild the state. Ends no domain that still has clients."""
        retained, unknown_sets = self._retained_leases()
        for slot in saved["slots"] if saved else ():
            exclusive, gpus = bool(slot["exclusive"]), tuple(slot["gpus"])
            # Files of an earlier version lack the last keys.
            used, account, joined = slot.get("used"), slot.get("account"), bool(slot.get("joined", True))
            self.post(
                ev.SlotWanted(
                    slot["id"], gpus, slot["uid"], exclusive, False, used, account=account, joined=joined
                )
            )
            self.slots[gpus, slot["uid"]] = slot["id"]
        slots = {slot["id"]: slot for slot in saved["slots"]} if saved else {}
        found = map(_member, saved.get("members", ()) if saved else ())
        # Their processes live and will connect again.
        self.members = [m for m in found if m is not None and _alive(m.process)]
        for row in saved["domains"] if saved else ():
            self._domain(row, slots[row["slot"]])
        self._unknown({row["id"] for row in saved["domains"]} if saved else set())
        retained = self._without_orphans(retained)
        self._hold(unknown_sets)
        self.attacher.inherit(retained)
        self.rows = saved["clients"] if saved else ()
        # First, because the reports of participants revise them.
        for record in self.failovers:
            gone = (f.process for f in record.fates if f.outcome in (Outcome.TOLD, Outcome.SILENT))
            self.post(mev.FailoverRestored(record, frozenset(p for p in gone if not _alive(p))))
        for participant in self.members:
            self.post(participant)
        # Files of an earlier version lack this key.
        self.policies = saved.get("zone_policies", ()) if saved else ()
        self._restore_exited(retained)

    def _without_orphans(self, retained: Mapping[ClientId, RetainedLease]) -> dict[ClientId, RetainedLease]:
        """Return the leases of adopted domains, and of domains without living processes; hold all other
        leases apart."""
        remaining = dict(retained)
        for domain in {c.domain for c in retained} - set(self.domains.names()):
            if processes := pin_domain(str(self.layout.pipe_dir(domain))):
                mine = {c: remaining.pop(c) for c in retained if c.domain == domain}
                self.orphans.take(domain, processes, mine)
        return remaining

    def _unknown(self, known: Collection[str]) -> None:
        """Remove or report the directories that the state file does not name. A domain that lives in one
        is not ended."""
        for name in self.layout.known_domains():
            if name in known:
                continue
            found = pipedir.ownership(str(self.layout.pipe_dir(name)))
            living = self._living(name)
            if found.owner in (pipedir.Owner.NOBODY, pipedir.Owner.STALE) and not living:
                self.layout.forget_domain(name)
                continue
            # Without its socket no command lists its clients, and mpsd would end it under them.
            if found.owner is pipedir.Owner.LIVE and self._adopt_unrecorded(name, living):
                continue
            self._tell_unknown(name, found.pid or (living[0].pid if living else None))

    def _adopt_unrecorded(self, name: str, living: Sequence[ProcessInstance]) -> bool:
        """Adopt a living domain without a row, if sources that root alone writes prove its identity.

        It serves its clients to their end, and no new ones.
        """
        pipe_dir = str(self.layout.pipe_dir(name))
        for process in living:
            identity = unrecorded.identify(pipe_dir, process, self.gpus)
            if identity is None:
                continue
            gpus, uid = identity
            known = self.slots.get((gpus, uid))
            slot = known or slot_name(gpus, uid)
            if known is None and slot in self.slots.values():
                continue  # The name belongs to a slot of other GPUs.
            try:
                server = self.domains.adopt(name, gpus, uid, process)
            except MpsdError as error:
                log.info("cannot adopt a control daemon", domain=name, reason=str(error))
                continue
            log.warning("adopted a domain that the state file does not name", domain=name, slot=slot)
            if known is None:
                self.slots[gpus, uid] = slot
                self.post(ev.SlotWanted(slot, gpus, uid, start=False))
            running = ServerState.ACTIVE if server else ServerState.GONE
            old, state = ev.DomainRole.OLD, DomainState.RETIRED
            private = pipedir.is_private(pipe_dir, uid)
            self.post(ev.DomainAdopted(name, slot, old, state, process, server, running, private=private))
            self.domains.ask(name)
            return True
        return False

    def _tell_unknown(self, name: str, pid: int | None) -> None:
        where = str(self.layout.pipe_dir(name))
        self.unknown.append(Condition(Code.DOMAIN_UNSUPERVISED, name, where, pid or 0))

    def _retained_leases(self) -> tuple[dict[ClientId, RetainedLease], dict[str, Sequence[int]]]:
        """Return the leases that the store kept, and by name the sets that mpsd does not understand."""
        retained: dict[ClientId, RetainedLease] = {}
        unknown_sets: dict[str, Sequence[int]] = {}
        # Of two sets of one client use the newer form: it was about to replace the other.
        for name, fds in sorted(self.store.fetch_all().items(), key=lambda item: is_current(item[0])):
            if self.take_other_set(name, fds):
                continue
            parsed = stored_lease(name, len(fds))
            if parsed is None:
                unknown_sets[name] = fds
                continue
            client, roles = parsed
            if client in retained:
                retained[client].close()
                self.store.drop(retained[client].name)
            retained[client] = RetainedLease(name, dict(zip(roles, fds, strict=True)))
        return retained, unknown_sets

    def _hold(self, unknown_sets: Mapping[str, Sequence[int]]) -> None:
        """Hold sets of unknown form while their domain lives: each may be a lease of another version of
        mpsd."""
        for name, fds in unknown_sets.items():
            domain = domain_named(name)
            processes = [] if domain is None else pin_domain(str(self.layout.pipe_dir(domain)))
            if domain is None or processes:
                self.orphans.hold(name, fds, domain, processes)
                continue
            log.error("released stored descriptors: they belong to no living client", name=name)
            for fd in fds:
                os.close(fd)
            self.store.drop(name)

    def _domain(self, row: Mapping[str, Any], slot: Mapping[str, Any]) -> None:
        name, gpus = row["id"], tuple(slot["gpus"])
        state = _domain_state(row)
        control = _instance(row["control"]) or self._recorded(name)
        server: ProcessInstance | None = None
        try:
            if control is not None:
                server = self.domains.adopt(name, gpus, slot["uid"], control)
        except MpsdError as error:
            log.info("cannot adopt a control daemon", domain=name, reason=str(error))
            control = None
        if control is None:
            control, server = self._started_unseen(name, gpus, slot["uid"])
        if control is None:
            server = _instance(row["server"])
            if strangers := self._living(name, besides=server):
                self._tell_unknown(name, strangers[0].pid)
                return
            if not self.domains.adopt_headless(name, gpus, server):
                # The domain is gone: remove its directory, so that the name cannot mislead.
                self.layout.forget_domain(name)
                if any(m.home == name for m in self.members):
                    # Living programs have dead contexts there and must be moved.
                    dead, exited_processes = DomainState.HEADLESS, ServerState.GONE
                    self.post(
                        ev.DomainAdopted(
                            name, slot["id"], ev.DomainRole.OLD, dead, None, None, exited_processes
                        )
                    )
                return
            state = DomainState.HEADLESS
        elif state in (*_GONE, DomainState.STARTING):
            if state is DomainState.STOPPING:
                self.stopping.add(name)
            # The daemon died while it started or stopped this domain: it is empty, so end it.
            state = DomainState.RETIRED
        role = self._role(name, slot)
        known = _instance(row["server"])
        died = known if state in _HELD and known != server else None
        if died is not None:
            # The server died while no daemon ran: post that when all its clients are known.
            self.dead_servers.append(ev.ServerDied(name, died))
            server = died
        running = ServerState.ACTIVE if server else ServerState.GONE
        if state is DomainState.FAULTED:
            running = ServerState.FAULT
        if role is ev.DomainRole.ACTIVE and state in (DomainState.WARM, DomainState.FULL):
            # The daemon died between switching the path and writing the state file, or before the switch.
            state = DomainState.ACTIVE
        bereft = frozenset(found for of in row.get("bereft", ()) if (found := _instance(of)) is not None)
        private = pipedir.is_private(str(self.layout.pipe_dir(name)), slot["uid"])
        trial = _instance(row["trial"]) if row.get("trial") else None
        self.post(
            ev.DomainAdopted(name, slot["id"], role, state, control, server, running, bereft, private, trial)
        )
        if died is None and name not in self.stopping:
            self.domains.ask(name)

    def _living(self, name: str, besides: ProcessInstance | None = None) -> list[ProcessInstance]:
        """Return the daemon's own processes that were started in a domain's pipe directory.

        Processes of other users do not count: any process can name this directory in its environment.
        """
        found = []
        for process in pin_domain(str(self.layout.pipe_dir(name))):
            process.close()
            with contextlib.suppress(MpsdError):
                if process.instance != besides and procs.users(process.instance).all_are(os.getuid()):
                    found.append(process.instance)
        return found

    def _started_unseen(
        self, name: str, gpus: tuple[str, ...], uid: int | None
    ) -> tuple[ProcessInstance | None, ProcessInstance | None]:
        """Return the control daemon and server that no file names: the daemon was killed while it started
        them."""
        for process in self._living(name):
            try:
                return process, self.domains.adopt(name, gpus, uid, process)
            except MpsdError:
                continue  # A server, or a process of another user.
        return None, None

    def _recorded(self, name: str) -> ProcessInstance | None:
        """Return the control daemon that the pid file of a pipe directory names, with its present start
        time."""
        pid = pipedir.recorded_pid(str(self.layout.pipe_dir(name)))
        if pid is None:
            return None
        try:
            return procs.facts(pid).instance
        except MpsdError:
            return None

    def _role(self, name: str, slot: Mapping[str, Any]) -> ev.DomainRole:
        target = None
        with contextlib.suppress(OSError):
            target = os.path.basename(os.readlink(self.layout.slot_path(slot["id"])))
        if name == target:
            return ev.DomainRole.ACTIVE
        if name == slot["spare"]:
            return ev.DomainRole.SPARE
        if name == slot.get("second"):
            return ev.DomainRole.SECOND
        return ev.DomainRole.OLD

    def _restore_exited(self, retained: Mapping[ClientId, RetainedLease]) -> None:
        """Restore the leases of exited clients. Living clients join again by the lists of their domains."""
        facts = {(r["domain"], int(r["pid"]), int(r["start_ticks"])): r for r in self.rows}
        for domain, process in sorted({(c.domain, c.process) for c in retained}):
            exited = sorted(c for c in retained if (c.domain, c.process) == (domain, process))
            if _alive(process):
                # After an exec, the leases of the former program belong to an exited client.
                before = [c for c in exited if not self.attacher.is_present(c)]
                if len(before) < len(exited):
                    self.attacher.notice(domain, process.pid)
                if not before:
                    continue
                exited = before
            restored = tuple(c.space for c in exited if self.attacher.restore(c))
            row = facts.get((domain, process.pid, process.start_ticks))
            # Files of an earlier version lack this key.
            listed = row is not None and bool(row.get("listed", True))
            self.post(ev.LeaseRestored(domain, _facts(process, row), restored, listed))

    async def join_living(self) -> None:
        """Notice every client that the servers list."""
        # All at once: a user can stop servers, and each of them takes seconds to time out.
        await asyncio.gather(*map(self._join_listed, self.domains.names()))
        await self.attacher.noticed()
        self._exited_meanwhile()
        for row in self.policies:
            self._restore_policy(row)
        for died in self.dead_servers:
            self.post(died)
            # Only now: a successor of the dead server must be seen after its death.
            self.domains.ask(died.domain)

    async def _join_listed(self, domain: str) -> None:
        if domain in self.stopping:
            self._join_recorded(domain)
            return
        try:
            pids = await self.domains.listed_clients(domain, LIST_S)
        except MpsdError as error:
            log.warning("cannot list the clients of a domain", domain=domain, reason=str(error))
            # A domain without its control socket cannot be asked, and must not end under its clients.
            self._join_recorded(domain)
            self.unlisted.add(domain)
            return
        for pid in pids:
            self.attacher.notice(domain, pid, listed=True)

    def _join_recorded(self, domain: str) -> None:
        """Notice the living clients of a domain that the state file names."""
        for row in self.rows:
            process = ProcessInstance(int(row["pid"]), int(row["start_ticks"]))
            if row["domain"] == domain and _alive(process):
                # Only root writes the state file, so its row proves as much as the list that it came from.
                listed = bool(row.get("listed", True))
                self.attacher.notice(domain, process.pid, listed=listed)

    def _restore_policy(self, row: Mapping[str, Any]) -> None:
        """Restore the policy of a living client. Skip a row that mpsd does not understand."""
        try:
            process = _instance(row["process"])
            policy = None if row["policy"] is None else ZonePolicy(row["policy"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            log.warning("cannot restore a policy for guard hits", reason=repr(error))
            return
        if process is not None and policy is not None:
            self.post(ev.ZonePolicySet(process, policy))
        if process is not None and row.get("frozen"):
            self.post(ev.FreezeRestored(process))

    def _exited_meanwhile(self) -> None:
        """Restore the leases of clients that exited after they were listed and before they were described."""
        unclaimed = self.attacher.retained
        self._restore_exited(
            {client: retained for client, retained in unclaimed.items() if not _alive(client.process)}
        )


def _member(row: Mapping[str, Any]) -> mev.MemberRestored | None:
    """Return the participant of a row; None if mpsd does not understand the row."""
    try:
        process, home = _instance(row["process"]), str(row["home"])
        mode, left = FailoverMode(row["mode"]), str(row["left_behind"])
        uid = int(row["uid"])
        # Files of an earlier version lack these keys.
        excess = SWITCHED_OFF if row.get("switched_off") else _excess(row.get("excess"))
        budgets = _limit(row.get("limit")), excess
    except (KeyError, IndexError, TypeError, ValueError) as error:
        log.warning("cannot restore a fail-over participant", reason=repr(error))
        return None
    return None if process is None else mev.MemberRestored(process, uid, mode, home, left, *budgets)


def _limit(row: Mapping[str, Any] | None) -> SnapshotLimit | None:
    return None if row is None else SnapshotLimit(int(row["bytes"]), frozenset(map(str, row["gpus"])))


def _excess(row: Mapping[str, Any] | None) -> Excess | None:
    if row is None:
        return None
    budget, needs, has = SnapshotBudget(row["budget"]), int(row["needs"]), int(row["has"])
    return Excess(budget, needs, has, bool(row["listable"]))


def _alive(process: ProcessInstance) -> bool:
    """Return whether the process lives.

    Raises BusyError if that cannot be decided: rather refuse to start than release memory of a living
    process.
    """
    pinned = procs.Pinned.living(process)
    if pinned is not None:
        pinned.close()
    return pinned is not None


def _facts(process: ProcessInstance, row: Mapping[str, Any] | None) -> ProcessFacts:
    if row is None:
        return ProcessFacts(process, 0, 0, 0, "[unknown: it exited while mpsd was not running]", "")
    return ProcessFacts(
        process,
        int(row["ppid"]),
        int(row["uid"]),
        int(row["gid"]),
        str(row["command"]),
        str(row["exe"]),
        str(row["cgroup"]),
    )
