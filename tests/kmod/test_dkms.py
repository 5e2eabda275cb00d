"""The real dkms, Coccinelle and kernel headers, with a driver of two tiny modules: built, found first, gone.

Everything lies below a folder of the test; nothing is loaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kmod.build import LIB_MODULES, Kernel, kernel
from kmod.changes import have_spatch
from kmod.dkms import Module
from kmod.errors import Unavailable
from kmod.install import Wish, check, kernels, perform, plan_install, plan_uninstall, resolved
from kmod.machine import Machine
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
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]


@pytest.fixture
def wish(tmp_path: Path) -> tuple[Machine, Wish]:
    machine, found = Machine(tmp_path / "root"), kernel()
    folder = machine.modules / found.release
    for made in (folder / "updates/dkms", machine.dkms_tree, machine.sources, machine.root / "etc"):
        made.mkdir(parents=True)
    for name in ("modules.order", "modules.builtin"):
        (folder / name).write_text("")
    for name in ("build", "source"):
        link = LIB_MODULES / found.release / name
        if link.exists():
            (folder / name).symlink_to(link.resolve())
    tree = find(add_source(machine))
    (tree.root / "nvidia/nv.c").write_text(CORE)
    (tree.root / "nvidia-uvm/tiny.c").write_text(USER)
    with (tree.root / "Kbuild").open("a") as file:
        file.write(KBUILD)
    (tree.root / "Makefile").write_text(MAKEFILE.format(headers=folder / "build"))
    return machine, Wish(tree, Kernel(found.release, found.headers))


def steps(machine: Machine, given: Wish) -> None:
    perform(plan_install(machine, given), print)


def installed_uvm(machine: Machine, release: str) -> Path:
    found = resolved(machine, release, "nvidia-current-open-uvm")
    assert found
    return found


def dkms_says(machine: Machine) -> str:
    command = ["dkms", "status", "--dkmstree", str(machine.dkms_tree), "--sourcetree", str(machine.sources)]
    command += ["--installtree", str(machine.modules)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60.0).stdout


def test_both_modules_are_built_found_first_and_gone_again(wish: tuple[Machine, Wish]) -> None:
    machine, given = wish
    release = given.kernel.release
    # The stock ones of the same names, where dkms would write ours too.
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


def test_a_kernel_that_dkms_removes_loses_ours(wish: tuple[Machine, Wish]) -> None:
    machine, given = wish
    release = given.kernel.release
    steps(machine, given)
    assert machine.ours(release).is_dir()
    command = ["dkms", "--dkmstree", str(machine.dkms_tree), "--sourcetree", str(machine.sources)]
    command += ["--installtree", str(machine.modules), "remove", "-m", "mpsd-nvidia", "-v", "550.163.01"]
    subprocess.run(
        [*command, "-k", release, "--no-depmod"], check=True, timeout=120.0, stdin=subprocess.DEVNULL
    )
    assert not machine.ours(release).exists()
    steps(machine, given)
    check(machine, release, NAMES)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing")
def test_modules_are_signed_with_the_key_that_is_named(wish: tuple[Machine, Wish], tmp_path: Path) -> None:
    machine, given = wish
    key, certificate = tmp_path / "a key", tmp_path / "cert"
    command = ["openssl", "req", "-new", "-x509", "-nodes", "-subj", "/CN=a test", "-newkey", "rsa:2048"]
    command += ["-keyout", str(key), "-outform", "DER", "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60.0)
    signed = Wish(given.tree, given.kernel, given_key(key, certificate))
    steps(machine, signed)
    check(machine, given.kernel.release, NAMES)
    shown = subprocess.run(
        ["modinfo", "-F", "signer", str(installed_uvm(machine, given.kernel.release))],
        capture_output=True,
        text=True,
        timeout=60.0,
    )
    assert shown.stdout == "a test\n"
