"""Installing puts the patched modules before the stock ones, uninstalling takes them away.

Each step of both is killed, and other half-done states are tried.
"""

from __future__ import annotations

import lzma
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kmod.build import Kernel
from kmod.changes import INCLUDE
from kmod.dkms import Dkms, Module, module_set
from kmod.errors import KmodError, Unavailable
from kmod.install import (
    InstallRequest,
    Manifest,
    check,
    folder_of,
    perform,
    plan_install,
    plan_uninstall,
    require,
    resolved,
    roll_back,
)
from kmod.machine import Machine, must_be_root
from kmod.placed import kernels
from kmod.secureboot import given_key
from kmod.tree import find
from tests.kmod.machines import (
    NAMES,
    RELEASE,
    VERSION,
    add_programs,
    add_source,
    elf,
    make_machine,
    needs_kmod,
    quiet,
    wish,
)
from tests.kmod.smalltree import contents

pytestmark = needs_kmod
INSTALL_STEPS = 7
UNINSTALL_STEPS = 6


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    for name, value in add_programs(tmp_path).items():
        monkeypatch.setenv(name, value)
    made = make_machine(tmp_path / "root")
    stock = contents(made.modules / RELEASE / "updates/dkms")
    source = contents(made.sources / f"nvidia-current-open-{VERSION}")
    yield made
    assert contents(made.modules / RELEASE / "updates/dkms") == stock
    assert contents(made.sources / f"nvidia-current-open-{VERSION}") == source


# The output of a modprobe that has the module directory /usr/lib/modules.
MODPROBE_OF_USR = """\
#!/bin/sh
said=$({real} "$@") || exit
printf '%s\\n' "$said" | sed 's|/lib/modules/|/usr/lib/modules/|'
"""


def test_a_modprobe_that_calls_the_folder_usr_lib_finds_ours(machine: Machine, tmp_path: Path) -> None:
    real, stands_in = shutil.which("modprobe"), tmp_path / "programs/modprobe"
    stands_in.write_text(MODPROBE_OF_USR.format(real=real))
    stands_in.chmod(0o755)
    (machine.root / "usr/lib").symlink_to("../lib")
    install(machine)
    found = resolved(machine, RELEASE, "nvidia-current-open")
    assert found == machine.root / "usr/lib/modules" / RELEASE / "updates/mpsd/nvidia-current-open.ko"
    assert plan_install(machine, wish(machine)) == []
    uninstall(machine)


def install(machine: Machine) -> None:
    perform(plan_install(machine, wish(machine)), quiet)


def uninstall(machine: Machine) -> None:
    perform(plan_uninstall(machine), quiet)


def uvm(machine: Machine) -> Path | None:
    return resolved(machine, RELEASE, "nvidia-current-open-uvm")


def stock_uvm(machine: Machine) -> Path:
    return machine.modules / RELEASE / "updates/dkms/nvidia-current-open-uvm.ko"


def assert_installed(machine: Machine) -> None:
    check(machine, RELEASE, NAMES)
    assert plan_install(machine, wish(machine)) == []
    folder = folder_of(machine, VERSION)
    assert INCLUDE in (folder / "nvidia-uvm/uvm.c").read_text()
    assert sorted(path.name for path in machine.ours(RELEASE).iterdir()) == [
        "nvidia-current-open-uvm.ko",
        "nvidia-current-open.ko",
    ]


def assert_gone(machine: Machine) -> None:
    assert uvm(machine) == stock_uvm(machine)
    assert plan_uninstall(machine) == []
    left = [path for path in machine.root.rglob("*") if "mpsd" in path.name and "programs" not in path.parts]
    assert left == []


def killed(act: int, steps: object, name: str = "") -> None:
    """Take the steps in a child that is killed before step `act`, or in the middle of dkms' verb `name`."""
    child = os.fork()
    if child == 0:
        count = 0

        def say(text: str) -> None:
            nonlocal count
            if count == act:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

        if name:
            os.environ["KILL"] = name
        try:
            perform(steps, say)  # type: ignore[arg-type]
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_the_patched_modules_come_first_and_the_stock_ones_come_back(machine: Machine) -> None:
    assert uvm(machine) == stock_uvm(machine)
    assert len(plan_install(machine, wish(machine))) == INSTALL_STEPS
    install(machine)
    assert_installed(machine)
    assert uvm(machine) == machine.ours(RELEASE) / "nvidia-current-open-uvm.ko"
    assert Dkms(machine).kernels(VERSION) == [RELEASE]
    assert "override nvidia-current-open * updates/mpsd\n" in machine.depmod_settings.read_text()
    assert len(plan_uninstall(machine)) == UNINSTALL_STEPS
    uninstall(machine)
    assert_gone(machine)


@pytest.mark.parametrize("step", range(INSTALL_STEPS))
def test_an_install_that_was_killed_before_a_step_is_finished_by_the_next(
    machine: Machine, step: int
) -> None:
    killed(step, plan_install(machine, wish(machine)))
    install(machine)
    assert_installed(machine)


@pytest.mark.parametrize("step", range(INSTALL_STEPS))
def test_an_install_that_was_killed_before_a_step_can_be_taken_out(machine: Machine, step: int) -> None:
    killed(step, plan_install(machine, wish(machine)))
    uninstall(machine)
    assert_gone(machine)


@pytest.mark.parametrize("verb", ["add", "build", "install"])
def test_an_install_that_was_killed_inside_dkms_is_finished_or_taken_out(machine: Machine, verb: str) -> None:
    killed(-1, plan_install(machine, wish(machine)), verb)
    install(machine)
    assert_installed(machine)
    uninstall(machine)
    killed(-1, plan_install(machine, wish(machine)), verb)
    uninstall(machine)
    assert_gone(machine)


@pytest.mark.parametrize("step", range(UNINSTALL_STEPS))
def test_an_uninstall_that_was_killed_is_finished_or_undone(machine: Machine, step: int) -> None:
    install(machine)
    killed(step, plan_uninstall(machine))
    uninstall(machine)
    assert_gone(machine)
    install(machine)
    killed(step, plan_uninstall(machine))
    install(machine)
    assert_installed(machine)


def test_an_uninstall_that_was_killed_inside_dkms_is_finished(machine: Machine) -> None:
    install(machine)
    killed(-1, plan_uninstall(machine), "uninstall")
    uninstall(machine)
    assert_gone(machine)


def test_what_cannot_be_put_in_its_place_is_not_left_where_dkms_put_it(machine: Machine) -> None:
    """dkms continues and indexes it, and the kernel would load it beside the driver's own."""
    install(machine)
    stock = machine.modules / RELEASE / "updates/dkms"
    for module in NAMES:
        shutil.copy(machine.ours(RELEASE) / f"{module.installed}.ko", stock / f"mpsd-{module.installed}.ko")
    shutil.rmtree(machine.ours(RELEASE))
    machine.ours(RELEASE).write_text("where the folder must be")
    line = [str(folder_of(machine, VERSION) / "mpsd/place"), RELEASE]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60.0)
    assert done.returncode != 0 and "it keeps the driver's own" in done.stderr
    assert sorted(path.name for path in stock.iterdir()) == sorted(f"{m.installed}.ko" for m in NAMES)


def test_a_reboot_within_an_uninstall_finds_the_stock_modules(machine: Machine) -> None:
    install(machine)
    killed(1, plan_uninstall(machine))
    assert uvm(machine) == stock_uvm(machine)


def test_the_stock_modules_are_found_while_ours_are_built_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(machine)
    machine.depmod_settings.unlink()
    killed(-1, plan_install(machine, wish(machine)), "build")
    assert uvm(machine) == stock_uvm(machine)


def test_half_a_source_folder_is_made_anew(machine: Machine) -> None:
    folder = folder_of(machine, VERSION)
    folder.mkdir()
    (folder.with_name(f".{folder.name}.new")).mkdir()
    assert Manifest.read(folder) is None
    install(machine)
    assert_installed(machine)
    uninstall(machine)
    assert_gone(machine)


def test_dkms_of_the_same_version_half_there_is_put_right(machine: Machine) -> None:
    (Dkms(machine).tree / VERSION / RELEASE / "x/module").mkdir(parents=True)
    install(machine)
    assert_installed(machine)


def test_another_version_of_the_driver_replaces_the_one_before(machine: Machine) -> None:
    install(machine)
    newer = find(add_source(machine, "560.1"))
    perform(plan_install(machine, wish(machine, newer)), quiet)
    check(machine, RELEASE, NAMES)
    assert not folder_of(machine, VERSION).exists()
    assert Dkms(machine).versions() == ["560.1"]


def test_a_source_that_changed_is_built_again(machine: Machine, tmp_path: Path) -> None:
    tree = find(add_source(Machine(tmp_path / "elsewhere")))
    perform(plan_install(machine, wish(machine, tree)), quiet)
    (tree.root / "nvidia/nv.c").write_text('MODULE_LICENSE("Dual MIT/GPL"); // mended\n')
    assert "build" in " ".join(step.text for step in plan_install(machine, wish(machine, tree)))
    perform(plan_install(machine, wish(machine, tree)), quiet)
    assert "mended" in (folder_of(machine, VERSION) / "nvidia/nv.c").read_text()


def test_a_build_that_fails_leaves_the_stock_modules_and_the_log(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(KmodError, match="the compiler says no"):
        install(machine)
    roll_back(machine, RELEASE, quiet)
    assert (machine.state / "make.log").read_text() == "the compiler says no\n"
    (machine.state / "make.log").unlink()
    machine.state.rmdir()
    assert_gone(machine)


def test_a_build_that_fails_for_one_kernel_leaves_ours_for_the_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(machine)
    other = "6.1.0-2-test"
    shutil.copytree(machine.modules / RELEASE / "build", machine.modules / other / "build")
    monkeypatch.setenv("FAIL", "1")
    given = wish(machine)
    given = InstallRequest(given.tree, Kernel(other, given.kernel.headers))
    with pytest.raises(KmodError, match="the compiler says no"):
        perform(plan_install(machine, given), quiet)
    roll_back(machine, other, quiet)
    assert_installed(machine)
    assert kernels(machine) == [RELEASE]
    monkeypatch.delenv("FAIL")
    perform(plan_install(machine, given), quiet)
    assert kernels(machine) == [RELEASE, other]
    uninstall(machine)
    assert kernels(machine) == []


def test_only_root_changes_a_real_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(KmodError, match="install needs root: sudo mpsd-kmod install"):
        must_be_root(Machine(), "install")
    must_be_root(Machine(tmp_path), "install")


def test_modules_of_two_builds_are_an_error(machine: Machine) -> None:
    install(machine)
    (machine.ours(RELEASE) / "nvidia-current-open-uvm.ko").write_bytes(elf({}, {"answer": 1}))
    with pytest.raises(KmodError, match=r"another nvidia\.ko: answer differ"):
        check(machine, RELEASE, NAMES)
    assert plan_install(machine, wish(machine)) != []


def test_what_is_missing_is_named_before_anything_is_done(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(Unavailable, match="coccinelle dkms gcc kmod make; apt-get install"):
        require(machine, wish(machine))


def test_a_disk_that_is_too_small_is_named_before_anything_is_done(machine: Machine) -> None:
    big = wish(machine).tree.root / "nvidia/big"
    with big.open("wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(KmodError, match=r"usr/src has \d+ MiB free, but the build needs about 41943\d+ MiB"):
        require(machine, wish(machine))
    big.unlink()


def test_the_mend_for_some_kernels_is_chosen_when_it_is_built(machine: Machine, tmp_path: Path) -> None:
    install(machine)
    folder = folder_of(machine, VERSION)
    script = folder / "mpsd/before-build"
    for parameters, mended in (("a, b, c", False), ("a,\n\t b, c, d", True)):
        header = tmp_path / "headers/include/linux/pci.h"
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(f"int pci_resize_resource({parameters});\nint other(a, b);\n")
        assert (
            os.spawnvp(os.P_WAIT, "env", ["env", "-C", str(folder), str(script), str(tmp_path / "headers")])
            == 0
        )
        assert (", 0)" in (folder / "nvidia/nv-pci.c").read_text()) is mended


def placed(machine: Machine, files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files in our folder after dkms has installed these and run our script."""
    folder = machine.modules / RELEASE / "updates/dkms"
    for name, content in files.items():
        (folder / name).write_bytes(content)
    script = folder_of(machine, VERSION) / "mpsd/place"
    subprocess.run([str(script), RELEASE], check=True, timeout=60.0)
    assert not list(folder.glob("mpsd-*"))
    return contents(machine.ours(RELEASE))


def test_compressed_modules_replace_others(machine: Machine) -> None:
    install(machine)
    (machine.ours(RELEASE) / "nvidia-current-open.ko.new").write_text("left by a run that was killed")
    core, user = lzma.compress(elf({"answer": 3}, {})), lzma.compress(elf({}, {"answer": 3}))
    files = {"mpsd-nvidia-current-open.ko.xz": core, "mpsd-nvidia-current-open-uvm.ko.xz": user}
    assert placed(machine, files) == {name.removeprefix("mpsd-"): data for name, data in files.items()}
    machine.depmod(RELEASE)
    check(machine, RELEASE, NAMES)


@pytest.mark.skipif(shutil.which("xz") is None, reason="xz is missing: apt-get install xz-utils")
def test_what_is_to_be_signed_is_decompressed_before(machine: Machine, tmp_path: Path) -> None:
    key, certificate = tmp_path / "a key", tmp_path / "certificate"
    key.write_text("")
    certificate.write_text("")
    given = wish(machine)
    signed = InstallRequest(given.tree, given.kernel, given_key(key, certificate))
    with pytest.raises(Unavailable, match=r"--sign: .*sign-file is missing"):
        require(machine, signed)
    tool = machine.modules / RELEASE / "build/scripts/sign-file"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nprintf "%s" "$1 ${2##*/} ${3##*/}" >>"$4"\n')
    tool.chmod(0o755)
    (machine.modules / RELEASE / "build/.config").write_text('CONFIG_MODULE_SIG_HASH="sha256"\n')
    require(machine, signed)
    perform(plan_install(machine, signed), quiet)
    check(machine, RELEASE, NAMES)
    files = {
        "mpsd-nvidia-current-open.ko.xz": lzma.compress(b"core "),
        "mpsd-nvidia-current-open-uvm.ko": b"user ",
    }
    assert placed(machine, files) == {
        "nvidia-current-open.ko": b"core sha256 a key certificate",
        "nvidia-current-open-uvm.ko": b"user sha256 a key certificate",
    }


def test_the_set_of_modules_is_the_source_s_own(machine: Machine) -> None:
    tree = wish(machine).tree
    assert module_set(tree) == NAMES
    conf = tree.root / "dkms.conf"
    before = conf.read_text()
    conf.write_text("BUILT_MODULE_NAME[0]=nvidia\n")
    with pytest.raises(KmodError, match="does not build nvidia-uvm"):
        module_set(tree)
    conf.write_text("# a form\n__DKMS_MODULES\n")
    assert module_set(tree) == (Module("nvidia", "nvidia"), Module("nvidia-uvm", "nvidia-uvm"))
    conf.write_text(before)
