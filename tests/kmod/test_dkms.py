"""The real dkms, Coccinelle and kernel headers, with a driver of two tiny modules.

Every file is below a folder of the test; no module is loaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kmod.build import Kernel, kernel
from kmod.changes import have_spatch
from kmod.dkms import Module
from kmod.errors import KmodError, Unavailable
from kmod.install import InstallRequest, check, perform, plan_install, plan_uninstall, resolved
from kmod.installtrial import furnish, try_install
from kmod.machine import Machine
from kmod.placed import kernels
from kmod.secureboot import given_key
from kmod.symbols import disagreements
from kmod.tree import find
from tests.kmod.machines import add_source

CORE = """\
#include <linux/module.h>
int tiny_answer(int question);
int tiny_answer(int question) { return question + 1; }
EXPORT_SYMBOL(tiny_answer);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION("550.163.01");
"""
USER = """\
#include <linux/module.h>
int tiny_answer(int question);
static int __init start(void) { return tiny_answer(0) ? 0 : -EINVAL; }
module_init(start);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION("550.163.01");
"""
KBUILD = """
obj-m := nvidia.o nvidia-uvm.o
nvidia-objs := nvidia/nv.o
nvidia-uvm-objs := nvidia-uvm/tiny.o
"""
MAKEFILE = "modules:\n\t$(MAKE) -C {headers} M=$(CURDIR) modules\n"
NAMES = (Module("nvidia", "nvidia-current-open"), Module("nvidia-uvm", "nvidia-current-open-uvm"))
TOOLS = ("dkms", "make", "gcc", "depmod", "modprobe", "bash")


def why_not() -> str:
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if not have_spatch():
        missing.append("spatch")
    if missing:
        return f"missing: {' '.join(missing)}: apt-get install dkms coccinelle kmod gcc make"
    if os.geteuid() != 0:
        return "dkms installs for root only, below another folder too"
    try:
        kernel()
    except Unavailable as error:
        return f"{error}: apt-get install linux-headers-amd64"
    return ""


REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(bool(REASON), reason=REASON)]


@pytest.fixture
def wish(tmp_path: Path) -> tuple[Machine, InstallRequest]:
    machine, found = Machine(tmp_path / "root"), kernel()
    folder = furnish(machine, found.release)
    tree = find(add_source(machine))
    (tree.root / "nvidia/nv.c").write_text(CORE)
    (tree.root / "nvidia-uvm/tiny.c").write_text(USER)
    with (tree.root / "Kbuild").open("a") as file:
        file.write(KBUILD)
    (tree.root / "Makefile").write_text(MAKEFILE.format(headers=folder / "build"))
    return machine, InstallRequest(tree, Kernel(found.release, found.headers))


def steps(machine: Machine, given: InstallRequest) -> None:
    perform(plan_install(machine, given), print)


def installed_uvm(machine: Machine, release: str) -> Path:
    found = resolved(machine, release, "nvidia-current-open-uvm")
    assert found
    return found


def dkms_says(machine: Machine) -> str:
    command = ["dkms", "status", "--dkmstree", str(machine.dkms_tree), "--sourcetree", str(machine.sources)]
    command += ["--installtree", str(machine.modules)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60.0).stdout


def test_both_modules_are_built_found_first_and_gone_again(wish: tuple[Machine, InstallRequest]) -> None:
    machine, given = wish
    release = given.kernel.release
    # The stock modules of the same names, where dkms would write ours too.
    stock = machine.modules / release / "updates/dkms"
    steps(machine, given)
    for path in machine.ours(release).iterdir():
        shutil.copy(path, stock)
    before = {path.name: path.read_bytes() for path in stock.iterdir()}
    perform(plan_uninstall(machine), print)
    assert installed_uvm(machine, release).parent == stock
    steps(machine, given)
    check(machine, release, NAMES)
    assert plan_install(machine, given) == []
    ours = machine.ours(release)
    assert installed_uvm(machine, release).parent == ours
    assert disagreements(ours / "nvidia-current-open.ko", installed_uvm(machine, release)) == (1, [])
    assert f"mpsd-nvidia/550.163.01, {release}" in dkms_says(machine)
    assert {path.name: path.read_bytes() for path in stock.iterdir()} == before
    perform(plan_uninstall(machine), print)
    assert installed_uvm(machine, release).parent == stock
    assert {path.name: path.read_bytes() for path in stock.iterdir()} == before
    assert kernels(machine) == [] and dkms_says(machine) == ""


def dkms_itself(machine: Machine, *words: str) -> None:
    """Call dkms as the hooks of the distribution's kernel packages do."""
    command = ["dkms", "--dkmstree", str(machine.dkms_tree), "--sourcetree", str(machine.sources)]
    command += ["--installtree", str(machine.modules), *words, "--no-depmod"]
    environment = {**os.environ, "sign_file": "/nonexistent"}
    subprocess.run(command, timeout=300.0, stdin=subprocess.DEVNULL, env=environment, check=True)


def test_a_kernel_that_comes_and_goes_gets_and_loses_ours(wish: tuple[Machine, InstallRequest]) -> None:
    machine, given = wish
    release = given.kernel.release
    which = ("-m", "mpsd-nvidia", "-v", "550.163.01", "-k", release)
    steps(machine, given)
    dkms_itself(machine, "uninstall", *which)
    assert not machine.ours(release).exists()
    dkms_itself(machine, "autoinstall", "-k", release)
    machine.depmod(release)
    check(machine, release, NAMES)
    dkms_itself(machine, "unbuild", *which)
    # The driver was upgraded: its new source has another name, and only the stock modules fit.
    given.tree.root.rename(given.tree.root.with_name("nvidia-current-open-560.1"))
    dkms_itself(machine, "autoinstall", "-k", release)
    assert not machine.ours(release).exists()


def test_a_run_after_dkms_itself_removed_all_begins_anew(wish: tuple[Machine, InstallRequest]) -> None:
    machine, given = wish
    steps(machine, given)
    dkms_itself(machine, "remove", "-m", "mpsd-nvidia", "-v", "550.163.01", "-k", given.kernel.release)
    steps(machine, given)
    check(machine, given.kernel.release, NAMES)


def test_the_trial_sees_what_it_says(wish: tuple[Machine, InstallRequest], tmp_path: Path) -> None:
    """The published source has a template as dkms.conf: its folders are its modules then."""
    machine, given = wish
    (given.tree.root / "dkms.conf").write_text("# a form\n__DKMS_MODULES\n")
    steps(machine, given)
    stock = [machine.ours(given.kernel.release) / name for name in ("nvidia.ko", "nvidia-uvm.ko")]
    said = try_install(given.tree, given.kernel, stock, tmp_path / "trial")
    assert "2 modules before the stock ones, 1 symbols of nvidia.ko" in said and "found again" in said
    with pytest.raises(KmodError, match="modprobe finds None for nvidia"):
        try_install(given.tree, given.kernel, [], tmp_path / "trial")
    assert list((tmp_path / "trial").iterdir()) == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")
def test_modules_are_signed_with_the_key_that_is_named(
    wish: tuple[Machine, InstallRequest], tmp_path: Path
) -> None:
    machine, given = wish
    key, certificate = tmp_path / "a key", tmp_path / "cert"
    command = ["openssl", "req", "-new", "-x509", "-nodes", "-subj", "/CN=a test", "-newkey", "rsa:2048"]
    command += ["-keyout", str(key), "-outform", "DER", "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60.0)
    signed = InstallRequest(given.tree, given.kernel, given_key(key, certificate))
    steps(machine, signed)
    check(machine, given.kernel.release, NAMES)
    shown = subprocess.run(
        ["modinfo", "-F", "signer", str(installed_uvm(machine, given.kernel.release))],
        capture_output=True,
        text=True,
        timeout=60.0,
    )
    assert shown.stdout == "a test\n"
