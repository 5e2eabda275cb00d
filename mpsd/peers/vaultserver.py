"""RUN/vault.sock: the socket at which programs store descriptors of GPU memory and claim what was kept.

A socket of its own, because ZMTP carries no descriptors. Any local user may connect; the kernel tells the
peer's uid and pid. Any violation of the protocol of mpsd.vault.messages (garbage, a wrong size, a missing or
extra descriptor, a descriptor that is no exported memory, a wrong order, a sender other than the process that
connected) ends the connection, and is counted by its reason. Segments stored before stay.

No peer can block the event loop. Peers are identified in threads, and sending never waits. Messages of a user
are read one by one at a limited rate. Rejected descriptors are closed in threads, because a file system may
delay a close; so are connections, because unread descriptors wait in them.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mpsd.base.errors import DeadlineError, GpuError, MpsdError
from mpsd.base.model import ProcessInstance
from mpsd.core.vault import Outcome, Owner, Refusal, Segment
from mpsd.gpu.base import ExportedMemory
from mpsd.peers.credentials import Credentials
from mpsd.peers.quotas import Account, Standing
from mpsd.peers.receive import Budgets, Refused, receive
from mpsd.peers.server import Accepted, DoorLimits, Server, Surroundings
from mpsd.peers.vaultpeer import VaultPeer, identify, pin
from mpsd.vault import messages
from mpsd.vault.holdings import Vault
from mpsd.vault.messages import Kind, Message, Status, WireError
from mpsd.vault.notes import digest, share_digest
from mpsd.zones.grants import Grant

IDENTIFY_DEADLINE_S = 2.0
SEGMENTS_PER_MESSAGE = 8
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
"""Takes over a ledger and returns which zones are granted. Raises GpuError, and leaves the descriptor, if
it is none."""
_CARRIES = (Kind.PUT, Kind.PUT_NAMED, Kind.LEDGER)


@dataclass(frozen=True, slots=True)
class VaultServerLimits:
    """Limits of peers.

    `rate`: messages per second of one user over all connections; `burst`: at once. Beyond these, messages are
    not read for a while. PIECES_FOR_ONE segments that a message touches count as one more message.
    """

    connections: int = 256
    all_connections: int = 1024
    reserve: int = 64
    rate: float = 2000.0
    burst: float = 500.0
    hello_s: float = 10.0


class VaultConnection(Accepted):
    """One connection: not identified yet, identified (`peer`), or greeted (`process`)."""

    def __init__(self, sock: socket.socket, credentials: Credentials, account: Account) -> None:
        super().__init__(sock, credentials, account)
        self.accepted = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.peer: VaultPeer | None = None
        self.process: ProcessInstance | None = None
        self.ledger = False
        self.task: asyncio.Task[None] | None = None
        self.pause: asyncio.TimerHandle | None = None


class VaultServer:
    def __init__(
        self,
        path: Path,
        vault: Vault,
        limits: VaultServerLimits | None = None,
        take_ledger: LedgerTaker | None = None,
        surroundings: Surroundings | None = None,
        admits: Callable[[int], bool] = lambda uid: True,
    ) -> None:
        """`take_ledger`: None grants no guard zones. `admits` returns whether a user may use the vault."""
        self._admits = admits
        self._take_ledger = take_ledger
        self._vault = vault
        self._limits = chosen = limits or VaultServerLimits()
        self._loop = asyncio.get_running_loop()
        self._budgets = Budgets(chosen.rate, chosen.burst)
        self.server = Server(
            path,
            socket.SOCK_SEQPACKET,
            "vault",
            DoorLimits(chosen.connections, chosen.all_connections, chosen.reserve, chosen.hello_s),
            surroundings or Surroundings.of(""),
            VaultConnection,
            self._opened,
            self._ended,
            vault.counters,
        )
        vault.on_end.append(self._process_ended)

    def start(self) -> None:
        """Open the socket. Raises ConfigError, AlreadyRunningError."""
        self._vault.offered_at = self.server.start()

    async def close(self) -> None:
        self._vault.offered_at = ""
        tasks = [c.task for c in self.server.connections if c.task is not None]
        self.server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- connections -------------------------------------------------------------------------------------

    def _opened(self, connection: VaultConnection) -> None:
        connection.task = self._loop.create_task(self._identify_peer(connection))

    async def _identify_peer(self, connection: VaultConnection) -> None:
        try:
            probe = partial(identify, connection.socket, connection.accepted)
            peer = await self._vault.probes.run(connection.uid, probe, IDENTIFY_DEADLINE_S)
        except DeadlineError:
            # For example, its executable lies on a file server that does not answer.
            self.server.end(connection, "not_seen")
            return
        except (MpsdError, OSError):
            self.server.end(connection, "gone")
            return
        connection.task = None
        connection.peer = peer
        self.server.watch(connection, self._read)

    def _ended(self, connection: VaultConnection) -> None:
        if connection.pause is not None:
            connection.pause.cancel()
        if connection.process is not None:
            self._vault.leave(connection.process)

    def _process_ended(self, process: ProcessInstance) -> None:
        for connection in [c for c in self.server.connections if c.process == process]:
            connection.process = None
            connection.peer = None
            self.server.end(connection)

    # -- messages ----------------------------------------------------------------------------------------

    def _read(self, connection: VaultConnection) -> None:
        """Read one message. The loop serves other connections before the next one."""
        if not self._budgets.allows(connection.account) or self.server.closing_full(connection.owner):
            self.server.unwatch(connection)
            self._vault.counters["slowed"] += 1
            pause_s = min(1.0, self._limits.burst / 2 / self._limits.rate)
            connection.pause = self._loop.call_later(pause_s, self._resume, connection)
            return
        self._budgets.charge(connection.account)
        fds: list[int] = []
        try:
            received = receive(connection.socket, messages.LAYOUT.size + 1, descriptors=1)
            if not received.data:
                self.server.end(connection)
                return
            fds = received.fds
            self._check_sender(connection, received.sender)
            self._obey(connection, messages.unpack(received.data), fds)
        except BlockingIOError:
            pass
        except (Refused, WireError) as error:
            self.server.end(connection, str(error))
        except OSError:
            self.server.end(connection)
        finally:
            # Accepted descriptors are no longer in the list.
            self.server.close_descriptors(connection.owner, fds)

    def _charge(self, connection: VaultConnection, segments: int) -> None:
        self._budgets.charge(connection.account, segments / SEGMENTS_PER_MESSAGE)

    def _check_sender(self, connection: VaultConnection, sender: Credentials | None) -> None:
        """Refuse a forked child, or a process that received the socket: it is not the client."""
        if connection.peer is not None and (sender is None or sender.pid != connection.peer.pid):
            raise Refused("sender")

    def _resume(self, connection: VaultConnection) -> None:
        self.server.watch(connection, self._read)

    def _obey(self, connection: VaultConnection, message: Message, fds: list[int]) -> None:
        if bool(fds) != (message.kind in _CARRIES):
            raise Refused("descriptors")
        if (message.kind is Kind.HELLO) != (connection.process is None):
            raise Refused("order")
        process = connection.process
        if process is None:
            self._hello(connection, message)
            return
        match message.kind:
            case Kind.PUT:
                self._put(connection, process, message, fds)
            case Kind.DROP | Kind.RELEASE:
                # Answer when the memory is free, and read the next message only then.
                self.server.unwatch(connection)
                connection.task = self._loop.create_task(self._release(connection, process, message))
            case Kind.KEEP:
                outcome = self._vault.keep(process, message.name)
                self._charge(connection, len(outcome.changed))
                self._answer(connection, message, _STATUS[outcome.refusal])
            case Kind.PUT_NAMED:
                self._put_named(connection, process, message, fds)
            case Kind.CLAIM:
                self._claim(connection, process, message)
            case Kind.LEDGER:
                if connection.ledger:
                    raise Refused("order")
                connection.ledger = True
                # mpsd may not know the process as a client yet.
                self.server.unwatch(connection)
                connection.task = self._loop.create_task(
                    self._ledger(connection, process, message, fds.pop())
                )
            case Kind.SHARE:
                self._share(connection, process, message)
            case Kind.OPEN:
                self._open(connection, process, message)
            case Kind.TAKE:
                self._take(connection, process, message)
            case Kind.LEAVE:
                outcome = self._vault.leave_segment(process, message.number)
                self._answer(connection, message, _STATUS[outcome.refusal])

    def _hello(self, connection: VaultConnection, message: Message) -> None:
        peer = connection.peer
        assert peer is not None
        if not self._admits(peer.uid):
            raise Refused("level")
        owner = peer.owner
        if message.token != messages.NO_TOKEN:
            owner = Owner(peer.uid, token=digest(message.token))
        try:
            pinned = pin(connection.socket, peer.pid, accepted=connection.accepted)
        except MpsdError as error:
            raise Refused("gone") from error
        if pinned.instance != peer.instance:
            pinned.close()
            raise Refused("gone")
        # The vault takes the pin, and closes it if it refuses the peer.
        if self._vault.join(pinned, owner, peer.program) is None:
            raise Refused("another_owner")
        connection.process = peer.instance
        connection.standing = Standing.WORKING
        self.server.allow_descriptors(connection)
        self._answer(connection, message, Status.OK)

    def _put(
        self, connection: VaultConnection, process: ProcessInstance, message: Message, fds: list[int]
    ) -> None:
        self._answer(connection, message, _STATUS[self._taken_in(process, message, fds).refusal])

    def _put_named(
        self, connection: VaultConnection, process: ProcessInstance, message: Message, fds: list[int]
    ) -> None:
        outcome = self._taken_in(process, message, fds, message.name)
        if outcome.holding is None:
            self._answer(connection, message, _STATUS[outcome.refusal])
            return
        # The program relies on it: answer when the segment also outlives the daemon.
        self.server.unwatch(connection)
        connection.task = self._loop.create_task(self._when_stored(connection, message, outcome.holding))

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

    async def _when_stored(self, connection: VaultConnection, message: Message, holding: Segment) -> None:
        stored = await self._vault.stored(holding)
        self._answer_late(connection, replace(message, count=int(stored)), Status.OK)

    async def _ledger(
        self, connection: VaultConnection, process: ProcessInstance, message: Message, fd: int
    ) -> None:
        taken: list[int] = [fd]
        try:
            grant = None
            if self._take_ledger is not None:
                grant = await self._take_ledger(process, fd)
                taken.clear()
        except GpuError:
            self.server.end(connection, "not_ledger")
            return
        finally:
            self.server.close_descriptors(connection.owner, taken)
        connection.task = None
        if connection.open:
            status = Status.QUOTA if grant is None else Status.OK
            size, count = (grant.bytes, grant.zones) if grant is not None else (0, 0)
            self._answer(
                connection, replace(message, index=messages.READS_FAR, size=size, count=count), status
            )
            self._resume(connection)

    async def _release(self, connection: VaultConnection, process: ProcessInstance, message: Message) -> None:
        if message.kind is Kind.DROP:
            done = await self._vault.drop(process, message.number)
            status = Status.OK if done else Status.UNKNOWN
        else:
            named = self._vault.named(process, message.name)
            self._charge(connection, len(named))
            done = await self._vault.wait_until_released(self._vault.ledger.free(named))
            status = Status.OK if done else Status.DENIED
        self._answer_late(connection, message, status)

    def _answer_late(self, connection: VaultConnection, message: Message, status: Status) -> None:
        """Answer a connection that was not read meanwhile, and may have ended."""
        connection.task = None
        if connection.open:
            self._answer(connection, message, status)
            self._resume(connection)

    def _claim(self, connection: VaultConnection, process: ProcessInstance, message: Message) -> None:
        """Hand out a duplicate. The kept segment stays until it is released, freed or too old."""
        found = self._vault.named(process, message.name)
        # Listing is cheap; the program claims each segment in a message of its own.
        self._charge(connection, len(found) // 64)
        if message.index >= len(found):
            self._vault.counters["claims_denied"] += 1
            self._answer(connection, message, Status.UNKNOWN if found else Status.DENIED)
            return
        self._hand_out(connection, message, found[message.index], len(found))

    def _take(self, connection: VaultConnection, process: ProcessInstance, message: Message) -> None:
        outcome = self._vault.take(process, message.name, message.number, message.address)
        if outcome.refusal is Refusal.IN_USE and self._vault.unwatched(process, message.name):
            self.server.unwatch(connection)
            connection.task = self._loop.create_task(self._take_after_check(connection, process, message))
        else:
            self._taken(connection, message, outcome)

    async def _take_after_check(
        self, connection: VaultConnection, process: ProcessInstance, message: Message
    ) -> None:
        await self._vault.probe_unwatched(process, message.name)
        connection.task = None
        if connection.open:
            outcome = self._vault.take(process, message.name, message.number, message.address)
            self._taken(connection, message, outcome)
            self._resume(connection)

    def _taken(self, connection: VaultConnection, message: Message, outcome: Outcome) -> None:
        if outcome.holding is not None:
            self._hand_out(connection, message, outcome.holding, 1)
            return
        # An unknown segment and another owner's segment get the same answer.
        unknown = outcome.refusal is Refusal.NOTHING
        self._vault.counters["claims_denied"] += unknown
        self._answer(connection, message, Status.DENIED if unknown else _STATUS[outcome.refusal])

    def _hand_out(self, connection: VaultConnection, message: Message, holding: Segment, count: int) -> None:
        answer = replace(
            message,
            number=holding.number,
            size=holding.size,
            address=holding.address,
            gpu=holding.gpu,
            count=count,
        )
        self._vault.counters["claims"] += 1
        self._answer(connection, answer, Status.OK, [self._vault.descriptor(holding)])

    def _share(self, connection: VaultConnection, process: ProcessInstance, message: Message) -> None:
        if message.token == messages.NO_TOKEN:
            raise Refused("token")
        refusal = self._vault.share(process, message.number, share_digest(message.token))
        if refusal is None:
            self._vault.counters["shares"] += 1
        self._answer(connection, message, _STATUS[refusal])

    def _open(self, connection: VaultConnection, process: ProcessInstance, message: Message) -> None:
        """Hand out a duplicate of shared memory, which lives as long as the opener has it mapped."""
        holding = self._vault.shared(process, share_digest(message.token))
        if holding is None:
            # Do not reveal whether another owner has it.
            self._vault.counters["opens_denied"] += 1
            self._answer(connection, message, Status.DENIED)
            return
        self._vault.counters["opens"] += 1
        answer = replace(message, number=0, size=holding.size, gpu=holding.gpu)
        self._answer(connection, answer, Status.OK, [self._vault.descriptor(holding)])

    def _answer(
        self, connection: VaultConnection, message: Message, status: Status, fds: Sequence[int] = ()
    ) -> None:
        data = messages.pack(replace(message, status=status, token=messages.NO_TOKEN), answer=True)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        try:
            connection.socket.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self.server.end(connection, "does_not_read")
        except OSError:
            self.server.end(connection)
