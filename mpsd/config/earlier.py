"""Keys of an earlier release that still work in this one, with one warning line.

Two switches became `protect`:

    [vault] enabled   [failover] enabled   [failover] mode     protect
    true              true                 exact, keep         "failover"
    true              true                 off                 "guard"
    true              false                                    "guard"
    false             false                                    "observe"

A key that is not set counts as false there, but a file without any of them has the default of `protect`.
Other keys became constants and have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpsd.base.errors import ConfigError
from mpsd.base.protection import ProtectSetting

_SWITCHES = (("vault", "enabled"), ("failover", "enabled"))
_CONSTANTS = (
    ("guard", "follow_interval_s"),
    ("lease", "probe_interval_ms"),
    ("journal", "evidence_window_s"),
)
_MODE, _OFF = ("failover", "mode"), "off"
_WORDS = {"true": True, "false": False}


def _variable(place: tuple[str, str]) -> str:
    return "_".join(("MPSD", *place)).upper()


VARIABLES = tuple(map(_variable, (*_SWITCHES, *_CONSTANTS)))
"""Variables of keys that have gone. They win over the file."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """A file's table and the environment without the keys of an earlier release. `warning`: "" if none is
    set."""

    table: Mapping[str, Any]
    environ: Mapping[str, str]
    warning: str = ""


class _Sources:
    """Copies of a file's table and of the environment, from which keys are taken."""

    def __init__(self, table: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self.table = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in table.items()}
        self.environ = dict(environ)
        self.names: list[str] = []

    def take(self, place: tuple[str, str]) -> list[tuple[object, str]]:
        """Remove a key. Return its values, the effective one last, each with its place for a message."""
        section, key = place
        keys, variable, found = self.table.get(section), _variable(place), list[tuple[object, str]]()
        if isinstance(keys, dict) and key in keys:
            found.append((keys.pop(key), f"[{section}] {key}"))
        if variable in self.environ:
            text = self.environ.pop(variable)
            found.append((_WORDS.get(text, text), f"${variable}"))
        self.names += [name for _, name in found]
        return found

    def takes_mode_off(self) -> bool:
        """Remove the mode "off". Return whether it was the effective one."""
        section, key = _MODE
        keys, variable = self.table.get(section), _variable(_MODE)
        given = self.environ.get(variable)
        off = isinstance(keys, dict) and keys.get(key) == _OFF
        if off and given is not None and given.strip("\"'") != _OFF:
            # The variable wins, and the file's value is none that the schema has.
            del self.table[section][key]
            return False
        if off or (given is not None and given.strip("\"'") == _OFF):
            self.take(_MODE)
            return True
        return False


def replace_earlier(table: Mapping[str, Any], environ: Mapping[str, str], source: str) -> Earlier:
    """Replace the keys of an earlier release. Raise ConfigError for a switch that is neither true nor
    false."""
    sources = _Sources(table, environ)
    switches = {}
    for place in _SWITCHES:
        for value, name in sources.take(place):
            switches[place] = _switch(value, source, name)
    off = sources.takes_mode_off()
    advices = []
    if sources.names:
        fits = _setting(switches, off=off)
        if "protect" in sources.table or "MPSD_PROTECT" in sources.environ:
            advices.append(f"remove {_all(sources.names)}: protect is set too")
        else:
            sources.table["protect"] = fits.value
            advices.append(f'write protect = "{fits.value}" instead of {_all(sources.names)}')
    sources.names = []
    for place in _CONSTANTS:
        sources.take(place)
    if sources.names:
        advices.append(f"remove {_all(sources.names)}: without effect")
    warning = f"{source} has keys of an earlier release: {'; '.join(advices)}" if advices else ""
    return Earlier(sources.table, sources.environ, warning)


def _all(names: list[str]) -> str:
    return " and ".join(names)


def _setting(switches: Mapping[tuple[str, str], bool], *, off: bool) -> ProtectSetting:
    vault, failover = (switches.get(place, False) for place in _SWITCHES)
    if failover and not off:
        return ProtectSetting.FAILOVER
    return ProtectSetting.GUARD if vault or failover else ProtectSetting.OBSERVE


def _switch(value: object, source: str, name: str) -> bool:
    if not isinstance(value, bool):
        where = name if name.startswith("$") else f"{source}: {name}"
        raise ConfigError(f"{where} must be true or false", remedy='remove it and set protect = "auto"')
    return value
