"""RUN/failover.sock: where programs that can go on in a second domain say so, and are told when.

Any local user may connect; who that is says the kernel, and one process is one program here, by its pid and
start time. Whatever is not the protocol of mpsd.failover.wire (garbage, a wrong size, a descriptor, a wrong
order, a sender that is not who connected) ends the connection, counted by its reason. All that is well said
becomes an event: what it is worth, core decides.

Nothing that a peer does blocks the loop: sending never waits, and who does not read is let go; a user's
messages are taken in one by one at a limited rate; what descriptors strangers send is closed in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from mpsd.core import events as ev
from mpsd.core import memberevents as mev
from mpsd.doors import ANCILLARY, Budgets, Refused, listen, unpack_ancillary
from mpsd.errors import MpsdError
from mpsd.failover import wire
from mpsd.failover.wire import Kind, Message, WireError
from mpsd.model import ProcessInstance, Spared, Whose
from mpsd.vault.closing import Closers
from mpsd.vault.peer import credentials, pin

log = structlog.get_logger("mpsd.failover.door")


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """`rate`: messages a second of one user over all connections, `burst` at once. Then they are not read
    for a while."""

    connections: int = 256
    all_connections: int = 1024
    rate: float = 500.0
    burst: float = 1000.0
    hello_s: float = 10.0


class Visit:
    """One connection; `greeted` once it has said HELLO."""

    def __init__(self, sock: socket.socket, uid: int, process: ProcessInstance) -> None:
        self.socket = sock
        self.uid = uid
        self.process = process
        self.greeted = False
        self.timer: asyncio.TimerHandle | None = None
        self.pause: asyncio.TimerHandle | None = None


class Door:
    """`counters`: what was let in, refused and why, for `status`."""

    def __init__(
        self, path: Path, post: Callable[[ev.Event], None], limits: DoorLimits | None = None
    ) -> None:
        self.path = path
        self.offered_at = ""
        self.counters: Counter[str] = Counter()
        self._post = post
        self._limits = limits or DoorLimits()
        self._loop = asyncio.get_running_loop()
        self._visits: dict[int, Visit] = {}
        self._greeted: dict[ProcessInstance, Visit] = {}
        self._per_user: Counter[int] = Counter()
        self._budgets = Budgets(self._limits.rate, self._limits.burst)
        self._closers: Closers | None = None
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Raises ConfigError, OSError."""
        sock, path = listen(self.path)
        self._closers = Closers("failover-stranger")
        self._listener = sock
        self.offered_at = path
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """Programs see the end of their connection, and come again when there is a daemon."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self.offered_at = ""
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            self._listener.close()
            self._listener = None
        for visit in tuple(self._visits.values()):
            self._end(visit)
        if self._closers is not None:
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
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(0.1, self._listen_again)
            return
        try:
            self._let_in(sock)
        except (Refused, MpsdError, OSError) as error:
            self._count(str(error) if isinstance(error, Refused) else "gone", "a newcomer")
            sock.close()

    def _listen_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _let_in(self, sock: socket.socket) -> None:
        """Raises Refused, MpsdError, OSError."""
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        pid, uid = credentials(sock)
        full = self._per_user.total() >= self._limits.all_connections
        if full or self._per_user[uid] >= self._limits.connections:
            raise Refused("connections")
        if pid <= 0:
            raise Refused("gone")
        with pin(sock, pid) as pinned:
            # Its end needs no watch here: that of its connection is enough.
            process = pinned.instance
        visit = self._visits[sock.fileno()] = Visit(sock, uid, process)
        self._per_user[uid] += 1
        visit.timer = self._loop.call_later(self._limits.hello_s, self._refuse, visit, "silent")
        self._loop.add_reader(sock.fileno(), self._read, visit)

    def _refuse(self, visit: Visit, reason: str) -> None:
        self._count(reason, f"uid {visit.uid}")
        self._end(visit)

    def _count(self, reason: str, who: str) -> None:
        self.counters[f"closed_{reason}"] += 1
        if self.counters[f"closed_{reason}"] == 1:
            log.warning("a connection for fail-over was closed", reason=reason, of=who)

    def _end(self, visit: Visit) -> None:
        number = visit.socket.fileno()
        if self._visits.pop(number, None) is None:
            return
        self._loop.remove_reader(number)
        for timer in (visit.timer, visit.pause):
            if timer is not None:
                timer.cancel()
        self._per_user[visit.uid] -= 1
        if not self._per_user[visit.uid]:
            del self._per_user[visit.uid]
        assert self._closers is not None
        with contextlib.suppress(OSError):
            visit.socket.shutdown(socket.SHUT_RDWR)
        self._closers.close(visit.uid, [visit.socket.detach()])
        if self._greeted.get(visit.process) is visit:
            del self._greeted[visit.process]
            self._post(mev.MemberLeft(visit.process))

    # -- messages ----------------------------------------------------------------------------------------

    def _read(self, visit: Visit) -> None:
        """One message; the loop serves others before the next."""
        assert self._closers is not None
        budget = self._budgets.of(visit.uid)
        if budget.left < 1 or self._closers.full(visit.uid):
            self._loop.remove_reader(visit.socket.fileno())
            self.counters["slowed"] += 1
            visit.pause = self._loop.call_later(0.1, self._resume, visit)
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
            if sender != visit.process.pid:
                # A forked child, or whoever was given the socket, is not the program.
                raise Refused("sender")
            if fds or flags & socket.MSG_CTRUNC:
                raise Refused("descriptors")
            self._obey(visit, wire.unpack(data))
        except BlockingIOError:
            pass
        except (Refused, WireError) as error:
            self._refuse(visit, str(error))
        except OSError:
            self._end(visit)
        finally:
            self._closers.close(visit.uid, fds)

    def _resume(self, visit: Visit) -> None:
        if self._visits.get(visit.socket.fileno()) is visit:
            self._loop.add_reader(visit.socket.fileno(), self._read, visit)

    def _obey(self, visit: Visit, message: Message) -> None:
        """Raises Refused."""
        if (message.kind is Kind.HELLO) == visit.greeted or message.kind not in wire.FROM_PROGRAM:
            raise Refused("order")
        if message.kind is Kind.HELLO:
            self._greet(visit)
        self._post(_event(visit, message))

    def _greet(self, visit: Visit) -> None:
        visit.greeted = True
        if visit.timer is not None:
            visit.timer.cancel()
            visit.timer = None
        before, self._greeted[visit.process] = self._greeted.get(visit.process), visit
        if before is not None:
            # It connected again, and its old connection's end has not been read yet.
            self._refuse(before, "replaced")

    def tell(self, process: ProcessInstance, message: Message) -> None:
        """Say something to a program; one that has gone, or does not read, is not told."""
        visit = self._greeted.get(process)
        if visit is None:
            self.counters["untold"] += 1
            return
        try:
            visit.socket.sendmsg([wire.pack(message)], [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._refuse(visit, "does_not_read")
        except OSError:
            self._end(visit)


def _event(visit: Visit, message: Message) -> ev.Event:
    """What the program said, as core takes it. None of it is believed of anybody else."""
    process, generation, values = visit.process, message.generation, message.values
    match message.kind:
        case Kind.HELLO:
            knows = (bool(values[0] & wire.TAKES_FENCED), bool(values[0] & wire.GIVES))
            return mev.MemberCame(process, visit.uid, message.mode, generation, *knows)
        case Kind.READY:
            return mev.MemberReady(process, generation, values[0], values[1])
        case Kind.UNREADY:
            return mev.MemberUnready(process, generation, message.text, bool(values[0]))
        case Kind.OPAQUE:
            return mev.MemberOpaque(process, message.text)
        case Kind.UNSURE:
            return mev.MemberUnsure(process, message.text)
        case Kind.SHORT:
            return mev.MemberShort(process, *values[:3])
        case Kind.GAVE:
            if values[1] not in set(Spared):
                raise Refused("what")
            return mev.MemberGave(process, values[0], Spared(values[1]))
        case Kind.LOOKED:
            if values[0] not in set(Whose):
                raise Refused("whose")
            return mev.MemberLooked(process, generation, Whose(values[0]))
        case Kind.LEFT:
            return mev.MemberPages(process, bool(values[0]), values[1], values[2])
        case Kind.OWN_ERROR:
            return mev.MemberError(process, values[0])
        case Kind.MOVED:
            held, fence, first, restored, replayed, waits = values
            restored, takes = (0, restored) if waits else (restored, 0)
            new_s = (waits - 2) / 1e3 if waits > 1 else None
            told = (held, fence, first, restored, replayed, message.text, bool(waits), takes, new_s)
            return mev.MemberMoved(process, generation, *told)
        case Kind.DONE:
            runs_on = bool(values[2])
            return mev.MemberDone(process, generation, values[0], values[1], message.text, runs_on)
        case Kind.STAYED:
            return mev.MemberStayed(process, generation, message.text)
    raise Refused("order")
