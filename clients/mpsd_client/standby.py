"""mpsd-standby: a program, and a second process of it that waits to take over. The standard library alone.

For programs without mpsd's libcuda. What is decided is rota.py's; this starts, ends and hears processes.

Long because the command line, the processes and the daemon's word meet in one loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from mpsd_client import rota, turns
from mpsd_client._protocol import errors
from mpsd_client.actors import Actor, adopt_orphans
from mpsd_client.client import Client, connect
from mpsd_client.env import fitting, named_gpu
from mpsd_client.events import DAEMON_BACK, DAEMON_LOST, Event, Watcher
from mpsd_client.rota import Left
from mpsd_client.run import NOT_EXECUTABLE, NOT_FOUND, USAGE
from mpsd_client.transport import find_socket
from mpsd_client.vault import token_of

UNAVAILABLE = 69
GRACE_S, SETTLE_S = 10.0, 30.0
FIRST_PAUSE_S, LAST_PAUSE_S, COMPARE_S = 0.2, 5.0, 0.5
ASK_S, STARTS_FOR_S = 5.0, 30.0
PATIENCE_MS = 150
_MISSED, _FAULTED = "lost", "faulted"
_WORDS = {turns.READY: "ready", turns.TOOK: "took", turns.HEARS: "hears", turns.LEFT: "left"}
_WORDS |= {turns.KEEPS: "overdue"}

_DESCRIPTION = "Run a CUDA program so that it goes on after a fault of its neighbours: warm, or restarted."
_EPILOG = """\
The program calls session.wait_for_turn() (mpsd_client) when all is done that it can do beforehand: its
modules loaded, its context made, its named buffers attached. Then a second process of it is started in the
standby domain, which does the same, with the same buffers, and waits there. When the domain of the first is
lost, or it ends by itself with an error, it is killed with all that it has started, and the second has its
turn: when the first has ended, or, after a fault, as soon as it has let go of its named buffers.

  --cold     nobody waits: the program is started anew, and finds its named buffers

A program that calls nothing is restarted cold. The program's processes are in sessions of their own. SIGTERM,
SIGINT and SIGHUP are passed on as SIGTERM; what does not end within 10 s is killed.

exit status: the program's, 128 + N where signal N ended it; 2 the command line is wrong, 69 no daemon or no
domain, 126 the program cannot be executed, 127 it is not found
"""


class Stage:
    """One run: `play` is the loop; everything else is called from it, and what takes time is a task."""

    def __init__(self, given: argparse.Namespace, command: Sequence[str], socket_path: str) -> None:
        self._given, self._command, self._socket_path = given, command, socket_path
        self._rota = rota.Rota(warm=not given.cold, restarts=given.restarts, within_s=given.within)
        self._heard: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._actors: dict[int, Actor] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._gpu: str | None = named_gpu(os.environ, given.gpu)
        self._over_since = 0.0
        self._holders: Client | None = None
        # Two that have ended may be waited for at a time.
        self._asking = asyncio.Lock()
        self._retry_at, self._pause_s, self._why_none = 0.0, FIRST_PAUSE_S, ""
        self._compare_at: float | None = None
        self._status: int | None = None

    async def play(self) -> int:
        """The exit status. Raises MpsdError where no daemon is there. Nothing of the program outlives it,
        but what a process that ended well has left in the background."""
        watcher = await asyncio.to_thread(Watcher, self._tell, None, self._socket_path, required=True)
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._loop.add_signal_handler(number, self._heard.put_nowait, ("signal", number))
            self._do(self._rota.begin())
            while self._status is None:
                self._do(await self._next())
            return self._status
        finally:
            for task in self._tasks:
                task.cancel()
            for actor in self._actors.values():
                actor.kill()
                actor.finish()
                self._let_go(actor)
            await asyncio.to_thread(watcher.close)

    def _tell(self, event: Event) -> None:
        """In the watcher's thread."""
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._heard.put_nowait, ("event", event))

    async def _next(self) -> list[rota.Action]:
        """What follows from the next thing that happens, or is due."""
        now = time.monotonic()
        if self._compare_at is not None and now >= self._compare_at:
            self._compare_at = now + COMPARE_S
            self._spawn(self._compare())
        if now >= self._retry_at and (wanted := self._rota.wants_standby()):
            return wanted
        try:
            async with asyncio.timeout(FIRST_PAUSE_S):
                heard = await self._heard.get()
        except TimeoutError:
            return []
        match heard:
            case ("event", event):
                return self._domain_said(event)
            case ("status", status):
                return self._compared(status)
            case ("signal", number):
                self._say("stopping", f"{signal.Signals(number).name}: the program is ended")
                return self._rota.stop(128 + number)
            case ("started", actor, domain, role):
                return self._started(actor, domain, role)
            case ("not-started", role, status, why):
                return self._not_started(role, status, why)
            case ("ended", number, status):
                return self._ended(number, status)
            case ("settled", actor, left):
                return self._settled(actor, left)
            case ("overdue", number):
                return self._rota.overdue(number)
            case ("ready", number):
                return self._rota.ready(number, time.monotonic())
            case ("hears", number):
                return self._rota.hears(number)
            case ("left", number):
                return self._let_go_of(number)
            case ("took", number):
                return self._took(number)
        return []

    def _took(self, number: int) -> list[rota.Action]:
        ms = _ms_since(self._over_since)
        self._over_since = 0.0
        self._say("took-over", f"process {number} goes on after {ms:.1f} ms", ms=ms)
        return self._rota.ready(number, time.monotonic())

    def _let_go_of(self, number: int) -> list[rota.Action]:
        actor = self._actors.get(number)
        ms = _ms_since(actor.lost_at) if actor is not None else 0.0
        self._say("left", f"process {number} has let go of its buffers after {ms:.1f} ms", ms=ms)
        return self._rota.left(number, time.monotonic())

    def _settled(self, actor: Actor, left: Left) -> list[rota.Action]:
        if left is Left.NOTHING:
            ms = _ms_since(actor.lost_at)
            text = f"nothing of process {actor.pid} is on the GPU any more after {ms:.1f} ms"
            self._say("settled", text, ms=ms, ended_ms=_ms(actor.ended_at - actor.lost_at))
        return self._rota.settled(actor.pid, left)

    # -- domains -----------------------------------------------------------------------------------------

    def _domain_said(self, event: Event) -> list[rota.Action]:
        if event.kind == DAEMON_LOST:
            self._say("daemon-lost", str(event))
        if event.kind in (DAEMON_BACK, _MISSED):
            self._compare_at = time.monotonic()
        if event.kind != "domain-left" or event.domain is None:
            return []
        lost, faulted = bool(event.data.get("lost")), event.data.get("state") == _FAULTED
        return self._left(event.domain, str(event.data.get("why")), lost, faulted)

    def _left(self, domain: str, why: str, lost: bool, faulted: bool) -> list[rota.Action]:
        working, now = self._rota.working, time.monotonic()
        if lost and working is not None and working.domain == domain and not working.over:
            self._over_since = self._actors[working.number].lost_at = now
        return self._rota.lost(domain, why, now, work_too=lost, faulted=faulted)

    async def _compare(self) -> None:
        """What happened while nobody told: asked until somebody answers."""
        with contextlib.suppress(errors.MpsdError):
            self._heard.put_nowait(("status", await asyncio.to_thread(self._ask_status)))

    def _compared(self, status: Mapping[str, Any]) -> list[rota.Action]:
        self._compare_at = None
        serving = {str(d["id"]): not d["lost"] for d in status["domains"]}
        actions = []
        for actor in (self._rota.working, self._rota.waiting):
            if actor is not None and not serving.get(actor.domain):
                actions += self._left(actor.domain, "lost while it was not heard of", True, False)
        return actions

    # -- doing -------------------------------------------------------------------------------------------

    def _do(self, actions: Sequence[rota.Action]) -> None:
        for action in actions:
            match action:
                case rota.Start(role):
                    self._spawn(self._start(role))
                case rota.End(number):
                    if not self._rota.stopping:
                        # It says nothing any more to whomever it serves once the next one has its turn.
                        self._actors[number].strike()
                    self._spawn(self._end(self._actors[number]))
                case rota.LetGo(number):
                    self._actors[number].tell(turns.LET_GO)
                    self._spawn(self._be_patient(number))
                case rota.Settle(number):
                    self._spawn(self._settle(number))
                case rota.GiveTurn(number):
                    self._actors[number].tell(turns.GO)
                case rota.Say(kind, text):
                    self._say(kind, text)
                case rota.Leave(status):
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
            self._heard.put_nowait(("signal", signal.SIGTERM))

    async def _start(self, role: rota.Role) -> None:
        waits = role is rota.Role.STANDBY
        again = role is rota.Role.AGAIN
        await asyncio.sleep(self._rota.pause_s if again else 0.0)
        end = time.monotonic() + STARTS_FOR_S
        said = ""
        while True:
            self._rota.asking()
            try:
                domain, variables = await asyncio.to_thread(self._ask_env, waits)
                break
            except errors.MpsdError as error:
                patient = again or (isinstance(error, errors.NotReadyError) and not waits)
                if not patient or time.monotonic() >= end or self._rota.stopping:
                    status = 0 if waits else UNAVAILABLE
                    self._heard.put_nowait(("not-started", role, status, str(error)))
                    return
                if said != (said := str(error)):
                    self._say("not-yet", f"nothing is started yet, {STARTS_FOR_S:g} s at most: {said}")
                await asyncio.sleep(FIRST_PAUSE_S)
        if self._rota.stopping:
            self._heard.put_nowait(("not-started", role, 0, "it is stopped"))
            return
        try:
            actor = Actor(self._command, {**os.environ, **variables}, role.value)
        except OSError as error:
            status = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            why = f"{self._command[0]}: {error.strerror}"
            self._heard.put_nowait(("not-started", role, status, why))
            return
        self._actors[actor.pid] = actor
        self._loop.add_reader(actor.line.fileno(), self._hear, actor)
        self._loop.add_reader(actor.fileno(), self._process_ended, actor)
        self._heard.put_nowait(("started", actor, domain, role))

    def _started(self, actor: Actor, domain: str, role: rota.Role) -> list[rota.Action]:
        self._pause_s, self._why_none = FIRST_PAUSE_S, ""
        if role is rota.Role.AGAIN:
            self._over_since = 0.0
        self._say("started", f"process {actor.pid} in domain {domain} ({role.value})")
        return self._rota.started(actor.pid, domain)

    def _not_started(self, role: rota.Role, status: int, why: str) -> list[rota.Action]:
        """Why nobody waits is said once, until it changes."""
        if role is not rota.Role.STANDBY:
            self._say("not-started", why)
            self._status = self._status if self._status is not None else status or None
        elif why != self._why_none:
            self._why_none = why
            self._say("no-standby", f"nobody waits: {why}")
        self._retry_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        return self._rota.not_started(status)

    def _ask_env(self, standby: bool) -> tuple[str, Mapping[str, str]]:
        """In a thread: the domain, by its own directory, for one that is lost leads to another; on the GPU
        that the first one had, for its memory is there."""
        working = self._rota.working
        with connect(self._socket_path, timeout=ASK_S) as daemon:
            variables = daemon.env(self._gpu, self._given.shared, ASK_S, standby=standby)
            if working is not None and standby and daemon.domain == working.domain:
                # Who works took over in the spare: the one that the path leads to has room.
                variables = daemon.env(self._gpu, self._given.shared, ASK_S)
            if not daemon.domain:
                raise errors.ProtocolError("the daemon says no domain", remedy="use an mpsd of this version")
            if standby and working is not None and daemon.domain == working.domain:
                raise errors.NotFoundError("there is no domain besides the one in which the program works")
            if daemon.lost:
                raise errors.NotReadyError(f"domain {daemon.domain} is lost, and no other is there yet")
            self._gpu = self._gpu or (daemon.gpus[0] if daemon.gpus else None)
            variables["CUDA_MPS_PIPE_DIRECTORY"] = daemon.directory
            if daemon.vault_socket:
                variables["MPSD_VAULT_SOCKET"] = daemon.vault_socket
            return daemon.domain, fitting(variables, os.environ, self._given.gpu, daemon.numbers)

    def _ask_status(self) -> Mapping[str, Any]:
        """In a thread."""
        with connect(self._socket_path, timeout=ASK_S) as daemon:
            return daemon.status(timeout=ASK_S)

    def _ask_holders(self) -> Sequence[Mapping[str, Any]]:
        """In a thread, one at a time: who is on the GPU. By a connection that stays while this is asked."""
        try:
            self._holders = self._holders or connect(self._socket_path, timeout=ASK_S)
            return self._holders.holders(timeout=ASK_S)
        except errors.ProtocolError:
            # An older daemon does not know the question.
            self._hang_up()
            status = self._ask_status()
            return [*status["clients"], *status["dead"]]
        except errors.MpsdError:
            self._hang_up()
            raise

    def _hang_up(self) -> None:
        holders, self._holders = self._holders, None
        if holders is not None:
            holders.close()

    # -- processes ---------------------------------------------------------------------------------------

    def _hear(self, actor: Actor) -> None:
        lines = actor.lines()
        if lines is None:
            self._loop.remove_reader(actor.line.fileno())
            return
        for line in lines:
            if line in _WORDS:
                self._heard.put_nowait((_WORDS[line], actor.pid))

    def _process_ended(self, actor: Actor) -> None:
        self._loop.remove_reader(actor.fileno())
        self._spawn(self._finish(actor))

    async def _finish(self, actor: Actor) -> None:
        """What a process has left in its sessions would go on with its memory: it is ended before the number
        is anybody else's. Not where it ended well; and where all is being stopped it has its time."""
        status = os.waitid(os.P_PID, actor.pid, os.WEXITED | os.WNOWAIT)
        ended_well = status is not None and status.si_code == os.CLD_EXITED and status.si_status == 0
        if self._rota.stopping:
            end = time.monotonic() + GRACE_S
            while time.monotonic() < end and await asyncio.to_thread(actor.is_there):
                await asyncio.sleep(turns.STEP_S)
        working = self._rota.working
        works = working is not None and working.number == actor.pid and not working.over
        if not (ended_well and works) and not await asyncio.to_thread(actor.kill):
            self._say("unkilled", f"processes of {actor.pid} do not end: {sorted(actor.members())}")
        self._heard.put_nowait(("ended", actor.pid, actor.finish()))

    def _ended(self, number: int, status: int) -> list[rota.Action]:
        working, actor, now = self._rota.working, self._actors[number], time.monotonic()
        actor.ended_at = now
        actor.lost_at = actor.lost_at or now
        if working is not None and working.number == number:
            self._over_since = self._over_since or now
        actions = self._rota.ended(number, status, now)
        if working is None or working.number != number:
            self._retry_at = time.monotonic() + FIRST_PAUSE_S
        if not any(isinstance(action, rota.Settle) for action in actions):
            self._let_go(self._actors.pop(number))
        return actions

    async def _end(self, actor: Actor) -> None:
        if not self._rota.stopping:
            await asyncio.to_thread(actor.kill)
            return
        await asyncio.to_thread(actor.signal, signal.SIGTERM)
        await asyncio.sleep(GRACE_S)
        if actor.fileno() >= 0 and await asyncio.to_thread(actor.is_there):
            self._say("killed", f"process {actor.pid} did not end within {GRACE_S:g} s")
            await asyncio.to_thread(actor.kill)

    async def _be_patient(self, number: int) -> None:
        """It is lost, and is not to go on for long; but to be killed while it lets go would cost more time
        than it has."""
        await asyncio.sleep(self._given.patience / 1e3)
        self._heard.put_nowait(("overdue", number))

    async def _settle(self, number: int) -> None:
        """Until nothing of it is on the GPU any more, as the daemon sees it; a daemon that does not answer is
        waited for."""
        actor = self._actors.pop(number)
        self._let_go(actor)
        began, told = time.monotonic(), False
        while True:
            try:
                async with self._asking:
                    left = _left_by(actor, await asyncio.to_thread(self._ask_holders))
            except errors.MpsdError:
                await asyncio.sleep(FIRST_PAUSE_S)
                began = time.monotonic()
                continue
            waited = time.monotonic() - began
            if left is Left.NOTHING or waited > SETTLE_S:
                break
            if not told and waited > 1.0:
                told = True
                self._say("waits", f"work of process {number} is not seen to have ended yet")
            await asyncio.sleep(turns.until_next_look(waited))
        async with self._asking:
            await asyncio.to_thread(self._hang_up)
        self._heard.put_nowait(("settled", actor, left))

    def _let_go(self, actor: Actor) -> None:
        if actor.fileno() >= 0:
            self._loop.remove_reader(actor.fileno())
            self._loop.remove_reader(actor.line.fileno())
            actor.close()

    def _say(self, kind: str, text: str, **more: object) -> None:
        say(self._given.json, kind, text, **more)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _ms_since(moment: float) -> float:
    return _ms(time.monotonic() - moment) if moment else 0.0


def _left_by(actor: Actor, rows: Sequence[Mapping[str, Any]]) -> Left:
    mine = [row for row in rows if (row.get("pid"), row.get("start_ticks")) in actor.known]
    if not mine:
        return Left.NOTHING
    return Left.UNKNOWN if all(row.get("blind") for row in mine) else Left.WORK


def say(as_json: bool, kind: str, text: str, **more: object) -> None:
    said = {"kind": kind, "text": text, "at": time.time(), **more}
    line = json.dumps(said) if as_json else f"mpsd-standby: {text}"
    with contextlib.suppress(OSError):
        os.write(2, line.encode(errors="backslashreplace") + b"\n")


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    command = given.program[1:] if given.program[:1] == ["--"] else given.program
    if not command:
        say(given.json, "usage", "which program? (mpsd-standby --help)")
        return USAGE
    adopt_orphans()
    try:
        return asyncio.run(_play(given, command))
    except errors.MpsdError as error:
        say(given.json, "unavailable", f"{error}")
        return UNAVAILABLE


async def _play(given: argparse.Namespace, command: Sequence[str]) -> int:
    token_of(os.environ)
    return await Stage(given, command, given.socket or find_socket(os.environ, os.getuid())).play()


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
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
    parser.add_argument("--cold", action="store_true", help="nobody waits: start the program anew")
    parser.add_argument(
        "--restarts", type=count, default=5, help="after so many it is left (default: %(default)s), ..."
    )
    parser.add_argument(
        "--within",
        type=count,
        default=60,
        help="... within so many seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--patience",
        type=count,
        default=PATIENCE_MS,
        metavar="MS",
        help="a process whose domain had a fault has this to let go of its buffers (default: %(default)s)",
    )
    parser.add_argument("--gpu", help="index or UUID of the GPU, where there are several")
    parser.add_argument("--shared", action="store_true", help="in the domain that all users share")
    parser.add_argument("--json", action="store_true", help="what is said on stderr as JSON, a line each")
    parser.add_argument("--socket", help="the daemon's; default: $MPSD_SOCKET, your own's, the machine's")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="and its arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
