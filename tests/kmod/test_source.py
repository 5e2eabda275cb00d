"""The driver source to patch: the loaded driver's, the only one, or the one named on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kmod.errors import KmodError, UnknownTree
from kmod.machine import Machine
from kmod.source import candidates, choose, proprietary, stock_versions
from tests.kmod.machines import RELEASE, add_source, elf, load
from tests.kmod.smalltree import make_tree


def closed(machine: Machine, version: str, name: str = "nvidia") -> Path:
    root = add_source(machine, version, name=name)
    (root / "nvidia/nv.c").write_text('MODULE_LICENSE("NVIDIA");\n')
    return root


def test_the_only_source_is_taken(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    root = add_source(machine)
    (machine.sources / "nvidia-no-source").mkdir()
    (machine.sources / "linux-headers").mkdir()
    assert choose(machine, RELEASE).root == root


def test_the_installer_s_and_a_vendor_s_folder_are_found_but_not_ours(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for name in ("nvidia", "nvidia-open", "nvidia-srv", "mpsd-nvidia"):
        add_source(machine, "570.1", name=name)
    assert [tree.root.name for tree in candidates(machine)] == [
        "nvidia-570.1",
        "nvidia-open-570.1",
        "nvidia-srv-570.1",
    ]


def test_of_several_the_loaded_driver_s_is_taken(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    add_source(machine, "550.1")
    newer = add_source(machine, "560.1")
    with pytest.raises(
        KmodError, match=r"several driver sources: .*550\.1 \(550\.1\), .*560\.1\); choose one"
    ):
        choose(machine, RELEASE)
    machine.proc.mkdir()
    load(machine, ["nvidia 1 0 -"], version="560.1")
    assert choose(machine, RELEASE).root == newer
    load(machine, ["nvidia 1 0 -"], version="565.1")
    with pytest.raises(KmodError, match=r"driver 565\.1 is loaded, but its source is missing"):
        choose(machine, RELEASE)
    assert choose(machine, RELEASE, newer).root == newer


def test_after_an_upgrade_the_installed_driver_s_is_taken_and_not_the_loaded_one_s(tmp_path: Path) -> None:
    """The loaded modules are patched ones of the old driver, until ours are built again."""
    machine = Machine(tmp_path)
    old, newer = add_source(machine, "550.1"), add_source(machine, "560.1")
    stock = machine.modules / RELEASE / "kernel/drivers/video"
    stock.mkdir(parents=True)
    (stock / "nvidia-tesla.ko").write_bytes(elf({}, {}, version="560.1"))
    for other in ("nvidiafb", "nvidia-tesla-uvm", "nvidia_uvm", "nvidia-wmi-ec-backlight", "nvidia-fs"):
        (stock / f"{other}.ko").write_bytes(elf({}, {}, version="6.6"))
    (stock / "nvidia-half.ko").write_bytes(b"")
    machine.proc.mkdir()
    load(machine, ["nvidia 1 0 -"], version="550.1")
    assert choose(machine, RELEASE).root == newer
    assert choose(machine, "another kernel").root == old
    assert stock_versions(machine, RELEASE) == {"560.1"}
    (stock / "nvidia.ko").write_bytes(elf({}, {}, version="550.1"))
    assert choose(machine, RELEASE).root == old
    (stock / "nvidia.ko").unlink()
    newer.rename(tmp_path / "gone")
    with pytest.raises(
        KmodError, match=rf"driver 560\.1 is installed for {RELEASE}, but its source is missing"
    ):
        choose(machine, RELEASE)


def test_an_open_source_is_preferred_to_a_proprietary_one(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    shut = closed(machine, "550.1")
    with pytest.raises(KmodError, match=r"proprietary variant of driver 550\.1.*nvidia-open-kernel-dkms"):
        choose(machine, RELEASE)
    root = add_source(machine, "550.1")
    assert choose(machine, RELEASE).root == root
    with pytest.raises(KmodError, match="proprietary"):
        choose(machine, RELEASE, shut)


def test_nothing_to_patch_is_said_with_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(KmodError, match=r"no driver source below .*--tree FOLDER"):
        choose(Machine(tmp_path), RELEASE)
    with pytest.raises(UnknownTree):
        choose(Machine(tmp_path), RELEASE, tmp_path)


def test_a_published_source_needs_the_vendor_s_core(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "kernel-open")
    with pytest.raises(KmodError, match=r"lacks nvidia/nv-kernel\.o_binary"):
        choose(Machine(tmp_path), RELEASE, tmp_path)
    (root / "nvidia/nv-kernel.o_binary").write_text("")
    tree = choose(Machine(tmp_path), RELEASE, tmp_path)
    assert tree.root == root and not proprietary(tree)
