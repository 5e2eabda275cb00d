"""The answers of the control binary to the v2 text commands: pure and tolerant parsers.

The exit status is 0 whenever the daemon could be reached, so only the text tells whether a command worked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from mpsd.base.errors import ControlError
from mpsd.base.limits import PID_LIMIT
from mpsd.base.model import ServerState
from mpsd.base.text import complains, printable


class TerminateOutcome(Enum):
    """The outcome of terminate_client. After DEADLINE the client may still be terminated later."""

    DONE = "done"
    NOT_A_CLIENT = "not a client"
    DEADLINE = "deadline"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class TerminateReply:
    outcome: TerminateOutcome
    text: str


_NO_DAEMON = re.compile(r"cannot find MPS control daemon", re.IGNORECASE)
_NEVER_SILENT = {
    "get_server_status",
    "terminate_client",
    "get_default_active_thread_percentage",
    "get_active_thread_percentage",
    "get_default_client_priority",
}
_BUSY = re.compile(r"cannot send command to MPS control daemon", re.IGNORECASE)
_ALREADY = re.compile(r"instance of this daemon is already running|already running", re.IGNORECASE)
_PID_DIGITS = len(str(PID_LIMIT))
_PERCENTAGE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%?")
# Driver releases differ in the text before the number.
_PRIORITY = re.compile(r"\D{0,64}([01])")


def no_daemon(reply: str) -> bool:
    return bool(_NO_DAEMON.search(reply))


def busy(command: str, reply: str) -> bool:
    """Return whether another front end was being served: the command was not taken, or its answer was lost.

    Driver 580 says so, or prints nothing, which is never a valid answer to these commands.
    """
    if not reply.strip():
        return command.split()[0] in _NEVER_SILENT
    return bool(_BUSY.search(reply))


def already_running(reply: str) -> bool:
    return bool(_ALREADY.search(reply))


def pids(reply: str) -> tuple[int, ...]:
    """Parse a list of pids, separated by any white space. Raises ControlError for anything else in it."""
    words = reply.split()
    if not all(map(_is_pid, words)):
        raise ControlError(f"expected pids, but the control daemon answered: {printable(reply.strip())!r}")
    return tuple(int(word) for word in words)


def server_state(reply: str) -> ServerState:
    """Parse a server state; an answer that there is no such server is GONE. Raises ControlError."""
    word = reply.strip().upper()
    if word in ServerState.__members__:
        return ServerState[word]
    if complains(reply):
        return ServerState.GONE
    raise ControlError(
        f"expected a server state, but the control daemon answered: {printable(reply.strip())!r}"
    )


def terminated(reply: str) -> TerminateReply:
    """Parse the answer to terminate_client: its last line is a CUDA error, 0 for success.

    A process that is gone gets `Invalid process N!` and 1; a process without a context in this server gets
    201 (invalid context).
    """
    text = reply.strip()
    code = text.split()[-1:]
    if code == ["201"] or re.search(r"invalid process", text, re.IGNORECASE):
        return TerminateReply(TerminateOutcome.NOT_A_CLIENT, text)
    if code == ["0"]:
        return TerminateReply(TerminateOutcome.DONE, text)
    return TerminateReply(TerminateOutcome.REFUSED, text)


def percentage(reply: str) -> float:
    """Parse a percentage such as 25.0. Raises ControlError."""
    found = _PERCENTAGE.fullmatch(_last_word(reply))
    if found is None or float(found[1]) > 100:
        raise ControlError(
            f"expected a percentage, but the control daemon answered: {printable(reply.strip())!r}"
        )
    return float(found[1])


def priority(reply: str) -> int:
    """Parse a priority, 0 or 1. Raises ControlError."""
    found = _PRIORITY.fullmatch(_last_word(reply))
    if found is None:
        raise ControlError(
            f"expected a priority, but the control daemon answered: {printable(reply.strip())!r}"
        )
    return int(found[1])


def _is_pid(word: str) -> bool:
    # The pid of a client in another pid namespace is 0.
    return word.isascii() and word.isdigit() and len(word) <= _PID_DIGITS and int(word) <= PID_LIMIT


def _last_word(reply: str) -> str:
    return "".join(reply.split()[-1:])


def accepted(command: str, reply: str) -> str:
    """Return the stripped reply of a set command. Raises ControlError when it reads like a complaint."""
    if complains(reply):
        raise ControlError(f"{command}: the control daemon answered: {printable(reply.strip())!r}")
    return reply.strip()
