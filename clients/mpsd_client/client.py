"""The client: one method per operation, an iterator for events."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from mpsd_client._protocol import errors, messages
from mpsd_client.transport import Transport, find_socket

CONNECT_TIMEOUT_S = 5.0


class RemoteError(errors.MpsdError):
    """An error that only the daemon has a class for; `remote_code` is its code."""

    code = "remote"

    def __init__(self, message: str, *, remedy: str = "", remote_code: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.remote_code = remote_code


def connect(socket_path: str | None = None, timeout: float = CONNECT_TIMEOUT_S) -> Client:
    """A client on a connection of its own.

    `socket_path`: by default $MPSD_SOCKET, else the user's own daemon's, else /run/mpsd/mpsd.sock.
    `timeout`: seconds until the daemon must have shaken hands. Raises NotRunningError, DeniedError,
    DeadlineError, ProtocolError.
    """
    return Client(socket_path or find_socket(os.environ, os.getuid()), timeout)


class Client:
    """Asks one daemon. Use as a context, or close() it. Not for several threads at once.

    `timeout` of every method: seconds until the daemon gives up; None for the operation's own.
    All raise MpsdError: NotRunningError when the daemon goes away, DeadlineError, DeniedError,
    NotFoundError and whatever else the daemon answers. After a DeadlineError the client may be used on.
    """

    def __init__(self, socket_path: str, timeout: float = CONNECT_TIMEOUT_S) -> None:
        self.socket_path = socket_path
        self._timeout = timeout
        self.vault_socket = ""
        """Where programs bring memory that is to outlive them, once `env` was asked; empty: no vault."""
        self.failover_socket = ""
        """Where programs hear when they are to go on in another domain, as above; empty: there is none."""
        self.domain = self.directory = ""
        """The domain that `env` led to when it was asked, and its own pipe directory, which never leads to
        another; empty: not said."""
        self.gpus: tuple[str, ...] = ()
        """The GPUs of that domain, by UUID."""
        self.numbers: Mapping[str, int] = {}
        """The index of each of them; an older daemon does not say it."""
        self.lost = False
        """Whether that domain is lost, and nothing has taken its place yet: what starts there fails."""
        self._streams: list[EventStream] = []
        self._transport = Transport(socket_path, timeout)

    def call(
        self, op: str, args: Mapping[str, object] | None = None, timeout: float | None = None
    ) -> Mapping[str, Any]:
        """Any operation of the table by name; arguments that are None are left out."""
        given = {name: value for name, value in (args or {}).items() if value is not None}
        return _call(self._transport, op, given, timeout)

    def status(self, timeout: float | None = None) -> Mapping[str, Any]:
        """GPUs, domains, clients, the dead whose memory is held, counters ("schema": 1)."""
        return self.call("status", timeout=timeout)

    def holders(self, timeout: float | None = None) -> Sequence[Mapping[str, Any]]:
        """Who has work or memory on a GPU, dead or alive, until mpsd has given up what it holds of it:
        {"pid", "start_ticks", "uid", "blind" (nobody sees the end of its work)}; a user sees its own.

        Does not ask the GPU's driver, unlike `status`. ProtocolError where the daemon is older.
        """
        found: Sequence[Mapping[str, Any]] = self.call("holders", timeout=timeout)["holders"]
        return found

    def faults(
        self, limit: int | None = None, since_id: int | None = None, timeout: float | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """Fault records with ids above `since_id`, the newest `limit` of them, oldest first."""
        found: Sequence[Mapping[str, Any]] = self.call(
            "faults", {"limit": limit, "since_id": since_id}, timeout
        )["faults"]
        return found

    def failovers(
        self, limit: int | None = None, since_id: int | None = None, timeout: float | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """What became of programs whose domains were left, as for `faults`."""
        args = {"limit": limit, "since_id": since_id}
        found: Sequence[Mapping[str, Any]] = self.call("failovers", args, timeout)["failovers"]
        return found

    def explain(self, fault_class: str, timeout: float | None = None) -> str:
        """What a class of fault is, how far it reaches, what to do. Raises NotFoundError."""
        return str(self.call("explain", {"class": fault_class}, timeout)["text"])

    def kill(
        self,
        pid: int,
        *,
        start_ticks: int | None = None,
        dry_run: bool = False,
        reason: str = "",
        timeout: float | None = None,
    ) -> Mapping[str, Any]:
        """Evict one client so that nobody else is harmed: {"steps", "outcome", "evict_ms"}.

        `start_ticks` (field 22 of /proc/PID/stat) makes sure that it is the process that is meant:
        AmbiguousError otherwise. NotFoundError when the pid is not a client.
        """
        args = {"pid": pid, "start_ticks": start_ticks, "dry_run": dry_run, "reason": reason}
        return self.call("kill", args, timeout)

    def zone_policy(
        self,
        pid: int,
        policy: str,
        *,
        start_ticks: int | None = None,
        reason: str = "",
        timeout: float | None = None,
    ) -> Mapping[str, Any]:
        """What is done with one client when a guard zone absorbs an access of it: evict, absorb or freeze.

        For administrators. NotFoundError when the pid is not a client, UsageError for another policy.
        """
        args = {"pid": pid, "policy": policy, "start_ticks": start_ticks, "reason": reason}
        return self.call("zone_policy", args, timeout)

    def env(
        self,
        gpu: str | None = None,
        shared: bool = False,
        timeout: float | None = None,
        *,
        standby: bool = False,
    ) -> dict[str, str]:
        """The environment that a workload of this user must set before it initialises CUDA.

        `standby`: of one that is to wait in the domain that takes the active one's place when that is lost,
        by that domain's own directory. Raises "not-ready" (RemoteError) where there is none at the moment.
        """
        args = {"gpu": gpu, "shared": shared, "standby": standby or None}
        answer = self.call("env", args, timeout)
        self.domain = str(answer.get("domain") or "")
        self.directory = str(answer.get("directory") or "")
        self.gpus = tuple(str(uuid) for uuid in answer.get("gpus") or ())
        numbered = zip(self.gpus, answer.get("numbers") or (), strict=False)
        self.numbers = {uuid: int(number) for uuid, number in numbered if number is not None}
        self.lost = bool(answer.get("lost"))
        self.vault_socket = str(answer.get("vault", ""))
        self.failover_socket = str(answer.get("failover", ""))
        return {str(name): str(value) for name, value in answer["env"].items()}

    def vault_list(self, timeout: float | None = None) -> Sequence[Mapping[str, Any]]:
        """What the vault holds, oldest first; a user sees its own."""
        found: Sequence[Mapping[str, Any]] = self.call("vault_list", timeout=timeout)["holdings"]
        return found

    def vault_keep(
        self,
        pid: int,
        name: str,
        *,
        start_ticks: int | None = None,
        dry_run: bool = False,
        reason: str = "",
        timeout: float | None = None,
    ) -> Mapping[str, Any]:
        """What the process has in the vault, and will have, stays after it: {"held", "bytes", "dry_run"}.

        NotFoundError where it is no client of the vault, AmbiguousError where the name is taken.
        """
        args = {"pid": pid, "name": name, "start_ticks": start_ticks, "dry_run": dry_run, "reason": reason}
        return self.call("vault_keep", args, timeout)

    def vault_free(
        self, what: str, *, dry_run: bool = False, reason: str = "", timeout: float | None = None
    ) -> Mapping[str, Any]:
        """Let go of one piece (its id) or of all kept under a name: {"freed", "bytes", "dry_run"}.

        NotFoundError, AmbiguousError where several owners keep that name, DeniedError.
        """
        return self.call("vault_free", {"what": what, "dry_run": dry_run, "reason": reason}, timeout)

    def doctor(self, timeout: float | None = None) -> Sequence[Mapping[str, Any]]:
        """Checks as the daemon sees them: {"name", "ok" (None: does not apply), "finding", "remedy"}."""
        found: Sequence[Mapping[str, Any]] = self.call("doctor", timeout=timeout)["checks"]
        return found

    def drain(
        self,
        gpu: str | None = None,
        *,
        dry_run: bool = False,
        reason: str = "",
        timeout: float | None = None,
    ) -> Mapping[str, Any]:
        """Take no new clients on a GPU (index or UUID), or on all. For administrators."""
        return self.call("drain", {"gpu": gpu, "dry_run": dry_run, "reason": reason}, timeout)

    def undrain(
        self,
        gpu: str | None = None,
        *,
        dry_run: bool = False,
        reason: str = "",
        timeout: float | None = None,
    ) -> Mapping[str, Any]:
        """Take new clients again. For administrators."""
        return self.call("undrain", {"gpu": gpu, "dry_run": dry_run, "reason": reason}, timeout)

    def version(self, timeout: float | None = None) -> Mapping[str, Any]:
        return self.call("version", timeout=timeout)

    def subscribe(self, since_id: int | None = None, timeout: float | None = None) -> EventStream:
        """Events from now on, on a connection of their own, which ends with this client.

        `since_id`: first those kept with a greater "seq" (0: all that are kept). `gap` of the stream says
        whether those are not all that there were.
        """
        stream = EventStream(self.socket_path, since_id, self._timeout, timeout)
        self._streams.append(stream)
        return stream

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EventStream:
    """An endless iterator over events: {"seq", "kind", ...}.

    {"kind": "lost", "count": N} stands for N events that this reader was too slow for. `kept` is how
    many of the first events are from the past. `gap`: why these are not all since the one that was named:
    "earlier" (that was in an earlier life of the daemon), "never" (there was none of this number; all that
    are kept come), "forgotten" (it is long ago); empty otherwise. Iterating raises NotRunningError when
    the daemon goes.
    """

    def __init__(
        self, socket_path: str, since_id: int | None, connect_timeout: float, timeout: float | None
    ) -> None:
        self._transport = Transport(socket_path, connect_timeout)
        try:
            args = {} if since_id is None else {"since_id": since_id}
            answer = _call(self._transport, messages.SUBSCRIBE, args, timeout)
            self.kept = int(answer.get("kept", 0))
            self.gap = str(answer.get("gap", ""))
        except BaseException:
            self._transport.close()
            raise

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self

    def __next__(self) -> Mapping[str, Any]:
        if self._transport.session.closed:
            raise StopIteration
        return self._next(None)

    def next(self, deadline: float) -> Mapping[str, Any]:
        """The next event. Raises DeadlineError at `deadline` (time.monotonic())."""
        return self._next(deadline)

    def _next(self, deadline: float | None) -> Mapping[str, Any]:
        while True:
            answer = self._transport.next_answer(deadline, "the wait for an event")
            if isinstance(answer, messages.EventMessage):
                if answer.lost:
                    return {"seq": answer.seq, "kind": "lost", "count": answer.lost}
                return {"seq": answer.seq, **answer.event}
            if isinstance(answer, messages.ErrorReply):
                raise _error(answer)

    def interrupt(self) -> None:
        """Have a thread that waits for the next event give up with NotRunningError. From any thread."""
        self._transport.interrupt()

    def close(self) -> None:
        self._transport.close()


def _call(
    transport: Transport, op: str, args: Mapping[str, object], timeout: float | None
) -> Mapping[str, Any]:
    request_id, give_up = transport.ask(op, args, timeout)
    while True:
        answer = transport.next_answer(give_up, op)
        match answer:
            case messages.Reply(answered, result) if answered == request_id:
                return result
            case messages.ErrorReply(answered) if answered in (request_id, None):
                raise _error(answer)


def _error(answer: messages.ErrorReply) -> errors.MpsdError:
    kind = _CLASSES.get(answer.code)
    if kind is None:
        return RemoteError(answer.message, remedy=answer.remedy, remote_code=answer.code)
    return kind(answer.message, remedy=answer.remedy)


def _subclasses(kind: type[errors.MpsdError]) -> Iterator[type[errors.MpsdError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _subclasses(below)


_CLASSES = {kind.code: kind for kind in _subclasses(errors.MpsdError) if kind is not RemoteError}
