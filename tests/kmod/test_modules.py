"""Loaded modules and the processes that use them, read from a /proc and a /sys of the test."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kmod.machine import Machine
from kmod.modules import Loaded, load_order, parse, unload_order, use
from tests.kmod.machines import add_process, load, make_machine

SET = ["nvidia_uvm 100 4 -", "nvidia_drm 100 1 -", "nvidia_modeset 100 1 nvidia_drm,"]
SET += ["nvidia 100 9 nvidia_uvm,nvidia_modeset,"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return make_machine(tmp_path)


def test_a_line_of_the_kernel_s_list_says_who_holds_a_module() -> None:
    text = (
        "nvidia 1 9 nvidia_uvm,nvidia_modeset, Live 0x0 (OE)\next4 1 0 - Live 0x0\nbroken\nx 1 - - Live 0\n"
    )
    assert parse(text) == [Loaded("nvidia", 9, ("nvidia_uvm", "nvidia_modeset")), Loaded("ext4", 0, ())]


def test_modules_are_unloaded_before_those_that_they_hang_on(machine: Machine) -> None:
    load(machine, SET)
    loaded = use(machine).loaded
    assert unload_order(loaded) == ["nvidia_drm", "nvidia_uvm", "nvidia_modeset", "nvidia"]
    have = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_peermem")
    assert load_order([module.name for module in loaded], have) == [
        "nvidia",
        "nvidia_uvm",
        "nvidia_modeset",
        "nvidia_drm",
    ]
    assert load_order((), have) == ["nvidia", "nvidia_uvm"]


def test_modules_that_hold_each_other_are_still_all_named() -> None:
    assert unload_order([Loaded("a", 1, ("b",)), Loaded("b", 1, ("a",))]) == ["a", "b"]


def test_processes_are_named_with_what_they_have_open_and_mapped(machine: Machine) -> None:
    load(machine, SET)
    add_process(
        machine, 70, "trainer --fast", ["/dev/null", "/dev/nvidia-uvm", "/dev/nvidia0"], ["/dev/nvidia0"]
    )
    add_process(machine, 71, "mapper", ["/dev/null"], ["/dev/nvidiactl", "/lib/libc.so.6"])
    add_process(machine, 72, "bystander", ["/dev/null", "socket:[1]", "/home/nvidia/data"])
    found = use(machine)
    assert [(user.pid, user.devices, user.mapped) for user in found.users] == [
        (70, ("/dev/nvidia-uvm", "/dev/nvidia0"), ("/dev/nvidia0",)),
        (71, (), ("/dev/nvidiactl",)),
    ]
    assert found.busy and found.unexplained == () and not found.ours
    who = f"process 70 of uid {os.getuid()} (trainer --fast)"
    assert f"{who} open: /dev/nvidia-uvm /dev/nvidia0 mapped: /dev/nvidia0" in found.lines()


def test_a_display_counts_where_the_gpu_is_this_driver_s(machine: Machine) -> None:
    load(machine, SET)
    for node, driver in (("card0", "nvidia"), ("card1", "other")):
        folder = machine.sys / "class/drm" / node / "device"
        folder.mkdir(parents=True)
        (machine.sys / "bus" / driver).mkdir(parents=True)
        (folder / "driver").symlink_to(machine.sys / "bus" / driver)
    add_process(machine, 70, "compositor", ["/dev/dri/card0"])
    add_process(machine, 71, "other", ["/dev/dri/card1"])
    assert [user.pid for user in use(machine).users] == [70]


def test_a_device_that_a_container_renamed_is_known_by_its_number(machine: Machine) -> None:
    number = os.major(os.stat("/dev/null").st_rdev)
    (machine.proc / "devices").write_text(
        f"Character devices:\n{number:3} nvidia-uvm\n  5 tty\n\nBlock devices:\n"
    )
    load(machine, SET)
    add_process(machine, 70, "contained", ["/dev/null"])
    assert [user.devices for user in use(machine).users] == [("/dev/null",)]


def test_modules_that_are_not_the_driver_s_and_users_that_are_nobody_are_named(machine: Machine) -> None:
    load(machine, ["gdrdrv 10 0 -", "nvidia_uvm 10 2 -", "nvidia 10 2 nvidia_uvm,gdrdrv,"])
    found = use(machine)
    assert [module.name for module in found.others] == ["gdrdrv"]
    assert found.unexplained == ("nvidia_uvm",)
    assert found.busy
    text = "\n".join(found.lines())
    assert "held by module gdrdrv" in text and "nvidia_uvm has users that are not visible here" in text


def test_a_name_like_the_driver_s_makes_no_module_the_driver_s(machine: Machine) -> None:
    """The kernel's own modules do not count; a module of another package would not be loaded again."""
    (machine.proc / "modules").write_text("nvidia_wmi_ec_backlight 10 0 - Live 0x0000000000000000\n")
    assert use(machine).loaded == ()
    load(machine, ["nvidia_fs 10 0 -", "nvidia_uvm 10 0 -", "nvidia 10 2 nvidia_uvm,nvidia_fs,"])
    found = use(machine)
    assert [module.name for module in found.others] == ["nvidia_fs"]
    assert unload_order(found.loaded) == ["nvidia_uvm", "nvidia"] and found.busy


def test_loaded_and_unused_is_not_busy(machine: Machine) -> None:
    assert use(machine).lines() == []
    load(machine, ["nvidia_uvm 10 0 -", "nvidia 10 1 nvidia_uvm,"], ours=True)
    found = use(machine)
    assert not found.busy and found.ours and found.as_json()["busy"] is False


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_processes_that_may_not_be_looked_at_are_counted() -> None:
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)  # pytest's own folders are closed to other users.
        machine = make_machine(Path(made) / "root")
        load(machine, SET)
        add_process(machine, 70, "hidden", [])
        (machine.proc / "70/fd").chmod(0)
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            found = use(machine)
            told = any("1 processes are not readable" in line for line in found.lines())
            os._exit(0 if found.hidden == 1 and told else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_this_machine_is_read_without_a_fake() -> None:
    """With any modules loaded on this machine the lists agree, and no function raises."""
    found = use(Machine())
    assert set(unload_order(found.loaded)) == {module.name for module in found.loaded}
