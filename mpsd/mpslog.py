"""What the stock control daemon and servers write into control.log and server.log.

Pure: text in, frozen events out. A line is `[YYYY-MM-DD hh:mm:ss.mmm TAG PID] TEXT`; tags and
wording move between driver releases (r550 prints clients as `{pid, context}`, r580 as
`{PID: p, Context ID: c}`), so only the text is matched, loosely. What is not known is Unparsed,
never guessed. The log says that a fault happened and who was hit by it; it names the client that
caused it at best for memory faults.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


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


@dataclass(frozen=True, slots=True)
class ClientExit:
    pid: int
    context: int


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
class CulpritClient:
    """The client that the server itself names as the cause of a memory fault."""

    pid: int


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
    | ServerFatal
    | AffectedDevice
    | AffectedClient
    | CulpritClient
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
_CLIENT = r"\{\s*(?:PID:\s*)?(?P<pid>\d+)\s*,\s*(?:Context ID:\s*)?(?P<context>\d+)\s*\}"


def _number(found: re.Match[str], name: str) -> int:
    return int(found[name])


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
    _rule(r".*handling a fatal GPU error", lambda m: ServerFatal()),
    _rule(
        rf".*status of client {_CLIENT} is (?P<state>\w+)",
        lambda m: ClientStatus(_number(m, "pid"), _number(m, "context"), m["state"].upper() == "ACTIVE"),
    ),
    _rule(
        rf"(?:.*client {_CLIENT})?.*failed to receive.*status (?P<status>\d+)",
        lambda m: ClientDisconnected(int(m["pid"]) if m["pid"] else None, _number(m, "status")),
    ),
    _rule(
        rf"(?:.*client {_CLIENT})?.*Receive command failed",
        lambda m: ClientDisconnected(int(m["pid"]) if m["pid"] else None, None),
    ),
    _rule(rf".*Client {_CLIENT} exit", lambda m: ClientExit(_number(m, "pid"), _number(m, "context"))),
    _rule(r".*Destroy(?:ing)? server context on device (?P<n>\d+)", lambda m: DeviceReset(_number(m, "n"))),
    _rule(r".*Creating server context on device (?P<n>\d+)", lambda m: ContextCreated(_number(m, "n"))),
    _rule(
        r".*(?:culprit|triggered the|caused the|at fault|responsible)\D*(?P<pid>\d+)",
        lambda m: CulpritClient(_number(m, "pid")),
    ),
)

_ROUTINE = re.compile(
    r"""
    Accepting\ connection | User\ did\ not\ send\ valid\ credentials | To\ connect\ CUDA\ applications
    | NEW\ UI | UI\ closed | Start(up)?$ | .*connecting\ to\ control\ daemon | .*Initializing\ server\ process
    | Created?\ .*shared\ memory | .*Active\ Threads?\ Percentage | Device\ pinned\ memory\ limit
    | Server\ Priority | Server\ has\ started | Display\ Driver\ version | .*new\ client\ request
    | .*worker\ (created|thread) | .*Device\ .*is\ associated | .*Client\ .*connected
    | .*active\ client\ contexts | .*failed\ to\ start$ | .*waiting\ for\ current\ clients
    """,
    re.VERBOSE | re.IGNORECASE,
)


class _Block(Enum):
    """Which list of bare numbers is being announced."""

    NONE = 0
    DEVICES = 1
    CLIENTS = 2
    CULPRIT = 3


_HEADERS: tuple[tuple[re.Pattern[str], _Block], ...] = (
    (re.compile(r".*(?:culprit|triggered|caused|responsible)[^\d]*$", re.I), _Block.CULPRIT),
    (re.compile(r".*clients?\b.*\b(?:sticky|affected)|.*affected clients?", re.I), _Block.CLIENTS),
    (re.compile(r".*devices?\b.*\b(?:reset|affected)|.*affected devices?", re.I), _Block.DEVICES),
)
_BLOCK_EVENTS: dict[_Block, Callable[[int], Event]] = {
    _Block.DEVICES: AffectedDevice,
    _Block.CLIENTS: AffectedClient,
    _Block.CULPRIT: CulpritClient,
}


class LogParser:
    """Parses the lines of one log in order. Keeps what a multi-line block needs, and two counters."""

    def __init__(self) -> None:
        self.lines = 0
        self.unparsed = 0
        self._block = _Block.NONE
        self._replying = False

    def feed(self, line: str) -> LogLine:
        """Parse one line, without its newline."""
        self.lines += 1
        found = _PREFIX.match(line)
        if found:
            time, tag, writer, text = found[1], found[2], int(found[3]), found[4].strip()
        else:
            time, tag, writer, text = "", "", None, line.strip()
        event = self._event(text)
        if isinstance(event, Unparsed):
            self.unparsed += 1
        return LogLine(time, tag, writer, text, event)

    def _event(self, text: str) -> Event:
        if listed := self._listed(text):
            return listed
        self._block = _Block.NONE
        for pattern, make in _RULES:
            if found := pattern.match(text):
                event = make(found)
                self._replying |= isinstance(event, AdminCommand)
                return event
        return self._other(text)

    def _listed(self, text: str) -> Event | None:
        if self._block is _Block.NONE or not re.fullmatch(r"[\d\s,]+", text):
            return None
        # One number per line is the shape; several on one line are left unparsed rather than half read.
        if not text.isdigit():
            return Unparsed(text)
        return _BLOCK_EVENTS[self._block](int(text))

    def _other(self, text: str) -> Event:
        if text.lower().startswith(("ui closed", "new ui", "accepting connection")):
            self._replying = False
        if not text or _ROUTINE.match(text):
            return Routine(text)
        for pattern, block in _HEADERS:
            if pattern.match(text):
                self._block = block
                return Routine(text)
        # Whatever stands between a command and the end of its connection is the reply.
        return Routine(text) if self._replying else Unparsed(text)
