"""The folder in which modules are built: its contents, and when they do not count as the wanted build."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from kmod import workshop
from kmod.build import Kernel
from kmod.changes import have_spatch
from kmod.debian import Fetched
from kmod.errors import KmodError
from kmod.workshop import BUSY, KERNEL_IS, Workshop
from tests.kmod.smalltree import make_tree

RELEASE = "6.1.0-1"
# The least of a kernel's build that makes an object of one file and records the file's content.
KBUILD = """\
%.ko:
\t@echo made >>$(M)/made
\t@grep -q mpsd_init $(M)/nvidia-uvm/uvm.c && echo 'int patched;' >$(M)/x.c || echo 'int stock;' >$(M)/x.c
\t@gcc -c -o $(M)/$@ $(M)/x.c
"""
FAILS = "%.ko:\n\t@echo it does not compile; exit 3\n"
NEEDS = ("spatch", "make", "gcc", "objcopy", "nm")
missing = [name for name in NEEDS if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(bool(missing) or not have_spatch(), reason=f"missing: {', '.join(missing)}")


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    headers = tmp_path / "modules" / RELEASE / "build"
    for name in (*KERNEL_IS, "include/linux/pci.h"):
        (headers / name).parent.mkdir(parents=True, exist_ok=True)
        (headers / name).write_text("")
    (headers / "Makefile").write_text(KBUILD)
    monkeypatch.setattr(workshop, "LIB_MODULES", tmp_path / "modules")
    tree = make_tree(tmp_path / "source", "550.1")
    return Workshop(Fetched("trixie", "550.1-1", tree), Kernel(RELEASE, headers), tmp_path / "cache", 1)


def symbols(module: Path) -> str:
    return workshop.run(["nm", "--format=posix", module], deadline_s=60.0).split()[0]


def times_made(shop: Workshop) -> int:
    return len((shop.folder / "made").read_text().splitlines())


def test_both_kinds_come_of_one_folder_and_are_kept(shop: Workshop) -> None:
    for _ in range(2):
        assert symbols(shop.uvm(patched=False)) == "stock"
        assert symbols(shop.uvm(patched=True)) == "patched"
    assert times_made(shop) == 2
    assert not (shop.folder / BUSY).exists()


def test_another_kernel_or_compiler_or_recipe_is_built_for_anew(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {shop.kept_uvm(patched=False), shop.kept_uvm(patched=True)}
    (shop.headers / "Module.symvers").write_text("another")
    places.add(shop.kept_uvm(patched=False))
    (tmp_path / "cc").write_text("#!/bin/sh\necho another compiler\n")
    (tmp_path / "cc").chmod(0o755)
    with monkeypatch.context() as other:
        other.setattr(workshop, "COMPILER", str(tmp_path / "cc"))
        places.add(shop.kept_uvm(patched=False))
    monkeypatch.setattr(workshop, "RECIPE", (*workshop.RECIPE, tmp_path / "cc"))
    places.add(shop.kept_uvm(patched=False))
    newer = dataclasses.replace(shop, fetched=dataclasses.replace(shop.fetched, version="550.1-2"))
    places.add(newer.kept_uvm(patched=False))
    assert len(places) == 6


def test_a_build_that_was_broken_off_is_begun_anew(shop: Workshop) -> None:
    with pytest.raises(SystemExit), shop.bench() as bench:
        (bench.tree.root / "half").touch()
        raise SystemExit(1)
    with shop.bench() as bench:
        assert not bench.kept and not (bench.tree.root / "half").exists()
    with shop.bench() as bench:
        assert bench.kept


def test_a_build_that_fails_is_not_kept(shop: Workshop) -> None:
    (shop.headers / "Makefile").write_text(FAILS)
    with pytest.raises(KmodError, match="it does not compile"):
        shop.uvm(patched=True)
    assert not shop.kept_uvm(patched=True).exists()
    (shop.headers / "Makefile").write_text(KBUILD)
    assert symbols(shop.uvm(patched=True)) == "patched"
