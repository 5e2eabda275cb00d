"""What must hold of a fault in mode auto, by the protection level of the node."""

from __future__ import annotations

import pytest

from faultinject.registry import kinds
from faultinject.registry.checkers import check, rig_worked, survivors_live, verdict
from faultinject.registry.defaults import NO_PROMISE, under_default, without_proxy
from faultinject.registry.faults import REGISTRY, Fault, by_name
from faultinject.registry.observation import Observation, SurvivorSeen
from faultinject.registry.verdicts import Verdict


@pytest.mark.parametrize("fault", REGISTRY, ids=lambda fault: fault.name)
def test_at_level_failover_every_client_lives(fault: Fault) -> None:
    must = under_default(fault, "failover").survive[kinds.AUTO]
    assert must is (fault.survive["mpsd"] if fault.kind in NO_PROMISE else True)


@pytest.mark.parametrize(
    ("name", "level", "must"),
    [
        ("trap", "guard", False),
        ("trap", "observe", False),
        ("trap", None, False),
        ("zone_past_end@one", "guard", True),
        ("sigkill_running", "observe", True),
    ],
)
def test_below_it_nothing_more_is_promised_than_the_level_gives(name: str, level: str, must: bool) -> None:
    assert under_default(by_name(name), level).survive[kinds.AUTO] is must


@pytest.mark.parametrize(("level", "expected"), [("failover", Verdict.INVALID), ("observe", Verdict.VALID)])
def test_a_lost_client_is_judged_by_the_level_that_the_node_had(level: str, expected: Verdict) -> None:
    lost = SurvivorSeen("survivor-0", 7, True, False, 719, 1.0, 0, 9)
    seen = Observation(kinds.AUTO, (lost,), ready_expected=1, fired_at=0.5, notes={"level": level})
    assert verdict(check(by_name("trap"), seen, bars=False, laws=(survivors_live, rig_worked))) is expected


def test_a_zone_kind_without_the_proxy_is_a_memory_fault() -> None:
    zone = by_name("zone_past_end@one")
    bare = without_proxy(zone)
    assert zone.zoned and not bare.zoned and bare.name == zone.name
    assert bare.survive == {"stock": False, "mpsd": False} and bare.takes_domain
    assert [mode for mode in ("stock", "mpsd") if bare.runs_in(mode)] == ["stock", "mpsd"]
