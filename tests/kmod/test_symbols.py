"""The versions of symbols are read from module files as the kernel has them."""

from __future__ import annotations

import gzip
import lzma
import shutil
import subprocess
from pathlib import Path

import pytest

from kmod.errors import KmodError
from kmod.symbols import disagreements, given, wanted
from tests.kmod.machines import elf

GIVES = {"answer": 0x12345678, "question": 0xFFFFFFFF}
WANTS = {"answer": 0x12345678, "question": 1, "printk": 7}


@pytest.mark.parametrize("absolute", [False, True])
def test_what_a_module_gives_is_in_its_symbols(tmp_path: Path, absolute: bool) -> None:
    (tmp_path / "a.ko").write_bytes(elf(GIVES, {}, absolute=absolute))
    assert given(tmp_path / "a.ko") == GIVES
    assert wanted(tmp_path / "a.ko") == {}


def test_versions_that_differ_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.ko").write_bytes(elf(GIVES, {}))
    (tmp_path / "b.ko").write_bytes(elf({}, WANTS))
    assert wanted(tmp_path / "b.ko") == WANTS
    assert disagreements(tmp_path / "a.ko", tmp_path / "b.ko") == (2, ["question"])


def test_compressed_modules_are_read_as_well(tmp_path: Path) -> None:
    (tmp_path / "a.ko.xz").write_bytes(lzma.compress(elf(GIVES, {})))
    (tmp_path / "a.ko.gz").write_bytes(gzip.compress(elf(GIVES, {})))
    assert given(tmp_path / "a.ko.xz") == given(tmp_path / "a.ko.gz") == GIVES


@pytest.mark.skipif(shutil.which("zstd") is None, reason="zstd is missing: apt-get install zstd")
def test_modules_compressed_with_zstd_are_read_as_well(tmp_path: Path) -> None:
    (tmp_path / "a.ko").write_bytes(elf(GIVES, {}))
    subprocess.run(["zstd", "-q", str(tmp_path / "a.ko")], check=True, timeout=60.0)
    assert given(tmp_path / "a.ko.zst") == GIVES
    (tmp_path / "b.ko.zst").write_bytes(b"not that")
    with pytest.raises(KmodError, match=r"cannot read .*b\.ko\.zst"):
        given(tmp_path / "b.ko.zst")


def test_a_file_that_is_no_module_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ko"
    whole = elf(GIVES, WANTS)
    path.write_bytes(b"#!/bin/sh\n")
    with pytest.raises(KmodError, match="is not a module"):
        given(path)
    for size in range(6, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(KmodError, match="is truncated"):
            given(path)
    with pytest.raises(KmodError, match="cannot read"):
        given(tmp_path / "missing.ko")
