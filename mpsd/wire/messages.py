"""The protocol's messages: four kinds, and the table of operations.

    client                               daemon
    Request(id, op, args, deadline) ->   Reply(id, result)  or  ErrorReply(id, code, message, remedy)
    Request(id, "subscribe", ...)   ->   Reply, then EventMessage after EventMessage

Every request gets one answer. Requests of one connection may overlap: the id matches an answer to its
request. A message is one JSON object in one frame, with a version; the codec documents the fields.
The table below is the complete remote surface: each operation with its right, arguments and deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType

PROTOCOL_VERSION = 1

# The longest legitimate request (a kill with a reason of 500 characters) has about 4 KiB with every
# character escaped. A hostile peer can make the daemon buffer this much per connection.
MAX_REQUEST_BYTES = 16 << 10
# 1000 fault records of 4 KiB each, twice over.
MAX_ANSWER_BYTES = 8 << 20

MAX_ID = 2**53 - 1


class Gap(StrEnum):
    """Reason why a subscriber does not get every event after the one it names; part of the answer."""

    NONE = ""
    EARLIER = "earlier"  # The event is older than the daemon's last start.
    NEVER = "never"  # No event had that number yet. All kept events follow.
    FORGOTTEN = "forgotten"  # The oldest events since then are no longer kept.


MAX_DEADLINE_MS = 600_000


class ProtocolError(Exception):
    """The peer sent something that is not this protocol.

    `request_id` names the request, if its id could be read.
    """

    code = "protocol"

    def __init__(self, message: str, *, remedy: str = "", request_id: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.request_id = request_id


class Right(StrEnum):
    """Right that an operation requires. Root and the group `mpsd` have every right."""

    ANY = "any"
    OWN_CLIENT = "own client"
    ADMIN = "admin"


class Kind(Enum):
    INTEGER = int
    TEXT = str
    FLAG = bool


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of an operation. `low` and `high` bound an integer, or a text's length in characters."""

    name: str
    kind: Kind
    required: bool = False
    low: int = 0
    high: int = MAX_ID


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation. `deadline_s`: time limit of the answer if the request has none.

    `mutates`: the daemon logs the peer, and completes the operation even if the deadline passes.
    """

    name: str
    right: Right
    summary: str
    arguments: tuple[Argument, ...] = ()
    deadline_s: float = 5.0
    mutates: bool = False

    def argument(self, name: str) -> Argument | None:
        return next((a for a in self.arguments if a.name == name), None)


_GPU = Argument("gpu", Kind.TEXT, low=1, high=64)
_DRY_RUN = Argument("dry_run", Kind.FLAG)
_REASON = Argument("reason", Kind.TEXT, high=500)
_SINCE = Argument("since_id", Kind.INTEGER)
MIN_PID, MAX_PID = 2, 2**22
_PID = Argument("pid", Kind.INTEGER, required=True, low=MIN_PID, high=MAX_PID)

_NAME = Argument("name", Kind.TEXT, required=True, low=1, high=63)
_TICKS = Argument("start_ticks", Kind.INTEGER)

_TABLE = (
    Operation("status", Right.ANY, "GPUs, domains, clients, memory of exited clients"),
    Operation(
        "holders", Right.ANY, "running and exited processes with work or memory on a GPU; a user sees its own"
    ),
    Operation("gpus", Right.ANY, "index, UUID and name of every GPU; starts nothing and asks no driver"),
    Operation(
        "faults",
        Right.ANY,
        "fault records, newest last; a user sees records that concern its own clients",
        (Argument("limit", Kind.INTEGER, low=1, high=1000), _SINCE),
    ),
    Operation(
        "failovers",
        Right.ANY,
        "fail-over history, newest last; a user sees its own programs",
        (Argument("limit", Kind.INTEGER, low=1, high=1000), _SINCE),
    ),
    Operation(
        "explain",
        Right.ANY,
        "the meaning of a fault class",
        (Argument("class", Kind.TEXT, required=True, low=1, high=64),),
    ),
    Operation(
        "kill",
        Right.OWN_CLIENT,
        "evict one client without harm to the other clients",
        (_PID, Argument("start_ticks", Kind.INTEGER), _DRY_RUN, _REASON),
        deadline_s=20.0,
        mutates=True,
    ),
    Operation(
        "env",
        Right.ANY,
        "the environment that a job of this user sets; may start a domain",
        (_GPU, Argument("shared", Kind.FLAG), Argument("standby", Kind.FLAG)),
        deadline_s=15.0,
    ),
    Operation("doctor", Right.ANY, "capabilities of this machine, with remedies", deadline_s=30.0),
    Operation(
        "drain",
        Right.ADMIN,
        "stop admission of new clients on a GPU, or on all GPUs",
        (_GPU, _DRY_RUN, _REASON),
        deadline_s=15.0,
        mutates=True,
    ),
    Operation(
        "undrain",
        Right.ADMIN,
        "resume admission of new clients",
        (_GPU, _DRY_RUN, _REASON),
        deadline_s=15.0,
        mutates=True,
    ),
    Operation(
        "subscribe",
        Right.ANY,
        "kept events since an event number, then new events; a user gets its own",
        (_SINCE,),
    ),
    Operation(
        "zone_policy",
        Right.ADMIN,
        "set the consequence of a guard hit of one client",
        (_PID, _TICKS, Argument("policy", Kind.TEXT, required=True, low=1, high=16), _REASON),
        mutates=True,
    ),
    Operation(
        "protect",
        Right.OWN_CLIENT,
        "switch a running program's fail-over off: it stays at level guard",
        (_PID, _TICKS, Argument("level", Kind.TEXT, required=True, low=1, high=16), _DRY_RUN, _REASON),
        mutates=True,
    ),
    Operation("vault_list", Right.ANY, "segments in the vault; a user sees its own"),
    Operation(
        "vault_keep",
        Right.OWN_CLIENT,
        "keep a program's vault memory, now and later, under a name after its end",
        (_PID, Argument("start_ticks", Kind.INTEGER), _NAME, _DRY_RUN, _REASON),
        mutates=True,
    ),
    Operation(
        "vault_free",
        Right.OWN_CLIENT,
        "release one segment (by its id), or all segments that a name keeps",
        (Argument("what", Kind.TEXT, required=True, low=1, high=63), _DRY_RUN, _REASON),
        mutates=True,
    ),
    Operation("version", Right.ANY, "versions of daemon, back end and driver"),
)

OPERATIONS: Mapping[str, Operation] = MappingProxyType({row.name: row for row in _TABLE})

SUBSCRIBE = "subscribe"


@dataclass(frozen=True, slots=True)
class Request:
    """A request. `args` are checked against the table; `deadline_ms` counts from its arrival."""

    id: int
    op: str
    args: Mapping[str, int | str | bool] = field(default_factory=dict)
    deadline_ms: int = 5000

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.op]


@dataclass(frozen=True, slots=True)
class Reply:
    id: int
    result: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error. `id` is None if the request's id could not be read; `code` is the code of an MpsdError."""

    id: int | None
    code: str
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class EventMessage:
    """An event; or, with `lost` > 0 and an empty `event`, the number of events dropped for a slow subscriber.

    `seq` grows along the stream; gaps are events that this user may not see.
    """

    seq: int
    event: Mapping[str, object]
    lost: int = 0


Answer = Reply | ErrorReply | EventMessage
