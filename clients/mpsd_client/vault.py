"""The vault's socket from a program's side: bring a piece under a name, take it over, let go of it.

A connection is made for each errand and ends with it: the program is a client of the vault by its process,
not by a connection, so a daemon that was restarted meanwhile, a fork, and a connection of mpsd's libcuda in
the same process need no care.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType

from mpsd_client import _vaultwire as wire
from mpsd_client._protocol import errors
from mpsd_client._vaultwire import Kind, Message, Status
from mpsd_client.transport import find_socket

ANSWER_S = 5.0
SOCKET_VARIABLE, TOKEN_VARIABLE = "MPSD_VAULT_SOCKET", "MPSD_VAULT_TOKEN"
_SOCKET_NAME = "vault.sock"
_LIST = "mpsd-ctl vault list shows what there is"


class NoVaultError(errors.NotRunningError):
    """Nobody offers a vault here: no daemon, or one that has none. session() goes on without."""

    code = "no-vault"


class QuotaError(errors.BusyError):
    """The vault takes no more of this program, this user or at all."""

    code = "quota"


class InUseError(errors.BusyError):
    """Another living process has the buffer."""

    code = "in-use"


class NameTakenError(errors.AmbiguousError):
    """The name is that of something else: what a program keeps as a whole, or a buffer made this moment."""

    code = "name-taken"


@dataclass(frozen=True, slots=True)
class Piece:
    """What the vault handed out. `descriptor` is whoever has this to close. `address`: where the process
    that brought it had it mapped; `size` in bytes."""

    descriptor: int
    size: int
    address: int
    gpu: bytes


def find_vault(environ: Mapping[str, str], socket_path: str | None = None) -> str:
    """Where the vault's socket is: $MPSD_VAULT_SOCKET (mpsd-run sets it), else beside the daemon's own.

    `socket_path`: the daemon's. Raises NoVaultError.
    """
    if socket_path is None and environ.get(SOCKET_VARIABLE):
        return environ[SOCKET_VARIABLE]
    try:
        daemon = socket_path or find_socket(environ, os.getuid())
    except errors.NotRunningError as error:
        raise NoVaultError(error.message, remedy=error.remedy) from None
    path = os.path.join(os.path.dirname(daemon), _SOCKET_NAME)
    if not os.path.exists(path):
        there = "the daemon offers no vault" if os.path.exists(daemon) else "no daemon is there"
        raise NoVaultError(
            f"{there}: no socket at {path}",
            remedy="start mpsd with enabled = true under [vault] in its configuration",
        )
    return path


def token_of(environ: Mapping[str, str]) -> bytes:
    """MPSD_VAULT_TOKEN as mpsd's libcuda sends it: filled up with zeros. Raises UsageError for a longer one,
    whose beginning others may have too.
    """
    secret = os.fsencode(environ.get(TOKEN_VARIABLE, ""))
    if len(secret) > wire.TOKEN_ROOM:
        raise errors.UsageError(
            f"{TOKEN_VARIABLE} has {len(secret)} bytes, and at most {wire.TOKEN_ROOM} are sent",
            remedy="take a shorter one: the first characters of its sha256sum, say",
        )
    return secret.ljust(wire.TOKEN_ROOM, b"\0")


def check_name(name: str) -> None:
    """Raises UsageError."""
    if not wire.valid_name(name):
        raise errors.UsageError(
            f"{name!r} is not a name", remedy="1 to 63 printable ASCII characters without blanks, no number"
        )


class Vault:
    """A connection, greeted; use it as a context. Not for several threads at once.

    `path` as find_vault gives it. Raises NoVaultError, DeniedError, DeadlineError, ProtocolError.
    """

    def __init__(self, path: str, token: bytes = bytes(wire.TOKEN_ROOM)) -> None:
        self.path = path
        self._sequence = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        try:
            self._connect()
            self._ask(Message(Kind.HELLO, token=token))
        except BaseException:
            self._socket.close()
            raise

    def _connect(self) -> None:
        try:
            self._socket.connect(self.path)
        except PermissionError:
            raise errors.DeniedError(
                f"may not connect to {self.path}", remedy="every directory on the way must be searchable"
            ) from None
        except TimeoutError:
            raise errors.DeadlineError(f"{self.path} takes no connection") from None
        except OSError as error:
            raise NoVaultError(
                f"no vault answers on {self.path}: {error.strerror or error}",
                remedy="see whether mpsd runs: mpsd-ctl status",
            ) from None

    def bring(self, name: str, piece: Piece, number: int) -> bool:
        """Have a piece kept under a name of its own; its descriptor stays the caller's. Whether it is also
        where it outlives the daemon. Raises NameTakenError, QuotaError."""
        asked = Message(
            Kind.PUT_NAMED, number=number, size=piece.size, address=piece.address, gpu=piece.gpu, name=name
        )
        answer, _ = self._ask(asked, piece.descriptor)
        if answer.status is not Status.OK:
            raise _error(answer, name)
        return answer.count > 0

    def take(self, name: str, number: int) -> Piece | None:
        """What is kept under a name, which is this process's from now on; None where this owner keeps
        nothing so. Raises InUseError, NameTakenError, QuotaError."""
        answer, fds = self._ask(Message(Kind.TAKE, number=number, name=name))
        if answer.status is Status.DENIED:
            return None
        if answer.status is not Status.OK:
            raise _error(answer, name)
        return Piece(fds[0], answer.size, answer.address, answer.gpu)

    def claim(self, name: str) -> tuple[Piece, int] | None:
        """What is kept under a name, beside the process that has it, and how that one calls it; None where
        this owner keeps nothing so."""
        answer, fds = self._ask(Message(Kind.CLAIM, name=name))
        if answer.status in (Status.DENIED, Status.UNKNOWN):
            return None
        if answer.status is not Status.OK:
            raise _error(answer, name)
        return Piece(fds[0], answer.size, answer.address, answer.gpu), answer.number

    def leave(self, number: int) -> None:
        """This process has done with a piece that it brought or took: the next process may take it."""
        self._ask(Message(Kind.LEAVE, number=number))

    def release(self, name: str) -> bool:
        """Let go of what is kept under a name, for good. False where this owner keeps nothing so."""
        answer, _ = self._ask(Message(Kind.RELEASE, name=name))
        return answer.status is Status.OK

    def _ask(self, message: Message, descriptor: int | None = None) -> tuple[Message, list[int]]:
        self._sequence += 1
        deadline = time.monotonic() + ANSWER_S
        data = wire.pack(replace(message, sequence=self._sequence))
        try:
            socket.send_fds(self._socket, [data], [] if descriptor is None else [descriptor])
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            said, fds, _, _ = socket.recv_fds(self._socket, wire.LAYOUT.size + 1, 2, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise errors.DeadlineError(
                f"the vault did not answer within {ANSWER_S:g} s", remedy="see mpsd-ctl status"
            ) from None
        except OSError as error:
            raise self._closed(message, error.strerror or str(error)) from None
        try:
            if not said:
                raise self._closed(message, "closed")
            answer = wire.unpack_answer(said)
            wants = message.kind in (Kind.TAKE, Kind.CLAIM) and answer.status is Status.OK
            if (answer.kind, answer.sequence, len(fds)) != (message.kind, self._sequence, int(wants)):
                raise ValueError("an answer to something else")
        except ValueError as error:
            _close_all(fds)
            raise errors.ProtocolError(f"{self.path}: {error}") from None
        except errors.MpsdError:
            _close_all(fds)
            raise
        return answer, fds

    def _closed(self, message: Message, why: str) -> errors.MpsdError:
        if message.kind is Kind.HELLO:
            return errors.DeniedError(
                f"the vault at {self.path} ended the connection at once: {why}",
                remedy=f"{TOKEN_VARIABLE} must be what it was when this process first spoke to the vault",
            )
        return errors.ProtocolError(
            f"the vault at {self.path} ended the connection: {why}",
            remedy="its counters say why (vault_closed_... in mpsd-ctl status --json); "
            "a daemon older than this client knows no named buffers",
        )

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Vault:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _error(answer: Message, name: str) -> errors.MpsdError:
    match answer.status:
        case Status.QUOTA:
            return QuotaError(
                f"the vault takes no {name!r}: a quota is used up",
                remedy="free something (mpsd-ctl vault list), or raise the quotas of [vault] in mpsd.toml",
            )
        case Status.IN_USE:
            return InUseError(
                f"{name!r} belongs to another process, which is alive",
                remedy=f"end that one, or choose another name; {_LIST}",
            )
        case Status.NAME:
            return NameTakenError(
                f"{name!r} is the name of something else in the vault",
                remedy=f"choose another name, or mpsd-ctl vault free {name}; {_LIST}",
            )
    return errors.ProtocolError(f"the vault answers {answer.status.name} about {name!r}")


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
