"""The blocks of stream-ordered allocations (src/poolblocks.c) against a model."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libcuda_build.compile import FOLDER
from tests.libcuda.test_exact_random import examples
from tests.support.libcudas import compile_library

UNIT, GRANULE, SMALL = 512, 2 << 20, 1 << 20
MAY = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p)


class Block(ctypes.Structure):
    _fields_ = (
        ("next", ctypes.c_void_p),
        ("newer", ctypes.c_void_p),
        ("older", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("address", ctypes.c_uint64),
        ("capacity", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
        ("is_free", ctypes.c_bool),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("poolblocks") / "blocks.so"
    made = ctypes.CDLL(str(compile_library(target, FOLDER / "src" / "poolblocks.c", f"-I{FOLDER / 'src'}")))
    for name in ("add", "find", "fit"):
        getattr(made, f"mpsd_poolblocks_{name}").restype = ctypes.c_void_p
    made.mpsd_poolblocks_capacity.restype = ctypes.c_size_t
    return made


class Blocks:
    """The library and the model: capacity and pool by address; addresses of free blocks, oldest first."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.known: dict[int, tuple[int, int]] = {}
        self.free: list[int] = []

    def call(self, name: str, *arguments: Any) -> Any:
        values = [ctypes.c_uint64(value) if isinstance(value, int) else value for value in arguments]
        return getattr(self._library, f"mpsd_poolblocks_{name}")(*values)

    def at(self, address: int) -> Any:
        return ctypes.c_void_p(self.call("find", address))

    def fit(self, pool: int, size: int, forbidden: set[int]) -> int:
        """Return the address of the block that fits, 0 for none."""
        may = MAY(lambda block, _: Block.from_address(block or 0).address not in forbidden)
        found = self.call("fit", pool, size, may, None)
        return Block.from_address(found).address if found else 0

    def fit_of_model(self, pool: int, size: int, forbidden: set[int]) -> int:
        least = self.call("capacity", size)
        rows = [
            (self.known[address][0], -number, address)
            for number, address in enumerate(self.free)
            if self.known[address][1] == pool and address not in forbidden
        ]
        fits = [row for row in rows if least <= row[0] <= least + least // 8]
        return min(fits)[2] if fits else 0

    def all_free(self) -> set[int]:
        found: set[int] = set()

        def add(block: int | None, _: object) -> bool:
            found.add(Block.from_address(block or 0).address)
            return True

        self.call("each", MAY(add), None)
        return found

    def end(self) -> None:
        for address in self.known:
            self.call("remove", self.at(address))


SIZES = st.one_of(st.integers(1, 1 << 16), st.integers(1, 64 << 20), st.integers(1, 1 << 40))


@given(size=SIZES)
@examples(200)
def test_capacities_hold_what_was_asked_for(library: ctypes.CDLL, size: int) -> None:
    capacity = Blocks(library).call("capacity", size)
    assert size <= capacity and capacity % UNIT == 0
    assert capacity <= size + (max(UNIT, size // 8) if size <= SMALL else GRANULE)
    assert size <= SMALL or capacity % GRANULE == 0


def test_no_memory_has_that_size(library: ctypes.CDLL) -> None:
    assert Blocks(library).call("capacity", 2**64 - 1) == 0


STEP = st.tuples(
    st.sampled_from(["add", "free", "free", "take", "take", "remove"]),
    st.integers(1, 2),
    st.sampled_from(
        [1, 600, 700, 5000, 5100, 40_000, 900_000, 3 << 20, (3 << 20) + 1, 34 << 20, 37 << 20, 41 << 20]
    ),
    st.integers(0, 30),
)


@given(steps=st.lists(STEP, max_size=60), forbidden=st.sets(st.integers(1, 30), max_size=6))
@examples(60)
def test_blocks_are_as_in_the_model(
    library: ctypes.CDLL, steps: list[tuple[str, int, int, int]], forbidden: set[int]
) -> None:
    blocks, held, last = Blocks(library), {number << 21 for number in forbidden}, 0
    for what, pool, size, pick in steps:
        used = [address for address in blocks.known if address not in blocks.free]
        if what == "add":
            last += 1 << 21
            capacity = blocks.call("capacity", size)
            assert blocks.call("add", pool, last, capacity, size)
            blocks.known[last] = (capacity, pool)
        elif what == "free" and used:
            address = used[pick % len(used)]
            blocks.call("keep", blocks.at(address))
            blocks.free.append(address)
        elif what == "take":
            address = blocks.fit(pool, size, held)
            assert address == blocks.fit_of_model(pool, size, held)
            if address:
                blocks.call("take", blocks.at(address))
                blocks.free.remove(address)
        elif what == "remove" and blocks.known:
            address = sorted(blocks.known)[pick % len(blocks.known)]
            blocks.call("remove", blocks.at(address))
            assert not blocks.at(address)
            del blocks.known[address]
            blocks.free = [each for each in blocks.free if each != address]
        assert blocks.all_free() == set(blocks.free)
    blocks.end()
