"""One server for each socket of the daemon: the file, accept, admission and closing. Doors add a protocol.

Any local user may connect. The kernel tells the peer's credentials; `FairShares` says whether a newcomer
enters, displaces another connection or is refused. Each connection takes one descriptor from the daemon's
budget. The server took a few of them in advance, for root, and for newcomers that displace or hold nothing.

Nothing here waits for a peer. A thread closes a connection in which unread descriptors may lie.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from mpsd.base.errors import AlreadyRunningError, ConfigError, MpsdError
from mpsd.base.logs import Repeated
from mpsd.config.schema import check_socket_path
from mpsd.os.descriptors import Charge, DescriptorBudget, Purpose
from mpsd.peers.accounts import Accounts
from mpsd.peers.closing import OF_ONE, Closers
from mpsd.peers.credentials import Credentials, Rights, log_fields, peer_credentials, peer_groups
from mpsd.peers.quotas import Account, FairShares, Seat, Standing
from mpsd.peers.receive import SO_PASSRIGHTS, Refused, holds_nothing

BACKLOG = 64
PAUSE_S = 0.1
HEADROOM, LEAST_HEADROOM = 16, 4
"""Descriptors that a door takes in advance, at most and at least: half for privileged peers alone."""
_SMALL = 8
"""A door holds at most this fraction of the daemon's descriptors, and keeps this fraction as its reserve."""
OVERDRAWN = 16
"""Closes of what peers sent, or of refused connections, that may wait at a door beyond the budget."""


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """Limits of a door. `connections`: of one user; `reserve`: seats for root and the group alone.

    `hello_s`: time for the handshake.
    """

    connections: int
    all_connections: int
    reserve: int
    hello_s: float


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts that all doors of the daemon share. `headroom`: of doors that have not started yet."""

    rights: Rights
    accounts: Accounts
    descriptors: DescriptorBudget = field(default_factory=DescriptorBudget.unlimited)
    headroom: list[Charge] = field(default_factory=list)

    @classmethod
    def of(cls, group: str, descriptors: DescriptorBudget | None = None, doors: int = 0) -> Surroundings:
        """Take the headroom of so many doors now: other parts of the daemon may soon have the rest."""
        made = cls(Rights(group), Accounts(), descriptors or DescriptorBudget.unlimited())
        made.headroom.extend(made._take_headroom() for _ in range(doors))
        return made

    def headroom_of_door(self) -> Charge:
        return self.headroom.pop() if self.headroom else self._take_headroom()

    def _take_headroom(self) -> Charge:
        wanted = min(HEADROOM, max(LEAST_HEADROOM, self.descriptors.left // (4 * _SMALL)))
        return self.descriptors.charge_open(Purpose.CONNECTION, wanted)


class Accepted(Seat):
    """One connection. `open`: False as soon as the server has ended it."""

    def __init__(self, sock: socket.socket, credentials: Credentials, account: Account) -> None:
        super().__init__(account)
        self.socket = sock
        self.credentials = credentials
        self.open = True
        self.timer: asyncio.TimerHandle | None = None

    @property
    def uid(self) -> int:
        return self.credentials.uid

    @property
    def owner(self) -> int:
        return self.account.owner


C = TypeVar("C", bound=Accepted)


class Server(Generic[C]):
    """A door's socket. `connections`: the open ones. `problem`: why the socket's path leads nowhere.

    `make` makes the door's kind of connection. `opened` begins to serve it, and may raise Refused, MpsdError
    or OSError. `ended` cleans up after it; nothing of the server is needed for that.
    """

    def __init__(
        self,
        path: Path,
        kind: socket.SocketKind,
        name: str,
        limits: DoorLimits,
        surroundings: Surroundings,
        make: Callable[[socket.socket, Credentials, Account], C],
        opened: Callable[[C], None],
        ended: Callable[[C], None],
        counters: Counter[str] | None = None,
    ) -> None:
        self.path = path
        self.counters: Counter[str] = Counter() if counters is None else counters
        self.connections: dict[C, None] = {}
        self.problem = ""
        self._kind = kind
        self._name = name
        self._limits = limits
        self._around = surroundings
        self._make, self._opened, self._ended = make, opened, ended
        self._log = Repeated(structlog.get_logger(f"mpsd.peers.{name}"))
        self._listener: socket.socket | None = None
        self._former: list[socket.socket] = []
        self._identity: tuple[int, int] | None = None
        self._shares = FairShares(0, 0, 0)
        self._budget = budget = surroundings.descriptors
        self._tokens = _Tokens(budget, budget.charge_open(Purpose.CONNECTION, 0))
        # Descriptors that peers sent, and refused connections, until they are closed.
        self._sent = budget.charge_open(Purpose.CONNECTION, 0)
        self._refused = budget.charge_open(Purpose.CONNECTION, 0)
        self._closers: Closers | None = None
        self._closed_lock = threading.Lock()
        self._closed_calls: list[Callable[[], None]] = []

    # -- the socket --------------------------------------------------------------------------------------

    def start(self) -> str:
        """Open the socket and return its path.

        Raises ConfigError for a path that cannot be bound, AlreadyRunningError if a daemon listens there.
        """
        self._loop = asyncio.get_running_loop()
        self._bind()
        limits = self._limits
        capacity = min(limits.all_connections, self._budget.capacity // _SMALL)
        self._shares = FairShares(capacity, limits.connections, min(limits.reserve, capacity // _SMALL))
        self._tokens = _Tokens(self._budget, self._around.headroom_of_door())
        self._closers = Closers(f"{self._name}-close")
        return os.fspath(self.path)

    def check(self) -> None:
        """Make the socket again if its file was removed or replaced. Never raises; see `problem`."""
        self._serve_former()
        if self._listener is None or self._is_ours():
            self.problem = ""
            return
        before = self._listener
        try:
            self._bind()
        except MpsdError as error:
            self.problem = f"{error.message}; {error.remedy}"
            return
        self.problem = ""
        self._log.warning("made a removed socket again", path=str(self.path))
        self._loop.remove_reader(before.fileno())
        self._former.append(before)
        self._serve_former()

    def _serve_former(self) -> None:
        """Admit the peers that wait at sockets without a file, and close these sockets."""
        for former in tuple(self._former):
            try:
                for _ in range(BACKLOG + 1):
                    self._admit(former.accept()[0])
            except BlockingIOError:
                pass
            except OSError:
                continue  # No descriptor is free. The next check goes on.
            self._former.remove(former)
            self._close_socket(former, os.getuid())

    def _is_ours(self) -> bool:
        try:
            return _identity(self.path) == self._identity
        except OSError:
            return False

    def _bind(self) -> None:
        path = check_socket_path(self.path)
        _make_folder(self.path.parent)
        if _is_alive(path, self._kind):
            raise AlreadyRunningError(
                f"a daemon answers on {path}", remedy="stop it first, or choose another run_dir"
            )
        sock: socket.socket | None = None
        try:
            sock = socket.socket(socket.AF_UNIX, self._kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            # Connections inherit this: each message then tells its sender.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            _pass_rights(sock, False)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            sock.bind(path)
            # Write permission is permission to connect: for all users, whatever the umask is.
            os.chmod(path, 0o666)
            sock.listen(BACKLOG)
            self._identity = _identity(self.path)
        except OSError as error:
            if sock is not None:
                sock.close()
            raise ConfigError(
                f"cannot listen on {path}: {error.strerror}",
                remedy="choose another run_dir, or make it writable",
            ) from error
        self._listener = sock
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """End all connections, and remove the socket's file if it is still this one."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.remove_reader(listener.fileno())
            if self._is_ours():
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            self._former.append(listener)
        for former in self._former:
            # Connections that are not accepted yet may carry descriptors.
            self._close_socket(former, os.getuid())
        self._former = []
        for connection in tuple(self.connections):
            self.end(connection)
        if self._closers is not None:
            self._closers.end()
        self._tokens.close()

    # -- admission ---------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # The daemon has no free descriptor, whatever the budget says: accept again a little later.
            self._count("no_descriptor", error=error.strerror)
            self._pause()
            return
        self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        credentials = peer_credentials(sock)
        connection = self._make(sock, credentials, self._around.accounts.of(sock, credentials))
        rights = self._around.rights
        connection.privileged = rights.privileged(credentials, peer_groups(sock))
        if not self._make_room(connection):
            self._count("connections", credentials)
            self._refuse(sock, connection.owner)
            return
        self._shares.add(connection)
        self.connections[connection] = None
        connection.timer = self._loop.call_later(self._limits.hello_s, self._expect_hello, connection)
        try:
            self._opened(connection)
        except Refused as error:
            self.end(connection, str(error))
        except (MpsdError, OSError):
            self.end(connection, "gone")

    def _make_room(self, newcomer: C) -> bool:
        """Return whether the newcomer may enter, with a descriptor; end the connection that it displaces."""
        shares, privileged = self._shares, newcomer.privileged
        room = shares.has_room(newcomer)
        if room and self._tokens.take():
            return True
        displaced = shares.displaced_by(newcomer)
        # The rest of the daemon may have this door's descriptors: take one from those in advance, unless a
        # user has several here.
        if room and (displaced is None or shares.held_by(displaced.account.owner) == 1):
            may_borrow = privileged or not shares.held_by(newcomer.owner)
            if may_borrow and self._tokens.borrow(privileged):
                return True
        if displaced is None:
            return False
        # Its descriptor serves the newcomer, unless a thread has yet to close it.
        closed = self.end(displaced, "displaced")  # type: ignore[arg-type]
        return self._tokens.take() or self._tokens.borrow(closed or privileged)

    def _expect_hello(self, connection: C) -> None:
        if connection.standing is Standing.NEW:
            self.end(connection, "silent")

    def _refuse(self, sock: socket.socket, owner: int) -> None:
        """Close a connection that may not enter. Before Linux 6.16, a thread may have to close it."""
        self._refused.join(self._budget.charge_open(Purpose.CONNECTION, 1))
        if not self._close_socket(sock, owner, lambda: self._refused.split(1).release()):
            self._pause_if_refused()

    def _pause_if_refused(self) -> bool:
        if full := self._refused.count >= OVERDRAWN:
            self._pause()
        return full

    def _pause(self) -> None:
        """Accept again later."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        if not self._pause_if_refused() and self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    # -- connections -------------------------------------------------------------------------------------

    def watch(self, connection: C, read: Callable[[C], Any]) -> None:
        """Call `read` whenever the peer has sent something, unless the connection has ended."""
        if connection.open:
            self._loop.add_reader(connection.socket.fileno(), read, connection)

    def allow_descriptors(self, connection: C) -> None:
        """Let the peer send descriptors, which Linux 6.16 and later refuse until then."""
        if connection.open:
            _pass_rights(connection.socket, True)

    def unwatch(self, connection: C) -> None:
        if connection.open:
            self._loop.remove_reader(connection.socket.fileno())

    def watch_writing(self, connection: C, write: Callable[[C], Any]) -> None:
        if connection.open:
            self._loop.add_writer(connection.socket.fileno(), write, connection)

    def unwatch_writing(self, connection: C) -> None:
        if connection.open:
            self._loop.remove_writer(connection.socket.fileno())

    def end(self, connection: C, reason: str = "", detail: str = "") -> bool:
        """End a connection; its peer sees that at once. Return whether its descriptor is closed already.

        `reason`: counted and logged, with `detail`; empty: the peer left.
        """
        if not connection.open:
            return False
        if reason:
            self._count(reason, connection.credentials, **({"error": detail} if detail else {}))
        self._loop.remove_reader(connection.socket.fileno())
        self._loop.remove_writer(connection.socket.fileno())
        connection.open = False
        if connection.timer is not None:
            connection.timer.cancel()
        del self.connections[connection]
        self._shares.remove(connection)
        closed = self._close_socket(connection.socket, connection.owner, self._tokens.give)
        self._ended(connection)
        return closed

    def _count(self, reason: str, credentials: Credentials | None = None, **more: object) -> None:
        self.counters[f"closed_{reason}"] += 1
        peer = {} if credentials is None else log_fields(credentials)
        self._log.warning(f"closed a {self._name} connection", reason, reason=reason, **peer, **more)

    # -- closing -----------------------------------------------------------------------------------------

    def close_descriptors(self, owner: int, fds: list[int]) -> None:
        """Close descriptors that a peer has sent, in a thread. The budget has them until then."""
        assert self._closers is not None
        if count := len(fds):
            self._sent.join(self._budget.charge_open(Purpose.CONNECTION, count))
            self._closers.close(owner, fds, partial(self._closed, lambda: self._sent.split(count).release()))

    def closing_full(self, owner: int) -> bool:
        """Return whether to take nothing more from this user: too many of its closes are not done.

        Where the budget has none left, a user has one such close, and all users have OVERDRAWN.
        """
        assert self._closers is not None
        pending = self._closers.pending(owner)
        if pending >= min(OF_ONE, max(1, self._budget.capacity // _SMALL // 4)):
            return True
        none_left = not self._budget.fits(Purpose.CONNECTION)
        return none_left and (pending > 0 or self._sent.count >= OVERDRAWN)

    def _close_socket(self, sock: socket.socket, owner: int, then: Callable[[], None] = lambda: None) -> bool:
        """Close a connection or a listening socket, and then call `then` on the loop.

        Returns False if a thread has yet to close it.
        """
        assert self._closers is not None
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        if holds_nothing(sock):
            sock.close()
            then()
            return True
        self._closers.close(owner, [sock.detach()], partial(self._closed, then))
        return False

    def _closed(self, then: Callable[[], None]) -> None:
        """Let the loop call this. Called in a thread.

        One wake-up of the loop stands for many closes: its pipe has room for a few hundred, and a full pipe
        would lose the next signal.
        """
        with self._closed_lock:
            self._closed_calls.append(then)
            if len(self._closed_calls) > 1:
                return
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._after_closes)

    def _after_closes(self) -> None:
        with self._closed_lock:
            calls, self._closed_calls = self._closed_calls, []
        for call in calls:
            call()


class _Tokens:
    """The descriptors of one door: from the budget, and some taken in advance (headroom)."""

    def __init__(self, budget: DescriptorBudget, headroom: Charge) -> None:
        self._budget = budget
        self._headroom = headroom.count
        self._borrowed = 0
        self._closed = False

    def take(self) -> bool:
        return self._budget.take(Purpose.CONNECTION)

    def borrow(self, privileged: bool) -> bool:
        """Take one from the headroom, which has a half for privileged peers alone."""
        if self._borrowed >= (self._headroom if privileged else self._headroom // 2):
            return False
        self._borrowed += 1
        return True

    def give(self) -> None:
        if self._borrowed:
            self._borrowed -= 1
            if not self._closed:
                return
        self._budget.release(Purpose.CONNECTION)

    def close(self) -> None:
        """Return what was taken in advance. Connections whose close is not done return theirs by give()."""
        if not self._closed:
            self._budget.release(Purpose.CONNECTION, self._headroom - self._borrowed)
        self._closed = True


def _pass_rights(sock: socket.socket, allowed: bool) -> None:
    """Allow or refuse descriptors for this end. Without: closing the connection cannot wait for any."""
    with contextlib.suppress(OSError):  # An older kernel.
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, int(allowed))


def _identity(path: Path) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _is_alive(path: str, kind: socket.SocketKind) -> bool:
    """Return whether a process listens on this path. Never waits."""
    try:
        with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
            probe.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except BlockingIOError:
        return True  # Its queue is full.
    except OSError as error:
        # EPROTOTYPE: a listening socket of another type. Any other error: the file is no socket.
        return error.errno == errno.EPROTOTYPE
    return True


def _make_folder(folder: Path) -> None:
    """Make the socket's folder with its parents; those that are made get mode 0755, whatever the umask is."""
    if folder.is_dir():
        return
    try:
        for missing in reversed([p for p in (folder, *folder.parents) if not p.exists()]):
            missing.mkdir(exist_ok=True)
            missing.chmod(0o755)
    except OSError as error:
        raise ConfigError(
            f"cannot make directory {folder}: {error.strerror}", remedy="choose another run_dir"
        ) from error
