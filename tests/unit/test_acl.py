"""A directory for one user."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd import pipedir
from mpsd.linux import acl

MINE, OTHER = 65534, 65533


def can(what: str, path: Path, uid: int) -> bool:
    """Whether a user (in no group but its own) may do that with a path: a test of test(1)."""
    done = subprocess.run(["test", what, str(path)], user=uid, group=uid, extra_groups=[], cwd="/")
    return done.returncode == 0


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not below pytest's own directory, which is root's alone.
    path = Path(f"/tmp/mpt-acl-{os.getpid()}")
    path.mkdir(mode=0o755)
    yield path
    for inner in path.iterdir():
        inner.unlink()
    path.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_one_user_may_enter_and_change_nothing(directory: Path) -> None:
    try:
        acl.only_for(str(directory), MINE)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        pytest.skip("this file system has no ACLs")
    (directory / "control").touch(0o666)
    assert can("-e", directory / "control", MINE)
    assert not can("-w", directory, MINE), "root's daemon makes its files here"
    assert not can("-e", directory / "control", OTHER)
    # The second time, as when a control daemon is started there, nothing is opened in between.
    acl.only_for(str(directory), MINE)
    assert can("-x", directory, MINE) and not can("-x", directory, OTHER)


def test_the_owners_own_needs_no_list(tmp_path: Path) -> None:
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    pipedir.prepare(str(pipe), str(log), private_to=os.geteuid())
    assert stat.S_IMODE(pipe.stat().st_mode) == 0o700
    pipedir.prepare(str(pipe), str(log))
    assert stat.S_IMODE(pipe.stat().st_mode) == 0o755
    assert stat.S_IMODE(log.stat().st_mode) == 0o750
