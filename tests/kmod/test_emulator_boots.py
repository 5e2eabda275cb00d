"""What a boot has to show: checks that must fail count as much as those that must pass.

The boots themselves are scripts/test-kmod's.
"""

from __future__ import annotations

import pytest

from emulator import boots, proof, vm
from emulator.boots import BOOTS, RIG, Boot, verdicts
from emulator.guest import catalogue
from kmod import debian

MUST_FAIL = Boot("isolated", fails={"stray": "cancel-va"})


def result(name: str, text: str, *, passed: bool) -> vm.Result:
    return vm.Result(name, passed, text, 1.0, True)


@pytest.mark.parametrize(
    ("seen", "right", "says"),
    [
        (result("other", "fine", passed=True), True, "fine"),
        (result("other", "why", passed=False), False, "why"),
        (result("stray", "cancelled: ['cancel-va']", passed=False), True, "fails as it must"),
        (result("stray", "not reached", passed=False), False, "failed, but not with 'cancel-va'"),
        (result("stray", "sparse", passed=True), False, "passed, and has to fail"),
    ],
)
def test_each_check_has_to_end_as_it_must(seen: vm.Result, right: bool, says: str) -> None:
    (verdict,) = verdicts(MUST_FAIL, [seen])
    assert verdict.right is right
    assert says in verdict.text
    (line,) = boots.lines([verdict])
    assert line.startswith("ok " if right else "FAILED ")


@pytest.mark.parametrize("boot", [RIG, *BOOTS], ids=lambda boot: boot.checks)
def test_what_must_fail_is_among_the_checks(boot: Boot) -> None:
    assert set(boot.fails) <= {check.name for check in catalogue.SETS[boot.checks]}


def test_every_set_is_booted_and_the_bar_is_what_the_patched_module_passes() -> None:
    assert sorted(boot.checks for boot in (RIG, *BOOTS)) == sorted(catalogue.SETS)
    (bar,) = [boot for boot in BOOTS if boot.fails]
    assert not bar.patched
    patched = [boot for boot in BOOTS if boot.patched and boot.gpu]
    passed = {check.name: check.run for boot in patched for check in catalogue.SETS[boot.checks]}
    for check in catalogue.SETS[bar.checks]:
        if check.name in bar.fails:
            assert passed[check.name] is check.run


def test_ci_takes_the_required_suites() -> None:
    required = {suite.name for suite in debian.SUITES if suite.required}
    assert set(proof.FULL.boot) == required and set(proof.CI.boot) <= required
    assert proof.CI.boot and not {"patched", "isolated", "gpu-patched"} & proof.CI.skipped
    assert proof.CI.uvm and set(proof.CI.uvm) <= required
    assert set(proof.FULL.build) == {suite.name for suite in debian.SUITES}
