"""A model for the stand-in driver. Its tokens come out of kernels that change what they read.

A slot's cache is the words of its request. For each token a kernel adds one to every word in it, and another
sums them up. The host makes the token of that sum and copies it behind the last word. So all work that was
ever done on a cache is in it: a lost or repeated kernel, or a lost copy, changes what follows.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

from faultinject.programs.devices.driver import Driver
from faultinject.programs.llm.batch import LONGEST, WORDS

IMAGE = b"standin module\nkernel add add 200\nkernel sum sum 200\n"
"""Kernels take this many microseconds each, so that a fault mostly finds unfinished ones."""
WORD, TOTAL = 4, 8
CACHE = 512
"""Bytes of a slot's cache."""

assert LONGEST * WORD <= CACHE


def token_of(total: int) -> int:
    """The upper bits of a product: the low ones are poor."""
    return ((total * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF) >> 20 & (WORDS - 1)


def expected_tokens(prompt: Sequence[int], tokens: int) -> list[int]:
    """Return the sum that the kernels must compute, by arithmetic on the host."""
    cache, said = list(prompt), list[int]()
    for _ in range(tokens):
        cache = [word + 1 for word in cache]
        said.append(token_of(sum(cache)))
        cache.append(said[-1])
    return said


class Toy:
    """A Model on the driver that the loader finds."""

    name = "a toy"

    def __init__(self, slots: int) -> None:
        self._driver = Driver()
        module = ctypes.c_void_p()
        self._driver.call("cuModuleLoadData", ctypes.byref(module), IMAGE)
        self._add, self._sum = self._function(module, "add"), self._function(module, "sum")
        self._caches, self._totals = self._driver.alloc(slots * CACHE), self._driver.alloc(slots * TOTAL)
        self._slots, self._lengths = slots, [0] * slots

    def _function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self._driver.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def _launch(self, function: ctypes.c_void_p, *arguments: Any) -> None:
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        self._driver.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, places, None)

    def _word(self, slot: int, place: int) -> int:
        return self._caches + slot * CACHE + place * WORD

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        self._driver.write(self._word(slot, 0), array("I", prompt).tobytes())
        self._lengths[slot] = len(prompt)

    def step(self, slots: Sequence[int]) -> list[int]:
        for slot in slots:
            cache, length = ctypes.c_uint64(self._word(slot, 0)), ctypes.c_uint64(self._lengths[slot])
            self._launch(self._add, cache, length, ctypes.c_uint32(1))
            self._launch(self._sum, ctypes.c_uint64(self._totals + slot * TOTAL), cache, length)
        totals = array("Q", self._driver.read(self._totals, self._slots * TOTAL))
        tokens = [token_of(totals[slot]) for slot in slots]
        for slot, token in zip(slots, tokens, strict=True):
            self._driver.write(self._word(slot, self._lengths[slot]), token.to_bytes(WORD, "little"))
            self._lengths[slot] += 1
        return tokens

    def close(self) -> None:
        self._driver.close()
