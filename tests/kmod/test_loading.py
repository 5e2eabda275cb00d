"""The loaded modules are exchanged for the patched ones and back, or stay as they were."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kmod.command import undisturbed
from kmod.errors import InUse, KmodError, Unavailable
from kmod.install import Manifest, folder_of, perform, plan_install
from kmod.loading import loaded_is_old, plan_load, plan_unload, stock_view
from kmod.machine import Machine
from kmod.modules import is_ours, use
from tests.kmod.machines import (
    RELEASE,
    VERSION,
    add_kernel_programs,
    add_process,
    add_programs,
    elf,
    load,
    make_machine,
    needs_kmod,
    quiet,
    wish,
)

pytestmark = needs_kmod
STOCK = "updates/dkms/nvidia-current-open"
OURS = "updates/mpsd/nvidia-current-open"
UNLOADED = ["unload nvidia_uvm", "unload nvidia"]
LOADED = ["nvidia_uvm 1 0 -", "nvidia 1 1 nvidia_uvm,"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name, value in add_programs(tmp_path).items():
        monkeypatch.setenv(name, value)
    made = make_machine(tmp_path / "root")
    add_kernel_programs(made)
    perform(plan_install(made, wish(made)), quiet)
    return made


def manifest(machine: Machine) -> Manifest:
    found = Manifest.read(folder_of(machine, VERSION))
    assert found
    return found


def load_ours(machine: Machine) -> None:
    perform(plan_load(machine, use(machine), manifest(machine)), quiet)


def load_stock(machine: Machine) -> None:
    perform(plan_unload(machine, use(machine), manifest(machine)), quiet)


def log(machine: Machine) -> list[str]:
    path = machine.root / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def came(where: str) -> list[str]:
    return [f"load {where}.ko", f"load {where}-uvm.ko"]


def test_the_stock_modules_go_ours_come_and_back(machine: Machine) -> None:
    load(machine, LOADED)
    load_ours(machine)
    assert log(machine) == UNLOADED + came(OURS)
    assert is_ours(machine)
    assert plan_load(machine, use(machine), manifest(machine)) == []
    load_stock(machine)
    assert log(machine) == UNLOADED + came(STOCK)
    assert not is_ours(machine)
    assert plan_unload(machine, use(machine), manifest(machine)) == []


def test_nothing_is_unloaded_where_nothing_is_loaded(machine: Machine) -> None:
    load_ours(machine)
    assert log(machine) == came(OURS)


@pytest.mark.parametrize("ours", [False, True])
def test_modules_in_use_are_refused_with_who_uses_them(machine: Machine, ours: bool) -> None:
    load(machine, LOADED, ours=ours)
    add_process(machine, 70, "trainer", ["/dev/nvidia-uvm"])
    plan = plan_unload if ours else plan_load
    with pytest.raises(InUse, match=r"(?s)in use; .*process 70 of uid .*trainer.*open: /dev/nvidia-uvm"):
        plan(machine, use(machine), manifest(machine))
    assert log(machine) == []


def test_ours_that_do_not_load_leave_the_stock_ones_loaded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(machine, LOADED)
    monkeypatch.setenv("REFUSE", OURS + "-uvm")
    said = r"(?s)Key was rejected.*The driver's own modules are loaded again.*uninstall --next-boot"
    with pytest.raises(KmodError, match=said):
        load_ours(machine)
    assert log(machine) == [*UNLOADED, came(OURS)[0], "unload nvidia", *came(STOCK)]
    assert not is_ours(machine)


def test_ours_that_do_not_load_leave_nothing_where_nothing_was(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSE", OURS + "-uvm")
    with pytest.raises(KmodError, match=r"(?s)Key was rejected.*No driver module is loaded, as before"):
        load_ours(machine)
    assert use(machine).loaded == ()


def test_a_module_that_came_into_use_meanwhile_stays_and_the_others_come_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(machine, LOADED)
    monkeypatch.setenv("BUSY", "nvidia")
    with pytest.raises(KmodError, match=r"(?s)nvidia is in use.*loaded again"):
        load_ours(machine)
    assert log(machine) == ["unload nvidia_uvm", f"load {STOCK}-uvm.ko"]
    load(machine, LOADED, ours=True)
    with pytest.raises(KmodError, match=r"(?s)nvidia is in use.*loaded again"):
        load_stock(machine)
    assert log(machine) == ["unload nvidia_uvm", f"load {OURS}-uvm.ko"]


def test_stock_modules_that_do_not_load_leave_ours_loaded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(machine, LOADED, ours=True)
    monkeypatch.setenv("REFUSE", STOCK + "-uvm")
    said = (
        r"(?s)cannot load the driver's own modules: .*Key was rejected.*The patched modules are loaded again"
    )
    with pytest.raises(KmodError, match=said):
        load_stock(machine)
    assert log(machine) == [*UNLOADED, came(STOCK)[0], "unload nvidia", *came(OURS)]
    assert is_ours(machine)


def test_what_cannot_be_put_back_either_is_said_with_both_reasons(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(machine, LOADED)
    monkeypatch.setenv("REFUSE", "-uvm")
    said = r"(?s)load the patched modules: .*Key was.*be loaded either: .*Key was.*mpsd-kmod status"
    with pytest.raises(KmodError, match=said):
        load_ours(machine)
    monkeypatch.delenv("REFUSE")
    log(machine)
    # No module or only one is loaded, but the plan to load the earlier modules is known.
    load_stock(machine)
    assert log(machine)[-2:] == came(STOCK) and len(use(machine).loaded) == 2


def test_a_rule_that_asks_for_nvidia_uvm_when_nvidia_comes_does_not_bring_ours(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(machine, LOADED, ours=True)
    monkeypatch.setenv("UDEV", "1")
    load_stock(machine)
    assert log(machine) == [*UNLOADED, came(STOCK)[0], came(OURS)[1], "unload nvidia_uvm", came(STOCK)[1]]
    assert not is_ours(machine)


@pytest.mark.parametrize("ours", [False, True])
def test_an_exchange_that_was_killed_is_finished_either_way(machine: Machine, ours: bool) -> None:
    """With no module loaded, only the saved plan says which were loaded before."""
    load(machine, LOADED)
    steps = plan_load(machine, use(machine), manifest(machine))
    perform(steps[:-1], quiet)
    assert use(machine).loaded == () and log(machine) == UNLOADED
    (load_ours if ours else load_stock)(machine)
    assert log(machine) == came(OURS if ours else STOCK)
    assert not list(machine.state.glob("to-load"))
    plan = plan_load if ours else plan_unload
    assert plan(machine, use(machine), manifest(machine)) == []


def test_what_was_to_be_loaded_and_is_loaded_by_now_is_nothing_to_do(machine: Machine) -> None:
    """After the kill another program, for example a CUDA program, loaded the driver, and uses it."""
    load(machine, LOADED)
    perform(plan_load(machine, use(machine), manifest(machine))[:-1], quiet)
    load(machine, LOADED, ours=True)
    add_process(machine, 70, "trainer", ["/dev/nvidia-uvm"])
    assert plan_load(machine, use(machine), manifest(machine)) == []


def test_without_nvidia_uvm_nobody_can_tell_whose_nvidia_is_loaded(machine: Machine) -> None:
    load(machine, ["nvidia 1 0 -"])
    load_stock(machine)
    assert log(machine) == ["unload nvidia", *came(STOCK)]
    assert plan_unload(machine, use(machine), manifest(machine)) == []


def test_a_patched_module_of_another_build_is_exchanged(machine: Machine) -> None:
    load_ours(machine)
    log(machine)
    (machine.sys / "module/nvidia_uvm/srcversion").write_text("AAAA\n")
    assert not loaded_is_old(machine, manifest(machine))
    path = machine.ours(RELEASE) / "nvidia-current-open-uvm.ko"
    path.write_bytes(elf({}, {"answer": 2}, source="BBBB"))
    assert loaded_is_old(machine, manifest(machine))
    load_ours(machine)
    assert log(machine) == UNLOADED + came(OURS)


def test_signals_wait_for_the_end_of_an_exchange() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with undisturbed():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(os.getpid(), number)
        assert heard == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_stock_modules_ours_are_not_unloaded(machine: Machine) -> None:
    load_ours(machine)
    log(machine)
    for path in (machine.modules / RELEASE / "updates/dkms").iterdir():
        path.unlink()
    with pytest.raises(KmodError, match="nvidia-current-open not found"):
        load_stock(machine)
    assert log(machine) == []


def test_what_could_not_be_put_back_is_not_unloaded_for_ours(machine: Machine) -> None:
    load(machine, LOADED)
    for path in (machine.modules / RELEASE / "updates/dkms").iterdir():
        path.unlink()
    with pytest.raises(KmodError, match="nvidia-current-open not found"):
        load_ours(machine)
    assert log(machine) == []


def test_half_of_ours_is_not_loaded(machine: Machine) -> None:
    (machine.ours(RELEASE) / "nvidia-current-open-uvm.ko").unlink()
    with pytest.raises(KmodError, match=r"does not find the patched modules.*which does not exist"):
        plan_load(machine, use(machine), manifest(machine))


def test_the_view_without_ours_has_all_else(machine: Machine) -> None:
    other = machine.modules / RELEASE / "updates/other.ko"
    other.write_bytes((machine.modules / RELEASE / f"{STOCK}.ko").read_bytes())
    view = stock_view(machine) / "lib/modules" / RELEASE
    assert {path.name for path in (view / "updates").iterdir()} == {"dkms", "other.ko"}
    text = (view / "modules.dep").read_text()
    assert "updates/dkms/nvidia-current-open-uvm.ko" in text and "mpsd" not in text
    assert (stock_view(machine) / "usr/lib/modules" / RELEASE / "modules.dep").is_file()


def test_below_another_root_nothing_of_this_machine_is_started(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="this machine's programs are not used"):
        Machine(tmp_path).kernel_program("rmmod")
    assert Machine().kernel_program("rmmod") == "rmmod"
