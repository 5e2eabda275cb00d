"""A wrong command or a concurrent run gets an error of one sentence, and loses nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kmod.alone import alone, holders
from kmod.caching import making
from kmod.changes import have_spatch
from kmod.errors import KmodError
from tests.kmod.smalltree import contents, make_tree
from tests.kmod.test_build import ROOT, command

needs_spatch = pytest.mark.skipif(not have_spatch(), reason="spatch is missing: apt-get install coccinelle")
MPSD_KMOD = ROOT / "kmod_patches/mpsd-kmod"
NOBODYS_HOME = {"PATH": os.environ["PATH"]}
UNKNOWN_UID = 123456
GONE = 2**22 + 1
"""More than any pid."""


def proof(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "emulator.proof", *map(str, words)]
    path = f"{ROOT}:{ROOT / 'kmod_patches'}"
    return subprocess.run(
        line,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60.0,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


@needs_spatch
def test_of_two_runs_in_a_tree_one_waits(tmp_path: Path) -> None:
    for number in range(4):
        root = make_tree(tmp_path / str(number))
        before = contents(root)
        line = [sys.executable, str(MPSD_KMOD), "apply", str(root)]
        runs = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        said = sorted(run.communicate(timeout=60.0)[0] for run in runs)
        assert [run.returncode for run in runs] == [0, 0]
        assert [text.split(": ")[1] for text in said] == ["already applied\n", "applied\n"]
        assert command("status", root).stdout.endswith(": applied\n")
        assert command("reverse", root).returncode == 0
        assert contents(root) == before


def test_who_is_waited_for_is_named(tmp_path: Path) -> None:
    held = "import sys, pathlib; from kmod.alone import alone\nwith alone(pathlib.Path(sys.argv[1]), 0):"
    held += " print('held', flush=True); sys.stdin.read()"
    line = [sys.executable, "-c", held, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "kmod_patches")}
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(KmodError, match=rf"process {other.pid} \(python"), alone(tmp_path, 0.0):
            pytest.fail("both were alone")
        other.communicate("", timeout=60.0)
    with alone(tmp_path, 0.0):
        assert holders(tmp_path) == "a process of another user"


def test_it_says_that_what_it_says_goes_nowhere() -> None:
    with open("/dev/full", "wb") as full:
        for words in (["status"], ["--help"], ["install", "--help"]):
            line = [sys.executable, str(MPSD_KMOD), *words]
            done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60.0)
            assert "Traceback" not in done.stderr and done.stderr.count("\n") <= 1
            # If Python does not buffer, argparse ignores the error.
            if words == ["status"]:
                assert (done.returncode, done.stderr.count("No space left on device")) == (1, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user needs root")
def test_a_user_without_a_home_is_told_what_to_set() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/usr/bin/python3", str(MPSD_KMOD), *words],
            capture_output=True,
            text=True,
            user=UNKNOWN_UID,
            env=NOBODYS_HOME,
            timeout=60.0,
        )

    if not Path("/usr/bin/python3").exists() or run("--help").returncode == 126:
        pytest.skip("no python3 of the system's")
    assert run("--help").returncode == 0
    done = run("fetch", "trixie", "/nowhere")
    assert done.returncode == 1
    assert "Set XDG_CACHE_HOME" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("suite", ["../../evil", "", "trixie main", "https://x", "Trixie"])
def test_a_suite_is_a_name(tmp_path: Path, suite: str) -> None:
    done = command("fetch", suite, tmp_path / "new", "--cache", tmp_path / "a/b/cache")
    assert done.returncode == 1
    assert (
        "is not the name of a Debian suite" in done.stderr
        and "bookworm, trixie, sid, experimental" in done.stderr
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_fetched_into(tmp_path: Path) -> None:
    done = command("fetch", "trixie", tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        f"mpsd-kmod: {tmp_path} exists already; name a new folder\n",
    )


@needs_spatch
def test_an_empty_file_and_one_that_is_gone_are_named(tmp_path: Path) -> None:
    root = make_tree(tmp_path)
    file = root / "nvidia-uvm/uvm_va_space.c"
    file.write_text("")
    done = command("apply", root)
    assert done.returncode == 1 and done.stderr.startswith(
        "mpsd-kmod: nvidia-uvm/uvm_va_space.c: 0 lines added"
    )
    file.unlink()
    for verb in ("status", "apply"):
        done = command(verb, root)
        assert done.returncode == 1 and "has no nvidia-uvm/uvm_va_space.c" in done.stderr


@needs_spatch
def test_damaged_notes_leave_a_way(tmp_path: Path) -> None:
    root = make_tree(tmp_path)
    assert command("apply", root).returncode == 0
    notes = root / "nvidia-uvm/.mpsd-kmod/notes.json"
    notes.write_text("{")
    for verb in ("status", "apply", "reverse"):
        done = command(verb, root)
        assert done.returncode == 1
        assert "fresh copy of the driver's source" in done.stderr and "originals" in done.stderr


@pytest.mark.parametrize("words", [["build", "TREE", "--jobs", "0"], ["build", "TREE", "--jobs", "-3"]])
def test_jobs_are_counted_from_one(words: Sequence[str], tmp_path: Path) -> None:
    done = command(*(str(tmp_path) if word == "TREE" else word for word in words))
    assert done.returncode == 2 and "is less than 1" in done.stderr


def test_a_kernel_is_for_a_tree() -> None:
    done = command("status", "--kernel", "nope")
    assert done.returncode == 1 and "name one" in done.stderr


def test_what_a_killed_run_has_left_goes(tmp_path: Path) -> None:
    (tmp_path / f".new-{GONE}-x").mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / f".new-{os.getpid()}-y").mkdir()
    with making(tmp_path / "made", "it") as made:
        made.rename(tmp_path / "made")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".new-{os.getpid()}-y", "kept", "made"]


def test_the_proof_refuses_what_it_could_not_write(tmp_path: Path) -> None:
    done = proof("--write", tmp_path / "file", "--cache", tmp_path)
    assert done.returncode == 2 and "--write needs output of guests" in done.stderr
    done = proof("--boot", "trixie", "--write", tmp_path / "nowhere/file", "--cache", tmp_path)
    assert done.returncode == 2 and "No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_proof_refuses_a_kernel_that_is_not_there(tmp_path: Path) -> None:
    done = proof("--kernel", "nope", "--cache", tmp_path)
    assert done.returncode == 2 and "no kernel headers for nope" in done.stderr


def test_a_part_is_of_ci_alone(tmp_path: Path) -> None:
    done = proof("--full", "--part", "build", "--cache", tmp_path)
    assert (done.returncode, done.stderr) == (2, "test-kmod: --part is for --ci alone\n")


def test_a_cache_that_cannot_be_written_is_named_in_each_row(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = proof("--cache", tmp_path / "file")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stdout.count("its source is unavailable in") == 4
