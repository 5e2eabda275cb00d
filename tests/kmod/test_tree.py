"""Recognition of folders with a driver source, and of kernels with headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kmod.build import kernel
from kmod.errors import Unavailable, UnknownTree
from kmod.tree import BUILD_LIST, find
from tests.kmod.smalltree import make_tree


def test_a_tree_says_its_version(tmp_path: Path) -> None:
    tree = find(make_tree(tmp_path, "550.163.01"))
    assert (tree.root, tree.version, tree.tested) == (tmp_path, "550.163.01", True)


def test_a_published_source_has_its_modules_one_folder_down(tmp_path: Path) -> None:
    make_tree(tmp_path / "kernel-open", "999.1")
    tree = find(tmp_path)
    assert (tree.root, tree.version, tree.tested) == (tmp_path / "kernel-open", "999.1", False)


def test_another_folder_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UnknownTree, match=r"neither nvidia-uvm/uvm\.c nor .* Name the folder"):
        find(tmp_path)


@pytest.mark.parametrize("missing", ["Kbuild", str(BUILD_LIST)])
def test_half_a_tree_is_refused_with_what_is_missing(tmp_path: Path, missing: str) -> None:
    (make_tree(tmp_path) / missing).unlink()
    with pytest.raises(UnknownTree, match=missing.replace(".", r"\.")):
        find(tmp_path)


def test_a_tree_without_a_version_is_refused(tmp_path: Path) -> None:
    (make_tree(tmp_path) / "Kbuild").write_text("obj-m += x.o\n")
    with pytest.raises(UnknownTree, match="does not contain the driver's version"):
        find(tmp_path)


def install_headers(folder: Path, release: str, *, shared: str = "") -> None:
    (folder / release / "build").mkdir(parents=True)
    header = folder / release / (shared or "build") / "include/linux/pci.h"
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text("")


def test_the_newest_kernel_with_headers_is_taken_where_the_running_one_has_none(tmp_path: Path) -> None:
    install_headers(tmp_path, "0.1.9-1")
    install_headers(tmp_path, "0.1.10-1", shared="source")
    (tmp_path / "0.2.0-1").mkdir()
    found = kernel(folder=tmp_path)
    assert (found.release, found.headers) == ("0.1.10-1", tmp_path / "0.1.10-1/source")
    assert kernel("0.1.9-1", tmp_path).headers == tmp_path / "0.1.9-1/build"


def test_a_kernel_that_was_named_must_have_headers(tmp_path: Path) -> None:
    install_headers(tmp_path, "0.1.9-1")
    with pytest.raises(Unavailable, match=r"0\.2\.0-1"):
        kernel("0.2.0-1", tmp_path)
    with pytest.raises(Unavailable, match="any kernel"):
        kernel(folder=tmp_path / "missing")
