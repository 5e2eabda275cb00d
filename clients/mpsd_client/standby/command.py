"""mpsd-standby: run a program and a second, waiting process of it. Standard library only.

For programs that do not use mpsd's libcuda. standby/schedule.py decides; this module starts, ends and reads
processes and asks the daemon.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from mpsd_client import turns
from mpsd_client._protocol import errors
from mpsd_client.client import Client, connect
from mpsd_client.env import obstacle
from mpsd_client.events import DAEMON_BACK, DAEMON_LOST, Event, Watcher
from mpsd_client.joining.devices import VISIBLE, requested
from mpsd_client.joining.plan import shown_gpus
from mpsd_client.joining.present import present_gpus
from mpsd_client.run import NOT_EXECUTABLE, NOT_FOUND, USAGE
from mpsd_client.standby import schedule
from mpsd_client.standby.processes import ProcessTree, adopt_orphans
from mpsd_client.standby.schedule import RemainingWork
from mpsd_client.transport import find_socket
from mpsd_client.vault import token_of

UNAVAILABLE = 69
GRACE_S, SETTLE_S = 10.0, 30.0
FIRST_PAUSE_S, LAST_PAUSE_S, CHECK_S = 0.2, 5.0, 0.5
ASK_S, STARTS_FOR_S = 5.0, 30.0
PATIENCE_MS = 150
_MISSED, _FAULTED = "lost", "faulted"
_MESSAGES = {
    turns.READY: "ready",
    turns.TOOK_OVER: "took",
    turns.CAN_RELEASE: "hears",
    turns.RELEASED: "left",
}
_MESSAGES |= {turns.CANNOT_RELEASE: "overdue"}

_DESCRIPTION = "Run a CUDA program that survives faults of its domain: a waiting process takes over."
_EPILOG = """\
The program calls session.wait_for_turn() (mpsd_client) after its preparation: modules loaded, context
created, named buffers attached. mpsd-standby then starts a second process of the program in the standby
domain. The second process does the same preparation with the same buffers and waits.

mpsd-standby kills the first process and its child processes when their domain faults or the first process
fails. The second process gets its turn when the first has ended. After a fault it gets its turn as soon as
the first process has released its named buffers.

  --cold     start no second process: restart the program, which finds its named buffers

mpsd-standby restarts a program that does not call wait_for_turn() as with --cold. The program's processes
run in sessions of their own. mpsd-standby passes SIGTERM, SIGINT and SIGHUP on as SIGTERM and kills
processes that do not end within 10 s.

exit status: the program's own, 128 + N if signal N ended it. 2 wrong command line; 69 no daemon or
no domain; 126 program cannot be executed; 127 program not found
"""


class Runner:
    """One run of mpsd-standby. `play` is the loop and calls everything else; slow work runs in tasks."""

    def __init__(self, options: argparse.Namespace, command: Sequence[str], socket_path: str) -> None:
        self._options, self._command, self._socket_path = options, command, socket_path
        self._scheduler = schedule.Scheduler(
            warm=not options.cold, restarts=options.restarts, within_s=options.within
        )
        self._messages: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._actors: dict[int, ProcessTree] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._gpu: str | None = options.gpu
        self._takeover_began = 0.0
        self._holders: Client | None = None
        # Two ended processes may have work on the GPU at a time.
        self._holders_lock = asyncio.Lock()
        self._retry_at, self._pause_s, self._reason_without_standby = 0.0, FIRST_PAUSE_S, ""
        self._check_at: float | None = None
        self._status: int | None = None

    async def play(self) -> int:
        """Run until the program is over and return the exit status. Raises MpsdError without a daemon.

        No process of the program outlives this, except background processes of one that exited with 0."""
        watcher = await asyncio.to_thread(Watcher, self._tell, None, self._socket_path, required=True)
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._loop.add_signal_handler(number, self._messages.put_nowait, ("signal", number))
            self._do(self._scheduler.begin())
            while self._status is None:
                self._do(await self._next())
            return self._status
        finally:
            for task in self._tasks:
                task.cancel()
            for actor in self._actors.values():
                actor.kill()
                actor.finish()
                self._release(actor)
            await asyncio.to_thread(watcher.close)

    def _tell(self, event: Event) -> None:
        """Queue an event. Called in the watcher's thread."""
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._messages.put_nowait, ("event", event))

    async def _next(self) -> list[schedule.Action]:
        """Wait for the next message or deadline and return the actions that follow from it."""
        now = time.monotonic()
        if self._check_at is not None and now >= self._check_at:
            self._check_at = now + CHECK_S
            self._spawn(self._check_domains())
        if now >= self._retry_at and (wanted := self._scheduler.wants_standby()):
            return wanted
        try:
            async with asyncio.timeout(FIRST_PAUSE_S):
                message = await self._messages.get()
        except TimeoutError:
            return []
        match message:
            case ("event", event):
                return self._on_domain_event(event)
            case ("status", status):
                return self._domains_checked(status)
            case ("signal", number):
                self._say("stopping", f"{signal.Signals(number).name} received: ending the program")
                return self._scheduler.stop(128 + number)
            case ("started", actor, domain, role):
                return self._started(actor, domain, role)
            case ("not-started", role, status, why):
                return self._not_started(role, status, why)
            case ("ended", number, status):
                return self._ended(number, status)
            case ("settled", actor, left):
                return self._settled(actor, left)
            case ("overdue", number):
                return self._scheduler.release_overdue(number)
            case ("ready", number):
                return self._scheduler.ready(number, time.monotonic())
            case ("hears", number):
                return self._scheduler.can_release(number)
            case ("left", number):
                return self._buffers_released(number)
            case ("took", number):
                return self._took_over(number)
        return []

    def _took_over(self, number: int) -> list[schedule.Action]:
        ms = _ms_since(self._takeover_began)
        self._takeover_began = 0.0
        self._say("took-over", f"process {number} took over after {ms:.1f} ms", ms=ms)
        return self._scheduler.ready(number, time.monotonic())

    def _buffers_released(self, number: int) -> list[schedule.Action]:
        actor = self._actors.get(number)
        ms = _ms_since(actor.lost_at) if actor is not None else 0.0
        self._say("left", f"process {number} released its buffers after {ms:.1f} ms", ms=ms)
        return self._scheduler.memory_released(number, time.monotonic())

    def _settled(self, actor: ProcessTree, remaining: RemainingWork) -> list[schedule.Action]:
        if remaining is RemainingWork.NOTHING:
            ms = _ms_since(actor.lost_at)
            text = f"process {actor.pid} has no work or memory on the GPU after {ms:.1f} ms"
            self._say("settled", text, ms=ms, ended_ms=_ms(actor.ended_at - actor.lost_at))
        return self._scheduler.settled(actor.pid, remaining)

    # -- domains -----------------------------------------------------------------------------------------

    def _on_domain_event(self, event: Event) -> list[schedule.Action]:
        if event.kind == DAEMON_LOST:
            self._say("daemon-lost", str(event))
        if event.kind in (DAEMON_BACK, _MISSED):
            self._check_at = time.monotonic()
        if event.kind != "domain-left" or event.domain is None:
            return []
        lost, faulted = bool(event.data.get("lost")), event.data.get("state") == _FAULTED
        return self._domain_left(event.domain, str(event.data.get("why")), lost, faulted)

    def _domain_left(self, domain: str, why: str, lost: bool, faulted: bool) -> list[schedule.Action]:
        working, now = self._scheduler.working, time.monotonic()
        if lost and working is not None and working.domain == domain and not working.end_reason:
            self._takeover_began = self._actors[working.number].lost_at = now
        return self._scheduler.domain_left(domain, why, now, work_lost=lost, faulted=faulted)

    async def _check_domains(self) -> None:
        """Ask for the domains' states after a gap in the events; the loop repeats this until it succeeds."""
        with contextlib.suppress(errors.MpsdError):
            self._messages.put_nowait(("status", await asyncio.to_thread(self._ask_status)))

    def _domains_checked(self, status: Mapping[str, Any]) -> list[schedule.Action]:
        self._check_at = None
        serving = {str(d["id"]): not d["lost"] for d in status["domains"]}
        actions = []
        for actor in (self._scheduler.working, self._scheduler.waiting):
            if actor is not None and not serving.get(actor.domain):
                actions += self._domain_left(
                    actor.domain, "it faulted during a gap in the events", True, False
                )
        return actions

    # -- doing -------------------------------------------------------------------------------------------

    def _do(self, actions: Sequence[schedule.Action]) -> None:
        for action in actions:
            match action:
                case schedule.Start(role):
                    self._spawn(self._start(role))
                case schedule.End(number):
                    if not self._scheduler.stopping:
                        # It must send nothing to its own clients once the next process has its turn.
                        self._actors[number].kill_group()
                    self._spawn(self._end(self._actors[number]))
                case schedule.ReleaseMemory(number):
                    self._actors[number].send(turns.RELEASE)
                    self._spawn(self._await_release(number))
                case schedule.Settle(number):
                    self._spawn(self._settle(number))
                case schedule.GiveTurn(number):
                    self._actors[number].send(turns.GO)
                case schedule.Say(kind, text):
                    self._say(kind, text)
                case schedule.Leave(status):
                    if self._status is None:
                        self._status = status if status >= 0 else 128 - status

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._say("failed", f"{type(error).__name__}: {error}")
            self._messages.put_nowait(("signal", signal.SIGTERM))

    async def _start(self, role: schedule.Role) -> None:
        waits = role is schedule.Role.STANDBY
        again = role is schedule.Role.AGAIN
        await asyncio.sleep(self._scheduler.pause_s if again else 0.0)
        end = time.monotonic() + STARTS_FOR_S
        reported = ""
        while True:
            self._scheduler.asking()
            try:
                domain, variables = await asyncio.to_thread(self._ask_env, waits)
                break
            except errors.MpsdError as error:
                patient = again or (isinstance(error, errors.NotReadyError) and not waits)
                if not patient or time.monotonic() >= end or self._scheduler.stopping:
                    status = 0 if waits else UNAVAILABLE
                    self._messages.put_nowait(("not-started", role, status, str(error)))
                    return
                if reported != (reported := str(error)):
                    self._say("not-yet", f"cannot start yet, retrying for {STARTS_FOR_S:g} s: {reported}")
                await asyncio.sleep(FIRST_PAUSE_S)
        if self._scheduler.stopping:
            self._messages.put_nowait(("not-started", role, 0, "mpsd-standby is stopping"))
            return
        try:
            merged = {**os.environ, **variables}
            environ = {name: value for name, value in merged.items() if value is not None}
            actor = ProcessTree(self._command, environ, role.value)
        except OSError as error:
            status = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            why = f"{self._command[0]}: {error.strerror}"
            self._messages.put_nowait(("not-started", role, status, why))
            return
        self._actors[actor.pid] = actor
        self._loop.add_reader(actor.connection.fileno(), self._read_messages, actor)
        self._loop.add_reader(actor.fileno(), self._process_ended, actor)
        self._messages.put_nowait(("started", actor, domain, role))

    def _started(self, actor: ProcessTree, domain: str, role: schedule.Role) -> list[schedule.Action]:
        self._pause_s, self._reason_without_standby = FIRST_PAUSE_S, ""
        if role is schedule.Role.AGAIN:
            self._takeover_began = 0.0
        self._say("started", f"process {actor.pid} in domain {domain} ({role.value})")
        return self._scheduler.started(actor.pid, domain)

    def _not_started(self, role: schedule.Role, status: int, why: str) -> list[schedule.Action]:
        """Report why there is no waiting process, once per reason."""
        if role is not schedule.Role.STANDBY:
            self._say("not-started", why)
            self._status = self._status if self._status is not None else status or None
        elif why != self._reason_without_standby:
            self._reason_without_standby = why
            self._say("no-standby", f"no waiting process: {why}")
        self._retry_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        return self._scheduler.not_started(status)

    def _ask_env(self, standby: bool) -> tuple[str, Mapping[str, str | None]]:
        """Return the domain to start in and its variables (None: to unset). Called in a thread.

        The variables name the domain's own pipe directory, because the slot leads to another domain after a
        fault. The GPU is that of the first process, because its memory is there."""
        working, named = self._scheduler.working, self._options.gpu is not None
        with connect(self._socket_path, timeout=ASK_S) as daemon:
            node = daemon.node_gpus(ASK_S)
            request = None if named else requested(os.environ, node, present_gpus())
            gpu = self._gpu if self._gpu is not None or request is None else request.first
            wanted = daemon.env(gpu, self._options.shared, ASK_S, standby=standby)
            if working is not None and standby and daemon.domain == working.domain:
                # The working process took over in the standby domain: use the domain behind the slot.
                wanted = daemon.env(gpu, self._options.shared, ASK_S)
            if not daemon.domain:
                raise errors.ProtocolError(
                    "the daemon's answer names no domain", remedy="use one version of mpsd and mpsd-client"
                )
            if standby and working is not None and daemon.domain == working.domain:
                raise errors.NotFoundError("the only domain is the one in which the program works")
            if daemon.lost:
                raise errors.NotReadyError(f"domain {daemon.domain} faulted and has no successor yet")
            self._gpu = gpu or (daemon.gpus[0] if daemon.gpus else None)
            if why := obstacle(daemon.directory):
                raise errors.NotReadyError(f"cannot join MPS: {why}")
            variables = shown_gpus(os.environ, request, wanted.get(VISIBLE), daemon.gpus, node)
            variables["CUDA_MPS_PIPE_DIRECTORY"] = daemon.directory
            if daemon.vault_socket:
                variables["MPSD_VAULT_SOCKET"] = daemon.vault_socket
            return daemon.domain, variables

    def _ask_status(self) -> Mapping[str, Any]:
        """Return the daemon's status. Called in a thread."""
        with connect(self._socket_path, timeout=ASK_S) as daemon:
            return daemon.status(timeout=ASK_S)

    def _ask_holders(self) -> Sequence[Mapping[str, Any]]:
        """Return the processes on the GPU. Called in a thread, one call at a time; keeps its connection."""
        try:
            self._holders = self._holders or connect(self._socket_path, timeout=ASK_S)
            return self._holders.holders(timeout=ASK_S)
        except errors.ProtocolError:
            # An older daemon does not have this operation.
            self._disconnect()
            status = self._ask_status()
            return [*status["clients"], *status["dead"]]
        except errors.MpsdError:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        holders, self._holders = self._holders, None
        if holders is not None:
            holders.close()

    # -- processes ---------------------------------------------------------------------------------------

    def _read_messages(self, actor: ProcessTree) -> None:
        lines = actor.messages()
        if lines is None:
            self._loop.remove_reader(actor.connection.fileno())
            return
        for line in lines:
            if line in _MESSAGES:
                self._messages.put_nowait((_MESSAGES[line], actor.pid))

    def _process_ended(self, actor: ProcessTree) -> None:
        self._loop.remove_reader(actor.fileno())
        self._spawn(self._finish(actor))

    async def _finish(self, actor: ProcessTree) -> None:
        """Kill what an ended process has left in its sessions, before another process gets its memory.

        Processes that it left behind after exit status 0 stay. While mpsd-standby stops, they get GRACE_S."""
        status = os.waitid(os.P_PID, actor.pid, os.WEXITED | os.WNOWAIT)
        ended_well = status is not None and status.si_code == os.CLD_EXITED and status.si_status == 0
        if self._scheduler.stopping:
            end = time.monotonic() + GRACE_S
            while time.monotonic() < end and await asyncio.to_thread(actor.is_living):
                await asyncio.sleep(turns.LONGEST_POLL_S)
        working = self._scheduler.working
        works = working is not None and working.number == actor.pid and not working.end_reason
        if not (ended_well and works) and not await asyncio.to_thread(actor.kill):
            self._say("unkilled", f"cannot kill processes of {actor.pid}: {sorted(actor.living())}")
        self._messages.put_nowait(("ended", actor.pid, actor.finish()))

    def _ended(self, number: int, status: int) -> list[schedule.Action]:
        working, actor, now = self._scheduler.working, self._actors[number], time.monotonic()
        actor.ended_at = now
        actor.lost_at = actor.lost_at or now
        if working is not None and working.number == number:
            self._takeover_began = self._takeover_began or now
        actions = self._scheduler.ended(number, status, now)
        if working is None or working.number != number:
            self._retry_at = time.monotonic() + FIRST_PAUSE_S
        if not any(isinstance(action, schedule.Settle) for action in actions):
            self._release(self._actors.pop(number))
        return actions

    async def _end(self, actor: ProcessTree) -> None:
        if not self._scheduler.stopping:
            await asyncio.to_thread(actor.kill)
            return
        await asyncio.to_thread(actor.signal, signal.SIGTERM)
        await asyncio.sleep(GRACE_S)
        if actor.fileno() >= 0 and await asyncio.to_thread(actor.is_living):
            self._say("killed", f"process {actor.pid} did not end within {GRACE_S:g} s")
            await asyncio.to_thread(actor.kill)

    async def _await_release(self, number: int) -> None:
        """Give a process of a faulted domain time to release its buffers.

        It must end soon, but killing it during the release takes longer than waiting."""
        await asyncio.sleep(self._options.patience / 1e3)
        self._messages.put_nowait(("overdue", number))

    async def _settle(self, number: int) -> None:
        """Poll the daemon until nothing of the process is on the GPU. Keep trying without an answer."""
        actor = self._actors.pop(number)
        self._release(actor)
        began, told = time.monotonic(), False
        while True:
            try:
                async with self._holders_lock:
                    remaining = _remaining_of(actor, await asyncio.to_thread(self._ask_holders))
            except errors.MpsdError:
                await asyncio.sleep(FIRST_PAUSE_S)
                began = time.monotonic()
                continue
            waited = time.monotonic() - began
            if remaining is RemainingWork.NOTHING or waited > SETTLE_S:
                break
            if not told and waited > 1.0:
                told = True
                self._say("waits", f"waiting for GPU work of process {number} to end")
            await asyncio.sleep(turns.poll_pause(waited))
        async with self._holders_lock:
            await asyncio.to_thread(self._disconnect)
        self._messages.put_nowait(("settled", actor, remaining))

    def _release(self, actor: ProcessTree) -> None:
        if actor.fileno() >= 0:
            self._loop.remove_reader(actor.fileno())
            self._loop.remove_reader(actor.connection.fileno())
            actor.close()

    def _say(self, kind: str, text: str, **more: object) -> None:
        say(self._options.json, kind, text, **more)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _ms_since(moment: float) -> float:
    return _ms(time.monotonic() - moment) if moment else 0.0


def _remaining_of(actor: ProcessTree, rows: Sequence[Mapping[str, Any]]) -> RemainingWork:
    mine = [row for row in rows if (row.get("pid"), row.get("start_ticks")) in actor.known]
    if not mine:
        return RemainingWork.NOTHING
    return RemainingWork.UNKNOWN if all(row.get("blind") for row in mine) else RemainingWork.WORK


def say(as_json: bool, kind: str, text: str, **more: object) -> None:
    message = {"kind": kind, "text": text, "at": time.time(), **more}
    line = json.dumps(message) if as_json else f"mpsd-standby: {text}"
    with contextlib.suppress(OSError):
        os.write(2, line.encode(errors="backslashreplace") + b"\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    command = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not command:
        say(
            options.json, "usage", "no program given: usage is mpsd-standby [OPTION]... PROGRAM [ARGUMENT]..."
        )
        return USAGE
    adopt_orphans()
    try:
        return asyncio.run(_play(options, command))
    except errors.MpsdError as error:
        say(options.json, "unavailable", f"{error}")
        return UNAVAILABLE


async def _play(options: argparse.Namespace, command: Sequence[str]) -> int:
    token_of(os.environ)
    return await Runner(options, command, options.socket or find_socket(os.environ, os.getuid())).play()


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpsd-standby",
        usage="mpsd-standby [--cold] [--gpu GPU] PROGRAM [ARGUMENT]...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--cold", action="store_true", help="start no waiting process: restart the program")
    parser.add_argument(
        "--restarts", type=count, default=5, help="stop after this many restarts (default: %(default)s) ..."
    )
    parser.add_argument(
        "--within",
        type=count,
        default=60,
        help="... within this many seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--patience",
        type=count,
        default=PATIENCE_MS,
        metavar="MS",
        help="time to release named buffers after a fault of the domain (default: %(default)s)",
    )
    parser.add_argument("--gpu", help="index or UUID of the GPU")
    parser.add_argument("--shared", action="store_true", help="use the domain that all users share")
    parser.add_argument("--json", action="store_true", help="print messages on stderr as JSON lines")
    parser.add_argument(
        "--socket", help="the daemon's socket; default: $MPSD_SOCKET, then the user's own, then the machine's"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser
