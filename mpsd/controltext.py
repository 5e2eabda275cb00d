"""What the control binary answers to the v2 text commands. Pure and tolerant: the exit status is
0 whenever the daemon could be reached, so whether a command worked stands in the text alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from mpsd.errors import ControlError
from mpsd.model import ServerState
from mpsd.text import printable


class TerminateOutcome(Enum):
    """How terminate_client ended. After DEADLINE the client may still be terminated later on."""

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
    "get_default_client_priority",
}
_BUSY = re.compile(r"cannot send command to MPS control daemon", re.IGNORECASE)
_ALREADY = re.compile(r"instance of this daemon is already running|already running", re.IGNORECASE)
_COMPLAINT = re.compile(
    r"invalid|error|fail|unknown|unrecogni[sz]ed|unsupported|usage|cannot|can't|no such"
    r"|not (?:found|a valid|support)",
    re.IGNORECASE,
)


def no_daemon(reply: str) -> bool:
    return bool(_NO_DAEMON.search(reply))


def busy(command: str, reply: str) -> bool:
    """Another front end was being served: the command was not taken, or its answer was lost.

    Driver 580 says so, or says nothing at all, which for these commands is never an answer.
    """
    if not reply.strip():
        return command.split()[0] in _NEVER_SILENT
    return bool(_BUSY.search(reply))


def already_running(reply: str) -> bool:
    return bool(_ALREADY.search(reply))


def pids(reply: str) -> tuple[int, ...]:
    """A list of pids, by any white space. Raises ControlError when there is anything else in it."""
    words = reply.split()
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ControlError(f"expected pids, the control daemon answered: {printable(reply.strip())!r}")
    return tuple(int(word) for word in words)


def server_state(reply: str) -> ServerState:
    """One word; anything that says that there is no such server is GONE. Raises ControlError."""
    word = reply.strip().upper()
    if word in ServerState.__members__:
        return ServerState[word]
    if _COMPLAINT.search(reply):
        return ServerState.GONE
    raise ControlError(f"expected a server state, the control daemon answered: {printable(reply.strip())!r}")


def terminated(reply: str) -> TerminateReply:
    """The last line is a CUDA error, 0 for success.

    A process that is gone gets `Invalid process N!` and 1, one without a context in this server 201
    (invalid context).
    """
    text = reply.strip()
    code = text.split()[-1:]
    if code == ["201"] or re.search(r"invalid process", text, re.IGNORECASE):
        return TerminateReply(TerminateOutcome.NOT_A_CLIENT, text)
    if code == ["0"]:
        return TerminateReply(TerminateOutcome.DONE, text)
    return TerminateReply(TerminateOutcome.REFUSED, text)


def percentage(reply: str) -> float:
    """A float such as 25.0. Raises ControlError."""
    try:
        return float(reply.split()[-1].rstrip("%"))
    except (IndexError, ValueError):
        raise ControlError(
            f"expected a percentage, the control daemon answered: {printable(reply.strip())!r}"
        ) from None


def priority(reply: str) -> int:
    """0 or 1. Raises ControlError."""
    found = re.search(r"(\d+)\s*$", reply)
    if not found:
        raise ControlError(f"expected a priority, the control daemon answered: {printable(reply.strip())!r}")
    return int(found[1])


def accepted(command: str, reply: str) -> str:
    """The reply of a set command, stripped. Raises ControlError when it reads like a complaint."""
    if _COMPLAINT.search(reply):
        raise ControlError(f"{command}: the control daemon answered: {printable(reply.strip())!r}")
    return reply.strip()
