"""The virtual machine itself: it says what went wrong inside, and the real nvidia-uvm runs in it.

Needs QEMU, the headers of a kernel and its package from the machine's archive, and builds up to four modules:
only where MPSD_TEST_KMOD=1 asks for it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from emulator import __main__ as command
from emulator import image, kernel, vm
from emulator.guest import catalogue
from kmod.debian import cache_folder

pytestmark = pytest.mark.skipif(
    os.environ.get("MPSD_TEST_KMOD") != "1", reason="minutes; MPSD_TEST_KMOD=1 runs it (needs QEMU, apt)"
)


def boot(machine: vm.Machine, name: str, folder: Path) -> dict[str, vm.Result]:
    results = vm.run(machine, [name], catalogue.SETS[name], folder / "console")
    return {result.name: result for result in results}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_rig_tells_what_went_wrong_inside(tmp_path: Path) -> None:
    found = kernel.find(cache_folder())
    image.write(tmp_path / "initramfs", {})
    seen = boot(vm.Machine(found.image, tmp_path / "initramfs"), "rig", tmp_path)
    assert seen["right"].passed and seen["right"].text == 'said "all of it"\nin two lines'
    assert not seen["wrong"].passed and "not what it has to be" in seen["wrong"].text
    assert not seen["dead"].passed and seen["dead"].text == "its process ended with -11"
    assert not seen["silent"].ended and "no answer within" in seen["silent"].text
    assert seen["behind-silent"].text == "not reached"


def prepared(folder: Path, suite: str, *, patched: bool, gpu: bool = False) -> vm.Machine:
    return command.prepare(folder, cache_folder(), suite, patched=patched, gpu=gpu)


def failures(seen: dict[str, vm.Result]) -> list[vm.Result]:
    return [result for result in seen.values() if not result.passed]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "suite, patched, gpu",
    [
        ("bookworm", False, False),
        ("trixie", False, False),
        ("bookworm", False, True),
        ("trixie", False, True),
        ("trixie", True, False),
        ("bookworm", True, True),
        ("trixie", True, True),
    ],
)
def test_the_module_passes_its_checks(suite: str, patched: bool, gpu: bool, tmp_path: Path) -> None:
    """On the stub: what holds of the stock module; the patched one's device answers the daemon's reader.

    On the GPU in software: UVM's own tests of its channels and copies; a stray store is cancelled by the
    stock module, and stays with its client by the patched one.
    """
    machine = prepared(tmp_path, suite, patched=patched, gpu=gpu)
    for name in command.sets_for(patched=patched, gpu=gpu):
        assert not failures(boot(machine, name, tmp_path)), vm.tail(tmp_path / "console")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_without_the_patch_the_same_faults_do_not_stay_there(suite: str, tmp_path: Path) -> None:
    """The checks that the patched module passes can fail, and the stock module fails them."""
    machine = prepared(tmp_path, suite, patched=False, gpu=True)
    seen = boot(machine, "isolated", tmp_path)
    failed = {result.name: result.text for result in failures(seen)}
    assert sorted(failed) == ["stray-copy-goes-on", "stray-store-goes-on"], vm.tail(tmp_path / "console")
    assert "cancel-va" in failed["stray-store-goes-on"]
    assert "reported" in failed["stray-copy-goes-on"]
