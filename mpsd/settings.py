"""Settings of the stock control daemon that must outlive it: from the configuration, or made by hand.

The stock daemon forgets them when it quits. What an operator sets on a running domain shows in its
control log, so it is kept and applied to every domain that starts later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpsd.config import Limits

# How many leading words of a command say what is set; the rest is the value.
_KEY_WORDS = {
    "set_default_active_thread_percentage": 1,
    "set_default_client_priority": 1,
    "set_default_device_pinned_mem_limit": 2,
}


def mebibytes(value: str) -> int:
    """`1G` or `512M` (checked by the configuration) in MiB."""
    return int(value[:-1]) * (1024 if value[-1] == "G" else 1)


class ControlSettings:
    """The commands for a new control daemon: what the configuration says, and over it what was set by hand.

    Only the latter is kept over a restart of mpsd: the configuration may have changed by then.
    """

    def __init__(self, limits: Limits) -> None:
        self._commands: dict[str, str] = {}
        self._configured: dict[str, str] = {}
        if limits.active_thread_percentage is not None:
            self.learn(f"set_default_active_thread_percentage {limits.active_thread_percentage:g}")
        if limits.client_priority is not None:
            self.learn(f"set_default_client_priority {limits.client_priority}")
        for gpu, value in limits.pinned_device_memory.items():
            self.learn(f"set_default_device_pinned_mem_limit {gpu} {mebibytes(value)}M")
        self._configured = dict(self._commands)

    def learn(self, command: str) -> bool:
        """Remember a command if it is a setting. True when it changed something."""
        words = command.split()
        count = _KEY_WORDS.get(words[0]) if words else None
        if count is None or len(words) != count + 1:
            return False
        key = " ".join(words[:count])
        changed = self._commands.get(key) != command
        self._commands[key] = command
        return changed

    def commands(self) -> Sequence[str]:
        return tuple(self._commands.values())

    def by_hand(self) -> Sequence[str]:
        """Those that the configuration does not say."""
        return tuple(c for key, c in self._commands.items() if self._configured.get(key) != c)

    def restore(self, commands: Sequence[str]) -> None:
        for command in commands:
            self.learn(command)

    def limit_of(self, gpu: str) -> Mapping[str, str]:
        """What `status` shows: setting to value, without the command words."""
        shown = {}
        for key, command in self._commands.items():
            words = key.split()
            if len(words) == 1 or words[1] == gpu:
                shown[words[0].removeprefix("set_default_")] = command.split()[-1]
        return shown
