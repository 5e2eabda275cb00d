"""The batch of the small server: which request gets which slot, and when; the toy detects wrong results."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faultinject.programs.llm import serve, toy
from faultinject.programs.llm.batch import (
    LONGEST,
    MOST,
    PROMPT,
    WAVE,
    WORDS,
    Batch,
    Request,
    request,
    wave,
)

REQUESTS = st.lists(st.integers(1, 6), max_size=24).map(
    lambda tokens: [Request(number, (1, 2), each) for number, each in enumerate(tokens)]
)


@given(slots=st.integers(1, 5), requests=REQUESTS, late=st.lists(st.integers(0, 40), max_size=24))
def test_each_request_gets_its_tokens_in_the_order_of_arrival(
    slots: int, requests: list[Request], late: list[int]
) -> None:
    """`late`: the step before which each request arrives, in ascending order."""
    arrivals = sorted((late + [0] * len(requests))[: len(requests)])
    batch, coming = Batch(slots), list(zip(arrivals, requests, strict=True))
    had: dict[int, int] = {}
    begun: list[int] = []
    step = 0
    while coming or not batch.idle:
        batch.add([each for at, each in coming if at <= step])
        coming = [(at, each) for at, each in coming if at > step]
        given = batch.admit()
        begun += [given[slot].number for slot in sorted(given)]
        # No request waits beside a free slot, and none has two.
        assert len(batch.active) == slots or not batch.waiting
        numbers = [each.number for each in batch.active.values()]
        assert len({*numbers}) == len(numbers)
        before = dict(batch.active)
        assert batch.advance() == before
        for each in before.values():
            had[each.number] = had.get(each.number, 0) + 1
        done = {slot for slot, each in before.items() if had[each.number] == each.tokens}
        assert {*batch.active} == {*before} - done
        step += 1
    assert had == {each.number: each.tokens for each in requests}
    assert begun == [each.number for each in requests]


def test_a_slot_is_given_away_before_the_next_step() -> None:
    batch = Batch(2)
    batch.add([Request(0, (1, 2), 1), Request(1, (1, 2), 3), Request(2, (1, 2), 1)])
    assert {slot: each.number for slot, each in batch.admit().items()} == {0: 0, 1: 1}
    batch.advance()
    assert {slot: each.number for slot, each in batch.admit().items()} == {0: 2}


@given(seed=st.integers(0, 1000), number=st.integers(0, 10**6))
def test_requests_are_a_function_of_seed_and_number_and_fit(seed: int, number: int) -> None:
    one = request(seed, number)
    assert one == request(seed, number) == Request.of(one.data())
    assert 2 <= len(one.prompt) <= PROMPT and 1 <= one.tokens <= MOST
    assert len(one.prompt) + one.tokens <= LONGEST
    assert all(0 < word < WORDS for word in one.prompt)


def test_waves_are_parts_of_one_row() -> None:
    assert [each.number for each in wave(1, 0) + wave(1, 1)] == list(range(2 * WAVE))
    assert wave(1, 1)[0] == request(1, WAVE) != request(2, WAVE)


class Memory:
    """A driver with a bytearray as memory; each launch runs its kernel `times` times."""

    def __init__(self, times: Callable[[int], int] = lambda launch: 1) -> None:
        self._bytes = bytearray(1 << 16)
        self._next, self._launches, self._times = 0, 0, times
        self._names: dict[int, str] = {}

    def alloc(self, size: int) -> int:
        self._next += size
        return self._next - size

    def write(self, at: int, data: bytes) -> None:
        self._bytes[at : at + len(data)] = data

    def read(self, at: int, size: int) -> bytes:
        return bytes(self._bytes[at : at + size])

    def close(self) -> None: ...

    def call(self, name: str, *arguments: Any) -> None:
        match name:
            case "cuModuleGetFunction":
                handle = ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))
                handle[0] = len(self._names) + 1
                self._names[len(self._names) + 1] = arguments[2].decode()
            case "cuLaunchKernel":
                for _ in range(self._times(self._launches)):
                    self._run(self._names[arguments[0].value], arguments[9])
                self._launches += 1

    def _run(self, name: str, places: Any) -> None:
        first, second = (ctypes.c_uint64.from_address(places[place]).value for place in (0, 1))
        at, words = (first, second) if name == "add" else (second, self._long(places[2]))
        cache = memoryview(self._bytes)[at : at + 4 * words].cast("I")
        if name == "add":
            for place in range(words):
                cache[place] += ctypes.c_uint32.from_address(places[2]).value
        else:
            self.write(first, sum(cache).to_bytes(8, "little"))

    @staticmethod
    def _long(place: int) -> int:
        return ctypes.c_uint64.from_address(place).value


def answers(monkeypatch: pytest.MonkeyPatch, memory: Memory, requests: list[Request]) -> dict[int, list[int]]:
    said: dict[int, list[int]] = {each.number: [] for each in requests}
    monkeypatch.setattr(toy, "Driver", lambda: memory)
    monkeypatch.setattr(
        serve,
        "say",
        lambda what, number, tokens: [said[who].append(token) for who, _, token in tokens],
    )
    server = serve.Server(toy.Toy(3), 3)
    server.accept_requests({"requests": [each.data() for each in requests]})
    while not server.batch.idle:
        server.step()
    return said


def test_the_toys_tokens_are_a_function_of_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = wave(1, 0, 10)
    right = {each.number: toy.expected_tokens(each.prompt, each.tokens) for each in requests}
    assert answers(monkeypatch, Memory(), requests) == right
    assert answers(monkeypatch, Memory(), requests[::-1]) == right
    # They rarely repeat each other: otherwise an error could go unseen.
    assert all(len({*tokens}) > len(tokens) * 0.8 for tokens in right.values())


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("launch", [0, 60, 120])
def test_a_toys_kernel_that_is_lost_or_runs_twice_is_seen(
    monkeypatch: pytest.MonkeyPatch, times: int, launch: int
) -> None:
    requests = wave(1, 0, 10)
    right = answers(monkeypatch, Memory(), requests)
    assert answers(monkeypatch, Memory(lambda n: times if n == launch else 1), requests) != right
