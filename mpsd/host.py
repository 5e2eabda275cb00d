"""Running domains: their control daemons, servers and logs, on the daemon's loop.

Everything that happens in a domain's own processes and files becomes an event here; what core decides
about a domain (start, stop, ask, terminate) is carried out here, each with a deadline.

Long because a domain's start, adoption, logs, commands and end share its processes and descriptors.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from mpsd import mpslog, pipedir, procs
from mpsd.calm import Calm
from mpsd.control import OUTPUT_FILE, ControlDaemon, TerminateOutcome
from mpsd.core import events as ev
from mpsd.errors import MpsdError
from mpsd.layout import Layout
from mpsd.linux.pinned import Pinned
from mpsd.logfollow import LogFollower
from mpsd.model import ProcessInstance, ServerState
from mpsd.settings import ControlSettings, Setting, understood
from mpsd.tasks import Tasks

log = structlog.get_logger("mpsd.host")

Post = Callable[[ev.Event], None]
ASK_DEADLINE_S = 2.0
KILLED_S = 10.0
LARGEST_STATUS = 999


@dataclass(slots=True)
class Callbacks:
    """What a domain's logs tell besides events: a client to notice or that may have left, a setting made.

    `save`: write down now what there is, before a process is started. `in_use`: whether a domain has clients.
    """

    post: Post
    notice: Callable[[str, int], None]
    left: Callable[[str, int], None]
    set_by_hand: Callable[[], None]
    save: Callable[[], object]
    in_use: Callable[[str], bool]


@dataclass(slots=True)
class Host:
    """One domain that runs. `uid`: its owner, None for everybody. `server` is pinned while it lives.

    `claimed`: settings that its log tells of and its control daemon has not confirmed yet, by key. `dying`: a
    server whose death was told though its threads are still in the driver.
    """

    name: str
    uid: int | None
    control: ControlDaemon
    parser: mpslog.LogParser = field(default_factory=mpslog.LogParser)
    follower: LogFollower | None = None
    server: Pinned | None = None
    dying: ProcessInstance | None = None
    control_watch: int = -1
    claimed: dict[str, Setting] = field(default_factory=dict)
    confirming: bool = False


class Hosts:
    """All domains of one daemon. Closing it leaves them running."""

    def __init__(
        self,
        binary: str,
        environment: Mapping[str, str],
        layout: Layout,
        settings: ControlSettings,
        callbacks: Callbacks,
        calm: Calm,
        *,
        start_deadline_s: float,
        private: bool = False,
    ) -> None:
        """`private`: a user's domains can be reached by that user alone."""
        self._binary = binary
        self._environment = dict(environment)
        self._layout = layout
        self._settings = settings
        self._callbacks = callbacks
        self.calm = calm
        self._start_deadline_s = start_deadline_s
        self._private = private
        self._hosts: dict[str, Host] = {}
        self._tasks = Tasks(callbacks.post)
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._stopping: set[str] = set()
        self._loop = asyncio.get_running_loop()

    def names(self) -> tuple[str, ...]:
        return tuple(self._hosts)

    def control_of(self, domain: str) -> ControlDaemon | None:
        host = self._hosts.get(domain)
        return host.control if host else None

    def unparsed(self) -> int:
        return sum(h.parser.unparsed for h in self._hosts.values())

    def _control(self, domain: str, gpus: tuple[str, ...]) -> ControlDaemon:
        return ControlDaemon(
            self._binary,
            str(self._layout.pipe_dir(domain)),
            str(self._layout.domain_log_dir(domain)),
            gpus=gpus,
            environment=self._environment,
        )

    def start(self, domain: str, gpus: tuple[str, ...], uid: int | None) -> None:
        task = self._starting[domain] = self._tasks.spawn(self._start(domain, gpus, uid))
        task.add_done_callback(lambda _: self._starting.pop(domain, None))

    async def _start(self, domain: str, gpus: tuple[str, ...], uid: int | None) -> None:
        await self.calm.over()
        self._callbacks.save()
        host = Host(domain, uid, self._control(domain, gpus))
        private_to = uid if self._private else None
        try:
            pipedir.prepare(host.control.pipe_dir, host.control.log_dir, private_to)
            # Before the daemon starts: a log left from an earlier life of this name is not read again.
            self._follow(host)
            # A domain of everybody's: its one server takes clients of every user at a time.
            await host.control.start(self._start_deadline_s, multiuser=uid is None, private_to=private_to)
            self._hosts[domain] = host
            self._watch_control(host)
            for command in self._settings.commands(uid):
                await host.control.command(command)
            await host.control.start_server(uid or 0, self._start_deadline_s)
            await host.control.wait_active(self._start_deadline_s)
        except (MpsdError, OSError) as error:
            log.error("domain did not start", domain=domain, reason=str(error))
            await self._abandon(host)
            self._callbacks.post(ev.DomainStartFailed(domain, str(error)))
            return
        instance = host.control.instance
        assert instance is not None
        server = self._pin_server(host)
        self._callbacks.post(ev.DomainStarted(domain, instance, server))

    async def _abandon(self, host: Host) -> None:
        """Clear away what a failed start left, so that core may forget the domain."""
        if host.control.alive():
            await host.control.kill()
        self._hosts.pop(host.name, None)
        self._let_go(host)
        self._layout.forget_domain(host.name)

    def adopt(
        self, domain: str, gpus: tuple[str, ...], uid: int | None, control: ProcessInstance
    ) -> ProcessInstance | None:
        """Take over a running domain; its server's instance, None if it has none.

        Raises NotFoundError when it has ended, AmbiguousError when the process is another one.
        """
        daemon = ControlDaemon.adopt(
            self._binary,
            str(self._layout.pipe_dir(domain)),
            str(self._layout.domain_log_dir(domain)),
            control,
            gpus=gpus,
            environment=self._environment,
        )
        host = Host(domain, uid, daemon)
        self._hosts[domain] = host
        self._follow(host)
        self._watch_control(host)
        return self._pin_server(host)

    def adopt_headless(self, domain: str, gpus: tuple[str, ...], server: ProcessInstance | None) -> bool:
        """Take over what is left of a domain whose control daemon died; False if nothing is."""
        # Without a control daemon there is nobody to be set: whose it is does not matter.
        if server is None:
            return False
        host = Host(domain, None, self._control(domain, gpus))
        try:
            self._set_server(host, Pinned.open(server.pid, server.start_ticks))
        except MpsdError:
            return False
        self._hosts[domain] = host
        return True

    def _follow(self, host: Host) -> None:
        path = os.path.join(host.control.log_dir, OUTPUT_FILE)
        host.follower = LogFollower(path, from_start=False)
        self._loop.add_reader(host.follower.fileno(), self._read_log, host, host.follower)

    def _read_log(self, host: Host, follower: LogFollower) -> None:
        for line in follower.drain():
            self._understand(host, host.parser.feed(line))

    def _understand(self, host: Host, line: mpslog.LogLine) -> None:
        match line.event:
            case mpslog.NewClient(pid=0):
                self._callbacks.post(ev.Counted({"clients_without_pid": 1}))
            case mpslog.NewClient(pid=pid):
                self._callbacks.notice(host.name, pid)
            case mpslog.ServerReady() | mpslog.ContextCreated():
                self._tasks.spawn(self._ask_calmly(host.name))
            case mpslog.ServerFatal():
                self._callbacks.post(ev.ServerFatalLogged(host.name, line.text))
                self._tasks.spawn(self._ask_calmly(host.name))
            case mpslog.BlamedClient():
                # The pid in it is often an innocent one: the line counts as a sign of the fault alone.
                self._callbacks.post(ev.ServerFatalLogged(host.name, line.text))
            case mpslog.ClientRefused(pid=pid, status=mpslog.NOT_READY):
                self._callbacks.post(ev.ClientRefused(host.name, pid))
            case mpslog.ClientRefused(status=status):
                # As many counters as a cuda.h may have errors: a user's server writes what that user likes.
                shown = status if status <= LARGEST_STATUS else "other"
                self._callbacks.post(ev.Counted({f"clients_refused_{shown}": 1}))
            case mpslog.ClientDisconnected(pid=int(pid)) | mpslog.ClientExit(pid=pid):
                self._callbacks.left(host.name, pid)
            case mpslog.AdminCommand(text=text):
                self._claimed(host, text)

    def _claimed(self, host: Host, command: str) -> None:
        """A command that the log tells of: whether a setting is one, its control daemon is asked."""
        try:
            setting = understood(command, host.control.gpus)
        except ValueError as error:
            log.info("setting rejected", domain=host.name, command=command, reason=str(error))
            self._callbacks.post(ev.Counted({"settings_rejected": 1}))
            return
        if setting is None or self._hosts.get(host.name) is not host:
            return
        host.claimed[setting.key] = setting
        # One question at a time, whatever a log says.
        if not host.confirming:
            host.confirming = True
            self._tasks.spawn(self._confirm(host))

    async def _confirm(self, host: Host) -> None:
        try:
            while host.claimed:
                setting = host.claimed.pop(next(iter(host.claimed)))
                if not self._settings.known(setting, host.uid):
                    await self._learn(host, setting)
        finally:
            host.confirming = False

    async def _learn(self, host: Host, setting: Setting) -> None:
        try:
            confirmed = setting.confirmed(await host.control.command(setting.question))
        except MpsdError as error:
            log.warning("setting not confirmed", domain=host.name, reason=str(error))
            confirmed = False
        if not confirmed:
            self._callbacks.post(ev.Counted({"settings_rejected": 1}))
            return
        self._settings.learn(setting, host.uid)
        log.info("setting kept for later domains", domain=host.name, command=setting.command)
        self._callbacks.set_by_hand()

    def _watch_control(self, host: Host) -> None:
        # The daemon object may wait on its own descriptor: this is a duplicate for the loop.
        host.control_watch = os.dup(host.control.fileno())
        os.set_inheritable(host.control_watch, False)
        self._loop.add_reader(host.control_watch, self._control_died, host)

    def _control_died(self, host: Host) -> None:
        self._unwatch_control(host)
        host.control.reap()
        instance = host.control.instance
        if instance is not None and self._hosts.get(host.name) is host:
            self._callbacks.post(ev.ControlDied(host.name, instance))

    def _unwatch_control(self, host: Host) -> None:
        if host.control_watch >= 0:
            self._loop.remove_reader(host.control_watch)
            os.close(host.control_watch)
            host.control_watch = -1

    def _pin_server(self, host: Host) -> ProcessInstance | None:
        """Pin the server that the control daemon has now, if it is another one than before."""
        instances = host.control.server_instances() if host.control.alive() else ()
        known = host.server.instance if host.server else None
        if not instances or known in instances:
            return known
        try:
            found = Pinned.open(instances[-1].pid, instances[-1].start_ticks)
        except MpsdError:
            return known
        if known is not None and known != host.dying:
            # Its end is told before there is another one, however late the loop would have come to it.
            self._callbacks.post(ev.ServerDied(host.name, known))
        self._set_server(host, found)
        return instances[-1]

    def _set_server(self, host: Host, server: Pinned) -> None:
        self._drop_server(host)
        host.server = server
        self._loop.add_reader(server.fileno(), self._server_died, host, server)

    def _server_died(self, host: Host, server: Pinned) -> None:
        if host.server is server:
            self._drop_server(host)
        if host.dying != server.instance:
            self._callbacks.post(ev.ServerDied(host.name, server.instance))

    def _drop_server(self, host: Host) -> None:
        if host.server is not None:
            self._loop.remove_reader(host.server.fileno())
            host.server.close()
            host.server = None

    def ask(self, domain: str) -> None:
        """Find the server and its state, and tell core."""
        if domain in self._hosts:
            self._tasks.spawn(self._ask(domain))

    async def _ask_calmly(self, domain: str) -> None:
        await self.calm.over()
        await self._ask(domain)

    async def _ask(self, domain: str) -> None:
        host = self._hosts.get(domain)
        if host is None or not host.control.alive():
            return
        server = self._pin_server(host)
        if server is None or server == host.dying:
            self._callbacks.post(ev.ServerStateSeen(domain, ServerState.GONE))
            return
        self._callbacks.post(ev.ServerSeen(domain, server))
        try:
            state = await host.control.server_state(server.pid, ASK_DEADLINE_S)
        except MpsdError as error:
            log.warning("server state unknown", domain=domain, reason=str(error))
            self._callbacks.post(ev.Counted({"ask_failures": 1}))
            return
        if server == host.dying or host.server is None or host.server.instance != server:
            # Its end was told meanwhile, and what it said before is of no server any more.
            return
        if state is ServerState.FAULT and procs.is_ending(server):
            # It was killed, and takes a while to end: for its clients it is in FAULT, by nobody's work. In an
            # empty domain there is no hurry, and where a GPU admits one server the next one waits for it.
            if self._callbacks.in_use(domain):
                host.dying = server
                self._callbacks.post(ev.ServerDied(domain, server))
            return
        self._callbacks.post(ev.ServerStateSeen(domain, state))

    def terminate(
        self, domain: str, server: ProcessInstance, process: ProcessInstance, deadline_s: float
    ) -> None:
        self._tasks.spawn(self._terminate(domain, server, process, deadline_s))

    async def _terminate(
        self, domain: str, server: ProcessInstance, process: ProcessInstance, deadline_s: float
    ) -> None:
        host = self._hosts.get(domain)
        if host is None:
            self._callbacks.post(ev.TerminateFinished(process, False, f"domain {domain} is not there"))
            return
        try:
            reply = await host.control.terminate_client(server.pid, process.pid, deadline_s)
        except Exception as error:
            # Whatever went wrong, core must hear of it: it waits with SIGKILL until then.
            self._callbacks.post(ev.TerminateFinished(process, False, f"terminate_client: {error}"))
            return
        done = reply.outcome is TerminateOutcome.DONE
        text = f"terminate_client: {'done' if done else reply.text or reply.outcome.value}"
        self._callbacks.post(ev.TerminateFinished(process, done, text))

    async def listed_clients(self, domain: str) -> tuple[int, ...]:
        """The pids that the server itself lists. Raises MpsdError."""
        host = self._hosts.get(domain)
        if host is None or host.server is None or not host.control.alive():
            return ()
        return await host.control.clients(host.server.instance.pid, ASK_DEADLINE_S)

    def stop(self, domain: str, deadline_s: float) -> None:
        """End a domain; once, however often it is asked for."""
        if domain not in self._stopping:
            self._stopping.add(domain)
            task = self._tasks.spawn(self._stop(domain, deadline_s))
            task.add_done_callback(lambda _: self._stopping.discard(domain))

    async def _stop(self, domain: str, deadline_s: float) -> None:
        if (start := self._starting.get(domain)) is not None:
            # What is just coming up has processes that nobody else would end.
            await asyncio.wait({start})
        host = self._hosts.pop(domain, None)
        if host is not None:
            try:
                if host.control.alive():
                    await host.control.quit(deadline_s)
            except (MpsdError, OSError) as error:
                log.warning("domain is stopped by force", domain=domain, reason=str(error))
                if host.control.alive():
                    await host.control.kill()
            if host.server is not None and host.server.alive():
                # A server without its control daemon has nobody left to end it.
                await _end_server(host.server, deadline_s)
            self._let_go(host)
            self._layout.forget_domain(domain)
        self._callbacks.post(ev.DomainStopped(domain))

    def trim_logs(self, limit: int) -> None:
        """Bound every log file; a full or read-only disk is reported, never fatal."""
        for host in self._hosts.values():
            if host.follower is None:
                continue
            try:
                host.follower.trim(limit, min(limit // 4, 1 << 20))
            except OSError as error:
                log.warning("log cannot be trimmed", path=host.follower.path, reason=error.strerror)

    def _let_go(self, host: Host) -> None:
        if host.follower is not None:
            self._loop.remove_reader(host.follower.fileno())
            host.follower.close()
            host.follower = None
        self._unwatch_control(host)
        self._drop_server(host)
        host.control.close()

    async def idle(self) -> None:
        """Until no start, stop or command is under way."""
        while self._tasks.running():
            await self._tasks.ended()

    async def close(self) -> None:
        """Let go of every domain without ending it."""
        await self._tasks.cancel()
        for host in tuple(self._hosts.values()):
            self._let_go(host)
        self._hosts.clear()


async def _end_server(server: Pinned, patience_s: float) -> None:
    server.signal(signal.SIGTERM)
    if not await server.ended(patience_s):
        server.signal(signal.SIGKILL)
        # The driver takes its channels apart first, and what runs there with them.
        if not await server.ended(max(patience_s, KILLED_S)):
            log.warning("a server that was killed has not ended", pid=server.instance.pid, after_s=KILLED_S)
