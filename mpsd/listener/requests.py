"""Requests being worked on: rights, deadlines, limits, the audit log. Sends nothing itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import structlog

from mpsd.errors import BusyError, DeniedError, MpsdError
from mpsd.listener.connection import Connection
from mpsd.listener.peers import Peer, Rights, log_fields
from mpsd.wire.messages import ErrorReply, Request, Right

log = structlog.get_logger("mpsd.listener")

Handler = Callable[[Peer, Request], Awaitable[Mapping[str, object]]]
Outcome = Mapping[str, object] | ErrorReply
# Called with the outcome of a request. The peer is None where it was refused before it was looked up.
Answer = Callable[[Connection, Request, Outcome, Peer | None], None]


class Requests:
    """`max_pending`: requests that one user may have under way, over all connections."""

    def __init__(self, handler: Handler, rights: Rights, answer: Answer, max_pending: int) -> None:
        self._handler = handler
        self._rights = rights
        self._answer = answer
        self._max_pending = max_pending
        self._pending: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, connection: Connection, request: Request) -> None:
        uid = connection.credentials.uid
        if self._pending[uid] >= self._max_pending:
            error = BusyError(
                f"{self._pending[uid]} requests of user {uid} are being worked on",
                remedy="wait for an answer before asking more",
            )
            self._answer(connection, request, _refusal(request, error), None)
            return
        self._pending[uid] += 1
        task = asyncio.create_task(self._serve(connection, request))
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, uid))

    async def close(self) -> None:
        """Abandon what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, uid: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pending[uid] -= 1
        if not self._pending[uid]:
            del self._pending[uid]

    async def _serve(self, connection: Connection, request: Request) -> None:
        work = asyncio.create_task(self._work(connection, request))
        try:
            done, _ = await asyncio.wait({work}, timeout=request.deadline_ms / 1e3)
            if not done:
                self._answer(connection, request, _too_late(request), None)
                if request.operation.mutates:
                    # What was begun is carried through: half an eviction is worse than a late one.
                    await asyncio.wait({work})
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _work(self, connection: Connection, request: Request) -> None:
        peer = self._rights.known(connection.credentials)
        if peer is None:
            peer = await asyncio.to_thread(self._rights.peer, connection.credentials)
        if request.operation.mutates:
            self._record("asked", connection, request, args=dict(request.args))
        outcome = await self._outcome(peer, request)
        if request.operation.mutates:
            failed = isinstance(outcome, ErrorReply)
            what = {"code": outcome.code} if isinstance(outcome, ErrorReply) else {}
            self._record("failed" if failed else "done", connection, request, **what)
        self._answer(connection, request, outcome, peer)

    async def _outcome(self, peer: Peer, request: Request) -> Outcome:
        try:
            if request.operation.right is Right.ADMIN and not peer.admin:
                raise DeniedError(
                    f"user {peer.uid} may not {_spoken(request.op)}",
                    remedy="ask root or a member of the mpsd group",
                )
            return await self._handler(peer, request)
        except MpsdError as error:
            return _refusal(request, error)
        except Exception as error:
            # A fault of ours in one request is that request's: the daemon goes on for all others.
            log.error("request failed", op=request.op, error=repr(error), exc_info=True)
            return ErrorReply(
                request.id, "internal", f"{request.op} failed inside the daemon", "see the daemon's log"
            )

    @staticmethod
    def _record(what: str, connection: Connection, request: Request, **more: object) -> None:
        log.info(what, op=request.op, request=request.id, **log_fields(connection.credentials), **more)


def _spoken(operation: str) -> str:
    """As mpsd-ctl has it."""
    return operation.removeprefix("zone_").replace("_", " ")


def _refusal(request: Request, error: MpsdError) -> ErrorReply:
    return ErrorReply(request.id, error.code, error.message, error.remedy)


def _too_late(request: Request) -> ErrorReply:
    seconds = request.deadline_ms / 1e3
    more = "; it goes on" if request.operation.mutates else ""
    return ErrorReply(
        request.id, "deadline", f"{request.op} did not end within {seconds:g} s{more}", "see mpsd-ctl status"
    )
