"""The ring of records: a reader sees each record once and in order, or sees by `seq` which it missed."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpsd.gpu.nvidia.kernel_abi import RING_RECORDS
from tests.kmod.native import Pipe, build

WORDS = 5
NEW_RING, PUT, TAKE, HAS, DRAIN = range(5)
# Puts come in bunches, so that a short history overruns a reader.
BUNCHES = [1, 1, 2, 3, 100, RING_RECORDS - 1, RING_RECORDS, RING_RECORDS + 1]
steps = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(BUNCHES)),
    st.tuples(st.just("take"), st.integers(0, 2)),
    st.tuples(st.just("take"), st.integers(0, 2)),
    st.tuples(st.just("drink"), st.integers(0, 2)),
)


@pytest.fixture(scope="module")
def compiled_ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipe]:
    pipe = Pipe(build(tmp_path_factory.mktemp("ring"), "ring_driver", "mpsd-ring.c"), WORDS)
    yield pipe
    pipe.close()


@pytest.fixture
def ring(compiled_ring: Pipe) -> Pipe:
    compiled_ring.ask([(NEW_RING,)])
    return compiled_ring


def tell(ring: Pipe, *request: int) -> tuple[int, ...]:
    return struct.unpack(f"={WORDS}Q", ring.ask([request])[0])


def put(ring: Pipe, first: int, count: int) -> list[int]:
    """Put records `first` ..., each with address 10 n and owner n. Return the owners that were returned."""
    raw = ring.ask([(PUT, 10 * number, number) for number in range(first, first + count)])
    return [int(struct.unpack_from("=Q", answer)[0]) for answer in raw]


def take(ring: Pipe, written: int, position: int) -> int:
    """Read once at `position`. Return the reader's new position."""
    found, seq, owner, address, told = tell(ring, TAKE, position)
    assert told == written
    assert tell(ring, HAS, position)[0] == found == (position < written)
    if not found:
        return position
    assert seq == max(position + 1, written - RING_RECORDS + 1)
    assert (owner, address) == (seq, 10 * seq)
    return seq


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(history=st.lists(steps, max_size=20))
def test_readers_at_their_own_pace(ring: Pipe, history: list[tuple[str, int]]) -> None:
    tell(ring, NEW_RING)
    written, positions = 0, [0, 0, 0]
    for what, number in history:
        if what == "put":
            handed_back = put(ring, written + 1, number)
            expected = [max(0, seq - RING_RECORDS) for seq in range(written + 1, written + number + 1)]
            assert handed_back == expected
            written += number
        else:
            for _ in range(1 if what == "take" else 5):
                positions[number] = take(ring, written, positions[number])


@pytest.mark.parametrize("count", [0, 1, RING_RECORDS, RING_RECORDS + 3])
def test_in_the_end_every_owner_is_handed_back_once(count: int, ring: Pipe) -> None:
    before = [owner for owner in put(ring, 1, count) if owner]
    drained = []
    while (answer := tell(ring, DRAIN))[0]:
        drained.append(answer[2])
        assert len(drained) <= RING_RECORDS
    assert sorted(before + drained) == list(range(1, count + 1))
    assert (answer[4], tell(ring, TAKE, 0)[0], tell(ring, HAS, 0)[0]) == (0, 0, 0)


def test_a_reader_from_before_a_reload_finds_nothing_until_there_is_more(ring: Pipe) -> None:
    put(ring, 1, 2)
    assert tell(ring, TAKE, 7)[:2] == (0, 7)
    assert tell(ring, HAS, (1 << 64) - 1)[0] == 0
