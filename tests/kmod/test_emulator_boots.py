"""The results that a boot must show: checks that must fail count as much as those that must pass.

scripts/test-kmod runs the boots themselves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator import boots, proof, vm
from emulator.boots import BOOTS, RIG, Boot, verdicts
from emulator.guest import catalogue
from kmod import build, debian
from kmod.trial import Row

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
        (result("stray", "sparse", passed=True), False, "passed, but must fail"),
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


@pytest.mark.parametrize(
    ("part", "calls"),
    [
        ([], ["hooks and builds", "boots with source of trixie"]),
        (["--part", "build"], ["hooks and builds"]),
        (["--part", "boot"], ["fetch trixie", "boots with source of trixie"]),
    ],
    ids=["whole", "build", "boot"],
)
def test_both_parts_of_ci_are_the_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: list[str], calls: list[str]
) -> None:
    made: list[str] = []
    source = debian.Fetched("trixie", "550.163.01-2", tmp_path)

    def tried(_trial: object) -> list[Row]:
        made.append("hooks and builds")
        return [Row("trixie", source)]

    def fetch(suite: str, _cache: Path) -> debian.Fetched:
        made.append(f"fetch {suite}")
        return source

    def boot_all(_scope: object, fetched: dict[str, debian.Fetched], *_: object) -> list[str]:
        made.append(f"boots with source of {', '.join(fetched)}")
        return []

    monkeypatch.setattr(build, "kernel", lambda _release: build.Kernel("6.1.0-test", tmp_path))
    monkeypatch.setattr(proof.kernel, "newest", lambda: "6.1.0-test")
    monkeypatch.setattr(proof, "end_when_told", lambda: None)
    monkeypatch.setattr(proof, "tried", tried)
    monkeypatch.setattr(proof, "boot_all", boot_all)
    monkeypatch.setattr(debian, "fetch", fetch)
    assert proof.main(["--ci", *part, "--cache", str(tmp_path)]) == 0
    assert made == calls
