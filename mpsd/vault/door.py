"""RUN/vault.sock: where programs bring descriptors and come back for what they kept.

A socket of its own, for ZMQ cannot carry descriptors. Any local user may connect; who that is says the
kernel. Whatever is not the protocol of mpsd.vault.wire (garbage, a wrong size, a descriptor too many or
too few, one that is no exported memory, a wrong order, a sender that is not who connected) ends the
connection, counted by its reason; it does not end what the process has brought before.

Nothing that a peer does blocks the loop: peers are identified in threads, sending never waits, a peer's
messages are taken in one by one at a limited rate, and descriptors that are not what they should be are
closed in threads, for a file system may make its close wait; connections too, for descriptors wait in them.

Long because whatever a peer may say is answered, refused or counted in this one place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog

from mpsd.core.vault import Holding, Outcome, Owner, Refusal
from mpsd.doors import ANCILLARY, Budgets, Refused, listen, unpack_ancillary
from mpsd.errors import DeadlineError, GpuError, MpsdError
from mpsd.gpu.base import ExportedMemory
from mpsd.model import ProcessInstance
from mpsd.vault import wire
from mpsd.vault.closing import Closers
from mpsd.vault.hold import Vault
from mpsd.vault.notes import digest, share_digest
from mpsd.vault.peer import VaultPeer, credentials, identify
from mpsd.vault.wire import Kind, Message, Status, WireError
from mpsd.zones.grants import Grant

log = structlog.get_logger("mpsd.vault.door")

IDENTIFY_DEADLINE_S = 2.0
PIECES_FOR_ONE = 8
_STATUS = {
    None: Status.OK,
    Refusal.CLIENT_QUOTA: Status.QUOTA,
    Refusal.USER_QUOTA: Status.QUOTA,
    Refusal.FULL: Status.QUOTA,
    Refusal.TWICE: Status.TWICE,
    Refusal.NAME_TAKEN: Status.NAME,
    Refusal.BAD_NAME: Status.NAME,
    Refusal.NOTHING: Status.UNKNOWN,
    Refusal.IN_USE: Status.IN_USE,
}
LedgerTaker = Callable[[ProcessInstance, int], Awaitable["Grant | None"]]
"""Takes a ledger over and says what may be laid. Raises GpuError for what is no ledger, which it leaves."""
_CARRIES = (Kind.PUT, Kind.PUT_NAMED, Kind.LEDGER)


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """`rate`: messages a second of one user over all connections, `burst` at once. Then they are not read
    for a while. PIECES_FOR_ONE pieces that a message touches count as one more."""

    connections: int = 256
    all_connections: int = 1024
    rate: float = 2000.0
    burst: float = 500.0
    hello_s: float = 10.0


class Visit:
    """One connection: not known yet, known (`peer`), greeted (`process`)."""

    def __init__(self, sock: socket.socket, uid: int) -> None:
        self.socket = sock
        self.uid = uid
        self.accepted = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.peer: VaultPeer | None = None
        self.process: ProcessInstance | None = None
        self.ledger = False
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.pause: asyncio.TimerHandle | None = None


class Door:
    def __init__(
        self,
        path: Path,
        vault: Vault,
        limits: DoorLimits | None = None,
        take_ledger: LedgerTaker | None = None,
    ) -> None:
        """`take_ledger`: None grants guard zones to nobody."""
        self.path = path
        self._take_ledger = take_ledger
        self._vault = vault
        self._limits = limits or DoorLimits()
        self._loop = asyncio.get_running_loop()
        self._visits: dict[int, Visit] = {}
        self._per_user: Counter[int] = Counter()
        self._closers = Closers()
        self._budgets = Budgets(self._limits.rate, self._limits.burst)
        self._listener: socket.socket | None = None
        vault.on_end.append(self._process_ended)

    def start(self) -> None:
        """Raises ConfigError, OSError."""
        sock, path = listen(self.path)
        self._listener = sock
        self._vault.offered_at = path
        self._loop.add_reader(sock.fileno(), self._accept)

    async def close(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._vault.offered_at = ""
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            # Who has connected and is not accepted yet may have sent something.
            self._close_socket(self._listener, os.getuid())
        tasks = [v.task for v in self._visits.values() if v.task is not None]
        for visit in tuple(self._visits.values()):
            self._end(visit)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._closers.end()

    # -- connections -------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # No descriptor is free: the next one waits a little.
            self._count("no_descriptor", error.strerror or "")
            self._listen_later(None)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        _, uid = credentials(sock)
        # Those that are still being closed count.
        if (
            self._per_user.total() >= self._limits.all_connections
            or self._per_user[uid] >= self._limits.connections
        ):
            self._count("connections", f"uid {uid}")
            self._close_socket(sock, uid)
            if self._closers.full(uid):
                self._listen_later(uid)
            return
        visit = self._visits[sock.fileno()] = Visit(sock, uid)
        self._per_user[uid] += 1
        visit.task = self._loop.create_task(self._meet(visit))

    def _listen_later(self, uid: int | None) -> None:
        """`uid`: whose connections cannot even be refused until some of them are closed."""
        if self._listener is not None and self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(0.1, self._listen_again, uid)

    def _listen_again(self, uid: int | None) -> None:
        if uid is not None and self._closers.full(uid):
            self._listen_later(uid)
        elif self._listener is not None and self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _close_socket(self, sock: socket.socket, uid: int, then: Callable[[], None] | None = None) -> None:
        """Its peer sees the end at once; what lies unread in it is closed off the loop."""
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        self._closers.close(uid, [sock.detach()], then)

    def _closed(self, uid: int) -> None:
        """In a thread: a connection of this user is no more."""
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._one_less, uid)

    def _one_less(self, uid: int) -> None:
        self._per_user[uid] -= 1
        if not self._per_user[uid]:
            del self._per_user[uid]

    async def _meet(self, visit: Visit) -> None:
        try:
            look = partial(identify, visit.socket, visit.accepted)
            peer = await self._vault.looks.run(visit.uid, look, IDENTIFY_DEADLINE_S, late=_unpin)
        except DeadlineError:
            # Its program lies on a file server that does not answer, perhaps.
            self._refuse(visit, "not_seen")
            return
        except (MpsdError, OSError):
            self._refuse(visit, "gone")
            return
        visit.task = None
        visit.peer = peer
        visit.timer = self._loop.call_later(self._limits.hello_s, self._refuse, visit, "silent")
        self._loop.add_reader(visit.socket.fileno(), self._read, visit)

    def _refuse(self, visit: Visit, reason: str) -> None:
        self._count(reason, f"uid {visit.uid}")
        self._end(visit)

    def _count(self, reason: str, who: str) -> None:
        self._vault.counters[f"closed_{reason}"] += 1
        if self._vault.counters[f"closed_{reason}"] == 1:
            log.warning("a connection to the vault was closed", reason=reason, of=who)

    def _end(self, visit: Visit) -> None:
        number = visit.socket.fileno()
        if self._visits.pop(number, None) is None:
            return
        self._loop.remove_reader(number)
        for timer in (visit.timer, visit.pause):
            if timer is not None:
                timer.cancel()
        self._close_socket(visit.socket, visit.uid, partial(self._closed, visit.uid))
        if visit.process is not None:
            self._vault.leave(visit.process)
        elif visit.peer is not None:
            visit.peer.pinned.close()

    def _process_ended(self, process: ProcessInstance) -> None:
        for visit in [v for v in self._visits.values() if v.process == process]:
            visit.process = None
            visit.peer = None
            self._end(visit)

    # -- messages ----------------------------------------------------------------------------------------

    def _read(self, visit: Visit) -> None:
        """One message; the loop serves others before the next."""
        budget = self._budgets.of(visit.uid)
        if budget.left < 1 or self._closers.full(visit.uid):
            self._pause(visit)
            self._vault.counters["slowed"] += 1
            pause_s = min(1.0, self._limits.burst / 2 / self._limits.rate)
            visit.pause = self._loop.call_later(pause_s, self._resume, visit)
            return
        budget.left -= 1
        fds: list[int] = []
        try:
            data, ancillary, flags, _ = visit.socket.recvmsg(
                wire.LAYOUT.size + 1, ANCILLARY, socket.MSG_CMSG_CLOEXEC
            )
            fds, sender = unpack_ancillary(ancillary)
            if not data:
                self._end(visit)
                return
            self._check_sender(visit, sender)
            if flags & socket.MSG_CTRUNC or len(fds) > 1:
                raise Refused("descriptors")
            self._obey(visit, wire.unpack(data), fds)
        except BlockingIOError:
            pass
        except (Refused, WireError) as error:
            self._refuse(visit, str(error))
        except OSError:
            self._end(visit)
        finally:
            # What was taken has been taken off the list.
            self._closers.close(visit.uid, fds)

    def _charge(self, visit: Visit, pieces: int) -> None:
        self._budgets.of(visit.uid).left -= pieces / PIECES_FOR_ONE

    def _check_sender(self, visit: Visit, sender: int | None) -> None:
        """A forked child, or whoever was given the socket, is not the client."""
        if visit.peer is not None and sender != visit.peer.pid:
            raise Refused("sender")

    def _pause(self, visit: Visit) -> None:
        self._loop.remove_reader(visit.socket.fileno())

    def _resume(self, visit: Visit) -> None:
        if visit.socket.fileno() in self._visits:
            self._loop.add_reader(visit.socket.fileno(), self._read, visit)

    def _obey(self, visit: Visit, message: Message, fds: list[int]) -> None:
        if bool(fds) != (message.kind in _CARRIES):
            raise Refused("descriptors")
        if (message.kind is Kind.HELLO) != (visit.process is None):
            raise Refused("order")
        process = visit.process
        if process is None:
            self._hello(visit, message)
            return
        match message.kind:
            case Kind.PUT:
                self._put(visit, process, message, fds)
            case Kind.DROP | Kind.RELEASE:
                # The answer comes when the memory is free, and the next message after that.
                self._pause(visit)
                visit.task = self._loop.create_task(self._let_go(visit, process, message))
            case Kind.KEEP:
                outcome = self._vault.keep(process, message.name)
                self._charge(visit, len(outcome.changed))
                self._answer(visit, message, _STATUS[outcome.refusal])
            case Kind.PUT_NAMED:
                self._put_named(visit, process, message, fds)
            case Kind.CLAIM:
                self._claim(visit, process, message)
            case Kind.LEDGER:
                if visit.ledger:
                    raise Refused("order")
                visit.ledger = True
                # Who brings it may not be known as a client yet.
                self._pause(visit)
                visit.task = self._loop.create_task(self._ledger(visit, process, message, fds.pop()))
            case Kind.SHARE:
                self._share(visit, process, message)
            case Kind.OPEN:
                self._open(visit, process, message)
            case Kind.TAKE:
                self._take(visit, process, message)
            case Kind.LEAVE:
                outcome = self._vault.leave_piece(process, message.number)
                self._answer(visit, message, _STATUS[outcome.refusal])

    def _hello(self, visit: Visit, message: Message) -> None:
        peer = visit.peer
        assert peer is not None
        owner = peer.owner
        if message.token != wire.NO_TOKEN:
            owner = Owner(peer.uid, token=digest(message.token))
        if self._vault.join(peer.pinned, owner, peer.program) is None:
            # Its pin went to the vault, which has closed it.
            visit.peer = None
            raise Refused("another_owner")
        visit.process = peer.pinned.instance
        if visit.timer is not None:
            visit.timer.cancel()
            visit.timer = None
        self._answer(visit, message, Status.OK)

    def _put(self, visit: Visit, process: ProcessInstance, message: Message, fds: list[int]) -> None:
        self._answer(visit, message, _STATUS[self._taken_in(process, message, fds).refusal])

    def _put_named(self, visit: Visit, process: ProcessInstance, message: Message, fds: list[int]) -> None:
        outcome = self._taken_in(process, message, fds, message.name)
        if outcome.holding is None:
            self._answer(visit, message, _STATUS[outcome.refusal])
            return
        # Its program relies on it: the answer comes when it outlives the daemon too.
        self._pause(visit)
        visit.task = self._loop.create_task(self._when_stored(visit, message, outcome.holding))

    def _taken_in(
        self, process: ProcessInstance, message: Message, fds: list[int], alone: str | None = None
    ) -> Outcome:
        claimed = ExportedMemory(message.size, message.gpu)
        try:
            outcome = self._vault.put(process, claimed, message.number, message.address, fds[0], alone)
        except GpuError as error:
            raise Refused("not_memory") from error
        fds.clear()
        return outcome

    async def _when_stored(self, visit: Visit, message: Message, holding: Holding) -> None:
        stored = await self._vault.stored(holding)
        self._answer_late(visit, replace(message, count=int(stored)), Status.OK)

    async def _ledger(self, visit: Visit, process: ProcessInstance, message: Message, fd: int) -> None:
        taken: list[int] = [fd]
        try:
            grant = None
            if self._take_ledger is not None:
                grant = await self._take_ledger(process, fd)
                taken.clear()
        except GpuError:
            self._refuse(visit, "not_ledger")
            return
        finally:
            self._closers.close(visit.uid, taken)
        visit.task = None
        if self._visits.get(visit.socket.fileno()) is visit:
            status = Status.QUOTA if grant is None else Status.OK
            size, count = (grant.bytes, grant.zones) if grant is not None else (0, 0)
            self._answer(visit, replace(message, index=wire.READS_FAR, size=size, count=count), status)
            self._resume(visit)

    async def _let_go(self, visit: Visit, process: ProcessInstance, message: Message) -> None:
        if message.kind is Kind.DROP:
            done = await self._vault.drop(process, message.number)
            status = Status.OK if done else Status.UNKNOWN
        else:
            named = self._vault.named(process, message.name)
            self._charge(visit, len(named))
            done = await self._vault.gone(self._vault.ledger.free(named))
            status = Status.OK if done else Status.DENIED
        self._answer_late(visit, message, status)

    def _answer_late(self, visit: Visit, message: Message, status: Status) -> None:
        """To one that was not read meanwhile, and may have gone."""
        visit.task = None
        if self._visits.get(visit.socket.fileno()) is visit:
            self._answer(visit, message, status)
            self._resume(visit)

    def _claim(self, visit: Visit, process: ProcessInstance, message: Message) -> None:
        """A duplicate; what is kept stays until it is released, freed or too old."""
        found = self._vault.named(process, message.name)
        # They are only listed, and who comes back claims each of them.
        self._charge(visit, len(found) // 64)
        if message.index >= len(found):
            self._vault.counters["claims_denied"] += 1
            self._answer(visit, message, Status.UNKNOWN if found else Status.DENIED)
            return
        self._hand_out(visit, message, found[message.index], len(found))

    def _take(self, visit: Visit, process: ProcessInstance, message: Message) -> None:
        outcome = self._vault.take(process, message.name, message.number, message.address)
        if outcome.refusal is Refusal.IN_USE and self._vault.unwatched(process, message.name):
            self._pause(visit)
            visit.task = self._loop.create_task(self._take_after_a_look(visit, process, message))
        else:
            self._taken(visit, message, outcome)

    async def _take_after_a_look(self, visit: Visit, process: ProcessInstance, message: Message) -> None:
        await self._vault.look_at_unwatched(process, message.name)
        visit.task = None
        if self._visits.get(visit.socket.fileno()) is visit:
            outcome = self._vault.take(process, message.name, message.number, message.address)
            self._taken(visit, message, outcome)
            self._resume(visit)

    def _taken(self, visit: Visit, message: Message, outcome: Outcome) -> None:
        if outcome.holding is not None:
            self._hand_out(visit, message, outcome.holding, 1)
            return
        # What is nobody's and what is another owner's look the same.
        unknown = outcome.refusal is Refusal.NOTHING
        self._vault.counters["claims_denied"] += unknown
        self._answer(visit, message, Status.DENIED if unknown else _STATUS[outcome.refusal])

    def _hand_out(self, visit: Visit, message: Message, holding: Holding, count: int) -> None:
        answer = replace(
            message,
            number=holding.number,
            size=holding.size,
            address=holding.address,
            gpu=holding.gpu,
            count=count,
        )
        self._vault.counters["claims"] += 1
        self._answer(visit, answer, Status.OK, [self._vault.descriptor(holding)])

    def _share(self, visit: Visit, process: ProcessInstance, message: Message) -> None:
        if message.token == wire.NO_TOKEN:
            raise Refused("token")
        refusal = self._vault.share(process, message.number, share_digest(message.token))
        if refusal is None:
            self._vault.counters["shares"] += 1
        self._answer(visit, message, _STATUS[refusal])

    def _open(self, visit: Visit, process: ProcessInstance, message: Message) -> None:
        """A duplicate, which keeps the memory for as long as whoever opens it has it mapped."""
        holding = self._vault.shared(process, share_digest(message.token))
        if holding is None:
            # Not told whether another owner has it.
            self._vault.counters["opens_denied"] += 1
            self._answer(visit, message, Status.DENIED)
            return
        self._vault.counters["opens"] += 1
        answer = replace(message, number=0, size=holding.size, gpu=holding.gpu)
        self._answer(visit, answer, Status.OK, [self._vault.descriptor(holding)])

    def _answer(self, visit: Visit, message: Message, status: Status, fds: Sequence[int] = ()) -> None:
        data = wire.pack(replace(message, status=status, token=wire.NO_TOKEN), answer=True)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        try:
            visit.socket.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._refuse(visit, "does_not_read")
        except OSError:
            self._end(visit)


def _unpin(peer: VaultPeer) -> None:
    peer.pinned.close()
