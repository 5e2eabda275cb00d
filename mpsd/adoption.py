"""Taking over what an earlier daemon left: domains, servers, living clients, leases of the dead.

The state file says what there should be; nothing in it is believed until it is proven on the living
process. Where the file and the stable path disagree, the path is right: it is what clients use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import structlog

from mpsd import pipedir, procs
from mpsd.attacher import Attacher
from mpsd.core import events as ev
from mpsd.core import memberevents as mev
from mpsd.core.standby import Member, Standing
from mpsd.core.state import Client, Domain, DomainState, State
from mpsd.errors import MpsdError
from mpsd.host import Hosts, Post
from mpsd.layout import Layout
from mpsd.lease import Kept, domain_named, is_current, stored_lease
from mpsd.leasestore import LeaseStore
from mpsd.model import ClientId, FailoverMode, ProcessFacts, ProcessInstance, ServerState, ZonePolicy
from mpsd.orphans import Orphans, pin_domain

log = structlog.get_logger("mpsd.adoption")

LEVEL = 1
KIND = "mpsd-state"
_GONE = (DomainState.STOPPING, DomainState.FAILED)
# With contexts of clients, as long as the server is the one that made them.
_HELD = (DomainState.ACTIVE, DomainState.WARM, DomainState.POISONED, DomainState.RETIRED)


def to_file(state: State, settings: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """What a later daemon needs of this state, as plain values."""
    living = {c.id.process for c in state.clients.values() if c.living}
    return {
        "next_domain": state.next_domain,
        "drained": sorted(state.drained),
        "settings": dict(settings),
        "slots": [
            {
                "id": s.id,
                "gpus": list(s.gpus),
                "uid": s.uid,
                "exclusive": s.exclusive,
                "active": s.active,
                "spare": s.spare,
                "used": s.used,
            }
            for s in state.slots.values()
        ],
        "domains": [_domain_row(d, living) for d in state.domains.values()],
        "clients": [_client_row(c) for c in state.clients.values() if c.leased],
        "members": [_member_row(m) for m in state.members.values() if m.home is not None],
        "zone_policies": [
            _policy_row(c)
            for c in state.clients.values()
            if c.living and (c.zone_policy is not None or c.frozen is not None)
        ],
    }


def _policy_row(client: Client) -> dict[str, Any]:
    return {
        "process": _instance_row(client.id.process),
        "policy": client.zone_policy,
        "frozen": client.frozen is not None,
    }


def _member_row(member: Member) -> dict[str, Any]:
    """Where its work runs: it may be a client of two domains."""
    left = member.reason if member.standing is Standing.LEFT_BEHIND else ""
    return {
        "process": _instance_row(member.process),
        "uid": member.uid,
        "mode": member.mode,
        "home": member.home,
        "left_behind": left,
    }


def _domain_row(domain: Domain, living: Set[ProcessInstance]) -> dict[str, Any]:
    return {
        "id": domain.id,
        "slot": domain.slot,
        "state": domain.state.value,
        "control": _instance_row(domain.control),
        "server": _instance_row(domain.server),
        "bereft": sorted(map(_instance_row, living & domain.bereft)),
    }


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
    }


def _instance(row: Sequence[int] | None) -> ProcessInstance | None:
    return ProcessInstance(int(row[0]), int(row[1])) if row else None


@dataclass(slots=True)
class Adoption:
    """One take-over, at the start of a daemon, before anything new is started."""

    layout: Layout
    hosts: Hosts
    attacher: Attacher
    store: LeaseStore
    orphans: Orphans
    post: Post
    # Whether a stored set is another part's, which has taken it then.
    others: Callable[[str, Sequence[int]], bool] = lambda name, fds: False
    unknown: list[str] = field(default_factory=list)
    rows: Sequence[Mapping[str, Any]] = ()
    policies: Sequence[Mapping[str, Any]] = ()
    dead_servers: list[ev.ServerDied] = field(default_factory=list)
    members: Sequence[mev.MemberRestored] = ()

    def run(self, saved: Mapping[str, Any] | None) -> None:
        """Post the events that rebuild the state. Nothing here ends a domain that still has clients."""
        kept, strange = self._kept_leases()
        for slot in saved["slots"] if saved else ():
            exclusive, gpus = bool(slot["exclusive"]), tuple(slot["gpus"])
            self.post(
                ev.SlotWanted(slot["id"], gpus, slot["uid"], exclusive, start=False, used=slot.get("used"))
            )
        slots = {slot["id"]: slot for slot in saved["slots"]} if saved else {}
        found = map(_member, saved.get("members", ()) if saved else ())
        # They live on, and will come again.
        self.members = [m for m in found if m is not None and _alive(m.process)]
        for row in saved["domains"] if saved else ():
            self._domain(row, slots[row["slot"]])
        self._unknown({row["id"] for row in saved["domains"]} if saved else set())
        kept = self._without_orphans(kept)
        self._hold(strange)
        self.attacher.inherit(kept)
        self.rows = saved["clients"] if saved else ()
        for member in self.members:
            self.post(member)
        # Not in files of an earlier mpsd.
        self.policies = saved.get("zone_policies", ()) if saved else ()
        self._dead(kept)

    def _without_orphans(self, kept: Mapping[ClientId, Kept]) -> dict[ClientId, Kept]:
        """The leases of domains that were adopted, or of which nothing lives; the others are held apart."""
        left = dict(kept)
        for domain in {c.domain for c in kept} - set(self.hosts.names()):
            if processes := pin_domain(str(self.layout.pipe_dir(domain))):
                mine = {c: left.pop(c) for c in kept if c.domain == domain}
                self.orphans.take(domain, processes, mine)
        return left

    def _unknown(self, known: Collection[str]) -> None:
        """Directories that the state file does not know: what lives in one is not ended, but told."""
        for name in self.layout.known_domains():
            if name in known:
                continue
            found = pipedir.ownership(str(self.layout.pipe_dir(name)))
            living = self._living(name)
            if found.owner in (pipedir.Owner.NOBODY, pipedir.Owner.STALE) and not living:
                self.layout.forget_domain(name)
                continue
            self._tell_unknown(name, found.pid or (living[0].pid if living else None))

    def _tell_unknown(self, name: str, pid: int | None) -> None:
        end = f"echo quit | CUDA_MPS_PIPE_DIRECTORY={self.layout.pipe_dir(name)} nvidia-cuda-mps-control"
        what = f"domain {name} of an earlier mpsd is not supervised any more (process {pid} serves it)"
        self.unknown.append(f"{what}: once its clients have left, {end}")

    def _kept_leases(self) -> tuple[dict[ClientId, Kept], dict[str, Sequence[int]]]:
        """What the store kept: leases, and by name what is not understood."""
        kept: dict[ClientId, Kept] = {}
        strange: dict[str, Sequence[int]] = {}
        # Of two sets of one client the newer form is taken: the other was being replaced.
        for name, fds in sorted(self.store.fetch_all().items(), key=lambda item: is_current(item[0])):
            if self.others(name, fds):
                continue
            parsed = stored_lease(name, len(fds))
            if parsed is None:
                strange[name] = fds
                continue
            client, roles = parsed
            if client in kept:
                kept[client].close()
                self.store.drop(kept[client].name)
            kept[client] = Kept(name, dict(zip(roles, fds, strict=True)))
        return kept, strange

    def _hold(self, strange: Mapping[str, Sequence[int]]) -> None:
        """It may be a lease of another mpsd's form: held while anything lives of the domain that it names."""
        for name, fds in strange.items():
            domain = domain_named(name)
            processes = [] if domain is None else pin_domain(str(self.layout.pipe_dir(domain)))
            if domain is None or processes:
                self.orphans.hold(name, fds, domain, processes)
                continue
            log.error("a stored set is no lease of anything that lives", name=name)
            for fd in fds:
                os.close(fd)
            self.store.drop(name)

    def _domain(self, row: Mapping[str, Any], slot: Mapping[str, Any]) -> None:
        name, gpus = row["id"], tuple(slot["gpus"])
        state = DomainState(row["state"])
        control = _instance(row["control"]) or self._recorded(name)
        server: ProcessInstance | None = None
        try:
            if control is not None:
                server = self.hosts.adopt(name, gpus, slot["uid"], control)
        except MpsdError as error:
            log.info("control daemon is not adopted", domain=name, reason=str(error))
            control = None
        if control is None:
            control, server = self._started_unseen(name, gpus, slot["uid"])
        if control is None:
            server = _instance(row["server"])
            if strangers := self._living(name, besides=server):
                self._tell_unknown(name, strangers[0].pid)
                return
            if not self.hosts.adopt_headless(name, gpus, server):
                # Nothing of it is left: its directory goes, so that the name can never mislead.
                self.layout.forget_domain(name)
                if any(m.home == name for m in self.members):
                    # Programs that live on have their dead contexts there, and are to be moved.
                    dead, gone = DomainState.HEADLESS, ServerState.GONE
                    self.post(ev.DomainAdopted(name, slot["id"], ev.DomainRole.OLD, dead, None, None, gone))
                return
            state = DomainState.HEADLESS
        elif state in (*_GONE, DomainState.STARTING):
            # It was being started or stopped when the daemon died: empty, so it is ended.
            state = DomainState.RETIRED
        role = self._role(name, slot)
        known = _instance(row["server"])
        died = known if state in _HELD and known != server else None
        if died is not None:
            # It died while nobody looked: that is told once all is known that it concerns.
            self.dead_servers.append(ev.ServerDied(name, died))
            server = died
        running = ServerState.ACTIVE if server else ServerState.GONE
        if state is DomainState.FAULTED:
            running = ServerState.FAULT
        if role is ev.DomainRole.ACTIVE and state is DomainState.WARM:
            # The path was switched, then the daemon died before it could write so.
            state = DomainState.ACTIVE
        bereft = frozenset(found for of in row.get("bereft", ()) if (found := _instance(of)) is not None)
        self.post(ev.DomainAdopted(name, slot["id"], role, state, control, server, running, bereft))
        if died is None:
            self.hosts.ask(name)

    def _living(self, name: str, besides: ProcessInstance | None = None) -> list[ProcessInstance]:
        """Processes of ours that were started in a domain's pipe directory: anybody may say that of his."""
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
        """The control daemon, and its server, that no file names: the daemon was killed as it started it."""
        for process in self._living(name):
            try:
                return process, self.hosts.adopt(name, gpus, uid, process)
            except MpsdError:
                continue  # A server, or not ours at all.
        return None, None

    def _recorded(self, name: str) -> ProcessInstance | None:
        """The control daemon that a pipe directory's own pid file names, pinned by its present life."""
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
        return ev.DomainRole.OLD

    def _dead(self, kept: Mapping[ClientId, Kept]) -> None:
        """Living clients join again by their domains' lists; for the dead the leases go on."""
        facts = {(r["domain"], int(r["pid"]), int(r["start_ticks"])): r for r in self.rows}
        for domain, process in sorted({(c.domain, c.process) for c in kept}):
            dead = sorted(c for c in kept if (c.domain, c.process) == (domain, process))
            if _alive(process):
                # After an exec, what was kept of the program before is a dead client's.
                before = [c for c in dead if not self.attacher.is_present(c)]
                if len(before) < len(dead):
                    self.attacher.notice(domain, process.pid)
                if not before:
                    continue
                dead = before
            restored = tuple(c.space for c in dead if self.attacher.restore(c))
            row = facts.get((domain, process.pid, process.start_ticks))
            self.post(ev.LeaseRestored(domain, _facts(process, row), restored))

    async def join_living(self) -> None:
        """Notice every client that the servers list."""
        for domain in self.hosts.names():
            try:
                pids = await self.hosts.listed_clients(domain)
            except MpsdError as error:
                log.warning("clients are not listed", domain=domain, reason=str(error))
                continue
            for pid in pids:
                self.attacher.notice(domain, pid, listed=True)
        await self.attacher.noticed()
        self._died_meanwhile()
        for row in self.policies:
            self._restore_policy(row)
        for died in self.dead_servers:
            self.post(died)
            # Only now: another one that has come since is no news before that.
            self.hosts.ask(died.domain)

    def _restore_policy(self, row: Mapping[str, Any]) -> None:
        """Of a client that lives on; what is not understood is left out."""
        try:
            process = _instance(row["process"])
            policy = None if row["policy"] is None else ZonePolicy(row["policy"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            log.warning("a policy for guard hits is not restored", reason=repr(error))
            return
        if process is not None and policy is not None:
            self.post(ev.ZonePolicySet(process, policy))
        if process is not None and row.get("frozen"):
            self.post(ev.FreezeRestored(process))

    def _died_meanwhile(self) -> None:
        """Those that lived when they were looked at, and had gone when they were to be described."""
        unclaimed = self.attacher.kept
        self._dead({client: kept for client, kept in unclaimed.items() if not _alive(client.process)})


def _member(row: Mapping[str, Any]) -> mev.MemberRestored | None:
    """None: it is not understood."""
    try:
        process, home = _instance(row["process"]), str(row["home"])
        mode, left = FailoverMode(row["mode"]), str(row["left_behind"])
        uid = int(row["uid"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        log.warning("a program that could fail over is not restored", reason=repr(error))
        return None
    return None if process is None else mev.MemberRestored(process, uid, mode, home, left)


def _alive(process: ProcessInstance) -> bool:
    """Raises BusyError where that is not to be told: rather no start than that a living one's memory goes."""
    pinned = procs.Pinned.living(process)
    if pinned is not None:
        pinned.close()
    return pinned is not None


def _facts(process: ProcessInstance, row: Mapping[str, Any] | None) -> ProcessFacts:
    if row is None:
        return ProcessFacts(process, 0, 0, 0, "[unknown: it died while mpsd was not there]", "")
    return ProcessFacts(
        process,
        int(row["ppid"]),
        int(row["uid"]),
        int(row["gid"]),
        str(row["command"]),
        str(row["exe"]),
        str(row["cgroup"]),
    )
