"""The commands of the control daemon that read and set limits.

The control daemon has a default for servers that it starts later, and the limits of the running server. It
keeps a memory limit under the name by which it was set, the GPU's ordinal in this domain or its UUID, and the
last one set is in force. Some drivers ignore a limit by UUID.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpsd.limits.values import Key, Kind, said

_LONGEST_COMMAND = 200
# A client's priority comes from the control daemon alone, which has no command for one server.
_OF_SERVER = {Kind.PERCENTAGE, Kind.MEMORY}
_VERBS = {f"set_default_{kind}": (kind, False) for kind in Kind} | {
    f"set_{kind}": (kind, True) for kind in _OF_SERVER
}


@dataclass(frozen=True, slots=True, order=True)
class Question:
    """One value that a control daemon has. `server`: of the running server, else for later servers.

    `device`: the GPU's name in this domain, of a memory limit alone.
    """

    key: Key
    device: str = ""
    server: bool = False

    @property
    def name(self) -> str:
        """Return its name in the state file."""
        return f"{'server' if self.server else 'default'} {self.key.kind} {self.device}".rstrip()

    @property
    def by_uuid(self) -> bool:
        return bool(self.device) and self.device == self.key.gpu

    def read(self, server: int) -> str:
        """Return the command that reads the value. `server`: pid of the running server."""
        return f"get_{self._subject(server)}"

    def write(self, server: int, value: str) -> str:
        """Return the command that sets the value."""
        return f"set_{self._subject(server)} {value}"

    def _subject(self, server: int) -> str:
        words = [self.key.kind, str(server)] if self.server else [f"default_{self.key.kind}"]
        return " ".join([*words, self.device]).rstrip()


def questions(gpus: Sequence[str], *, server: bool) -> tuple[Question, ...]:
    """Return the questions to a domain of these GPUs (UUIDs), with those about its `server` if it has one.

    Of two names of a limit, the one that counts comes last.
    """
    found = []
    for of_server in (False, True) if server else (False,):
        for kind in Kind:
            if of_server and kind not in _OF_SERVER:
                continue
            if kind is not Kind.MEMORY:
                found.append(Question(Key(kind), "", of_server))
                continue
            for ordinal, uuid in enumerate(gpus):
                found += [Question(Key(kind, uuid), name, of_server) for name in (uuid, str(ordinal))]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Claim:
    """A command that a log reports. `value`: see values.said()."""

    question: Question
    value: str | None
    text: str


def claim(command: str, gpus: Sequence[str]) -> Claim | None:
    """Parse a command to a domain of these GPUs (UUIDs); None if it sets no limit.

    Raises ValueError if no control daemon of this domain takes it.
    """
    words = command[: _LONGEST_COMMAND + 1].split()
    kind, of_server = _VERBS.get(words[0] if words else "", (None, False))
    if kind is None:
        return None
    wanted = 2 + of_server + (kind is Kind.MEMORY)
    if len(command) > _LONGEST_COMMAND or len(words) != wanted:
        raise ValueError(f"{words[0]}: wrong number of arguments")
    if kind is not Kind.MEMORY:
        return Claim(Question(Key(kind), "", of_server), said(kind, words[-1]), command)
    names = {str(ordinal): uuid for ordinal, uuid in enumerate(gpus)} | {uuid: uuid for uuid in gpus}
    device = words[-2]
    if device not in names:
        raise ValueError(f"{words[0]}: this domain has no GPU {device}")
    return Claim(Question(Key(kind, names[device]), device, of_server), said(kind, words[-1]), command)
