"""Reading /proc/PID/maps below an address agrees with plain reading, wherever pages cut it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpsd.os import procfs

PATHS = ("", "/dev/nvidia0", "[heap]", "/a-b/f00-bar", "/with\r and\x0b -")
# Many addresses that share their first digits, and have as many digits or one more.
FEW_DIGITS = st.text("01ef", min_size=6, max_size=11) | st.text("01ef", min_size=1, max_size=16)
ADDRESSES = FEW_DIGITS.map(lambda digits: int(digits, 16)) | st.integers(0, (1 << 64) - 1)
MAPS = st.lists(ADDRESSES, unique=True, max_size=20).map(sorted)


def written(starts: list[int], paths: list[str]) -> bytes:
    """Write rows as fs/proc/task_mmu.c does."""
    rows = (
        f"{start:08x}-{start + 4096:08x} rw-p 00000000 00:00 0 {paths[n % len(paths)]}\n"
        for n, start in enumerate(starts)
    )
    return "".join(rows).encode()


def plainly(text: bytes, below: int | None, limit: int) -> procfs.MapLines | None:
    """Read line by line."""
    if not text:
        return None
    found: list[bytes] = []
    for line in text[: text.rfind(b"\n") + 1].split(b"\n")[:-1]:
        if below is not None and int(line.partition(b"-")[0], 16) >= below:
            break
        found.append(line + b"\n")
    return procfs.MapLines(b"".join(found[:limit]), len(found) > limit)


def pieces(text: bytes, sizes: list[int]) -> Iterator[bytes]:
    n = 0
    while text:
        size = sizes[n % len(sizes)]
        yield text[:size]
        text, n = text[size:], n + 1


@settings(max_examples=300, deadline=None)
@given(
    starts=MAPS,
    paths=st.lists(st.sampled_from(PATHS), min_size=1, max_size=5),
    below=st.none() | ADDRESSES | st.tuples(st.integers(0, 19), st.sampled_from([-1, 0, 1])),
    sizes=st.lists(st.integers(1, 400) | st.just(4096), min_size=1, max_size=8),
    limit=st.integers(1, 25),
    lost=st.integers(0, 50),
)
@example(starts=[], paths=[""], below=1 << 36, sizes=[4096], limit=1, lost=0)
@example(starts=[0, (1 << 36) - 1, 1 << 36], paths=[""], below=1 << 36, sizes=[4096], limit=9, lost=0)
@example(starts=[0xFFFFFFFFFF600000], paths=[""], below=0xFFFFFFFF, sizes=[1], limit=9, lost=0)
def test_it_is_what_a_reader_line_by_line_finds(
    starts: list[int],
    paths: list[str],
    below: int | tuple[int, int] | None,
    sizes: list[int],
    limit: int,
    lost: int,
) -> None:
    """`below`: also next to an address that occurs. `lost`: number of characters missing at the end."""
    if isinstance(below, tuple):
        near, off = below
        below = max(0, (starts[near % len(starts)] if starts else 0) + off)
    whole = written(starts, paths)
    text = whole[: len(whole) - lost] if lost < len(whole) else b""
    given_next = pieces(text, sizes)
    at_now = 0

    def pread(fd: int, size: int, at: int) -> bytes:
        nonlocal at_now
        assert at == at_now
        data = next(given_next, b"")
        at_now += len(data)
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(procfs, "MAPS_LIMIT", limit)
        patch.setattr(os, "pread", pread)
        found = procfs.map_lines_of(-1, below)
    assert found == plainly(text, below, limit)
