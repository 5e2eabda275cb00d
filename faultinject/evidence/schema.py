"""The form of a report: its keys and their types.

Null means "not measured" or "does not apply", never zero.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from faultinject.evidence import revision

NUMBER = (int, float, type(None))
TEXT = (str, type(None))

ENVELOPE: Mapping[str, tuple[type, ...]] = {
    "schema": (int,),
    "kind": (str,),
    "device": (str,),  # as NVML names it, or SIMULATED
    "driver": (str,),
    "backend": (str,),  # nvidia or simulated
    "revision": (str,),  # of the code (evidence.revision); "unknown" in reports without it
    "date": (str,),  # ISO 8601, UTC
    "command": (str,),
    "leftovers": (list,),  # processes that had to be ended, in words
}
"""The keys of every campaign's report besides its results; that of the matrix has a form of its own."""


def envelope(
    kind: str, version: int, device: tuple[str, str], backend: str, date: str, words: Sequence[str]
) -> dict[str, Any]:
    """Return these keys without `leftovers`. `device`: GPU and driver; `words`: the command."""
    return {
        "schema": version,
        "kind": kind,
        "device": device[0],
        "driver": device[1],
        "backend": backend,
        "revision": revision.current(),
        "date": date,
        "command": shlex.join(words),
    }


def _is_foreign_bool(value: object, types: tuple[type, ...]) -> bool:
    """Tell a bool, which is an int in Python, from a number."""
    return isinstance(value, bool) and bool not in types


def violations(schema: Mapping[str, tuple[type, ...]], value: Mapping[str, Any], where: str) -> list[str]:
    """Return what is missing, unknown or of the wrong type in an object, in words."""
    missing = [f"{where}.{key} is missing" for key in schema if key not in value]
    foreign = [f"{where}.{key} is not in the schema" for key in value if key not in schema]
    mistyped = [
        f"{where}.{key} is {type(value[key]).__name__}"
        for key, types in schema.items()
        if key in value and (not isinstance(value[key], types) or _is_foreign_bool(value[key], types))
    ]
    return missing + foreign + mistyped


def report_violations(
    schema: Mapping[str, tuple[type, ...]], version: int, data: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what is wrong with a whole report, its version last."""
    yield from violations(schema, data, "report")
    if data["schema"] != version:
        yield f"report.schema is {data['schema']!r}, this program reads {version}"


def missing_fields(value: Any, of: type, where: str, optional: Sequence[str] = ()) -> Iterator[str]:
    """Yield the fields of a dataclass that an object lacks; `optional`: fields that older reports lack."""
    if not isinstance(value, dict):
        yield f"{where} is no object"
        return
    for each in fields(of):
        if each.name not in (*value, *optional):
            yield f"{where}.{each.name} is missing"
