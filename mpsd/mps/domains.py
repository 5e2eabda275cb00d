"""Running domains: their control daemons, servers and logs, on the daemon's event loop.

Events in the processes and files of a domain become events of core here. The decisions of core about a domain
(start, stop, query, terminate) are carried out here, each with a deadline.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import structlog

from mpsd.base import audit
from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import BusyError, ControlError, MpsdError
from mpsd.base.model import ProcessInstance, ServerState
from mpsd.config.layout import Layout
from mpsd.core import events as ev
from mpsd.limits.book import LimitBook, Owner
from mpsd.limits.keeper import LimitKeeper, Surroundings
from mpsd.mps import asking, pipedir
from mpsd.mps import log as mpslog
from mpsd.mps.control import OUTPUT_FILE, ControlDaemon, TerminateOutcome
from mpsd.mps.logreader import LogReader
from mpsd.mps.pathhealth import Path, PathHealth
from mpsd.mps.startup import FirstServer, FirstServerCallbacks, ServerEndedError, StartWatch
from mpsd.os import processes
from mpsd.os.descriptors import REMEDY, Charge, DescriptorBudget, Purpose
from mpsd.os.pinned import Pinned
from mpsd.os.quietperiod import QuietPeriod
from mpsd.os.tasks import Tasks

log = structlog.get_logger("mpsd.domains")

Post = Callable[[ev.Event], None]
ASK_DEADLINE_S = 2.0
KILLED_S = 10.0
DESCRIPTORS = 8
"""Of one domain: log, its watch of three, pidfds of the control daemon (two) and the server, one command."""
LARGEST_STATUS = 999
LOG_COUNTERS = ("log_lines_unparsed", "log_lines_cut", "log_lines_failed", "log_bytes_skipped")


@dataclass(slots=True)
class Callbacks:
    """Receivers of what a domain's logs tell: events, clients to notice or that may have left.

    `limits_changed`: write the limits of all slots now. `save`: write a changed state now, before a process
    is started. `in_use`: whether a domain has clients. `list_clients`: ask a domain's server for its clients,
    and notice them. `serves`: whether a domain takes clients, with a server that is not in FAULT.
    """

    post: Post
    notice: Callable[[str, int], None]
    client_left: Callable[[str, int], None]
    limits_changed: Callable[[], object]
    save: Callable[[], object]
    in_use: Callable[[str], bool]
    list_clients: Callable[[str], Awaitable[None]]
    serves: Callable[[str], bool]


@dataclass(slots=True)
class RunningDomain:
    """One running domain. `uid`: its owner, None for a shared domain. `server` is pinned while it lives.

    `private`: its pipe directory admits only root and the owner. A directory that an earlier mpsd left open
    stays open until the domain ends.

    `dying`: a server that was reported dead while its threads are still in the driver.

    `first`: the start of its first server, which its control daemon makes for a first client.
    """

    name: str
    uid: int | None
    control: ControlDaemon
    private: bool = False
    log: LogReader | None = None
    server: Pinned | None = None
    dying: ProcessInstance | None = None
    control_watch: int = -1
    startup: StartWatch | None = None
    first: FirstServer | None = None
    charge: Charge | None = None


class RunningDomains:
    """All domains of one daemon. Closing this object leaves them running."""

    def __init__(
        self,
        binary: str,
        environment: Mapping[str, str],
        layout: Layout,
        limits: LimitBook,
        callbacks: Callbacks,
        quiet_period: QuietPeriod,
        *,
        start_deadline_s: float,
        private: bool = True,
        budget: DescriptorBudget | None = None,
    ) -> None:
        """`private`: only its user can reach a user's domain, where the file system has ACLs."""
        self._binary = binary
        self._environment = dict(environment)
        self._layout = layout
        self._callbacks = callbacks
        self.quiet_period = quiet_period
        self._start_deadline_s = start_deadline_s
        self._private = private
        self.paths = PathHealth(layout, private=private)
        self._budget = budget or DescriptorBudget.unlimited()
        self._domains: dict[str, RunningDomain] = {}
        self._tasks = Tasks(callbacks.post)
        around = Surroundings(
            callbacks.serves,
            callbacks.limits_changed,
            lambda: callbacks.post(ev.Counted({"settings_rejected": 1})),
            self._tasks.spawn,
        )
        self.limits = LimitKeeper(limits, around, quiet_period)
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._stopping: set[str] = set()
        self._ended_logs: Counter[str] = Counter()
        self._questions = asking.PacedQuestions(self._ask, self._tasks.spawn, quiet_period)
        self._loop = asyncio.get_running_loop()

    def names(self) -> tuple[str, ...]:
        return tuple(self._domains)

    def control_of(self, domain: str) -> ControlDaemon | None:
        host = self._domains.get(domain)
        return host.control if host else None

    def conditions(self) -> list[Condition]:
        """Return the conditions of the domains' directories and logs."""
        found = (host.log.condition() for host in self._domains.values() if host.log is not None)
        return self._open_domains() + [condition for condition in found if condition is not None]

    def _open_domains(self) -> list[Condition]:
        """Return a condition if users' domains are open for lack of ACLs."""
        opened = [h for h in self._domains.values() if h.uid is not None and not h.private]
        if not self._private or not any(pipedir.lacks_acls(host.control.pipe_dir) for host in opened):
            return []
        return [Condition(Code.DOMAINS_OPEN, str(self._layout.run_dir), pipedir.NO_ACLS)]

    def totals(self) -> dict[str, int]:
        """Return the counters of all logs, those of ended domains included."""
        found = Counter(self._ended_logs)
        for host in self._domains.values():
            found.update(host.log.totals() if host.log else {})
        return dict.fromkeys(LOG_COUNTERS, 0) | found

    def check_logs(self, *, disk_full: bool) -> list[str]:
        """Look at every log, once a second. Return the domains that may have clients without a line."""
        logs = [host.log for host in self._domains.values() if host.log is not None]
        for reader in logs:
            reader.check(disk_full=disk_full)
        unheard = [reader.domain for reader in logs if not reader.works]
        self.limits.check(unheard)
        return unheard

    def _control(self, domain: str, gpus: tuple[str, ...]) -> ControlDaemon:
        return ControlDaemon(
            self._binary,
            str(self._layout.pipe_dir(domain)),
            str(self._layout.domain_log_dir(domain)),
            gpus=gpus,
            environment=self._environment,
        )

    def start(self, domain: str, gpus: tuple[str, ...], uid: int | None, *, server: bool = True) -> None:
        """Start a domain; without `server` its control daemon starts the server for its first client."""
        task = self._starting[domain] = self._tasks.spawn(self._start(domain, gpus, uid, server))
        task.add_done_callback(lambda _: self._starting.pop(domain, None))

    async def _start(self, domain: str, gpus: tuple[str, ...], uid: int | None, with_server: bool) -> None:
        await self.quiet_period.wait()
        self._callbacks.save()
        host = RunningDomain(domain, uid, self._control(domain, gpus))
        startup = host.startup = StartWatch()
        private_to = uid if self._private else None
        try:
            host.charge = self._budget.charge(Purpose.DOMAIN, DESCRIPTORS)
            if host.charge is None:
                raise BusyError("mpsd has no descriptor left for a domain", remedy=f"raise {REMEDY}")
            host.private = pipedir.prepare(host.control.pipe_dir, host.control.log_dir, private_to)
            # Without ACLs the directory stays open, also while the control daemon starts.
            private_to = private_to if host.private else None
            # Before the daemon starts: a log left from an earlier domain of this name is not read again.
            self._follow(host)
            # In a shared domain, one server takes clients of every user at a time.
            await host.control.start(self._start_deadline_s, multiuser=uid is None, private_to=private_to)
            self._domains[domain] = host
            self._watch_control(host)
            await self.limits.give(domain, Owner(gpus, uid), host.control)
            if with_server:
                await host.control.start_server(uid or 0, self._start_deadline_s)
                await startup.until_active(host.control, self._start_deadline_s)
            await self._must_be_reachable(host)
            await self.limits.confirm(domain)
        except (MpsdError, OSError) as error:
            log.error("the domain did not start", domain=domain, reason=str(error))
            await self._abandon(host)
            own = isinstance(error, ServerEndedError)
            reason = error.message if isinstance(error, ServerEndedError) else str(error)
            self._callbacks.post(ev.DomainStartFailed(domain, reason, own))
            return
        host.startup = None
        instance = host.control.instance
        assert instance is not None
        server = self._pin_server(host) if with_server else None
        if not with_server:
            host.first = self._first_server(host)
        self._callbacks.post(ev.DomainStarted(domain, instance, server, host.private))

    def _first_server(self, host: RunningDomain) -> FirstServer:
        """Watch the start of the server that the control daemon makes for a first client."""

        def failed(reason: str, server: ProcessInstance | None, *, late: bool = False) -> None:
            log.error("the server did not start", domain=host.name, reason=reason)
            self._callbacks.post(ev.ServerStartFailed(host.name, reason, server, late))

        def died(server: ProcessInstance) -> None:
            # No question may have found this server before its end.
            self._callbacks.post(ev.ServerSeen(host.name, server, _user_of(server)))
            self._callbacks.post(ev.ServerDied(host.name, server))

        callbacks = FirstServerCallbacks(
            failed, lambda why, server: failed(why, server, late=True), died, lambda: self.ask(host.name)
        )
        return FirstServer(host.control, self._start_deadline_s, callbacks, self._tasks.spawn)

    async def _must_be_reachable(self, host: RunningDomain) -> None:
        """Raise ControlError if no client of its user could get to a new domain."""
        (trouble,) = await self.paths.check([Path(host.name, host.uid, host.uid)])
        if trouble is not None and trouble.dead:
            raise ControlError(trouble.text, remedy=trouble.remedy)

    def serves(self, domain: str) -> bool:
        """Return whether the control daemon of a domain lives, and is not about to end."""
        control = self.control_of(domain)
        instance = control.instance if control is not None else None
        return instance is not None and not processes.is_ending(instance)

    async def _abandon(self, host: RunningDomain) -> None:
        """Clear away what a failed start left, so that core may forget the domain."""
        await _kill_control(host, "the start of the domain failed")
        self._domains.pop(host.name, None)
        self._forget(host)
        self._layout.forget_domain(host.name)

    def adopt(
        self, domain: str, gpus: tuple[str, ...], uid: int | None, control: ProcessInstance
    ) -> ProcessInstance | None:
        """Take over a running domain; return its server's instance, None if it has none.

        Raises NotFoundError when it has ended, AmbiguousError when the process is a different one.
        """
        daemon = ControlDaemon.adopt(
            self._binary,
            str(self._layout.pipe_dir(domain)),
            str(self._layout.domain_log_dir(domain)),
            control,
            gpus=gpus,
            environment=self._environment,
        )
        host = RunningDomain(domain, uid, daemon, private=pipedir.is_private(daemon.pipe_dir, uid))
        host.charge = self._budget.charge_open(Purpose.DOMAIN, DESCRIPTORS)
        self._domains[domain] = host
        self.limits.adopt(domain, Owner(gpus, uid), daemon)
        self._follow(host, adopted=True)
        self._watch_control(host)
        server = self._pin_server(host)
        host.first = self._first_server(host) if server is None else None
        return server

    def adopt_headless(self, domain: str, gpus: tuple[str, ...], server: ProcessInstance | None) -> bool:
        """Take over the server of a domain without its control daemon. Returns False if it has ended, too."""
        # The owner does not matter: without a control daemon there are no limits to apply.
        if server is None:
            return False
        host = RunningDomain(domain, None, self._control(domain, gpus))
        try:
            self._set_server(host, Pinned.open(server.pid, server.start_ticks))
        except MpsdError:
            return False
        host.charge = self._budget.charge_open(Purpose.DOMAIN, DESCRIPTORS)
        self._domains[domain] = host
        return True

    def _follow(self, host: RunningDomain, *, adopted: bool = False) -> None:
        control = host.control

        def output() -> str | None:
            """Return the control daemon's output, which is the log whatever the file is called by now."""
            return f"/proc/{control.instance.pid}/fd/1" if control.instance and control.alive() else None

        host.log = LogReader(
            host.name,
            os.path.join(control.log_dir, OUTPUT_FILE),
            output,
            lambda line: self._handle_line(host, line),
            lambda state, reason: self._callbacks.post(ev.LogStateSeen(host.name, state, reason)),
            adopted=adopted,
        )

    def _handle_line(self, host: RunningDomain, line: mpslog.LogLine) -> None:
        if host.startup is not None:
            host.startup.feed(line)
        if host.first is not None:
            host.first.feed(line, private=host.private)
        match line.event:
            case mpslog.ServerStarted() if host.first is not None and not host.first.told:
                self.ask(host.name, patient=True)
            case mpslog.NewClient(pid=0):
                self._callbacks.post(ev.Counted({"clients_without_pid": 1}))
            case mpslog.NewClient(pid=pid):
                self._callbacks.notice(host.name, pid)
            case mpslog.ServerReady() | mpslog.ContextCreated():
                self.ask(host.name, patient=True)
            case mpslog.ServerFatal():
                # Core decides by it in a private domain, and asks at once in any other domain.
                self._callbacks.post(ev.ServerFatalLogged(host.name, line.text))
                self.ask(host.name, patient=True)
            case mpslog.BlamedClient():
                # The pid in the line often belongs to an innocent client: the line counts only as a sign of
                # the fault.
                self._callbacks.post(ev.ServerFatalLogged(host.name, line.text))
            case mpslog.ClientRefused(pid=int(pid), status=mpslog.NOT_READY):
                self._callbacks.post(ev.ClientRefused(host.name, pid))
            case mpslog.ClientRefused(status=mpslog.MAX_CLIENTS):
                self._callbacks.post(ev.ClientRefused(host.name, None, full=True))
            case mpslog.ClientRefused(status=status):
                # At most as many counters as cuda.h has errors: a user's server can write any number.
                shown = status if status <= LARGEST_STATUS else "other"
                self._callbacks.post(ev.Counted({f"clients_refused_{shown}": 1}))
            case mpslog.ClientDisconnected(pid=int(pid)) | mpslog.ClientExit(pid=pid):
                self._callbacks.client_left(host.name, pid)
            case mpslog.AdminCommand(text=text):
                self.limits.said(host.name, text)

    def _watch_control(self, host: RunningDomain) -> None:
        # The daemon object may wait on its own descriptor, so the loop gets a duplicate.
        host.control_watch = os.dup(host.control.fileno())
        os.set_inheritable(host.control_watch, False)
        self._loop.add_reader(host.control_watch, self._control_died, host)

    def _control_died(self, host: RunningDomain) -> None:
        self._unwatch_control(host)
        host.control.reap()
        instance = host.control.instance
        if instance is not None and self._domains.get(host.name) is host:
            self._callbacks.post(ev.ControlDied(host.name, instance))

    def _unwatch_control(self, host: RunningDomain) -> None:
        if host.control_watch >= 0:
            self._loop.remove_reader(host.control_watch)
            os.close(host.control_watch)
            host.control_watch = -1

    def _pin_server(self, host: RunningDomain) -> ProcessInstance | None:
        """Pin the present server of the control daemon, if it has changed."""
        instances = host.control.server_instances() if host.control.alive() else ()
        known = host.server.instance if host.server else None
        if not instances or known in instances:
            return known
        try:
            found = Pinned.open(instances[-1].pid, instances[-1].start_ticks)
        except MpsdError:
            return known
        if known is not None and host.first is not None:
            host.first.ended(known)
        elif known is not None and known != host.dying:
            # Report the end of the old server before the new one, even if the loop has not seen it yet.
            self._callbacks.post(ev.ServerDied(host.name, known))
        self._set_server(host, found)
        return instances[-1]

    def _set_server(self, host: RunningDomain, server: Pinned) -> None:
        self._drop_server(host)
        host.server = server
        if host.first is None:
            self.limits.server_changed(host.name)
        self._loop.add_reader(server.fileno(), self._server_died, host, server)

    def _server_died(self, host: RunningDomain, server: Pinned) -> None:
        if host.server is server:
            self._drop_server(host)
        if host.first is not None:
            host.first.ended(server.instance)
        elif host.dying != server.instance:
            self._callbacks.post(ev.ServerDied(host.name, server.instance))

    def _drop_server(self, host: RunningDomain) -> None:
        if host.server is not None:
            self._loop.remove_reader(host.server.fileno())
            host.server.close()
            host.server = None

    def ask(self, domain: str, *, clients: bool = False, patient: bool = False) -> None:
        """Find the server and its state, and tell core; with `clients`, notice the clients that it lists.

        `patient`: after a quiet period that has begun.
        """
        if domain in self._domains:
            self._questions.request(domain, clients=clients, patient=patient)

    async def _ask(self, domain: str, clients: bool) -> None:
        await self._ask_state(domain)
        if clients and domain in self._domains:
            await self._callbacks.list_clients(domain)

    async def _ask_state(self, domain: str) -> None:
        host = self._domains.get(domain)
        if host is None or not host.control.alive():
            return
        server = self._pin_server(host)
        if server is None or server == host.dying:
            self._callbacks.post(ev.ServerStateSeen(domain, ServerState.GONE))
            return
        self._callbacks.post(ev.ServerSeen(domain, server, _user_of(server)))
        try:
            state = await host.control.server_state(server.pid, ASK_DEADLINE_S)
        except MpsdError as error:
            log.warning("server state unknown", domain=domain, reason=str(error))
            self._callbacks.post(ev.Counted({"ask_failures": 1}))
            return
        if server == host.dying or host.server is None or host.server.instance != server:
            # Its end was reported meanwhile: the answer describes no server any more.
            return
        if state is ServerState.FAULT and processes.is_ending(server):
            # The server was killed and takes a while to end. For its clients it is in FAULT, without an
            # offender. An empty domain can wait; and on a GPU that admits one server, the next server waits
            # for this one.
            if self._callbacks.in_use(domain):
                host.dying = server
                self._callbacks.post(ev.ServerDied(domain, server))
            return
        if host.first is not None and state in (ServerState.ACTIVE, ServerState.FAULT):
            host.first.close()
            host.first = None
            self.limits.server_changed(domain)
        self._callbacks.post(ev.ServerStateSeen(domain, state))

    def terminate(
        self, domain: str, server: ProcessInstance, process: ProcessInstance, deadline_s: float
    ) -> None:
        self._tasks.spawn(self._terminate(domain, server, process, deadline_s))

    async def _terminate(
        self, domain: str, server: ProcessInstance, process: ProcessInstance, deadline_s: float
    ) -> None:
        host = self._domains.get(domain)
        if host is None:
            self._callbacks.post(ev.TerminateFinished(process, False, f"domain {domain} does not exist"))
            return
        try:
            reply = await host.control.terminate_client(server.pid, process.pid, deadline_s)
        except Exception as error:
            # After any error, core must get the event: it delays SIGKILL until then.
            self._callbacks.post(ev.TerminateFinished(process, False, f"terminate_client: {error}"))
            return
        done = reply.outcome is TerminateOutcome.DONE
        text = f"terminate_client: {'done' if done else reply.text or reply.outcome.value}"
        self._callbacks.post(ev.TerminateFinished(process, done, text))

    async def listed_clients(self, domain: str, deadline_s: float = ASK_DEADLINE_S) -> tuple[int, ...]:
        """Return the pids that the server itself lists. Raises MpsdError."""
        host = self._domains.get(domain)
        if host is None or host.server is None or host.first is not None or not host.control.alive():
            # A server that is not ACTIVE yet lists none of the clients that wait for it.
            return ()
        began, reader = self._loop.time(), host.log
        pids = await host.control.clients(host.server.instance.pid, deadline_s)
        if reader is not None and host.log is reader:
            reader.answered(began)
        self._callbacks.post(ev.ClientsListed(domain, began, frozenset(pids)))
        if reader is not None and host.log is reader:
            reader.listed(pids, began)
        return pids

    def stop(self, domain: str, deadline_s: float) -> None:
        """End a domain; repeated calls have no effect."""
        if domain not in self._stopping:
            self._stopping.add(domain)
            task = self._tasks.spawn(self._stop(domain, deadline_s))
            task.add_done_callback(lambda _: self._stopping.discard(domain))

    async def _stop(self, domain: str, deadline_s: float) -> None:
        if (start := self._starting.get(domain)) is not None:
            # A domain that is just starting has processes that only this task would end.
            await asyncio.wait({start})
        host = self._domains.pop(domain, None)
        if host is not None:
            try:
                if host.control.alive():
                    await host.control.quit(deadline_s)
            except (MpsdError, OSError) as error:
                log.warning("the domain is stopped by force", domain=domain, reason=str(error))
                await _kill_control(host, str(error))
            if host.server is not None and host.server.alive():
                # A server without a control daemon ends only if mpsd ends it.
                await _end_server(host, host.server, deadline_s)
            self._forget(host)
            self._layout.forget_domain(domain)
        self._questions.forget(domain)
        self._callbacks.post(ev.DomainStopped(domain))

    def trim_logs(self, limit: int) -> None:
        """Bound every log file."""
        for host in self._domains.values():
            if host.log is not None:
                host.log.trim(limit, min(limit // 4, 1 << 20))

    def _forget(self, host: RunningDomain) -> None:
        self.limits.forget(host.name)
        if host.first is not None:
            host.first.close()
        if host.log is not None:
            self._ended_logs.update(host.log.totals())
            host.log.close()
            host.log = None
        self._unwatch_control(host)
        self._drop_server(host)
        host.control.close()
        if host.charge is not None:
            host.charge.release()

    async def idle(self) -> None:
        """Wait until no start, stop or command is under way."""
        while self._tasks.running():
            await self._tasks.ended()

    async def close(self) -> None:
        """Close the descriptors of every domain without ending it."""
        await self._tasks.cancel()
        self.paths.close()
        for host in tuple(self._domains.values()):
            self._forget(host)
        self._domains.clear()


def _user_of(server: ProcessInstance) -> int | None:
    try:
        return processes.users(server).effective
    except MpsdError:
        return None


async def _kill_control(host: RunningDomain, reason: str) -> None:
    """Kill a control daemon that lives, with its servers."""
    if host.control.alive() and (control := host.control.instance) is not None:
        _audit_kill(host, control, reason)
        await host.control.kill()


def _audit_kill(host: RunningDomain, process: ProcessInstance, reason: str) -> None:
    audit.record(
        "kill",
        "sent",
        pid=process.pid,
        start_ticks=process.start_ticks,
        domain=host.name,
        uid=host.uid,
        reason=reason,
    )


async def _end_server(host: RunningDomain, server: Pinned, patience_s: float) -> None:
    server.signal(signal.SIGTERM)
    if not await server.ended(patience_s):
        _audit_kill(host, server.instance, "the server without a control daemon ignored SIGTERM")
        server.signal(signal.SIGKILL)
        # The driver destroys the server's channels first, with the work that runs on them.
        if not await server.ended(max(patience_s, KILLED_S)):
            log.warning("a killed server has not ended", pid=server.instance.pid, after_s=KILLED_S)
