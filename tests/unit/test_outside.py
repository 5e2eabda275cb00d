"""Why a GPU process runs outside MPS: the pipe directory in its environment is closed to it, or gone."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpsd.api import outside
from mpsd.os import acl, processes
from tests.support.site import OTHER_UID

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
THIRD_UID = 65533


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Return a run directory with a slot that leads to a domain of OTHER_UID."""
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as name:
        base = Path(name)
        base.chmod(0o755)
        for place in ("d", "s", "d/d1"):
            (base / place).mkdir(mode=0o755)
        (base / "s" / "theirs").symlink_to(base / "d" / "d1")
        acl.only_for(str(base / "d" / "d1"), OTHER_UID)
        yield base


@contextmanager
def process(uid: int, path: str) -> Iterator[int]:
    with subprocess.Popen(
        ["/bin/cat"],
        env={outside.PIPE_VARIABLE: path},
        stdin=subprocess.PIPE,
        user=uid,
        group=uid,
        extra_groups=[],
        cwd="/",
    ) as child:
        try:
            yield child.pid
        finally:
            child.kill()


def reason(uid: int, path: Path | str, run_dir: Path) -> str:
    with process(uid, str(path)) as pid:
        return outside.reason(processes.facts(pid), str(run_dir))


@pytest.mark.parametrize("way", ["s/theirs", "d/d1", "s/./theirs/", "d/../s//theirs"])
def test_the_closed_directory_is_named(run_dir: Path, way: str) -> None:
    path = f"{run_dir}/{way}"
    told = f"uid {THIRD_UID} may not enter {run_dir}/d/d1, to which {path} leads; "
    assert reason(THIRD_UID, path, run_dir) == f"{told}start the program with mpsd-run"
    assert reason(OTHER_UID, path, run_dir) == ""


def test_a_directory_further_up_is_named(run_dir: Path) -> None:
    (run_dir / "s").chmod(0o700)
    assert f"may not enter {run_dir}/s, " in reason(OTHER_UID, run_dir / "s" / "theirs", run_dir)


@pytest.mark.parametrize("way", ["s/none", "d/d9"])
def test_a_path_that_leads_nowhere_is_named(run_dir: Path, way: str) -> None:
    assert reason(OTHER_UID, run_dir / way, run_dir) == (
        f"{run_dir}/{way} leads to no domain; start the program again with mpsd-run"
    )


@pytest.mark.parametrize(
    "way", ["/nowhere", "", "{0}", "{0}/s", "{0}/copies/1", "{0}/s/theirs/x", "{0}/s/../.."]
)
def test_a_path_of_the_users_choice_is_not_looked_at(
    run_dir: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked(*_: object) -> None:
        raise AssertionError("mpsd followed a user's path")

    monkeypatch.setattr(outside, "closed_directory", looked)
    assert reason(THIRD_UID, way.format(run_dir), run_dir) == ""


def test_a_run_directory_behind_a_link_is_the_same_one(run_dir: Path) -> None:
    link = run_dir.with_name(run_dir.name + "-link")
    link.symlink_to(run_dir)
    try:
        assert "may not enter" in reason(THIRD_UID, run_dir / "s" / "theirs", link)
        assert "may not enter" in reason(THIRD_UID, link / "s" / "theirs", link)
    finally:
        link.unlink()


def test_a_process_that_has_ended_has_no_reason(run_dir: Path) -> None:
    with process(THIRD_UID, str(run_dir / "s" / "theirs")) as pid:
        facts = processes.facts(pid)
    assert outside.reason(facts, str(run_dir)) == ""
