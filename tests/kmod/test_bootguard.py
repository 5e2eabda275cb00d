"""At boot, patched modules of a driver that is not installed are disabled, and no others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kmod import bootguard
from kmod.install import folder_of, perform, plan_install, plan_uninstall, resolved
from kmod.machine import Machine
from tests.kmod.machines import RELEASE, VERSION, add_programs, elf, make_machine, needs_kmod, quiet, wish

pytestmark = needs_kmod
STOCK = Path("updates/dkms/nvidia-current-open.ko")
LINK = Path("etc/systemd/system/sysinit.target.wants") / bootguard.NAME


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Our modules are installed, systemd runs the machine, and each module knows its version."""
    for name, value in add_programs(tmp_path).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "parts/nvidia.ko").write_bytes(elf({"answer": 2}, {}, version=VERSION))
    made = make_machine(tmp_path / "root")
    bootguard.unit(made).parent.mkdir(parents=True)
    upgrade(made, VERSION)
    perform(plan_install(made, wish(made)), quiet)
    return made


def upgrade(machine: Machine, version: str) -> None:
    (machine.modules / RELEASE / STOCK).write_bytes(elf({"answer": 1}, {}, version=version))


def boot(machine: Machine) -> str:
    """Return the output of the unit."""
    line = [folder_of(machine, VERSION) / "mpsd" / bootguard.SCRIPT, RELEASE]
    return subprocess.run(line, capture_output=True, text=True, timeout=60.0, check=True).stdout


def found(machine: Machine) -> Path | None:
    return resolved(machine, RELEASE, "nvidia-current-open")


def test_the_unit_comes_and_goes_with_our_modules(machine: Machine) -> None:
    text = bootguard.unit(machine).read_text()
    assert f"ExecStart=-/bin/sh /usr/src/mpsd-nvidia-{VERSION}/mpsd/versions %v\n" in text
    assert (machine.root / LINK).resolve() == bootguard.unit(machine)
    assert plan_install(machine, wish(machine)) == []
    (machine.root / LINK).unlink()
    (again,) = plan_install(machine, wish(machine))
    perform([again], quiet)
    assert (machine.root / LINK).is_symlink()
    perform(plan_uninstall(machine), quiet)
    assert not bootguard.remains(machine) and plan_uninstall(machine) == []


def test_without_systemd_there_is_none(machine: Machine) -> None:
    perform(plan_uninstall(machine), quiet)
    shutil.rmtree(machine.root / "etc/systemd")
    perform(plan_install(machine, wish(machine)), quiet)
    assert not bootguard.remains(machine) and plan_install(machine, wish(machine)) == []


def test_of_the_same_driver_they_stay(machine: Machine) -> None:
    assert boot(machine) == ""
    assert found(machine) == machine.ours(RELEASE) / STOCK.name


def test_of_another_driver_they_step_aside_and_an_install_brings_them_back(machine: Machine) -> None:
    upgrade(machine, "560.1")
    assert f"driver 560.1 is installed, the patched modules are {VERSION}" in boot(machine)
    assert found(machine) == machine.modules / RELEASE / STOCK
    assert boot(machine) == ""
    upgrade(machine, VERSION)
    perform(plan_install(machine, wish(machine)), quiet)
    assert found(machine) == machine.ours(RELEASE) / STOCK.name
    assert sorted(path.suffix for path in machine.ours(RELEASE).iterdir()) == [".ko", ".ko"]


def test_one_that_was_ended_before_its_depmod_is_finished_by_the_next(machine: Machine) -> None:
    upgrade(machine, "560.1")
    for path in machine.ours(RELEASE).iterdir():
        path.rename(path.with_name(path.name + ".off"))
    assert found(machine) != machine.modules / RELEASE / STOCK
    assert boot(machine) == ""
    assert found(machine) == machine.modules / RELEASE / STOCK


@pytest.mark.parametrize("how", ["no version", "half written", "none"])
def test_where_versions_are_not_known_nothing_is_changed(machine: Machine, how: str) -> None:
    stock = machine.modules / RELEASE / STOCK
    if how == "none":
        stock.unlink()
    else:
        stock.write_bytes(elf({"answer": 1}, {}) if how == "no version" else b"\x7fELF")
    assert boot(machine) == ""
    assert found(machine) == machine.ours(RELEASE) / STOCK.name
