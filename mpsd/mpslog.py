"""What the stock control daemon and servers write into control.log and server.log.

Pure: text in, frozen events out. A line is `[YYYY-MM-DD hh:mm:ss.mmm TAG PID] TEXT`; tags and
wording move between driver releases (r550 prints clients as `{pid, context}`, r580 as
`{PID: p, Context ID: c}`), so only the text is matched, loosely. What is not known is Unparsed,
never guessed. In the foreground (driver 580) the control daemon prints its own lines and those of
its servers on stdout, mixed; each line carries the pid of its writer, which keeps blocks apart.

The log says that a fault happened and whom it hit. It does not say who caused it: see BlamedClient.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

NOT_READY = 807
"""cudaErrorMpsServerNotReady: the status that a refused client sees."""


@dataclass(frozen=True, slots=True)
class ControlStarted:
    socket: str


@dataclass(frozen=True, slots=True)
class BinaryVersion:
    """CUDA version of the binary: major * 1000 + minor * 10."""

    number: int


@dataclass(frozen=True, slots=True)
class NewClient:
    """A client asked for a server. pid 0: the control daemon cannot see it (another pid namespace)."""

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
    """The server lost the connection. Status 806 is how a normal exit looks: no fault."""

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
    """A client was turned away; status 807 means that the server is in FAULT or not ready."""

    pid: int
    status: int


@dataclass(frozen=True, slots=True)
class Termination:
    """How a terminate_client ended, as the server tells it."""

    succeeded: bool


@dataclass(frozen=True, slots=True)
class ServerFatal:
    """A fatal GPU error reached the server: its clients are lost from here on."""


@dataclass(frozen=True, slots=True)
class AffectedDevice:
    device: int


@dataclass(frozen=True, slots=True)
class AffectedClient:
    """A client with a sticky error: hit by the fault, the offender among the others."""

    pid: int


@dataclass(frozen=True, slots=True)
class BlamedClient:
    """The client that the server says met the error: NO evidence of who caused it.

    It is the owner of the channel that the driver found, as in the kernel log. On driver 580 it was
    an innocent client in 8 of 12 memory faults.
    """

    pid: int
    context: int


@dataclass(frozen=True, slots=True)
class DeviceReset:
    """The server's context on a device was destroyed, at recovery or shutdown."""

    device: int


@dataclass(frozen=True, slots=True)
class ContextCreated:
    """The server made its context on a device, at start or at recovery."""

    device: int


@dataclass(frozen=True, slots=True)
class Routine:
    """A line that is known and says nothing that mpsd uses."""

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
    """One line of a log. `time` is the local time as written, `tag` and `writer` (a pid) may be missing."""

    time: str
    tag: str
    writer: int | None
    text: str
    event: Event


_PREFIX = re.compile(
    r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)\s+([A-Za-z][A-Za-z ]*?)\s+(\d+)\]\s?(.*)", re.S
)
_CLIENT = r"\{\s*(?:PID:\s*)?(?P<pid>\d+)\s*,\s*(?:Context(?: ID)?:\s*)?(?P<context>\d+)\s*\}"


def _number(found: re.Match[str], name: str) -> int:
    return int(found[name])


def _client(found: re.Match[str]) -> tuple[int, int]:
    return _number(found, "pid"), _number(found, "context")


def _disconnected(found: re.Match[str], status: str | None) -> ClientDisconnected:
    pid, context = _client(found) if found["pid"] else (None, None)
    return ClientDisconnected(pid, int(status) if status else None, context)


_Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], Event]]


def _rule(pattern: str, make: Callable[[re.Match[str]], Event]) -> _Rule:
    return re.compile(pattern, re.IGNORECASE), make


_RULES: tuple[_Rule, ...] = (
    _rule(
        r"NEW CLIENT (?P<pid>\d+) from user (?P<uid>\d+)(?P<rest>.*)",
        lambda m: NewClient(_number(m, "pid"), _number(m, "uid"), "pending" in m["rest"]),
    ),
    _rule(
        r"Starting new server (?P<pid>\d+) for user (?P<uid>\d+)",
        lambda m: ServerStarted(_number(m, "pid"), _number(m, "uid")),
    ),
    _rule(r"NEW SERVER (?P<pid>\d+):? *Ready", lambda m: ServerReady(_number(m, "pid"))),
    _rule(
        r"Server (?P<pid>\d+) exited with status (?P<status>-?\d+)",
        lambda m: ServerExited(_number(m, "pid"), _number(m, "status")),
    ),
    _rule(r"Starting control daemon using socket (?P<path>.+)", lambda m: ControlStarted(m["path"].strip())),
    _rule(r".*binary version: *(?P<number>\d+)", lambda m: BinaryVersion(_number(m, "number"))),
    _rule(r"Server encountered a fatal exception", lambda m: FatalShutdown()),
    _rule(r"Cmd: ?(?P<text>.*)", lambda m: AdminCommand(m["text"].strip())),
    _rule(r".*Failed to start *: *(?P<reason>.+)", lambda m: StartFailed(m["reason"].strip())),
    _rule(rf".*Client {_CLIENT} encountered a fatal", lambda m: BlamedClient(*_client(m))),
    _rule(r".*handling a fatal GPU error", lambda m: ServerFatal()),
    _rule(
        rf".*status of client {_CLIENT} is (?P<state>\w+)",
        lambda m: ClientStatus(*_client(m), m["state"].upper() == "ACTIVE"),
    ),
    _rule(
        rf"Failed to accept client {_CLIENT} with status (?P<status>\d+)",
        lambda m: ClientRefused(_number(m, "pid"), _number(m, "status")),
    ),
    # "recevie" is how driver 580 spells it. Older ones name the client before, or not at all.
    _rule(
        rf"(?=.*failed to rece)(?=(?:.*client {_CLIENT})?)(?=(?:.*status (?P<status>\d+))?)",
        lambda m: _disconnected(m, m["status"]),
    ),
    _rule(rf"(?:.*client {_CLIENT})?.*Receive command failed", lambda m: _disconnected(m, None)),
    _rule(rf".*Client {_CLIENT} exit", lambda m: ClientExit(*_client(m))),
    _rule(r".*Client process (?P<pid>\d+) disconnected", lambda m: ClientGone(_number(m, "pid"))),
    _rule(r"Client termination succeeded", lambda m: Termination(True)),
    _rule(r"Client termination failed", lambda m: Termination(False)),
    _rule(r".*Destroy(?:ing)? server context on device (?P<n>\d+)", lambda m: DeviceReset(_number(m, "n"))),
    _rule(r".*Creating server context on device (?P<n>\d+)", lambda m: ContextCreated(_number(m, "n"))),
)

_ROUTINE = re.compile(
    r"""
    Accepting\ connection | User\ did\ not\ send\ valid\ credentials | To\ connect\ CUDA\ applications
    | NEW\ UI | UI\ closed | Start(up)?$ | .*connecting\ to\ control\ daemon | .*Initializing\ server\ process
    | Created?\ .*shared\ memory | .*Active\ Threads?\ Percentage | Device\ pinned\ memory\ limit
    | Server\ Priority | Server\ has\ started | Display\ Driver\ version | .*new\ client\ request
    | .*worker\ (created|thread) | .*Device\ .*is\ associated | .*Client\ .*connected
    | .*active\ client\ contexts | .*failed\ to\ start$ | Using\ log\ directory
    | .*to\ be\ torn\ down | .*will\ be\ torn\ down | .*teardown\ in\ progress
    | Received\ device\ query | Client\ Priority | MPS\ server\ requesting\ client
    | Client\ termination\ request
    | quit\ command | (Try|Force)\ shutting\ down | Control\ will\ try | Exiting$ | Exit\ with\ status
    | Server\ has\ been\ notified | .*waiting\ for\ current\ clients | .*unable\ to\ shut\ ?down
    | .*active\ worker\ threads
    """,
    re.VERBOSE | re.IGNORECASE,
)


class _Block(Enum):
    """Which list of bare numbers was announced."""

    DEVICES = "devices"
    CLIENTS = "clients"


_HEADERS: tuple[tuple[re.Pattern[str], _Block], ...] = (
    (re.compile(r".*clients?\b.*\b(?:sticky|affected)|.*affected clients?", re.I), _Block.CLIENTS),
    (re.compile(r".*devices?\b.*\b(?:reset|affected)|.*affected devices?", re.I), _Block.DEVICES),
)
_BLOCK_EVENTS: dict[_Block, Callable[[int], Event]] = {
    _Block.DEVICES: AffectedDevice,
    _Block.CLIENTS: AffectedClient,
}


class LogParser:
    """Parses the lines of one log in order. Keeps what a multi-line block needs, and two counters."""

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
        found = _PREFIX.match(line)
        if found:
            time, tag, writer, text = found[1], found[2], int(found[3]), found[4].strip()
            self._writer = writer
        else:
            # Lines of a block may come without a prefix: they belong to the one before.
            time, tag, writer, text = "", "", None, line.strip()
        event = self._event(text)
        if isinstance(event, Unparsed):
            self.unparsed += 1
        return LogLine(time, tag, writer, text, event)

    def _event(self, text: str) -> Event:
        if listed := self._listed(text):
            return listed
        self._blocks.pop(self._writer, None)
        for pattern, make in _RULES:
            if found := pattern.match(text):
                event = make(found)
                if isinstance(event, AdminCommand):
                    self._replying = self._writer
                return event
        return self._other(text)

    def _listed(self, text: str) -> Event | None:
        block = self._blocks.get(self._writer)
        return _BLOCK_EVENTS[block](int(text)) if block and text.isascii() and text.isdigit() else None

    def _other(self, text: str) -> Event:
        replying = self._replying is not None and self._replying == self._writer
        if replying and text.lower().startswith(("ui closed", "new ui", "accepting connection")):
            self._replying = None
        if not text or _ROUTINE.match(text):
            return Routine(text)
        for pattern, block in _HEADERS:
            if pattern.match(text):
                self._blocks[self._writer] = block
                return Routine(text)
        # Whatever the daemon says between a command and the end of its connection is the reply.
        return Routine(text) if replying else Unparsed(text)
