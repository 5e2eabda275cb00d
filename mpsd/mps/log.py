"""Parser of the lines that the stock control daemon and servers write into control.log and server.log.

Pure: text in, frozen events out. A line is `[YYYY-MM-DD hh:mm:ss.mmm TAG PID] TEXT`. Tags and wording change
between driver releases (r550 prints clients as `{pid, context}`, r580 as `{PID: p, Context ID: c}`), so only
the text is matched, loosely. An unknown line is Unparsed, never guessed. In the foreground (driver 580) the
control daemon prints its own lines and those of its servers on stdout, mixed. Each line carries the pid of
its writer, which keeps blocks apart.

A user's server can write any line. Every pattern therefore takes time in proportion to the line: its repeated
parts are possessive, at most one part repeats without a fixed text before it, and a text in the middle of a
line is searched for. A number out of bounds makes its line Unparsed.

The log says that a fault happened and which clients it hit. It does not name the offender: see BlamedClient.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from mpsd.base.limits import PID_LIMIT

NOT_READY = 807
"""cudaErrorMpsServerNotReady: the status that a refused client sees."""
MAX_CLIENTS = 808
"""cudaErrorMpsMaxClientsReached: the server has no place for another client."""


@dataclass(frozen=True, slots=True)
class ControlStarted:
    socket: str


@dataclass(frozen=True, slots=True)
class BinaryVersion:
    """CUDA version of the binary: major * 1000 + minor * 10."""

    number: int


@dataclass(frozen=True, slots=True)
class NewClient:
    """A client requested a server. pid 0: the control daemon cannot see it (another pid namespace)."""

    pid: int
    uid: int
    pending: bool


@dataclass(frozen=True, slots=True)
class ServerStarted:
    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class ServerReady:
    pid: int


@dataclass(frozen=True, slots=True)
class ServerExited:
    pid: int
    status: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class FatalShutdown:
    """The control daemon saw its server end by a fatal exception."""


@dataclass(frozen=True, slots=True)
class AdminCommand:
    """A command of any front end, mpsd's own included."""

    text: str


@dataclass(frozen=True, slots=True)
class ClientStatus:
    pid: int
    context: int
    active: bool


@dataclass(frozen=True, slots=True)
class ClientDisconnected:
    """The server lost the connection of a client. A normal exit has status 806: no fault."""

    pid: int | None
    status: int | None
    context: int | None = None


@dataclass(frozen=True, slots=True)
class ClientExit:
    pid: int
    context: int


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The last connection of a process ended."""

    pid: int


@dataclass(frozen=True, slots=True)
class ClientRefused:
    """A client was turned away; status 807 means that the server is in FAULT or not ready.

    `pid` is None for status 808, the server has no place: its line names no client.
    """

    pid: int | None
    status: int


@dataclass(frozen=True, slots=True)
class Termination:
    """The outcome of a terminate_client, as the server reports it."""

    succeeded: bool


@dataclass(frozen=True, slots=True)
class ServerFatal:
    """A fatal GPU error reached the server: its clients are lost from here on."""


@dataclass(frozen=True, slots=True)
class AffectedDevice:
    device: int


@dataclass(frozen=True, slots=True)
class AffectedClient:
    """A client with a sticky error: hit by the fault. The offender is one of them."""

    pid: int


@dataclass(frozen=True, slots=True)
class BlamedClient:
    """The client that the server names as the one with the error: NO evidence of the offender.

    It is the owner of the channel that the driver found, as in the kernel log. On driver 580 it was an
    innocent client in 8 of 12 memory faults.
    """

    pid: int
    context: int


@dataclass(frozen=True, slots=True)
class DeviceReset:
    """The server's context on a device was destroyed, at recovery or shutdown."""

    device: int


@dataclass(frozen=True, slots=True)
class ContextCreated:
    """The server created its context on a device, at start or at recovery."""

    device: int


@dataclass(frozen=True, slots=True)
class Routine:
    """A known line without anything that mpsd uses."""

    text: str


@dataclass(frozen=True, slots=True)
class Unparsed:
    text: str


Event = (
    ControlStarted
    | BinaryVersion
    | NewClient
    | ServerStarted
    | ServerReady
    | ServerExited
    | StartFailed
    | FatalShutdown
    | AdminCommand
    | ClientStatus
    | ClientDisconnected
    | ClientExit
    | ClientGone
    | ClientRefused
    | Termination
    | ServerFatal
    | AffectedDevice
    | AffectedClient
    | BlamedClient
    | DeviceReset
    | ContextCreated
    | Routine
    | Unparsed
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log. `time` is the local time as written; `tag` and `writer` (a pid) may be missing."""

    time: str
    tag: str
    writer: int | None
    text: str
    event: Event


_UID_LIMIT = (1 << 32) - 1
_STATUS_LIMIT = (1 << 31) - 1
_CONTEXT_LIMIT = (1 << 64) - 1
_DIGITS = len(str(_CONTEXT_LIMIT))
BLOCKS_KEPT = 64
"""Writers with an open block. A user's server can write the pid of any writer."""

_PREFIX = re.compile(
    r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d++)?)\s++([A-Za-z][A-Za-z\s]*+)(?<=\s)(\d++)\]\s?(.*+)",
    re.ASCII | re.DOTALL,
)
_CLIENT = r"\{\s*+(?:PID:\s*+)?(?P<pid>\d++)\s*+,\s*+(?:Context(?: ID)?:\s*+)?(?P<context>\d++)\s*+\}"


class _OutOfBoundsError(ValueError):
    """A number of the line cannot be what the line says it is."""


def _number(digits: str, limit: int, least: int = 0) -> int:
    number = int(digits) if len(digits) <= _DIGITS else limit + 1
    if not least <= number <= limit:
        raise _OutOfBoundsError(digits[: _DIGITS + 1])
    return number


def _pid(found: re.Match[str]) -> int:
    return _number(found["pid"], PID_LIMIT, 1)


def _status(found: re.Match[str]) -> int:
    return _number(found["status"], _STATUS_LIMIT)


def _client(found: re.Match[str]) -> tuple[int, int]:
    return _pid(found), _number(found["context"], _CONTEXT_LIMIT)


_Make: TypeAlias = Callable[[re.Match[str]], Event]
_Search: TypeAlias = Callable[[str], re.Match[str] | None]
_Rule: TypeAlias = tuple[str, _Search, _Make]
"""Words without which the rule does not apply, in lower case; the search in a line; what a match means."""


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE | re.ASCII)


def _starts(words: str, pattern: str, make: _Make) -> _Rule:
    return words, _compiled(pattern).match, make


def _has(words: str, pattern: str, make: _Make) -> _Rule:
    return words, _compiled(pattern).search, make


_SOME_CLIENT = _compiled(rf"client {_CLIENT}")
_SOME_STATUS = _compiled(r"status (?P<status>\d++)")


def _disconnected(found: re.Match[str]) -> ClientDisconnected:
    client = _SOME_CLIENT.search(found.string)
    pid, context = _client(client) if client else (None, None)
    status = _SOME_STATUS.search(found.string)
    return ClientDisconnected(pid, _status(status) if status else None, context)


_RULES: tuple[_Rule, ...] = (
    _starts(
        "new client",
        r"NEW CLIENT (?P<pid>\d++) from user (?P<uid>\d++)(?P<rest>.*+)",
        lambda m: NewClient(
            _number(m["pid"], PID_LIMIT), _number(m["uid"], _UID_LIMIT), "pending" in m["rest"]
        ),
    ),
    _starts(
        "starting new server",
        r"Starting new server (?P<pid>\d++) for user (?P<uid>\d++)",
        lambda m: ServerStarted(_pid(m), _number(m["uid"], _UID_LIMIT)),
    ),
    _starts("new server", r"NEW SERVER (?P<pid>\d++):? *+Ready", lambda m: ServerReady(_pid(m))),
    _starts(
        "exited with status",
        r"Server (?P<pid>\d++) exited with status (?P<minus>-?)(?P<status>\d++)",
        lambda m: ServerExited(_pid(m), -_status(m) if m["minus"] else _status(m)),
    ),
    _starts(
        "starting control daemon",
        r"Starting control daemon using socket (?P<path>.++)",
        lambda m: ControlStarted(m["path"].strip()),
    ),
    _has(
        "binary version:",
        r"binary version: *+(?P<number>\d++)",
        lambda m: BinaryVersion(_number(m["number"], _STATUS_LIMIT)),
    ),
    _starts("fatal exception", r"Server encountered a fatal exception", lambda m: FatalShutdown()),
    _starts("cmd:", r"Cmd: ?(?P<text>.*+)", lambda m: AdminCommand(m["text"].strip())),
    # It repeats words of the person who asked: none of them is a message of the daemon.
    _starts("unknown command", r"Unknown command .*+", lambda m: Routine(m[0])),
    _has(
        "failed to start",
        r"Failed to start *+: *+(?P<reason>.++)",
        lambda m: StartFailed(m["reason"].strip()),
    ),
    _has(
        "encountered a fatal", rf"Client {_CLIENT} encountered a fatal", lambda m: BlamedClient(*_client(m))
    ),
    _has("handling a fatal", r"handling a fatal GPU error", lambda m: ServerFatal()),
    _has(
        "status of client",
        rf"status of client {_CLIENT} is (?P<state>\w++)",
        lambda m: ClientStatus(*_client(m), m["state"].upper() == "ACTIVE"),
    ),
    _starts(
        "failed to accept client",
        rf"Failed to accept client {_CLIENT} with status (?P<status>\d++)",
        lambda m: ClientRefused(_client(m)[0], _status(m)),
    ),
    _starts(
        "failed to accept new client",
        r"Failed to accept new client\. Maximum number of clients",
        lambda m: ClientRefused(None, MAX_CLIENTS),
    ),
    # "recevie" is the spelling of driver 580. Older drivers name the client before it, or not at all.
    _has("failed to rece", r"failed to rece", _disconnected),
    _has("receive command failed", r"Receive command failed", _disconnected),
    _has("exit", rf"Client {_CLIENT} exit", lambda m: ClientExit(*_client(m))),
    _has(
        "client process",
        r"Client process (?P<pid>\d++) disconnected",
        lambda m: ClientGone(_pid(m)),
    ),
    _starts("client termination", r"Client termination succeeded", lambda m: Termination(True)),
    _starts("client termination", r"Client termination failed", lambda m: Termination(False)),
    _has(
        "server context on device",
        r"Destroy(?:ing)? server context on device (?P<number>\d++)",
        lambda m: DeviceReset(_number(m["number"], _STATUS_LIMIT)),
    ),
    _has(
        "server context on device",
        r"Creating server context on device (?P<number>\d++)",
        lambda m: ContextCreated(_number(m["number"], _STATUS_LIMIT)),
    ),
)

_ROUTINE_STARTS = (
    "accepting connection",
    "user did not send valid credentials",
    "to connect cuda applications",
    "new ui",
    "ui closed",
    "device pinned memory limit",
    "server priority",
    "server has started",
    "display driver version",
    "using log directory",
    "received device query",
    "client priority",
    "mps server requesting client",
    "client termination request",
    "quit command",
    "try shutting down",
    "force shutting down",
    "control will try",
    "exit with status",
    "server has been notified",
)
_ROUTINE_TEXTS = ("start", "startup", "exiting")
_ROUTINE_WORDS = (
    "connecting to control daemon",
    "initializing server process",
    "active thread percentage",
    "active threads percentage",
    "new client request",
    "worker created",
    "worker thread",
    "active client contexts",
    "to be torn down",
    "will be torn down",
    "teardown in progress",
    "waiting for current clients",
    "unable to shut down",
    "unable to shutdown",
    "active worker threads",
)
_ROUTINE_PAIRS = (("device ", "is associated"), ("client ", "connected"))


def _is_routine(text: str) -> bool:
    """Return whether this is a known line without anything that mpsd uses. `text`: in lower case."""
    created = text.startswith(("create ", "created ")) and "shared memory" in text
    return (
        created
        or text in _ROUTINE_TEXTS
        or text.startswith(_ROUTINE_STARTS)
        or text.endswith("failed to start")
        or any(words in text for words in _ROUTINE_WORDS)
        or any(_in_order(text, *pair) for pair in _ROUTINE_PAIRS)
    )


def _in_order(text: str, first: str, then: str) -> bool:
    at = text.find(first)
    return at >= 0 and text.find(then, at + len(first)) >= 0


class _Block(Enum):
    """The list of bare numbers that was announced."""

    DEVICES = "devices"
    CLIENTS = "clients"


_HEADERS: tuple[tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str], _Block], ...] = tuple(
    (
        _compiled(rf"{noun}s?\b"),
        _compiled(rf"\b(?:{state}|affected)"),
        _compiled(rf"affected {noun}s?"),
        block,
    )
    for noun, state, block in (
        ("client", "sticky", _Block.CLIENTS),
        ("device", "reset", _Block.DEVICES),
    )
)
_BLOCK_EVENTS: dict[_Block, tuple[Callable[[int], Event], int, int]] = {
    _Block.DEVICES: (AffectedDevice, 0, _STATUS_LIMIT),
    _Block.CLIENTS: (AffectedClient, 1, PID_LIMIT),
}


def _announced(text: str) -> _Block | None:
    """Return the block that this line announces: the first noun, then its state, or the other way round."""
    for noun, state, both, block in _HEADERS:
        first = noun.search(text)
        if first is not None and (state.search(text, first.end()) or both.search(text)):
            return block
    return None


class LogParser:
    """Parses the lines of one log in order. Keeps the state of multi-line blocks, and two counters."""

    def __init__(self) -> None:
        self.lines = 0
        self.unparsed = 0
        self._writer: int | None = None
        # By the pid of the writer: lines of the control daemon and its servers come mixed.
        self._blocks: dict[int | None, _Block] = {}
        self._replying: int | None = None

    def feed(self, line: str) -> LogLine:
        """Parse one line, without its newline."""
        self.lines += 1
        try:
            parsed = self._parsed(line)
        except _OutOfBoundsError:
            parsed = LogLine("", "", None, line.strip(), Unparsed(line.strip()))
        if isinstance(parsed.event, Unparsed):
            self.unparsed += 1
        return parsed

    def _parsed(self, line: str) -> LogLine:
        found = _PREFIX.match(line)
        if found is None:
            # Lines of a block may come without a prefix: they belong to the previous writer.
            text = line.strip()
            return LogLine("", "", None, text, self._event(text))
        time, tag, writer, text = found[1], found[2].strip(), _number(found[3], PID_LIMIT), found[4].strip()
        self._writer = writer
        return LogLine(time, tag, writer, text, self._event(text))

    def _event(self, text: str) -> Event:
        if listed := self._listed(text):
            return listed
        self._blocks.pop(self._writer, None)
        lower = text.lower()
        for words, search, make in _RULES:
            if words in lower and (found := search(text)):
                event = make(found)
                if isinstance(event, AdminCommand):
                    self._replying = self._writer
                return event
        return self._other(text, lower)

    def _listed(self, text: str) -> Event | None:
        block = self._blocks.get(self._writer)
        if block is None or not (text.isascii() and text.isdigit()):
            return None
        make, least, limit = _BLOCK_EVENTS[block]
        return make(_number(text, limit, least))

    def _other(self, text: str, lower: str) -> Event:
        replying = self._replying is not None and self._replying == self._writer
        if replying and lower.startswith(("ui closed", "new ui", "accepting connection")):
            self._replying = None
        if not text or _is_routine(lower):
            return Routine(text)
        block = _announced(text)
        if block is not None:
            if len(self._blocks) >= BLOCKS_KEPT:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[self._writer] = block
            return Routine(text)
        # All text of the daemon between a command and the end of its connection is the reply.
        return Routine(text) if replying else Unparsed(text)
