"""RUN/failover.sock: the socket at which fail-over participants register and receive their moves.

Any local user may connect. The kernel tells the peer's uid and pid; a participant is one process, by pid and
start time. Any violation of the protocol of mpsd.failover.messages (garbage, a wrong size, a descriptor, a
wrong order, a sender other than the process that connected) ends the connection, and is counted by its
reason. Each valid message becomes an event; core decides what it is worth.

No peer can block the event loop. Sending never waits, and a peer that does not read is disconnected. Messages
of a user are read one by one at a limited rate. Descriptors that peers send are closed in threads.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpsd.base.model import ExceptionOwner, ProcessInstance, Reclaimable, SnapshotBudget
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.failover.participants import SWITCHED_OFF, Excess, SavingCost
from mpsd.failover import messages
from mpsd.failover.messages import Kind, Message, WireError
from mpsd.peers.credentials import Credentials
from mpsd.peers.quotas import Account, Standing
from mpsd.peers.receive import Budgets, Refused, receive
from mpsd.peers.server import Accepted, DoorLimits, Server, Surroundings
from mpsd.peers.vaultpeer import pin

MOST_THOUSANDTHS = 10**6
"""Greatest cost of saving that is told apart [thousandths of an epoch]."""


@dataclass(frozen=True, slots=True)
class FailoverServerLimits:
    """Limits of peers.

    `rate`: messages per second of one user over all connections; `burst`: at once. Beyond these, messages are
    not read for a while.
    """

    connections: int = 256
    all_connections: int = 1024
    reserve: int = 64
    rate: float = 500.0
    burst: float = 1000.0
    hello_s: float = 10.0


class FailoverConnection(Accepted):
    """One connection. `greeted`: it has sent HELLO."""

    def __init__(self, sock: socket.socket, credentials: Credentials, account: Account) -> None:
        super().__init__(sock, credentials, account)
        self.process = ProcessInstance(0, 0)
        self.greeted = False
        self.pause: asyncio.TimerHandle | None = None


class FailoverServer:
    """The socket's server. `counters`: connections accepted and refused, by reason, for `status`."""

    def __init__(
        self,
        path: Path,
        post: Callable[[ev.Event], None],
        limits: FailoverServerLimits | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.offered_at = ""
        self._post = post
        self._limits = chosen = limits or FailoverServerLimits()
        self._loop = asyncio.get_running_loop()
        self._greeted: dict[ProcessInstance, FailoverConnection] = {}
        self._budgets = Budgets(chosen.rate, chosen.burst)
        self.server = Server(
            path,
            socket.SOCK_SEQPACKET,
            "failover",
            DoorLimits(chosen.connections, chosen.all_connections, chosen.reserve, chosen.hello_s),
            surroundings or Surroundings.of(""),
            FailoverConnection,
            self._opened,
            self._ended,
        )
        self.counters = self.server.counters

    def start(self) -> None:
        """Open the socket. Raises ConfigError, AlreadyRunningError."""
        self.offered_at = self.server.start()

    def close(self) -> None:
        """Close all connections. Programs see the end of theirs and connect again when a daemon runs."""
        self.offered_at = ""
        self.server.close()

    # -- connections -------------------------------------------------------------------------------------

    def _opened(self, connection: FailoverConnection) -> None:
        """Pin the participant's process. Raises Refused, MpsdError, OSError."""
        if connection.credentials.pid <= 0:
            raise Refused("gone")
        with pin(connection.socket, connection.credentials.pid) as pinned:
            # No watch for the end of the process: the end of its connection is enough.
            connection.process = pinned.instance
        self.server.watch(connection, self._read)

    def _ended(self, connection: FailoverConnection) -> None:
        if connection.pause is not None:
            connection.pause.cancel()
        if self._greeted.get(connection.process) is connection:
            del self._greeted[connection.process]
            self._post(mev.MemberLeft(connection.process))

    # -- messages ----------------------------------------------------------------------------------------

    def _read(self, connection: FailoverConnection) -> None:
        """Read one message. The loop serves other connections before the next one."""
        if not self._budgets.allows(connection.account):
            self.server.unwatch(connection)
            self.counters["slowed"] += 1
            connection.pause = self._loop.call_later(0.1, self._resume, connection)
            return
        self._budgets.charge(connection.account)
        try:
            received = receive(connection.socket, messages.LAYOUT.size + 1)
            if not received.data:
                self.server.end(connection)
                return
            if received.sender is None or received.sender.pid != connection.process.pid:
                # A forked child, or a process that received the socket, is not the participant.
                raise Refused("sender")
            self._obey(connection, messages.unpack(received.data))
        except BlockingIOError:
            pass
        except (Refused, WireError) as error:
            self.server.end(connection, str(error))
        except OSError:
            self.server.end(connection)

    def _resume(self, connection: FailoverConnection) -> None:
        self.server.watch(connection, self._read)

    def _obey(self, connection: FailoverConnection, message: Message) -> None:
        """Turn a message into an event. Raises Refused."""
        if (message.kind is Kind.HELLO) == connection.greeted or message.kind not in messages.FROM_PROGRAM:
            raise Refused("order")
        if message.kind is Kind.HELLO:
            self._greet(connection)
        self._post(_event(connection, message))

    def _greet(self, connection: FailoverConnection) -> None:
        connection.greeted = True
        connection.standing = Standing.WORKING
        before, self._greeted[connection.process] = self._greeted.get(connection.process), connection
        if before is not None:
            # The program connected again before the end of its old connection was read.
            self.server.end(before, "replaced")

    def tell(self, process: ProcessInstance, message: Message) -> None:
        """Send a message to a program. A program that is gone or does not read gets nothing."""
        connection = self._greeted.get(process)
        if connection is None:
            self.counters["untold"] += 1
            return
        try:
            connection.socket.sendmsg([messages.pack(message)], [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self.server.end(connection, "does_not_read")
        except OSError:
            self.server.end(connection)


def _event(connection: FailoverConnection, message: Message) -> ev.Event:
    """Return the event of this message. It affects no other process than its sender."""
    process, generation, values = connection.process, message.generation, message.values
    match message.kind:
        case Kind.HELLO:
            flags = messages.TAKES_FENCED, messages.GIVES, messages.BUDGETS, messages.SWITCHES
            knows = [bool(values[0] & flag) for flag in flags]
            return mev.MemberCame(process, connection.uid, message.mode, generation, *knows)
        case Kind.READY:
            return mev.MemberReady(process, generation, values[0], values[1])
        case Kind.UNREADY:
            return mev.MemberUnready(process, generation, message.text, bool(values[0]))
        case Kind.OPAQUE:
            return mev.MemberOpaque(process, message.text)
        case Kind.UNSURE:
            return mev.MemberUnsure(process, message.text)
        case Kind.SHORT:
            return mev.MemberWantsMemory(process, *values[:3])
        case Kind.GAVE:
            if values[1] not in set(Reclaimable):
                raise Refused("what")
            return mev.MemberReleasedMemory(process, values[0], Reclaimable(values[1]))
        case Kind.HOLDS:
            return mev.MemberHolds(process, values[0], values[1])
        case Kind.COST:
            return mev.MemberCost(process, SavingCost(*values[:3]))
        case Kind.EXPOSED:
            return mev.MemberExposed(process, message.text if values[0] else None)
        case Kind.LEAVES:
            return mev.MemberExceeds(process, _excess(message))
        case Kind.LOOKED:
            if values[0] not in set(ExceptionOwner):
                raise Refused("whose")
            return mev.MemberFoundCode(process, generation, ExceptionOwner(values[0]), bool(values[1]))
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


def _excess(message: Message) -> Excess:
    """Return the budget that a program says it exceeds. Raises Refused."""
    budget, first, second, third, listable, _ = message.values
    match budget:
        case SnapshotBudget.TIME:
            thousandths = min(first * 1000 // max(1, second), MOST_THOUSANDTHS)
            return Excess(SnapshotBudget.TIME, thousandths, third, bool(listable))
        case SnapshotBudget.MEMORY:
            return Excess(SnapshotBudget.MEMORY, first, second, bool(listable))
        case SnapshotBudget.BY_HAND:
            return SWITCHED_OFF
    raise Refused("budget")
