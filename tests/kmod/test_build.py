"""The driver's makefile runs to its end or its deadline; sources come from where apt says."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kmod import debian
from kmod.alone import alone
from kmod.build import Kernel, build
from kmod.changes import have_spatch
from kmod.command import run, run_any
from kmod.errors import KmodError, Unavailable
from kmod.lint import compiled_with
from kmod.tree import Tree, find
from tests.kmod.smalltree import contents, make_tree

ROOT = Path(__file__).resolve().parents[2]
KERNEL = Kernel("6.1.0-1", Path("unused"))
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")
needs_spatch = pytest.mark.skipif(not have_spatch(), reason="spatch is missing: apt-get install coccinelle")
MAKES_BOTH = "modules:\n\t@echo kernel $(KERNEL_UNAME)\n\t@touch $(addsuffix .ko,$(NV_KERNEL_MODULES))\n"
FAILS = "modules:\n\t@echo it does not compile; exit 3\n"
MAKES_ONE = "modules:\n\t@touch nvidia.ko\n"
HANGS = "modules:\n\t@sleep 600 >held\n"
DEADLINE_MS = 30_000


def tree_with(tmp_path: Path, makefile: str) -> Tree:
    tree = find(make_tree(tmp_path / "tree"))
    (tree.root / "Makefile").write_text(makefile)
    return tree


@needs_make
def test_both_modules_are_built_for_the_kernel(tmp_path: Path) -> None:
    log = tmp_path / "log"
    modules = build(tree_with(tmp_path, MAKES_BOTH), KERNEL, log, jobs=1, deadline_s=60.0)
    assert [module.name for module in modules] == ["nvidia.ko", "nvidia-uvm.ko"]
    assert "kernel 6.1.0-1" in log.read_text()


@needs_make
@pytest.mark.parametrize(
    ("makefile", "said"), [(FAILS, "it does not compile"), (MAKES_ONE, "the build failed")]
)
def test_a_build_that_fails_shows_its_last_lines(tmp_path: Path, makefile: str, said: str) -> None:
    with pytest.raises(KmodError, match=said):
        build(tree_with(tmp_path, makefile), KERNEL, tmp_path / "log", jobs=1, deadline_s=60.0)


@needs_make
def test_a_build_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    tree = tree_with(tmp_path, HANGS)
    os.mkfifo(tree.root / "held")
    reader = os.open(tree.root / "held", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(KmodError, match="took more than"):
        build(tree, KERNEL, tmp_path / "log", jobs=1, deadline_s=1.0)
    ended = select.poll()
    ended.register(reader, select.POLLHUP)
    # No process holds the other end: the child has ended, or had not come so far.
    assert ended.poll(DEADLINE_MS) or os.read(reader, 1) == b""
    os.close(reader)


def test_a_program_that_is_missing_or_fails_or_hangs_is_named() -> None:
    with pytest.raises(Unavailable, match="no-such-program"):
        run(["no-such-program"], deadline_s=5.0)
    with pytest.raises(KmodError, match=r"exited with 3:\nwhy"):
        run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], deadline_s=60.0)
    with pytest.raises(KmodError, match=r"more than 0\.2 s"):
        run(["sleep", "600"], deadline_s=0.2)
    assert (
        run_any([sys.executable, "-c", "print('found'); raise SystemExit(1)"], deadline_s=60.0) == "found\n"
    )


def test_how_a_file_was_compiled_is_read_from_what_the_build_wrote(tmp_path: Path) -> None:
    tree = find(make_tree(tmp_path))
    with pytest.raises(KmodError, match="build first"):
        compiled_with(tree, "uvm.c")
    notes = tree.root / "nvidia-uvm/.uvm.o.cmd"
    notes.write_text(
        'savedcmd_/x/uvm.o := gcc-12 -Wp,-MMD,/x/.d -DA=\\"b\\" -c -o /x/uvm.o /x/uvm.c ; after\n\nmore\n'
    )
    assert compiled_with(tree, "uvm.c") == ['-DA="b"', "-c", "-o", "/x/uvm.o", "/x/uvm.c"]
    notes.write_text("something else\n")
    with pytest.raises(KmodError, match="has no compiler command"):
        compiled_with(tree, "uvm.c")


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="apt-get is missing")
def test_a_suite_that_is_gone_is_named(tmp_path: Path) -> None:
    apt = tmp_path / "apt"
    apt.mkdir()
    (apt / "sources.list").write_text(f"deb file:{tmp_path}/nowhere bookworm main\n")
    with pytest.raises(Unavailable, match="suite experimental: apt-get exited with"):
        debian.fetch("experimental", tmp_path / "cache", apt)


def test_a_second_run_waits_for_the_first_and_then_says_so(tmp_path: Path) -> None:
    refused = pytest.raises(KmodError, match="in use by another run")
    with alone(tmp_path, 0.0), refused, alone(tmp_path, 0.0):
        pytest.fail("both were alone")
    with alone(tmp_path, 0.0):
        assert not any(tmp_path.iterdir())


def command(*words: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "kmod_patches/mpsd-kmod"), *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60.0)


def test_the_command_refuses_another_folder_in_words(tmp_path: Path) -> None:
    done = command("apply", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"mpsd-kmod: {tmp_path} is not a source of the open kernel modules")


@needs_spatch
def test_the_command_applies_once_and_puts_back(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "999.1")
    before = contents(root)
    assert command("status", root).stdout == "driver 999.1 (not tested): clean\n"
    done = command("apply", root)
    assert (done.returncode, done.stdout) == (0, "driver 999.1: applied\n")
    assert "is not tested with this patch" in done.stderr
    assert command("apply", root).stdout == "driver 999.1: already applied\n"
    assert command("status", root).stdout == "driver 999.1 (not tested): applied\n"
    assert command("reverse", root).stdout == "driver 999.1: restored\n"
    assert contents(root) == before
    assert command("reverse", root).stdout == "driver 999.1: had no patch\n"
