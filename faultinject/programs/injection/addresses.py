"""Addresses of this process for out-of-bounds stores: one for each class of guard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

GRANULE = 64 << 10
"""Guards are laid in multiples of this."""

LOW = 0x40000
"""An address beyond the guard granule of the null page, below every mapping."""


def _mappings() -> Iterator[tuple[int, int, str]]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        start, end = (int(x, 16) for x in fields[0].split("-"))
        yield start, end, fields[5] if len(fields) > 5 else ""


def _middle_of_largest(matches: list[tuple[int, int]]) -> int:
    start, end = max(matches, key=lambda m: m[1] - m[0])
    return (start + end) // 2 // 8 * 8


def target_address(kind: str) -> int:
    """Return the target of an out-of-bounds store of this guard kind (0 for any other kind)."""
    match kind:
        case "guard_low":
            return LOW
        case "guard_file":
            return _middle_of_largest([(s, e) for s, e, name in _mappings() if ".so" in name])
        case "guard_heap":
            return _middle_of_largest([(s, e) for s, e, name in _mappings() if name == "[heap]"])
        case "guard_stack":
            return _middle_of_largest([(s, e) for s, e, name in _mappings() if name == "[stack]"])
        case _:
            return 0
