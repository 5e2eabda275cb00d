"""The level of the node: the decision as a table, and the collection for GPUs and users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
import structlog

from mpsd.base.conditions import Code
from mpsd.base.errors import GpuError
from mpsd.base.model import FailoverMode, Gpu
from mpsd.base.protection import Obstacle, Protection, ProtectionLevel, ProtectSetting
from mpsd.config.schema import BackendName, Config, FailoverSettings, ReplaySetting
from mpsd.daemon.options import policy_of
from mpsd.daemon.protection import Hardware, NodeProtection, level, of_descriptors
from mpsd.gpu.base import Backend
from mpsd.gpu.drivers import Combination
from mpsd.gpu.drivers import proven as real_entry
from mpsd.os.descriptors import SHARES, DescriptorBudget, Purpose

OBSERVE, GUARD, FAILOVER = ProtectionLevel
H200 = Gpu(0, "GPU-0", "NVIDIA H200", "0000:01:00.0", 1 << 37)
OTHER = Gpu(1, "GPU-1", "NVIDIA X1", "0000:02:00.0", 1 << 37)
NO_COPY = Obstacle(GUARD, "driver files", "cannot copy it", "free space")
NO_VAULT = Obstacle(OBSERVE, "vault", "the door is shut", "open it")


def hardware(proven: str | None) -> Hardware:
    if proven is None:
        return Hardware("575.1", "NVIDIA X1", None)
    highest = ProtectionLevel(proven)
    known = Combination("driver 580 on X", "nvidia", "580", ("X",), highest, highest, ())
    return Hardware("580.1", "X", known)


@pytest.mark.parametrize(
    ("setting", "user", "proven", "obstacles", "wanted", "why"),
    [
        ("auto", None, "failover", [], "failover", ""),
        ("auto", None, "guard", [], "guard", "driver 580 on X is proven for guard alone"),
        ("auto", None, None, [], "observe", "driver 575 on NVIDIA X1 is not proven"),
        ("auto", None, "failover", [NO_COPY], "guard", "cannot copy it"),
        ("auto", None, "failover", [NO_COPY, NO_VAULT], "observe", "the door is shut"),
        ("auto", None, None, [NO_VAULT], "observe", "driver 575 on NVIDIA X1 is not proven"),
        ("auto", "guard", "failover", [], "guard", '[users] sets "guard" for this user'),
        ("auto", "failover", "failover", [], "failover", ""),
        ("auto", "failover", None, [], "observe", "driver 575 on NVIDIA X1 is not proven"),
        ("failover", None, None, [], "failover", ""),
        ("failover", None, "guard", [], "failover", ""),
        ("failover", None, None, [NO_COPY], "guard", "cannot copy it"),
        ("failover", "observe", None, [NO_COPY], "observe", '[users] sets "observe" for this user'),
        ("guard", None, "failover", [], "guard", 'protect = "guard"'),
        ("guard", None, None, [], "guard", 'protect = "guard"'),
        ("guard", None, None, [NO_COPY], "guard", 'protect = "guard"'),
        ("guard", "failover", "failover", [], "guard", 'protect = "guard"'),
        ("guard", None, "failover", [NO_VAULT], "observe", "the door is shut"),
        ("observe", None, "failover", [], "observe", 'protect = "observe"'),
    ],
)
def test_the_level(
    setting: str, user: str | None, proven: str | None, obstacles: list[Obstacle], wanted: str, why: str
) -> None:
    found = level(
        ProtectSetting(setting), ProtectionLevel(user) if user else None, hardware(proven), obstacles
    )
    assert (found.level, found.why) == (ProtectionLevel(wanted), why)
    assert bool(found.remedy) is bool(why)


def test_an_unknown_driver_says_how_to_try_more() -> None:
    found = level(ProtectSetting.AUTO, None, Hardware("", "NVIDIA X1", None))
    assert found.why == "an unknown driver on NVIDIA X1 is not proven"
    assert 'protect = "failover"' in found.remedy


@dataclass
class Node:
    """A node of two GPUs, one of them proven, whose obstacles a test changes."""

    protect: str = "auto"
    mode: str = "exact"
    users: dict[str, ProtectionLevel] = field(default_factory=dict)
    gpus: Sequence[Gpu] = (H200,)
    driver: str | None = "580.159.04"
    machine: list[Obstacle] = field(default_factory=list)
    others: list[Obstacle] = field(default_factory=list)
    exclusive: set[str] = field(default_factory=set)
    simulated: bool = False

    auto: ProtectionLevel = FAILOVER

    def open(self) -> NodeProtection:
        backend = "simulated" if self.simulated else "nvidia"
        gpus = [replace(gpu, name="Simulated GPU") for gpu in self.gpus] if self.simulated else self.gpus
        self.config = Config(
            backend=BackendName(backend),
            protect=ProtectSetting(self.protect),
            users=self.users,
            failover=FailoverSettings(mode=ReplaySetting(self.mode)),
        )
        devices = SimpleNamespace(driver_version=self._driver_version)
        self.backend = cast(Backend, SimpleNamespace(name=backend, devices=devices, terminate_deadline_s=1.0))
        with patch("mpsd.daemon.protection.drivers.proven", self._proven):
            return NodeProtection(
                self.config,
                self.backend,
                gpus,
                lambda: self.machine,
                lambda: self.others,
                lambda: self.exclusive,
            )

    def _proven(self, backend: str, driver: str, gpu: str) -> Combination | None:
        """Return the real table's entry, as if `auto` took what it is proven for."""
        found = real_entry(backend, driver, gpu)
        return None if found is None else replace(found, auto=self.auto)

    def _driver_version(self) -> str:
        if self.driver is None:
            raise GpuError("no answer")
        return self.driver


def test_each_gpu_has_its_level_and_the_node_has_the_lowest() -> None:
    node = Node(gpus=(H200, OTHER)).open()
    assert (node.of(["GPU-0"]).level, node.of(["GPU-1"]).level, node.of().level) == (
        FAILOVER,
        OBSERVE,
        OBSERVE,
    )
    assert node.of(["GPU-0", "GPU-1"]).level is OBSERVE
    # One GPU suffices to open the doors; a domain needs all of its GPUs.
    assert node.allows(FAILOVER) and node.allows(FAILOVER, ["GPU-0"])
    assert not node.allows(GUARD, ["GPU-0", "GPU-1"]) and node.allows(OBSERVE, ["GPU-1"])
    assert node.gpus_without_failover == {"GPU-1"}
    views = node.views()
    assert views["GPU-0"] == {
        **{"setting": "auto", "level": "failover", "why": "", "remedy": ""},
        **{"driver": "580.159.04", "gpu": "NVIDIA H200", "evidence": views["GPU-0"]["evidence"]},
    }
    assert "faultinject/evidence/failover-sm.md" in views["GPU-0"]["evidence"]
    assert node.view() == views["GPU-1"] and views["GPU-1"]["evidence"] == ""


def test_a_user_has_a_lower_level_alone() -> None:
    node = Node(users={"4711": GUARD, "4712": OBSERVE, "4713": FAILOVER}).open()
    found = [node.of(["GPU-0"], uid).level for uid in (0, 4711, 4712, 4713)]
    assert found == [FAILOVER, GUARD, OBSERVE, FAILOVER]
    assert node.users_without_failover == {4711, 4712}
    assert [node.allows(GUARD, uid=uid) for uid in (0, 4711, 4712)] == [True, True, False]


def test_a_driver_that_does_not_answer_is_unknown() -> None:
    node = Node(driver=None).open()
    assert (node.of().level, node.failover_mode) == (OBSERVE, FailoverMode.OFF)
    assert node.view()["driver"] == ""


def test_obstacles_lower_the_level_and_not_what_is_allowed() -> None:
    world = Node()
    node = world.open()
    assert node.conditions() == [] and node.of().level is FAILOVER
    world.machine.append(NO_COPY)
    assert node.of() == Protection(GUARD, "cannot copy it", "free space")
    assert node.allows(FAILOVER) and node.failover_mode is FailoverMode.EXACT
    # It had more before, so it is a loss.
    (lost,) = node.conditions()
    assert (lost.code, lost.subject, lost.kind.degrades) == (Code.PROTECTION_LOWERED, "GPU 0", True)
    assert lost.detail == "guard instead of failover: cannot copy it"
    world.machine.clear()
    assert node.conditions() == [] and node.of().level is FAILOVER
    world.exclusive.add("GPU-0")
    assert "EXCLUSIVE_PROCESS of GPU 0" in node.of().why and node.of().remedy == "run nvidia-smi -i 0 -c 0"
    world.exclusive.clear()
    node.closed.append(NO_VAULT)
    assert node.of().level is OBSERVE


def test_auto_is_degraded_below_what_is_proven_for_a_real_gpu() -> None:
    (found,) = Node(machine=[NO_COPY]).open().conditions()
    assert found.detail == "guard instead of failover: cannot copy it"
    assert Node(gpus=(OTHER,)).open().conditions() == []
    # The simulated GPU often has no driver files from the start.
    world = Node(machine=[NO_COPY], simulated=True)
    node = world.open()
    assert node.conditions() == []
    world.machine.clear()
    assert node.conditions() == [] and node.of().level is FAILOVER
    world.machine.append(NO_COPY)
    assert [each.code for each in node.conditions()] == [Code.PROTECTION_LOWERED]


def test_the_log_names_the_level_and_what_keeps_it_down() -> None:
    with structlog.testing.capture_logs() as logged:
        Node().open().conditions()
        Node(machine=[NO_COPY], simulated=True).open().conditions()
    line = {"event": "protection", "log_level": "info", "gpu": 0}
    assert logged == [
        line | {"protection": "failover"},
        line | {"protection": "guard", "why": "cannot copy it", "remedy": "free space"},
    ]


def test_auto_takes_less_than_is_proven_where_the_table_says_so() -> None:
    node = Node(auto=GUARD).open()
    assert (node.of().level, node.conditions(), node.reach) == (GUARD, [], FAILOVER)
    assert "although failover is proven" in node.of().why and 'protect = "failover"' in node.of().remedy
    assert not node.allows(FAILOVER) and node.failover_mode is FailoverMode.OFF
    assert Node(auto=GUARD, protect="failover").open().of().level is FAILOVER


def test_a_compute_mode_that_the_operator_chose_is_no_condition_under_auto() -> None:
    assert Node(exclusive={"GPU-0"}).open().conditions() == []
    assert Node(exclusive={"GPU-0"}, protect="failover").open().conditions() != []


def test_what_ends_by_itself_is_no_condition() -> None:
    copying = replace(NO_COPY, passing=True)
    assert Node(protect="failover", machine=[copying]).open().conditions() == []


def test_an_unknown_user_of_the_configuration_is_a_condition() -> None:
    node = Node(users={"no-such-user": GUARD}).open()
    assert [(c.code, c.subject) for c in node.conditions()] == [(Code.USER_UNKNOWN, "no-such-user")]


@pytest.mark.parametrize("protect", ["guard", "failover"])
def test_a_level_that_was_asked_for_and_is_prevented_is_a_condition(protect: str) -> None:
    (found,) = Node(protect=protect, machine=[NO_VAULT]).open().conditions()
    assert found.detail == f"observe instead of {protect}: the door is shut"
    assert Node(protect="guard", machine=[NO_COPY]).open().conditions() == []
    # By the operator's word.
    assert Node(protect="failover", gpus=(OTHER,)).open().conditions() == []


def test_mode_keep_is_never_counted_as_protection() -> None:
    node = Node(mode="keep").open()
    assert node.of().level is GUARD and '"exact"' in node.of().remedy
    # Programs that take part may still have it.
    assert node.allows(FAILOVER) and node.failover_mode is FailoverMode.KEEP
    assert Node(mode="keep", protect="failover").open().conditions() != []


def test_an_ordinary_user_s_daemon_protects_its_own_programs() -> None:
    node = Node().open()
    with patch("os.geteuid", return_value=1000):
        assert node.of(uid=1000).level is FAILOVER and node.of().level is FAILOVER
        assert node.of(uid=1001).level is OBSERVE and "uid 1001" in node.of(uid=1001).why
    with patch("os.geteuid", return_value=0):
        assert node.of(uid=1001).level is FAILOVER


def test_ordinary_users_need_a_way_to_the_driver_files() -> None:
    node = Node(others=[NO_COPY]).open()
    with patch("os.geteuid", return_value=0):
        assert [node.of(uid=uid).level for uid in (None, 0, 1000)] == [FAILOVER, FAILOVER, GUARD]
        # doctor tells it, although root's own programs are protected.
        assert [check.name for check in node.checks()] == ["protection", "driver files"]


def test_a_domain_may_have_a_gpu_that_this_machine_lacks() -> None:
    node = Node(exclusive={"GPU-gone"}).open()
    assert node.of(["GPU-gone"]).level is OBSERVE and not node.allows(GUARD, ["GPU-0", "GPU-gone"])


def test_descriptors_for_the_vault() -> None:
    budget = DescriptorBudget(1024, shares=SHARES)
    assert of_descriptors(budget) == []
    while budget.take(Purpose.SEGMENT):
        pass
    (found,) = of_descriptors(budget)
    assert found.limit is OBSERVE and "LimitNOFILE" in found.remedy


def lines(node: NodeProtection) -> list[tuple[str, bool | None, str]]:
    return [(check.name, check.ok, check.finding) for check in node.checks()]


def test_doctor_tells_the_level_first_and_then_each_obstacle() -> None:
    title = "driver 580 on NVIDIA H200: proven"
    assert lines(Node().open()) == [("protection", True, f"failover ({title})")]
    assert lines(Node(machine=[NO_COPY]).open()) == [
        ("protection", False, f"guard ({title}); no more because cannot copy it"),
        ("driver files", None, "cannot copy it"),
    ]
    assert lines(Node(protect="failover", machine=[NO_COPY, NO_VAULT]).open()) == [
        ("protection", False, f"observe ({title}); no more because the door is shut"),
        ("driver files", False, "cannot copy it"),
        ("vault", False, "the door is shut"),
    ]
    # An obstacle to a level that was not asked for is none.
    assert [name for name, *_ in lines(Node(protect="guard", machine=[NO_COPY]).open())] == ["protection"]


def test_doctor_says_where_nothing_is_proven() -> None:
    (name, ok, finding), *rest = lines(Node(gpus=(OTHER,), protect="failover").open())
    assert (name, ok, finding) == ("protection", True, "failover (driver 580 on NVIDIA X1: not proven)")
    assert not rest
    (check,) = Node(gpus=(OTHER,)).open().checks()
    assert check.ok is None and check.finding.startswith("observe (driver 580 on NVIDIA X1: not proven)")
    assert 'protect = "failover"' in check.remedy
    names = [name for name, *_ in lines(Node(gpus=(H200, OTHER)).open())]
    assert names == ["protection of GPU 0", "protection of GPU 1"]


@pytest.mark.parametrize(
    ("protect", "gpu", "reach"),
    [("observe", H200, FAILOVER), ("auto", OTHER, OBSERVE), ("guard", OTHER, GUARD)],
)
def test_core_learns_which_level_could_be_had(protect: str, gpu: Gpu, reach: ProtectionLevel) -> None:
    node = Node(protect=protect, gpus=(gpu,))
    protection = node.open()
    assert policy_of(node.config, node.backend, protection, node.gpus).reach is reach


def test_core_learns_the_users_and_gpus_below_fail_over() -> None:
    node = Node(users={"4711": GUARD}, gpus=(H200, OTHER))
    protection = node.open()
    policy = policy_of(node.config, node.backend, protection, node.gpus)
    assert policy.failover is FailoverMode.EXACT
    assert (policy.users_without_failover, policy.gpus_without_failover) == ({4711}, {"GPU-1"})
    node = Node(protect="guard")
    protection = node.open()
    assert policy_of(node.config, node.backend, protection, node.gpus).failover is FailoverMode.OFF
