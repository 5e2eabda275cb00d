"""A survivor notices every wrong result; the address of a stray access must fit the kind of fault."""

from __future__ import annotations

import signal
from array import array
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from faultinject.programs import crowd, workloads
from faultinject.programs.injection.addresses import target_address
from faultinject.programs.injection.inject import action_of
from faultinject.programs.survivor import MASK, Computation, Tally, next_content, pattern
from mpsd.base.errors import UsageError


class Memory:
    """A device that is a dictionary of buffers; `spoil` is called after every increment."""

    on_mps = True

    def __init__(self, spoil: Callable[[Memory, int], None] = lambda memory, launches: None) -> None:
        self.buffers: dict[int, bytearray] = {}
        self.launches = 0
        self._spoil = spoil

    def alloc(self, size: int) -> int:
        self.buffers[len(self.buffers) + 1] = bytearray(size)
        return len(self.buffers)

    def write(self, address: int, data: bytes) -> None:
        self.buffers[address][: len(data)] = data

    def read(self, address: int, size: int) -> bytes:
        return bytes(self.buffers[address][:size])

    def increment(self, address: int, words: int) -> None:
        self.launches += 1
        held = array("I", bytes(self.buffers[address]))
        self.buffers[address][:] = next_content(held).tobytes()
        self._spoil(self, self.launches)

    def busy(self, seconds: float, *, fill: bool = False) -> None: ...
    def endless(self, *, fill: bool = False) -> None: ...
    def commit(self, kind: str, fire: Callable[[], None], stray: int = 0) -> None: ...
    def synchronize(self) -> None: ...
    def close(self) -> None: ...


def steps(device: Memory, count: int, *, check: bool = True) -> Tally:
    computation = Computation(device, 0xFFFFFFF0, 64, check=check)
    for _ in range(count):
        computation.step()
    return computation.tally


def flip(memory: Memory, launches: int) -> None:
    if launches == 3:
        memory.buffers[1][130] ^= 1


def lose_a_step(memory: Memory, launches: int) -> None:
    if launches == 3:
        back = array("I", [(x - 1) & MASK for x in array("I", bytes(memory.buffers[1]))])
        memory.buffers[1][:] = back.tobytes()


def foreign_write(memory: Memory, launches: int) -> None:
    if launches == 3:
        memory.buffers[2][:4] = b"\1\0\0\0"


def test_right_results_are_right_beyond_the_wrap_of_a_word() -> None:
    tally = steps(Memory(), 40)
    assert (tally.steps, tally.wrong) == (40, 0)


@pytest.mark.parametrize("spoil", [flip, lose_a_step, foreign_write])
def test_a_wrong_result_is_noticed(
    spoil: Callable[[Memory, int], None], capfd: pytest.CaptureFixture[str]
) -> None:
    assert steps(Memory(spoil), 40).wrong > 0
    assert '"what": "wrong"' in capfd.readouterr().out


def test_a_result_one_step_too_far_is_noticed(capfd: pytest.CaptureFixture[str]) -> None:
    def twice(memory: Memory, launches: int) -> None:
        if launches == 2:
            memory.increment(1, 64)

    assert steps(Memory(twice), 5).wrong > 0
    capfd.readouterr()


def test_without_checks_only_time_is_kept() -> None:
    tally = steps(Memory(flip), 40, check=False)
    assert tally.wrong == 0 and tally.longest


def test_the_longest_step_of_each_stretch_of_time_is_kept() -> None:
    tally = Tally()
    for start, end in ((1.0, 1.002), (1.01, 1.03), (1.04, 1.041), (1.06, 1.2)):
        tally.timed(start, end)
    assert tally.report()["longest"] == [(1.01, 1.03), (1.06, 1.2)]


def test_patterns_of_different_seeds_differ_everywhere() -> None:
    assert all(a != b for a, b in zip(pattern(7919, 64), pattern(7919 * 2, 64), strict=True))


@pytest.mark.parametrize(
    ("kind", "name"), [("guard_heap", "[heap]"), ("guard_stack", "[stack]"), ("guard_file", ".so")]
)
def test_stray_addresses_lie_in_a_mapping_of_their_class(kind: str, name: str) -> None:
    address = target_address(kind)
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(x, 16) for x in line.split()[0].split("-"))
        if start <= address < end:
            assert name in line
            break
    else:
        pytest.fail(f"{address:#x} is not mapped")


def test_other_kinds_have_no_stray_address() -> None:
    assert target_address("store") == 0
    assert 64 << 10 <= target_address("guard_low") < 8 << 30


def test_circumstances_have_a_deed_and_parts_have_none() -> None:
    assert action_of("full_log_disk") == "sigkill_running"
    assert action_of("server_death") is None
    assert action_of("churn") is None


def test_the_census_tells_orderly_ends_from_failures() -> None:
    census = crowd.Census()
    away = crowd.TURNED_AWAY << 8
    for status in (0, signal.SIGKILL, crowd.WRONG << 8, crowd.REFUSED << 8, away, signal.SIGSEGV):
        census.ended(status)
    assert (census.left, census.wrong, census.failed, census.turned_away) == (6, 1, 2, 1)


def test_an_unknown_backend_is_refused() -> None:
    from faultinject.programs.devices.base import open_device

    with pytest.raises(UsageError, match="there is no backend"):
        open_device("cuda")


def test_every_workload_has_a_module() -> None:
    for name in workloads.NAMES:
        assert find_spec(workloads.module_of(name)), name
