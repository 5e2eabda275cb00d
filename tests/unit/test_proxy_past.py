"""Calls that bypass the proxy: which functions, a stub's table entry, its exchange; without a proxy."""

from __future__ import annotations

import ctypes
import tomllib
from collections.abc import Callable
from typing import cast

import pytest

from faultinject.programs.basics.statistics import FOLDER
from faultinject.programs.pairing import bypass
from mpsd.base.errors import UnsupportedError

AT = 0x7F00_1234_5670
X86 = bytes.fromhex("55 4889e5 5d ff25 10000000") + bytes(5)
X86_BACK = bytes.fromhex("55 4889e5 5d ff25 eeffffff") + bytes(5)
# From an assembler: hint #34; adrp x16, 0x12345000 (and -0x5000); ldr x16, [x16, #0x678] (and #0x7ff8); br
# x16.
ARM = bytes.fromhex("5f2403d5 301a09b0 103e43f9 00021fd6")
ARM_BACK = bytes.fromhex("5f2403d5 d0fffff0 10fe7ff9 00021fd6")


@pytest.mark.parametrize(
    ("machine", "code", "at", "slot"),
    [
        ("x86_64", X86, AT, None),
        ("x86_64", X86, AT + 5, AT + 5 + 11 + 0x10),
        ("x86_64", X86_BACK, AT + 7, AT + 7 + 11 - 0x12),
        ("aarch64", ARM, AT, 0x7F00_1234_5000 + 0x1234_5000 + 0x678),
        ("aarch64", ARM_BACK, AT, 0x7F00_1234_5000 - 0x5000 + 0x7FF8),
        # The page is that of the second instruction, which is on the next page here.
        ("aarch64", ARM, 0x7F00_1234_5FFC, 0x7F00_1234_6000 + 0x1234_5000 + 0x678),
    ],
)
def test_a_stub_says_where_its_word_is(machine: str, code: bytes, at: int, slot: int | None) -> None:
    if slot is None:
        # Table entries lie at multiples of eight.
        with pytest.raises(UnsupportedError, match="no stub of the proxy's"):
            bypass.slot_of(code, at, machine)
    else:
        assert bypass.slot_of(code, at, machine) == slot


# Bits that encode the distance of the table entry, and on x86-64 the bytes after the jump.
FREE = {"x86_64": bytes(6) + b"\xff" * 10, "aarch64": bytes.fromhex("00000000 e0ffff60 00fc3f00 00000000")}


@pytest.mark.parametrize(("machine", "code", "at"), [("x86_64", X86, AT + 6), ("aarch64", ARM, AT)])
def test_a_stub_with_any_other_bit_is_none(machine: str, code: bytes, at: int) -> None:
    number, free = (int.from_bytes(part, "little") for part in (code, FREE[machine]))
    fixed = [1 << place for place in range(128) if not free >> place & 1]
    assert len(fixed) == {"x86_64": 48, "aarch64": 95}[machine]
    for bit in fixed:
        with pytest.raises(UnsupportedError, match="no stub of the proxy's"):
            bypass.slot_of((number ^ bit).to_bytes(16, "little"), at, machine)


def test_on_other_machines_it_is_said_that_calls_cannot_go_past() -> None:
    with pytest.raises(UnsupportedError, match="on x86-64 and aarch64, not on riscv64"):
        bypass.slot_of(X86, AT, "riscv64")


def test_a_word_is_written_only_where_that_may_be() -> None:
    maps = (
        "7f0000000000-7f0000001000 r-xp 00000000 08:01 12  /usr/lib/libcuda.so.1\n"
        "7f0000001000-7f0000002000 rw-p 00001000 08:01 12  /usr/lib/libcuda.so.1\n"
    )
    assert bypass.writable(maps, 0x7F0000001000) and bypass.writable(maps, 0x7F0000001FF8)
    assert not bypass.writable(maps, 0x7F0000000FF8)
    assert not bypass.writable(maps, 0x7F0000001FFC)
    assert not bypass.writable(maps, 0x7F0000003000)


def test_what_goes_past_submits_waits_or_asks() -> None:
    carried = tomllib.loads((FOLDER / "carry.toml").read_text())
    wrapped = tomllib.loads((FOLDER / "functions.toml").read_text())
    waits = {name for kind, names in carried.items() if kind.startswith("waits") for name in names}
    assert set(bypass.SUBMITS) <= {*carried["work"], *carried["waits_legacy"]}
    assert set(bypass.WAITS) <= waits
    assert set(bypass.ASKS) - {"cuStreamIsCapturing"} <= {*carried["ask"], *carried["give"]}
    # These have a wrapper that answers differently from the driver.
    assert not [name for name in bypass.ASKS if wrapped.get(name, {"wrap": "never"})["wrap"] != "never"]
    kept = {name for kind in ("settles", "settles_stream", "settles_event", "end") for name in carried[kind]}
    assert not kept & set(bypass.FUNCTIONS)
    assert len(set(bypass.FUNCTIONS)) == len(bypass.FUNCTIONS)


class Proxy:
    """A fake library: its wait returns `code`, and may have side effects."""

    def __init__(self) -> None:
        self.code, self.waits = 0, 0

    def cuCtxSynchronize(self) -> int:
        self.waits += 1
        return self.code


@pytest.fixture
def table() -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * 3)(11, 12, 13)


def over(
    proxy: Proxy, table: ctypes.Array[ctypes.c_uint64], *targets: int, driver: Proxy | None = None
) -> bypass.Bypass:
    at = ctypes.addressof(table)
    words = {at + 8 * number: target for number, target in enumerate(targets)}
    return bypass.Bypass(cast(ctypes.CDLL, proxy), cast(ctypes.CDLL, driver or Proxy()), words)


def test_words_are_exchanged_and_put_back_after_a_wait_each_time(
    table: ctypes.Array[ctypes.c_uint64],
) -> None:
    proxy = Proxy()
    way = over(proxy, table, 21, 12)
    assert way.differing() == 1
    found = []
    for is_past in (False, True, True, False):
        way.switch(past=is_past)
        found.append((list(table), way.is_past, way.differing(), proxy.waits))
    own, given = [11, 12, 13], [21, 12, 13]
    assert found == [(own, False, 1, 1), (given, True, 0, 2), (given, True, 0, 3), (own, False, 1, 4)]


def test_work_is_waited_for_past_the_proxy_whichever_way_calls_go(
    table: ctypes.Array[ctypes.c_uint64],
) -> None:
    proxy, driver = Proxy(), Proxy()
    way = over(proxy, table, 21, driver=driver)
    way.settle()
    way.switch(past=True)
    way.settle()
    assert (proxy.waits, driver.waits) == (1, 2)
    driver.code = 719
    with pytest.raises(UnsupportedError, match="returned 719"):
        way.settle()


def test_what_the_proxy_has_there_is_what_comes_back(table: ctypes.Array[ctypes.c_uint64]) -> None:
    way = over(Proxy(), table, 21, 22)
    table[0] = 31
    way.switch(past=True)
    way.switch(past=False)
    assert list(table) == [31, 12, 13]


def _fail(proxy: Proxy, table: ctypes.Array[ctypes.c_uint64]) -> None:
    proxy.code = 719


def _write(proxy: Proxy, table: ctypes.Array[ctypes.c_uint64]) -> None:
    table[1] = 99


@pytest.mark.parametrize(
    ("meanwhile", "error"), [(_fail, "returned 719"), (_write, "was changed by other code")]
)
def test_what_comes_between_is_told_and_nothing_is_written_over_it(
    meanwhile: Callable[[Proxy, ctypes.Array[ctypes.c_uint64]], None],
    error: str,
    table: ctypes.Array[ctypes.c_uint64],
) -> None:
    proxy = Proxy()
    way = over(proxy, table, 21, 22)
    way.switch(past=True)
    meanwhile(proxy, table)
    before = list(table)
    with pytest.raises(UnsupportedError, match=error):
        way.switch(past=False)
    assert list(table) == before and way.is_past


def test_without_a_proxy_in_the_process_there_is_nothing_to_go_past() -> None:
    with pytest.raises(UnsupportedError, match="there is no proxy in this process"):
        bypass.find_bypass()
