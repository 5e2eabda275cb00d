"""Check of functions.toml and names.txt against cuda.h. Unknown keys and names are errors."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from libcuda_build.carry import Carried, CarryError, PerThread, read_carried, read_per_thread
from libcuda_build.header import Function

ALWAYS, MEMORY, NEVER = WHEN = ("always", "memory", "never")


class TableError(Exception):
    """functions.toml or names.txt has an invalid entry."""


@dataclass(frozen=True)
class Plan:
    """The plan of a build: all names in order (the position is the index), and the functions used by name."""

    names: tuple[str, ...]
    called: tuple[str, ...]  # the proxy calls the real function
    wrapped: Mapping[str, str]  # the proxy has a wrapper; the value tells when it is used
    functions: Mapping[str, Function]
    carried: tuple[Carried, ...] = ()
    per_thread: tuple[PerThread, ...] = ()


def read_plan(folder: Path, functions: Mapping[str, Function]) -> Plan:
    """Return the plan from functions.toml and names.txt in `folder`. Raises TableError."""
    table = tomllib.loads((folder / "functions.toml").read_text())
    absent = frozenset(table.pop("newer", [])) - set(functions)
    entries = {name: when for name, when in _entries(table).items() if name not in absent}
    unknown = sorted(set(entries) - set(functions))
    if unknown:
        raise TableError(f"functions.toml: cuda.h does not declare {', '.join(unknown)}")
    extra = _extra(folder / "names.txt")
    functions = {**functions, **{name: Function(name, ()) for name, is_known in extra.items() if is_known}}
    names = sorted({*functions, *extra, *absent})
    wrapped = {name: when for name, when in sorted(entries.items()) if when != NEVER}
    carried, per_thread = _carried(folder / "carry.toml", functions, absent)
    return Plan(tuple(names), tuple(sorted(entries)), wrapped, functions, carried, per_thread)


def _carried(
    path: Path, functions: Mapping[str, Function], absent: Set[str]
) -> tuple[tuple[Carried, ...], tuple[PerThread, ...]]:
    try:
        carried = read_carried(path, functions, absent)
        return carried, read_per_thread(path, functions, carried)
    except CarryError as error:
        raise TableError(str(error)) from error


def _entries(table: Mapping[str, object]) -> dict[str, str]:
    found = {}
    for name, entry in table.items():
        if not isinstance(entry, dict) or set(entry) != {"wrap", "why"}:
            raise TableError(f"functions.toml: [{name}] takes the keys wrap and why, and both")
        if entry["wrap"] not in WHEN:
            raise TableError(f"functions.toml: [{name}] wrap is not one of {', '.join(WHEN)}")
        found[name] = str(entry["wrap"])
    return found


def _extra(path: Path) -> dict[str, bool]:
    """Return the names, and whether each is known to have no parameters."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    given = [line for line in lines if line and not line.startswith("#")]
    names = {line.removesuffix("()"): line.endswith("()") for line in given}
    wrong = [name for name in names if not (name.isidentifier() and name.startswith("cu"))]
    if wrong:
        raise TableError(f"{path.name}: not names of driver functions: {', '.join(wrong)}")
    return names
