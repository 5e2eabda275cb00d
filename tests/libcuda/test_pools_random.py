"""Random programs with stream-ordered allocations, moved anywhere, see the same as without a fault."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.libcuda.test_exact_random import WAITING, WAITING_MAPPED, Moved, Step, examples
from tests.support.alone import Alone, OneAtATime
from tests.support.libcudas import Libraries
from tests.support.moving import Post

SLOTS = 4


def model(steps: Sequence[Step]) -> list[int]:
    """Compute what the program of programs/pools.py sees."""
    slots = [0] * SLOTS
    is_used = [False] * SLOTS
    seen: list[int] = []
    for what, _, one, two, value in steps:
        if what == "alloc":
            slots[one], is_used[one] = value, True
        elif not is_used[one]:
            continue
        elif what in ("free", "again"):
            is_used[one] = False
        elif what in ("add", "late"):
            slots[one] += value
        elif what == "see":
            seen.append(slots[one])
        elif what == "copy" and is_used[two]:
            slots[one] = slots[two]
    seen += [word for word, used in zip(slots, is_used, strict=True) if used]
    return [word for word in seen for _ in range(4)]


class Pooled(Moved):
    """Run programs/pools.py and move it from one domain to the next."""

    def __init__(self, libraries: Libraries, post: Post, folder: Path) -> None:
        Alone.__init__(self, libraries, post, folder, "pools.py")


@pytest.fixture(scope="module")
def programs(libraries: Libraries) -> Iterator[OneAtATime[Pooled]]:
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as folder:
        programs = OneAtATime(Path(folder), partial(Pooled, libraries))
        try:
            yield programs
            programs.end()
        finally:
            programs.kill()


KINDS = ["alloc", "alloc", "free", "free", "again", "add", "late", "copy", "see", "see", "hold"]
KINDS += ["wait", "wait_all"]
STEP = st.tuples(
    st.sampled_from(KINDS), st.integers(0, 2), st.integers(0, 3), st.integers(0, 3), st.integers(1, 1000)
)
STEPS = st.lists(STEP, min_size=4, max_size=24)


@pytest.mark.timeout(1200)
@examples(12)
@given(steps=STEPS, lets=st.lists(st.integers(0, 30), min_size=3, max_size=3))
def test_what_is_seen_is_as_without_a_fault(
    programs: OneAtATime[Pooled], steps: list[Step], lets: list[int]
) -> None:
    expected = model(steps)
    for number, let in enumerate(lets):
        at = (len(steps) * (number + 1)) // 3
        for inside in (False, True):
            if inside and at < len(steps) and steps[at][0] not in WAITING | WAITING_MAPPED:
                continue
            assert programs.one().run(steps, at, let, inside=inside) == expected, (at, inside)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("let", [0, 4, 9, 15, 40])
def test_blocks_go_from_stream_to_stream(programs: OneAtATime[Pooled], let: int) -> None:
    """One slot is freed in one stream and allocated in another again and again, beside slow kernels."""
    steps: list[Step] = []
    for number in range(6):
        stream = number % 3
        steps += [("alloc", stream, 0, (number + 2) % 3, 6 * number + 5), ("late", stream, 0, 0, 1)]
        steps += [
            ("see", stream, 0, 0, 0),
            ("alloc", stream, 1, stream, 6 * number + 5),
            ("see", stream, 1, 0, 0),
        ]
    assert programs.one().run(steps, len(steps), let, inside=False) == model(steps)
