"""What can be said on the wire: four kinds of message and one table of operations.

    client                               daemon
    Request(id, op, args, deadline) ->   Reply(id, result)  or  ErrorReply(id, code, message, remedy)
    Request(id, "subscribe", ...)   ->   Reply, then EventMessage after EventMessage

Every request is answered once. Requests of one connection may overlap: the id says which answer is
whose. A message is one JSON object in one frame, with a version; the codec documents the fields.
The table below is the complete remote surface: who may ask what, with which arguments, for how long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType

PROTOCOL_VERSION = 1

# The longest legitimate request (a kill with a reason of 500 characters) has about 4 KiB when every
# character is escaped; what a hostile peer can make the daemon buffer is this times its connections.
MAX_REQUEST_BYTES = 16 << 10
# 1000 fault records of 4 KiB each, with as much again to spare.
MAX_ANSWER_BYTES = 8 << 20

MAX_ID = 2**53 - 1


class Gap(StrEnum):
    """Why a subscriber does not get every event after the one that it names; part of the answer."""

    NONE = ""
    EARLIER = "earlier"  # It was in an earlier life of the daemon, of which nothing is remembered.
    NEVER = "never"  # No event has had that number. All that are remembered come.
    FORGOTTEN = "forgotten"  # There were so many since that the oldest are not remembered any more.


MAX_DEADLINE_MS = 600_000


class ProtocolError(Exception):
    """The peer sent something that is not this protocol.

    `request_id` names the request that it happened in where that much could be read.
    """

    code = "protocol"

    def __init__(self, message: str, *, remedy: str = "", request_id: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.request_id = request_id


class Right(StrEnum):
    """What a peer needs. Root and the group `mpsd` have every right."""

    ANY = "any"
    OWN_CLIENT = "own client"
    ADMIN = "admin"


class Kind(Enum):
    INTEGER = int
    TEXT = str
    FLAG = bool


@dataclass(frozen=True, slots=True)
class Argument:
    """`low` and `high` bound an integer's value or a text's length in characters."""

    name: str
    kind: Kind
    required: bool = False
    low: int = 0
    high: int = MAX_ID


@dataclass(frozen=True, slots=True)
class Operation:
    """`deadline_s` is how long the answer may take where the request does not say.

    `mutates`: the daemon logs who asked, and carries it through even if the deadline passes.
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
    Operation("status", Right.ANY, "GPUs, domains, clients, what is held for the dead"),
    Operation("holders", Right.ANY, "who has work or memory on a GPU, dead or alive; a user sees its own"),
    Operation(
        "faults",
        Right.ANY,
        "fault records, newest last; a user gets those that concern its own clients",
        (Argument("limit", Kind.INTEGER, low=1, high=1000), _SINCE),
    ),
    Operation(
        "failovers",
        Right.ANY,
        "what became of programs whose domains were left, newest last; a user gets those of its own",
        (Argument("limit", Kind.INTEGER, low=1, high=1000), _SINCE),
    ),
    Operation(
        "explain",
        Right.ANY,
        "one class of fault",
        (Argument("class", Kind.TEXT, required=True, low=1, high=64),),
    ),
    Operation(
        "kill",
        Right.OWN_CLIENT,
        "evict one client; nobody else is harmed",
        (_PID, Argument("start_ticks", Kind.INTEGER), _DRY_RUN, _REASON),
        deadline_s=20.0,
        mutates=True,
    ),
    Operation(
        "env",
        Right.ANY,
        "the environment that a workload of this user must set; may start a domain",
        (_GPU, Argument("shared", Kind.FLAG), Argument("standby", Kind.FLAG)),
        deadline_s=15.0,
    ),
    Operation("doctor", Right.ANY, "what this machine can and cannot do", deadline_s=30.0),
    Operation(
        "drain",
        Right.ADMIN,
        "take no new clients on a GPU, or on all",
        (_GPU, _DRY_RUN, _REASON),
        deadline_s=15.0,
        mutates=True,
    ),
    Operation(
        "undrain",
        Right.ADMIN,
        "take new clients again",
        (_GPU, _DRY_RUN, _REASON),
        deadline_s=15.0,
        mutates=True,
    ),
    Operation(
        "subscribe",
        Right.ANY,
        "events from now on, after those kept since an event number; a user gets its own",
        (_SINCE,),
    ),
    Operation(
        "zone_policy",
        Right.ADMIN,
        "what is done with one client when a guard zone absorbs an access of it",
        (_PID, _TICKS, Argument("policy", Kind.TEXT, required=True, low=1, high=16), _REASON),
        mutates=True,
    ),
    Operation("vault_list", Right.ANY, "what the vault holds; a user sees its own"),
    Operation(
        "vault_keep",
        Right.OWN_CLIENT,
        "what a program has in the vault, and will have, stays after it under a name",
        (_PID, Argument("start_ticks", Kind.INTEGER), _NAME, _DRY_RUN, _REASON),
        mutates=True,
    ),
    Operation(
        "vault_free",
        Right.OWN_CLIENT,
        "let go of one piece (by its id) or of all that is kept under a name",
        (Argument("what", Kind.TEXT, required=True, low=1, high=63), _DRY_RUN, _REASON),
        mutates=True,
    ),
    Operation("version", Right.ANY, "versions of the daemon and of what it runs on"),
)

OPERATIONS: Mapping[str, Operation] = MappingProxyType({row.name: row for row in _TABLE})

SUBSCRIBE = "subscribe"


@dataclass(frozen=True, slots=True)
class Request:
    """`args` were checked against the table; `deadline_ms` counts from the arrival of the request."""

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
    """`id` is None where the request was too broken to have one. `code` is that of an MpsdError."""

    id: int | None
    code: str
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class EventMessage:
    """One event, or (`lost` > 0, `event` empty) the number that this subscriber was too slow for.

    `seq` grows along the stream; gaps are events that are not for this user.
    """

    seq: int
    event: Mapping[str, object]
    lost: int = 0


Answer = Reply | ErrorReply | EventMessage
