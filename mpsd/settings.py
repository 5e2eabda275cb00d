"""Settings of the stock control daemon that must outlive it: from the configuration, or made by hand.

The stock daemon forgets them when it quits. What an operator sets on a running domain shows in its
control log, so it is kept and applied to every later domain of the same owner (a user, or everybody).

What is trusted: a log line only says where to look. It must be a known command with a value in range for
a GPU that is there, and the control daemon itself must say, when asked, that this is its value now.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpsd.config import Limits

PERCENTAGE = "set_default_active_thread_percentage"
PRIORITY = "set_default_client_priority"
MEMORY = "set_default_device_pinned_mem_limit"
EVERYBODY = "everybody"
"""The owner of shared domains, in the state file and in `status`."""
_ANSWERED = 0.06  # The control daemon answers with one decimal.
_LONGEST_COMMAND = 200
_MIB = {"M": 1, "G": 1024}


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of one key. `device` is empty but for the memory limit."""

    name: str
    device: str
    value: str

    @property
    def key(self) -> str:
        return f"{self.name} {self.device}".rstrip()

    @property
    def command(self) -> str:
        return f"{self.key} {self.value}"

    @property
    def question(self) -> str:
        """The command that asks the control daemon for its present value."""
        return self.key.replace("set_", "get_", 1)

    def confirmed(self, reply: str) -> bool:
        """Whether the answer to `question` is this value."""
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([MG%]?)", reply.strip(), re.ASCII)
        if found is None:
            return False
        if self.name != MEMORY:
            return abs(float(found[1]) - float(self.value)) < _ANSWERED
        if found[2] not in _MIB:
            return False
        told, ours = float(found[1]) * _MIB[found[2]], mebibytes(self.value)
        # Driver 595 answers with whole GiB from one GiB on.
        return told == ours or (found[2] == "G" and told == ours - ours % 1024)


def mebibytes(value: str) -> int:
    """`1G` or `512M` (checked before) in MiB."""
    return int(value[:-1]) * _MIB[value[-1]]


def understood(command: str, gpus: Sequence[str]) -> Setting | None:
    """The setting that a command makes in a domain of these GPUs (UUIDs); None for commands of other kinds.

    Raises ValueError for a setting that no control daemon takes, or that this domain has no GPU for.
    """
    words = command[: _LONGEST_COMMAND + 1].split()
    if not words or words[0] not in (PERCENTAGE, PRIORITY, MEMORY):
        return None
    if len(command) > _LONGEST_COMMAND or len(words) != (3 if words[0] == MEMORY else 2):
        raise ValueError(f"{words[0]} takes other arguments")
    name, value = words[0], words[-1]
    if name == PERCENTAGE:
        number = re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?", value, re.ASCII)
        good = number is not None and 0 < float(value) <= 100
    elif name == PRIORITY:
        good = value in ("0", "1")
    else:
        value = value.upper()
        known = {str(i) for i in range(len(gpus))} | set(gpus)
        good = words[1] in known and re.fullmatch(r"[1-9][0-9]{0,7}[MG]", value, re.ASCII) is not None
    if not good:
        raise ValueError(f"{name} takes no such value here")
    return Setting(name, words[1] if name == MEMORY else "", value)


class ControlSettings:
    """The settings of a new control daemon: what the configuration says, and over it what was set by hand.

    Only the latter is kept over a restart of mpsd: the configuration may have changed by then. An owner is
    a uid, or None for domains of everybody.
    """

    def __init__(self, limits: Limits) -> None:
        found = []
        if limits.active_thread_percentage is not None:
            found.append(Setting(PERCENTAGE, "", f"{limits.active_thread_percentage:g}"))
        if limits.client_priority is not None:
            found.append(Setting(PRIORITY, "", str(limits.client_priority)))
        for gpu, value in limits.pinned_device_memory.items():
            found.append(Setting(MEMORY, gpu, f"{mebibytes(value)}M"))
        self._configured = {setting.key: setting for setting in found}
        self._by_hand: dict[int | None, dict[str, Setting]] = {}

    def _of(self, owner: int | None) -> dict[str, Setting]:
        return self._configured | self._by_hand.get(owner, {})

    def known(self, setting: Setting, owner: int | None) -> bool:
        return self._of(owner).get(setting.key) == setting

    def learn(self, setting: Setting, owner: int | None) -> None:
        """Keep a setting for later domains of this owner."""
        own = self._by_hand.setdefault(owner, {})
        # Set anew, it becomes the last one: for a memory limit by number and by UUID the last one counts.
        own.pop(setting.key, None)
        if self._configured.get(setting.key) != setting:
            own[setting.key] = setting

    def commands(self, owner: int | None) -> Sequence[str]:
        return tuple(setting.command for setting in self._of(owner).values())

    def by_hand(self) -> Mapping[str, Sequence[str]]:
        """Those that the configuration does not say, by owner, for the state file."""
        return {
            EVERYBODY if owner is None else str(owner): [s.command for s in own.values()]
            for owner, own in self._by_hand.items()
            if own
        }

    def restore(self, saved: Mapping[str, Sequence[str]], gpus: Sequence[str]) -> None:
        """Take back what `by_hand` gave. Raises ValueError for what it cannot have given."""
        for owner, commands in saved.items():
            for command in commands:
                setting = understood(command, gpus)
                if setting is not None:
                    self.learn(setting, None if owner == EVERYBODY else int(owner))

    def limit_of(self, gpu: str) -> Mapping[str, str]:
        """What `status` shows: setting to value, without the command words."""
        shown = {}
        owners = [(None, self._of(None)), *((o, s) for o, s in self._by_hand.items() if o is not None)]
        for owner, settings in owners:
            for setting in settings.values():
                if setting.device in ("", gpu):
                    whose = "" if owner is None else f" (user {owner})"
                    shown[setting.name.removeprefix("set_default_") + whose] = setting.value
        return shown
