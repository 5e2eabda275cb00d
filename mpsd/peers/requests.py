"""Requests in progress: rights, deadlines, limits, the audit log. Sends nothing itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import structlog

from mpsd.base import audit
from mpsd.base.errors import BusyError, DeniedError, MpsdError
from mpsd.base.logs import Repeated
from mpsd.peers.connection import Connection
from mpsd.peers.credentials import Peer, Rights, log_fields, requester
from mpsd.peers.quotas import Account
from mpsd.wire.messages import ErrorReply, Request, Right

log = structlog.get_logger("mpsd.peers")

Handler = Callable[[Peer, Request], Awaitable[Mapping[str, object]]]
Outcome = Mapping[str, object] | ErrorReply
# Called with the outcome of a request. The peer is None if the request was refused before the lookup.
Answer = Callable[[Connection, Request, Outcome, Peer | None], None]

QUICK_S = 5.0


class Requests:
    """The requests in progress. `max_pending`: limit for one account over all connections; a user with
    several accounts has twice as many."""

    def __init__(self, handler: Handler, rights: Rights, answer: Answer, max_pending: int) -> None:
        self._handler = handler
        self._rights = rights
        self._answer = answer
        self._max_pending = max_pending
        self._pending: Counter[Account | int] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._repeated = Repeated(log)

    def begin(self, connection: Connection, request: Request) -> None:
        account, most = connection.account, self._max_pending
        if self._pending[account] >= most or self._pending[account.owner] >= 2 * most:
            error = BusyError(
                f"user {account.uid} has {self._pending[account]} requests in progress",
                remedy="wait for an answer before the next request",
            )
            self._answer(connection, request, _refusal(request, error), None)
            return
        self._pending.update((account, account.owner))
        task = asyncio.create_task(self._serve(connection, request))
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, account))

    async def close(self) -> None:
        """Abandon all requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, account: Account, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        for key in (account, account.owner):
            self._pending[key] -= 1
            if not self._pending[key]:
                del self._pending[key]

    async def _serve(self, connection: Connection, request: Request) -> None:
        work = asyncio.create_task(self._work(connection, request))
        try:
            done, _ = await asyncio.wait({work}, timeout=request.deadline_ms / 1e3)
            if not done:
                self._answer(connection, request, _too_late(request), None)
                if request.operation.mutates:
                    # Complete what was begun: half an eviction is worse than a late one.
                    await asyncio.wait({work})
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _work(self, connection: Connection, request: Request) -> None:
        peer = self._rights.known(connection.credentials)
        if peer is None:
            peer = await asyncio.to_thread(self._rights.peer, connection.credentials)
        if _is_quick(request):
            # One large answer at a time, so that a connection that does not read costs one and no more.
            async with connection.turn:
                await connection.drained()
                self._answer(connection, request, await self._outcome(peer, request), peer)
            return
        if request.operation.mutates:
            self._record("asked", connection, request, peer, args=dict(request.args))
        outcome = await self._outcome(peer, request)
        if request.operation.mutates:
            # A dry run does nothing.
            what, more = "answered" if request.args.get("dry_run") else "done", {}
            if isinstance(outcome, ErrorReply):
                what, more = "failed", {"code": outcome.code}
            self._record(what, connection, request, peer, args=dict(request.args), **more)
        self._answer(connection, request, outcome, peer)

    async def _outcome(self, peer: Peer, request: Request) -> Outcome:
        try:
            if request.operation.right is Right.ADMIN and not peer.admin:
                raise DeniedError(
                    f"user {peer.uid} may not {SPOKEN.get(request.op, request.op)}",
                    remedy="ask root or a member of the mpsd group",
                )
            return await self._handler(peer, request)
        except MpsdError as error:
            if isinstance(error, DeniedError):
                audit.refusals.refuse(peer.uid, request.op, partial(requester, peer), error.message)
            return _refusal(request, error)
        except Exception as error:
            # A bug in the daemon must fail this request only.
            self._repeated.error(
                "request failed", request.op, op=request.op, error=repr(error), exc_info=True
            )
            return ErrorReply(
                request.id, "internal", f"{request.op} failed inside the daemon", "see the daemon's log"
            )

    def _record(
        self, what: str, connection: Connection, request: Request, peer: Peer, **more: object
    ) -> None:
        fields = {"op": request.op, "request": request.id, **log_fields(connection.credentials), **more}
        if peer.admin:
            log.info(what, **fields)
        else:
            # Any user can ask again and again. The audit log has each act of force.
            self._repeated.info(what, (connection.owner, request.op), **fields)


def _is_quick(request: Request) -> bool:
    """Return whether this operation only reads what mpsd knows: its answer is immediate, and may be large."""
    return not request.operation.mutates and request.operation.deadline_s <= QUICK_S


SPOKEN = {
    "drain": "drain a GPU",
    "undrain": "undrain a GPU",
    "zone_policy": "set the consequence of a client's guard hits",
}
"""Operations of administrators as words after "may not"."""


def _refusal(request: Request, error: MpsdError) -> ErrorReply:
    return ErrorReply(request.id, error.code, error.message, error.remedy)


def _too_late(request: Request) -> ErrorReply:
    seconds = request.deadline_ms / 1e3
    more = "; it goes on" if request.operation.mutates else ""
    return ErrorReply(
        request.id, "deadline", f"{request.op} did not end within {seconds:g} s{more}", "see mpsd-ctl status"
    )
