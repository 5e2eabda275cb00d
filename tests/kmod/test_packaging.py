"""The verbs as an operator types them: refusals that name the users, dry runs, JSON, one-sentence errors."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kmod import packaging
from kmod.__main__ import main
from kmod.alone import alone
from kmod.errors import KmodError
from kmod.machine import Machine
from tests.kmod.machines import (
    RELEASE,
    VERSION,
    add_kernel_programs,
    add_process,
    add_programs,
    add_source,
    elf,
    load,
    make_machine,
    needs_kmod,
)
from tests.kmod.smalltree import contents

COMMAND = Path(__file__).resolve().parents[2] / "kmod_patches/mpsd-kmod"
pytestmark = needs_kmod


class Typed:
    """A machine, and the output of mpsd-kmod on it."""

    def __init__(self, folder: Path) -> None:
        self.environment: dict[str, str] = add_programs(folder)
        self.machine = make_machine(folder / "root")
        add_kernel_programs(self.machine)

    def __call__(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        verb, *rest = words
        line = [sys.executable, str(COMMAND), verb, "--root", str(self.machine.root), *rest]
        environment: Mapping[str, str] = {**self.environment, **more}
        return subprocess.run(
            line, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=110.0, env=environment
        )

    def value(self, *words: str) -> dict[str, object]:
        done = self(*words, "--json")
        assert done.stdout.count("\n") == 1
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        return found


@pytest.fixture
def typed(tmp_path: Path) -> Typed:
    return Typed(tmp_path)


def busy(machine: Machine) -> None:
    load(machine, ["nvidia_uvm 1 1 -", "nvidia 1 1 nvidia_uvm,"])
    add_process(machine, 70, "trainer", ["/dev/nvidia0"])


def test_there_and_back(typed: Typed) -> None:
    assert typed("status").stdout.startswith("installed: no patched modules\nloaded: no nvidia module\n")
    done = typed("install")
    assert (done.returncode, done.stderr) == (0, "")
    assert "update-initramfs" in done.stdout
    assert typed("install").stdout == "already installed\n"
    said = typed("status").stdout
    assert f"kernel {RELEASE}: the patched modules come first" in said
    done = typed("load")
    assert (done.returncode, done.stderr) == (0, "")
    assert "loaded: driver" not in typed("status").stdout  # The stand-in has no file for the version.
    assert typed("uninstall").returncode == 1
    assert typed("unload").returncode == 0
    (typed.machine.proc / "modules").write_text("")
    assert typed("uninstall").returncode == 0
    assert typed("uninstall").stdout == "nothing is installed\n"


def test_a_dry_run_tells_each_step_and_does_none(typed: Typed) -> None:
    before = contents(typed.machine.root)
    done = typed("install", "--dry-run")
    assert done.returncode == 0
    assert [line.split()[1] for line in done.stdout.splitlines()][:2] == ["copy", "write"]
    assert contents(typed.machine.root) == before
    assert typed("install").returncode == 0
    before = contents(typed.machine.root)
    for verb in ("uninstall", "load"):
        done = typed(verb, "--dry-run")
        assert done.returncode == 0 and all(line.startswith("would ") for line in done.stdout.splitlines())
    assert contents(typed.machine.root) == before


def test_what_was_not_built_is_half_of_an_install(typed: Typed) -> None:
    """A kill in the middle of an install leaves it like this."""
    assert typed("install").returncode == 0
    for link in (typed.machine.dkms_tree / "mpsd-nvidia").glob("kernel-*"):
        link.unlink()
    assert "incomplete install; run install or uninstall again" in typed("status").stdout
    (installed,) = typed.value("status")["installed"]  # type: ignore[misc]
    assert installed["whole"] is False


def test_there_is_nothing_to_unload(typed: Typed) -> None:
    done = typed("unload")
    assert done.returncode == 1 and done.stderr.endswith("so there is nothing to unload\n")
    assert typed("load").stderr.endswith("/mpsd-kmod install\n")


def test_a_dry_run_tries_the_source(typed: Typed) -> None:
    (typed.machine.sources / f"nvidia-current-open-{VERSION}/nvidia-uvm/uvm_va_space.c").unlink()
    done = typed("install", "--dry-run")
    assert done.returncode == 1 and "has no nvidia-uvm/uvm_va_space.c" in done.stderr
    assert done.stdout == ""


def test_a_loaded_driver_is_not_pulled_from_under_its_users(typed: Typed) -> None:
    busy(typed.machine)
    before = contents(typed.machine.root)
    done = typed("install")
    assert done.returncode == 1
    assert "process 70 of uid" in done.stderr and "--next-boot" in done.stderr and "nvidia_uvm" in done.stderr
    refused = typed.value("install")
    assert refused["done"] is False and refused["loaded"]["users"][0]["pid"] == 70  # type: ignore[index]
    assert contents(typed.machine.root) == before
    done = typed("install", "--next-boot")
    assert done.returncode == 0 and "takes effect at the next boot" in done.stdout
    assert typed("load").returncode == 1
    # The stock modules are loaded: without ours, modules loaded later fit them.
    assert typed("uninstall").returncode == 0
    assert contents(typed.machine.root).keys() == before.keys()


def test_the_patched_modules_are_not_taken_from_under_their_users(typed: Typed) -> None:
    assert typed("install").returncode == 0
    load(typed.machine, ["nvidia_uvm 1 1 -", "nvidia 1 1 nvidia_uvm,"], ours=True)
    done = typed("uninstall")
    assert done.returncode == 1 and "mpsd-kmod unload first" in done.stderr
    # Another build first removes the build of every kernel, whichever it is for.
    (typed.machine.sources / f"nvidia-current-open-{VERSION}/nvidia/nv.c").write_text(
        'MODULE_LICENSE("Dual MIT/GPL"); // mended\n'
    )
    kernel = typed.machine.modules / RELEASE
    shutil.copytree(kernel / "build", kernel.with_name("6.1.0-2-other") / "build")
    done = typed("install", "--kernel", "6.1.0-2-other")
    assert done.returncode == 1 and "--next-boot" in done.stderr and "rmmod nvidia_uvm nvidia" in done.stderr
    assert f"kernel {RELEASE}: the patched modules come first" in typed("status").stdout
    done = typed("uninstall", "--next-boot")
    assert done.returncode == 0 and "update-initramfs" in done.stdout
    assert "takes effect at the next boot; loaded modules stay" in done.stdout


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["text", "json"])
def test_nobody_has_to_listen(typed: Typed, words: tuple[str, ...]) -> None:
    """A lost connection does not end an install half-way, nor remove its result."""
    read, write = os.pipe()
    os.close(read)
    line = [sys.executable, "-u", str(COMMAND), "install", "--root", str(typed.machine.root), *words]
    with os.fdopen(write, "wb") as nobody:
        done = subprocess.run(
            line, stdout=nobody, stderr=subprocess.PIPE, timeout=110.0, env=typed.environment
        )
    assert (done.returncode, done.stderr) == (0, b"")
    assert typed("install").stdout == "already installed\n"


def test_who_breaks_it_off_gets_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken_off(_machine: Machine) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["mpsd-kmod", "users"])
    monkeypatch.setattr(packaging.modules, "use", broken_off)
    monkeypatch.setattr("kmod.__main__.end_when_told", lambda: None)
    assert main() == 130
    assert "run the same command again to continue" in capsys.readouterr().err


def test_a_source_s_state_as_json(typed: Typed) -> None:
    tree = typed.machine.sources / f"nvidia-current-open-{VERSION}"
    assert typed.value("status", str(tree)) == {
        "folder": str(tree),
        "version": VERSION,
        "tested": True,
        "patch": "clean",
    }


def test_a_module_that_cannot_be_loaded_until_the_next_boot_is_named(typed: Typed) -> None:
    load(typed.machine, ["nvidia 1 0 -"])
    assert "nvidia_uvm cannot be loaded until then" in typed("install", "--next-boot").stdout


def test_another_kernel_is_no_matter_of_what_is_loaded(typed: Typed) -> None:
    busy(typed.machine)
    (typed.machine.proc / "sys/kernel/osrelease").write_text("6.1.0-0-other\n")
    assert typed("install", "--kernel", RELEASE).returncode == 0
    done = typed("load")
    assert done.returncode == 1 and "not installed for the running kernel 6.1.0-0-other" in done.stderr


def test_users_are_listed(typed: Typed) -> None:
    assert typed("users").stdout == "no driver module is loaded\n"
    assert typed.value("users")["busy"] is False
    busy(typed.machine)
    assert "process 70" in typed("users").stdout
    value = typed.value("users")
    assert value["busy"] is True and value["users"][0]["devices"] == ["/dev/nvidia0"]  # type: ignore[index]


def test_the_state_as_json(typed: Typed) -> None:
    assert typed.value("install")["done"] is True
    value = typed.value("status")
    assert value["running"] == RELEASE and value["secure_boot"] is None
    assert value["installed"] == [
        {
            "folder": str(typed.machine.sources / f"mpsd-nvidia-{VERSION}"),
            "whole": True,
            "version": VERSION,
            "from": str(typed.machine.sources / f"nvidia-current-open-{VERSION}"),
            "kernels": {RELEASE: True},
            "drivers": {RELEASE: []},
        }
    ]


def test_a_driver_that_was_upgraded_is_told(typed: Typed) -> None:
    assert typed("install").returncode == 0
    add_source(typed.machine, "560.1")
    old = typed.machine.sources / f"nvidia-current-open-{VERSION}"
    old.rename(typed.machine.root / "gone")
    assert "is missing or has another version: run install again" in typed("status").stdout
    # Meanwhile the loaded modules are the patched ones of the old driver: they still come first.
    stock = typed.machine.modules / RELEASE / "updates/dkms/nvidia-current-open.ko"
    stock.write_bytes(elf({"answer": 1}, {}, version="560.1"))
    load(typed.machine, ["nvidia_uvm 1 0 -", "nvidia 1 1 nvidia_uvm,"], ours=True)
    assert f"kernel {RELEASE} now has driver 560.1, whose libraries refuse" in typed("status").stdout
    done = typed("load")
    assert done.returncode == 1 and "/mpsd-kmod install` to build them again" in done.stderr
    assert typed("install", "--next-boot").stderr == "" and "560.1, patched" in typed("status").stdout


def test_half_an_install_is_told(typed: Typed) -> None:
    (typed.machine.sources / f"mpsd-nvidia-{VERSION}").mkdir()
    assert "incomplete install" in typed("status").stdout


def test_a_version_that_was_not_tried_is_tried_and_said_so(typed: Typed) -> None:
    old = typed.machine.sources / f"nvidia-current-open-{VERSION}"
    add_source(typed.machine, "999.1")
    old.rename(typed.machine.root / "gone")
    done = typed("install")
    assert done.returncode == 0 and "driver 999.1 is not tested with this patch" in done.stdout


def test_the_source_of_another_driver_than_is_installed_is_refused(typed: Typed) -> None:
    """Its modules would come first at the next boot, and the installed libraries refuse them."""
    other = str(add_source(typed.machine, "999.1"))
    stock = typed.machine.modules / RELEASE / "updates/dkms/nvidia-current-open.ko"
    stock.write_bytes(elf({"answer": 1}, {}, version=VERSION))
    done = typed("install", "--tree", other, "--next-boot")
    assert done.returncode == 1 and "is driver 999.1, but " in done.stderr
    assert not list(typed.machine.sources.glob("*mpsd*")) and not typed.machine.depmod_settings.exists()
    own = typed.machine.sources / f"nvidia-current-open-{VERSION}"
    assert typed("install", "--tree", str(own)).returncode == 0
    # Our modules do not count as the installed driver: the driver was upgraded beside them.
    stock.write_bytes(elf({"answer": 1}, {}, version="999.1"))
    assert typed("install", "--tree", other).returncode == 0


def test_what_the_hooks_do_not_fit_is_taken_out_again(typed: Typed) -> None:
    source = typed.machine.sources / f"nvidia-current-open-{VERSION}/nvidia-uvm/nvidia-uvm-sources.Kbuild"
    source.with_name("uvm.c").unlink()
    source.with_name("uvm.c").mkdir()
    (source.with_name("uvm.c") / "x").write_text("")
    done = typed("install", "--tree", str(source.parents[1]))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert not list(typed.machine.sources.glob("*mpsd*"))


def test_a_build_that_fails_is_taken_out_again(typed: Typed) -> None:
    done = typed("install", FAIL="1")
    assert done.returncode == 1 and "the compiler says no" in done.stderr
    assert "reverting: dkms: remove" in done.stdout
    assert "Complete log of the build: " in done.stderr and "/run/mpsd-kmod/make.log" in done.stderr
    assert not list(typed.machine.sources.glob("*mpsd*")) and not typed.machine.depmod_settings.exists()


def test_a_disk_that_is_full_is_one_sentence(typed: Typed, tmp_path: Path) -> None:
    """Where a folder must be is a file: the error names what cannot be written, and nothing is lost."""
    (typed.machine.root / "etc").write_text("")
    done = typed("install")
    assert done.returncode == 1 and "Traceback" not in done.stderr and "etc" in done.stderr
    assert not list(typed.machine.sources.glob("*mpsd*"))


def test_without_headers_what_to_install_is_named(typed: Typed) -> None:
    done = typed("install", "--kernel", "6.9.9-none")
    assert done.returncode == 1 and "apt-get install linux-headers-6.9.9-none" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_secure_boot_without_a_key_stops_before_the_build(typed: Typed) -> None:
    folder = typed.machine.sys / "firmware/efi/efivars"
    folder.mkdir(parents=True)
    (folder / "SecureBoot-0").write_bytes(b"\x06\0\0\0\x01")
    done = typed("install")
    assert done.returncode == 1 and "Secure Boot is on, but dkms has no signing key" in done.stderr
    assert "Secure Boot: on" in typed("status").stdout


def test_two_at_once_is_refused_in_words(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaging, "LOCK_DEADLINE_S", 0.0)
    given = argparse.Namespace(dry_run=False, root=typed.machine.root, json=False, next_boot=False)
    with alone(typed.machine.state, 0.0), pytest.raises(KmodError, match="in use by another run"):
        packaging.uninstall(given)
