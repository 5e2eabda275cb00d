"""Warnings of thread percentages at which cuBLAS is wrong: conditions, doctor, config check, mpsd-run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mpsd.api import percentages as uses
from mpsd.api.percentages import Percentages, configuration_notes, wrong_percentages
from mpsd.base.conditions import Code
from mpsd.base.errors import GpuError
from mpsd.base.model import Gpu, ProcessInstance
from mpsd.base.percentages import VARIABLE, Measured
from mpsd.config.schema import BackendName, Config, Limits
from mpsd_client.joining.percentage import percentage_warnings
from tests.support.core import World, process

TABLE = Measured("13.0", 0.02, frozenset({40, 43}))
GPU = Gpu(0, "GPU-0", "a GPU", "0000:01:00.0", 1 << 30)


def world() -> World:
    """Return a user's active domain d1 with clients 11 and 12, and its standby domain d2."""
    made = World().ready()
    made.join(11, 12)
    return made


def found(
    made: World, limit: float | None, own: dict[ProcessInstance, float | None], table: Measured | None = TABLE
) -> list[tuple[str, str]]:
    listed = list(wrong_percentages(made.state, lambda gpus: table, lambda domain: limit, own))
    # Only the limit, which the control daemon states, degrades the status.
    of_limit = {Code.BAD_THREAD_PERCENTAGE: True, Code.CLIENT_THREAD_PERCENTAGE: False}
    assert all(each.detail.startswith("its limit,") == of_limit[each.code] for each in listed)
    assert all(each.kind.degrades == of_limit[each.code] for each in listed)
    return [(each.subject, each.detail.partition(",")[0]) for each in listed]


def test_a_wrong_limit_is_told_of_the_active_domain_alone() -> None:
    assert found(world(), 40, {}) == [("d1", "its limit")]
    assert found(world(), 41, {}) == found(world(), None, {}) == []
    assert found(world(), 40, {}, None) == []


def test_a_lower_percentage_of_a_client_is_told_once_for_equal_ones() -> None:
    both = dict.fromkeys((process(11), process(12)), 43.0)
    assert found(world(), None, both) == [("d1", f"its {VARIABLE}")]
    # A higher one has no effect.
    assert found(world(), 41, both) == []
    assert found(world(), 50, {process(11): 40.0, process(12): 43.0}) == [("d1", f"its {VARIABLE}")] * 2


def test_a_condition_names_the_nearest_right_percentages() -> None:
    (condition,) = wrong_percentages(world().state, lambda gpus: TABLE, lambda domain: 40.0, {})
    assert "domain d1" in condition.text and "39 % and 41 %" in condition.text
    assert "right percentages" in condition.remedy and condition.kind.degrades


def percentages_on(monkeypatch: pytest.MonkeyPatch, table: Measured | None, devices: Any) -> Percentages:
    monkeypatch.setattr(uses.numerics, "table_of", lambda *asked: table)
    return Percentages(SimpleNamespace(name="nvidia", devices=devices), [GPU], lambda event: None)  # type: ignore[arg-type]


def test_doctor_says_once_what_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Devices:
        def driver_version(self) -> str:
            raise GpuError("NVML does not answer")

    async def look() -> None:
        unknown = percentages_on(monkeypatch, None, SimpleNamespace(driver_version=lambda: "580.1")).check()
        assert unknown.ok is None and "not measured for a GPU with driver 580.1" in unknown.finding
        assert "mpsd-faultinject numerics" in unknown.remedy
        assert "driver unknown" in percentages_on(monkeypatch, None, Devices()).check().finding
        known = percentages_on(monkeypatch, TABLE, SimpleNamespace(driver_version=lambda: "580.1")).check()
        assert known.ok is True and known.finding.endswith("at: 40, 43")

    asyncio.run(look())


def test_the_environment_of_a_client_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def own(asked: ProcessInstance) -> float:
        reads.append(asked.pid)
        return 40.0

    monkeypatch.setattr(uses, "own_percentage", own)

    async def look() -> None:
        known = percentages_on(monkeypatch, TABLE, SimpleNamespace(driver_version=lambda: "580.1"))
        made = world()
        for _ in range(3):
            known.follow(made.state.clients.values())
        await known._tasks.ended()
        assert sorted(reads) == [11, 12]
        assert len(known.conditions(made.state, lambda domain: None)) == 1
        known.follow(())
        assert known.conditions(made.state, lambda domain: None) == []
        await known.close()

    asyncio.run(look())


def test_the_configured_percentage_is_judged_on_each_measured_gpu() -> None:
    config = Config(backend=BackendName.SIMULATED, limits=Limits(active_thread_percentage=40))
    (note,) = configuration_notes(config)
    assert note.startswith("limits.active_thread_percentage") and "the simulated GPU" in note
    assert not configuration_notes(replace(config, limits=Limits(active_thread_percentage=41)))
    assert not configuration_notes(replace(config, limits=Limits()))


@pytest.mark.parametrize(
    ("own", "limit", "origin"),
    [
        ("40", None, VARIABLE),
        ("43", 50.0, VARIABLE),
        ("", 40.0, "the domain's limit"),
        ("60", 40.0, "the domain's limit"),
        ("39", 40.0, ""),
        ("", None, ""),
        ("x", None, ""),
    ],
)
def test_mpsd_run_warns_of_the_percentage_that_counts(own: str, limit: float | None, origin: str) -> None:
    told = percentage_warnings({VARIABLE: own}, {"limit": limit, "table": TABLE.view()})
    assert [text.split(": ")[1].split(",")[0] for text in told] == ([origin] if origin else [])
    assert percentage_warnings({VARIABLE: own}, None) == []
