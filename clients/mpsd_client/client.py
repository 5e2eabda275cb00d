"""The client of mpsd's protocol: one method per operation, and an iterator over events."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from mpsd_client._protocol import Protection, ProtectionLevel, errors, messages
from mpsd_client.joining.devices import NodeGpu
from mpsd_client.transport import Transport, find_socket

CONNECT_TIMEOUT_S = 5.0


class RemoteError(errors.MpsdError):
    """An error of the daemon without a class of its own here; `remote_code` is its code."""

    code = "remote"

    def __init__(self, message: str, *, remedy: str = "", remote_code: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.remote_code = remote_code


def connect(socket_path: str | None = None, timeout: float = CONNECT_TIMEOUT_S) -> Client:
    """Return a client on a new connection.

    `socket_path`: by default $MPSD_SOCKET, else the user's own daemon's, else /run/mpsd/mpsd.sock.
    `timeout`: seconds for connecting and the handshake. Raises NotRunningError, DeniedError, DeadlineError,
    ProtocolError.
    """
    return Client(socket_path or find_socket(os.environ, os.getuid()), timeout)


class Client:
    """A connection to one daemon. A context manager. Not for several threads at once.

    `timeout` of every method: seconds until the daemon stops the operation; None for the operation's default.
    All methods raise MpsdError: NotRunningError when the daemon ends, DeadlineError, DeniedError,
    NotFoundError and the daemon's other errors. The client stays usable after a DeadlineError.
    """

    def __init__(self, socket_path: str, timeout: float = CONNECT_TIMEOUT_S) -> None:
        self.socket_path = socket_path
        self._timeout = timeout
        self.vault_socket = ""
        """Socket to which programs bring memory that outlives them. Set by `env`; empty without a vault."""
        self.failover_socket = ""
        """Socket of the daemon's fail-over service. Set by `env`; empty without fail-over."""
        self.domain = self.directory = ""
        """Domain that the last `env` named, and its own pipe directory, which never leads to another domain.
        Empty if the daemon does not say."""
        self.gpus: tuple[str, ...] = ()
        """UUIDs of that domain's GPUs."""
        self.numbers: Mapping[str, int] = {}
        """Index of each of these GPUs. Empty with an older daemon."""
        self.lost = False
        """Whether that domain has faulted and has no successor yet: a program started there fails."""
        self.is_simulated = False
        """Whether the daemon of the last `env` serves the simulated GPU. False with an older daemon."""
        self.gpu_index: int | None = None
        """nvidia-smi's index of the requested GPU, else of the domain's first. None with an older daemon."""
        self.protection: Protection | None = None
        """Level of a program with the environment of the last `env`. None with an older daemon."""
        self.percentages: Mapping[str, Any] | None = None
        """That domain's limit and the measured percentages of its GPUs. None with an older daemon."""
        self._streams: list[EventStream] = []
        self._transport = Transport(socket_path, timeout)

    def call(
        self, op: str, args: Mapping[str, object] | None = None, timeout: float | None = None
    ) -> Mapping[str, Any]:
        """Call an operation by its name in the protocol. Arguments that are None are left out."""
        given = {name: value for name, value in (args or {}).items() if value is not None}
        return _call(self._transport, op, given, timeout)

    def status(self, timeout: float | None = None) -> Mapping[str, Any]:
        """Return GPUs, domains, clients, exited clients with held memory, and counters ("schema": 1)."""
        return self.call("status", timeout=timeout)

    def holders(self, timeout: float | None = None) -> Sequence[Mapping[str, Any]]:
        """Return the processes with work or memory on a GPU, exited ones too while mpsd holds their memory.

        Each: {"pid", "start_ticks", "uid", "blind" (the end of its work cannot be observed)}. A user sees its
        own processes. Unlike `status`, this does not query the GPU driver. ProtocolError with an older
        daemon.
        """
        found: Sequence[Mapping[str, Any]] = self.call("holders", timeout=timeout)["holders"]
        return found

    def node_gpus(self, timeout: float | None = None) -> Sequence[NodeGpu]:
        """Return the GPUs of the machine, in the order of their indices. Starts no domain."""
        try:
            rows = self.call("gpus", timeout=timeout)["gpus"]
        except errors.ProtocolError:
            # An older daemon closes the connection at an unknown operation. Its status has the rows too.
            self._transport.close()
            self._transport = Transport(self.socket_path, self._timeout)
            rows = self.status(timeout)["gpus"]
        found = [NodeGpu(int(row["index"]), str(row["uuid"]), str(row["name"])) for row in rows]
        return sorted(found, key=lambda gpu: gpu.index)

    def faults(
        self, limit: int | None = None, since_id: int | None = None, timeout: float | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """Return fault records with ids above `since_id`: the newest `limit` of them, oldest first."""
        found: Sequence[Mapping[str, Any]] = self.call(
            "faults", {"limit": limit, "since_id": since_id}, timeout
        )["faults"]
        return found

    def failovers(
        self, limit: int | None = None, since_id: int | None = None, timeout: float | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """Return the fail-over history of programs. Arguments as for `faults`."""
        args = {"limit": limit, "since_id": since_id}
        found: Sequence[Mapping[str, Any]] = self.call("failovers", args, timeout)["failovers"]
        return found

    def explain(self, fault_class: str, timeout: float | None = None) -> str:
        """Return the explanation of a fault class: meaning, reach, advice. Raises NotFoundError."""
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
        """Evict one client without harm to other clients. Returns {"steps", "outcome", "evict_ms"}.

        `start_ticks` (field 22 of /proc/PID/stat) identifies the process: AmbiguousError if it differs.
        NotFoundError if the pid is not a client.
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
        """Set the reaction to guard-zone hits of one client: evict, absorb or freeze. For administrators.

        NotFoundError if the pid is not a client, UsageError for an unknown policy.
        """
        args = {"pid": pid, "policy": policy, "start_ticks": start_ticks, "reason": reason}
        return self.call("zone_policy", args, timeout)

    def protect(
        self,
        pid: int,
        level: str,
        *,
        start_ticks: int | None = None,
        dry_run: bool = False,
        reason: str = "",
        timeout: float | None = None,
    ) -> Mapping[str, Any]:
        """Switch a running program's fail-over off: level "guard". Returns {"pid", "level", "steps"}.

        NotFoundError if the pid is not a client of the user, UsageError for another level or for a program
        at guard already. UnsupportedError if its proxy does not know the order.
        """
        args = {"pid": pid, "level": level, "start_ticks": start_ticks, "dry_run": dry_run, "reason": reason}
        return self.call("protect", args, timeout)

    def env(
        self,
        gpu: str | None = None,
        shared: bool = False,
        timeout: float | None = None,
        *,
        standby: bool = False,
    ) -> dict[str, str]:
        """Return the environment that a program of this user must set before it initialises CUDA.

        `standby`: for a process that waits in the standby domain, with that domain's own pipe directory.
        Raises RefusedError if a new client must not join now, because the GPU is lost or drained. Raises
        NotReadyError if there is no standby domain at the moment.
        """
        args = {"gpu": gpu, "shared": shared, "standby": standby or None}
        answer = self.call("env", args, timeout)
        self.domain = str(answer.get("domain") or "")
        self.directory = str(answer.get("directory") or "")
        self.gpus = tuple(str(uuid) for uuid in answer.get("gpus") or ())
        numbered = zip(self.gpus, answer.get("numbers") or (), strict=False)
        self.numbers = {uuid: int(number) for uuid, number in numbered if number is not None}
        self.gpu_index = answer.get("gpu_index")
        self.protection = _protection(answer.get("protection"))
        self.lost = bool(answer.get("lost"))
        self.is_simulated = answer.get("backend") == "simulated"
        self.percentages = answer.get("percentages")
        self.vault_socket = str(answer.get("vault", ""))
        self.failover_socket = str(answer.get("failover", ""))
        return {str(name): str(value) for name, value in answer["env"].items()}

    def vault_list(self, timeout: float | None = None) -> Sequence[Mapping[str, Any]]:
        """Return the vault's holdings, oldest first. A user sees its own."""
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
        """Keep a process's present and future vault memory after its end: {"held", "bytes", "dry_run"}.

        NotFoundError if the process is no client of the vault, AmbiguousError if the name is taken.
        """
        args = {"pid": pid, "name": name, "start_ticks": start_ticks, "dry_run": dry_run, "reason": reason}
        return self.call("vault_keep", args, timeout)

    def vault_free(
        self, what: str, *, dry_run: bool = False, reason: str = "", timeout: float | None = None
    ) -> Mapping[str, Any]:
        """Free one segment (by id) or all segments kept under a name: {"freed", "bytes", "dry_run"}.

        NotFoundError, AmbiguousError if several owners use the name, DeniedError.
        """
        return self.call("vault_free", {"what": what, "dry_run": dry_run, "reason": reason}, timeout)

    def doctor(self, timeout: float | None = None) -> Sequence[Mapping[str, Any]]:
        """Return the daemon's checks: {"name", "ok" (None: not applicable), "finding", "remedy"}."""
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
        """Stop accepting new clients on a GPU (index or UUID) or on all GPUs. For administrators."""
        return self.call("drain", {"gpu": gpu, "dry_run": dry_run, "reason": reason}, timeout)

    def undrain(
        self,
        gpu: str | None = None,
        *,
        dry_run: bool = False,
        reason: str = "",
        timeout: float | None = None,
    ) -> Mapping[str, Any]:
        """Accept new clients again. For administrators."""
        return self.call("undrain", {"gpu": gpu, "dry_run": dry_run, "reason": reason}, timeout)

    def version(self, timeout: float | None = None) -> Mapping[str, Any]:
        return self.call("version", timeout=timeout)

    def subscribe(self, since_id: int | None = None, timeout: float | None = None) -> EventStream:
        """Return an iterator over events, on a connection of its own that close() of this client ends.

        `since_id`: begin with stored events that have a greater "seq" (0: all stored events). The stream's
        `gap` tells whether stored events are missing.
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

    {"kind": "lost", "count": N} stands for N events for which this reader was too slow. `kept`: number of
    stored events at the beginning. `gap`: reason why stored events since `since_id` are missing: "earlier"
    (that id belongs to an earlier run of the daemon), "never" (no event has that id; all stored events come),
    "forgotten" (the daemon no longer stores them), or empty. Raises NotRunningError when the daemon ends.
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
        """Return the next event. Raises DeadlineError at `deadline` (time.monotonic())."""
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
        """Make a thread that waits for an event raise NotRunningError. From any thread."""
        self._transport.interrupt()

    def close(self) -> None:
        self._transport.close()


def _call(
    transport: Transport, op: str, args: Mapping[str, object], timeout: float | None
) -> Mapping[str, Any]:
    request_id, deadline = transport.ask(op, args, timeout)
    while True:
        answer = transport.next_answer(deadline, op)
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


def _protection(row: Mapping[str, Any] | None) -> Protection | None:
    if row is None:
        return None
    level = ProtectionLevel(row["level"])
    return Protection(level, str(row.get("why", "")), str(row.get("remedy", "")))


def _subclasses(kind: type[errors.MpsdError]) -> Iterator[type[errors.MpsdError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _subclasses(below)


_CLASSES = {kind.code: kind for kind in _subclasses(errors.MpsdError) if kind is not RemoteError}
