"""The vault's socket from a program's side: bring a segment under a name, take it over, release it.

Each request uses a connection of its own. The vault identifies a program by its process, not by a connection,
so a restarted daemon, a fork, and a connection of mpsd's libcuda in the same process need no special care.
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
_LIST = "mpsd-ctl vault list shows all names"


class NoVaultError(errors.NotRunningError):
    """No vault is offered: no daemon answers, or its vault is off. session() continues without one."""

    code = "no-vault"


class QuotaError(errors.BusyError):
    """A quota of the vault is used up: of this program, this user or the vault."""

    code = "quota"


class InUseError(errors.BusyError):
    """Another living process owns the buffer."""

    code = "in-use"


class NameTakenError(errors.AmbiguousError):
    """The name belongs to something else: memory kept as a whole program, or a buffer created just now."""

    code = "name-taken"


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment from the vault. Its receiver closes `descriptor`.

    `address`: where the process that brought it had mapped it; `size`: bytes."""

    descriptor: int
    size: int
    address: int
    gpu: bytes


def find_vault(environ: Mapping[str, str], socket_path: str | None = None) -> str:
    """Return the path of the vault's socket: $MPSD_VAULT_SOCKET (set by mpsd-run), else beside the daemon's.

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
        exists = "the daemon offers no vault" if os.path.exists(daemon) else "no daemon is running"
        raise NoVaultError(
            f"{exists}: no socket at {path}",
            remedy="start mpsd with enabled = true under [vault] in mpsd.toml",
        )
    return path


def token_of(environ: Mapping[str, str]) -> bytes:
    """Return MPSD_VAULT_TOKEN padded with zeros, as mpsd's libcuda sends it.

    Raises UsageError for a longer token: truncated, it could equal another user's token.
    """
    secret = os.fsencode(environ.get(TOKEN_VARIABLE, ""))
    if len(secret) > wire.TOKEN_ROOM:
        raise errors.UsageError(
            f"{TOKEN_VARIABLE} has {len(secret)} bytes; the limit is {wire.TOKEN_ROOM}",
            remedy="use a shorter token, such as the first characters of its sha256sum",
        )
    return secret.ljust(wire.TOKEN_ROOM, b"\0")


def check_name(name: str) -> None:
    """Check a buffer's name. Raises UsageError."""
    if not wire.valid_name(name):
        raise errors.UsageError(
            f"{name!r} is not a valid name",
            remedy="use 1 to 63 printable ASCII characters without blanks, not a number",
        )


class Vault:
    """A connection to the vault, after its handshake. A context manager. Not for several threads at once.

    `path`: as of find_vault(). Raises NoVaultError, DeniedError, DeadlineError, ProtocolError.
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
                f"may not connect to {self.path}", remedy="make every directory of the path searchable"
            ) from None
        except TimeoutError:
            raise errors.DeadlineError(
                f"{self.path} accepts no connection", remedy="see mpsd-ctl status"
            ) from None
        except OSError as error:
            raise NoVaultError(
                f"no vault answers on {self.path}: {error.strerror or error}",
                remedy="check that mpsd runs: mpsd-ctl status",
            ) from None

    def put_named(self, name: str, segment: Segment, number: int) -> bool:
        """Have a segment kept under a new name. The caller keeps its descriptor.

        Return whether it outlives the daemon already. Raises NameTakenError, QuotaError."""
        asked = Message(
            Kind.PUT_NAMED,
            number=number,
            size=segment.size,
            address=segment.address,
            gpu=segment.gpu,
            name=name,
        )
        answer, _ = self._ask(asked, segment.descriptor)
        if answer.status is not Status.OK:
            raise _error(answer, name)
        return answer.count > 0

    def take(self, name: str, number: int) -> Segment | None:
        """Take over what is kept under a name, or return None if this owner keeps nothing under it.

        Raises InUseError, NameTakenError, QuotaError."""
        answer, fds = self._ask(Message(Kind.TAKE, number=number, name=name))
        if answer.status is Status.DENIED:
            return None
        if answer.status is not Status.OK:
            raise _error(answer, name)
        return Segment(fds[0], answer.size, answer.address, answer.gpu)

    def claim(self, name: str) -> tuple[Segment, int] | None:
        """Return what is kept under a name, beside the process that owns it, and that process's number for
        it.

        None if this owner keeps nothing under the name."""
        answer, fds = self._ask(Message(Kind.CLAIM, name=name))
        if answer.status in (Status.DENIED, Status.UNKNOWN):
            return None
        if answer.status is not Status.OK:
            raise _error(answer, name)
        return Segment(fds[0], answer.size, answer.address, answer.gpu), answer.number

    def leave_segment(self, number: int) -> None:
        """Report that this process has unmapped a segment, so that the next process may take it."""
        self._ask(Message(Kind.LEAVE, number=number))

    def release(self, name: str) -> bool:
        """Release what is kept under a name, for good. False if this owner keeps nothing under it."""
        answer, _ = self._ask(Message(Kind.RELEASE, name=name))
        return answer.status is Status.OK

    def _ask(self, message: Message, descriptor: int | None = None) -> tuple[Message, list[int]]:
        self._sequence += 1
        deadline = time.monotonic() + ANSWER_S
        data = wire.pack(replace(message, sequence=self._sequence))
        try:
            socket.send_fds(self._socket, [data], [] if descriptor is None else [descriptor])
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            reply, fds, _, _ = socket.recv_fds(self._socket, wire.LAYOUT.size + 1, 2, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise errors.DeadlineError(
                f"the vault did not answer within {ANSWER_S:g} s", remedy="see mpsd-ctl status"
            ) from None
        except OSError as error:
            raise self._closed(message, error.strerror or str(error)) from None
        try:
            if not reply:
                raise self._closed(message, "closed")
            answer = wire.unpack_answer(reply)
            wants = message.kind in (Kind.TAKE, Kind.CLAIM) and answer.status is Status.OK
            if (answer.kind, answer.sequence, len(fds)) != (message.kind, self._sequence, int(wants)):
                raise ValueError("the answer belongs to another request")
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
                f"the vault at {self.path} closed the connection at once: {why}",
                remedy=f"keep {TOKEN_VARIABLE} as it was when this process first connected to the vault",
            )
        return errors.ProtocolError(
            f"the vault at {self.path} closed the connection: {why}",
            remedy="its counters show the reason (vault_closed_... in mpsd-ctl status --json); "
            "a daemon older than this client supports no named buffers",
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
                f"the vault refuses {name!r}: a quota is used up",
                remedy="free something (mpsd-ctl vault list), or raise the quotas of [vault] in mpsd.toml",
            )
        case Status.IN_USE:
            return InUseError(
                f"{name!r} belongs to another living process",
                remedy=f"end that process, or choose another name; {_LIST}",
            )
        case Status.NAME:
            return NameTakenError(
                f"{name!r} is in use for something else in the vault",
                remedy=f"choose another name, or run mpsd-ctl vault free {name}; {_LIST}",
            )
    return errors.ProtocolError(f"the vault answered {answer.status.name} for {name!r}")


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
