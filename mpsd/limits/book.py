"""The limits that each slot is to have: those set by hand, else those of the configuration.

A slot is known by its GPUs and its user. A memory limit is kept under the UUID of its GPU, because an ordinal
means another GPU in another domain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpsd.base.model import Gpu
from mpsd.base.quantities import mebibytes
from mpsd.config.schema import Limits
from mpsd.limits.questions import Question, claim
from mpsd.limits.values import STOCK, Key, Kind, said

EVERYBODY = "everybody"
"""The user of shared slots in state files of earlier versions."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A slot: its GPUs (UUIDs) and its user, None for all users."""

    gpus: tuple[str, ...]
    uid: int | None


class LimitBook:
    """The limits of all slots. Only those set by hand are stored: the configuration may change meanwhile."""

    def __init__(self, limits: Limits, gpus: Iterable[Gpu]) -> None:
        """Keep the configuration. An index of a GPU means the one with this index among `gpus`."""
        configured: dict[Key, str] = {}
        if limits.active_thread_percentage is not None:
            configured[Key(Kind.PERCENTAGE)] = f"{limits.active_thread_percentage:g}"
        if limits.client_priority is not None:
            configured[Key(Kind.PRIORITY)] = str(limits.client_priority)
        here = tuple(gpus)
        memory = limits.pinned_device_memory
        # The UUID is the better name, so it wins over the index.
        for name in sorted(memory, key=lambda name: not name.isdecimal()):
            for gpu in here:
                if name == str(gpu.index) or (not name.isdecimal() and gpu.uuid.startswith(name)):
                    configured[Key(Kind.MEMORY, gpu.uuid)] = f"{mebibytes(memory[name])}M"
        self._configured = configured
        self._by_hand: dict[Owner, dict[Key, str]] = {}

    def configured(self, owner: Owner) -> Mapping[Key, str]:
        """Return the limits of the configuration for this slot's GPUs."""
        return {k: v for k, v in self._configured.items() if not k.gpu or k.gpu in owner.gpus}

    def by_hand(self) -> Mapping[Owner, Mapping[Key, str]]:
        """Return the limits set by hand."""
        return self._by_hand

    def wanted(self, owner: Owner) -> Mapping[Key, str]:
        """Return the limits that every domain of this slot is to have."""
        return {**STOCK, **self.configured(owner), **self._by_hand.get(owner, {})}

    def learn(self, owner: Owner, key: Key, value: str) -> bool:
        """Keep a limit that was set by hand. Return whether it is another one than before."""
        before = self.wanted(owner).get(key)
        own = self._by_hand.setdefault(owner, {})
        own.pop(key, None)
        if self.wanted(owner).get(key) != value:
            own[key] = value
        return before != value

    def rows(self) -> list[dict[str, Any]]:
        """Return the limits set by hand, for the state file."""
        return [
            {
                "gpus": list(owner.gpus),
                "uid": owner.uid,
                "limits": [{"kind": k.kind.value, "gpu": k.gpu, "value": v} for k, v in sorted(own.items())],
            }
            for owner, own in self._by_hand.items()
            if own
        ]

    def old_rows(self) -> dict[str, list[str]]:
        """Return the limits set by hand for earlier versions, which keep commands for each user.

        Such a version applies them to every slot of the user, so of two slots the last one counts, and a
        memory limit is that of device 0: slots of several GPUs have none.
        """
        found: dict[str, dict[Kind, str]] = {}
        for owner, own in self._by_hand.items():
            commands = found.setdefault(EVERYBODY if owner.uid is None else str(owner.uid), {})
            for key, value in own.items():
                if not key.gpu or len(owner.gpus) == 1:
                    commands[key.kind] = Question(key, "0" if key.gpu else "").write(0, value)
        return {user: list(commands.values()) for user, commands in found.items() if commands}

    def restore(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Restore the result of `rows`. Raises ValueError, KeyError or TypeError for any other rows."""
        for row in rows:
            owner = Owner(tuple(map(str, row["gpus"])), None if row["uid"] is None else int(row["uid"]))
            for limit in row["limits"]:
                key = Key(Kind(limit["kind"]), str(limit["gpu"]))
                value = said(key.kind, str(limit["value"]))
                if value is None or (key.kind is Kind.MEMORY) != (key.gpu in owner.gpus):
                    raise ValueError(f"{key} {limit['value']!r} is no limit of a slot")
                self.learn(owner, key, value)

    def restore_old(self, settings: Mapping[str, Sequence[str]], owners: Iterable[Owner]) -> None:
        """Restore limits that an earlier version kept for each user, as commands.

        It applied them to every slot of the user. Raises ValueError for other commands.
        """
        known = tuple(owners)
        for user, commands in settings.items():
            uid = None if user == EVERYBODY else int(user)
            for owner in (owner for owner in known if owner.uid == uid):
                for command in commands:
                    self._restore_command(owner, command)

    def _restore_command(self, owner: Owner, command: str) -> None:
        words = command.split()
        device = words[1] if len(words) == 3 else ""
        if device.startswith("GPU-") and device not in owner.gpus:
            return  # Of another slot of this user.
        if device.isdecimal() and int(device) >= len(owner.gpus):
            return
        found = claim(command, owner.gpus)
        if found is None or found.value is None or found.question.server:
            raise ValueError(f"{command!r} sets no limit")
        self.learn(owner, found.question.key, found.value)
