"""Access control lists: a directory for one user."""

from __future__ import annotations

import errno
import os
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpsd.base.errors import ConfigError
from mpsd.mps import pipedir
from mpsd.os import acl

MINE, OTHER = 65534, 65533


def can(what: str, path: Path, uid: int) -> bool:
    """Return whether a user (in no group but its own) may do that with a path: an option of test(1)."""
    done = subprocess.run(["test", what, str(path)], user=uid, group=uid, extra_groups=[], cwd="/")
    return done.returncode == 0


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not below pytest's own directory, which only root may enter.
    path = Path(f"/tmp/mpt-acl-{os.getpid()}")
    path.mkdir(mode=0o755)
    yield path
    for inner in path.iterdir():
        inner.unlink()
    path.rmdir()


def test_the_user_of_a_directory_is_read_back(directory: Path) -> None:
    assert acl.user_of(str(directory)) is None
    try:
        acl.only_for(str(directory), MINE)
    except OSError as error:
        pytest.skip(f"no access control lists here: {error.strerror}")
    assert acl.user_of(str(directory)) == MINE


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
    # The second call, as when a control daemon is started there, opens no access in between.
    acl.only_for(str(directory), MINE)
    assert can("-x", directory, MINE) and not can("-x", directory, OTHER)


def test_the_owners_own_needs_no_list(tmp_path: Path) -> None:
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    pipedir.prepare(str(pipe), str(log), private_to=os.geteuid())
    assert stat.S_IMODE(pipe.stat().st_mode) == 0o700
    pipedir.prepare(str(pipe), str(log))
    assert stat.S_IMODE(pipe.stat().st_mode) == 0o755
    assert stat.S_IMODE(log.stat().st_mode) == 0o750


ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
NAMED = [(0x01, 7, acl._NO_ID), (0x02, 5, MINE), (0x02, 4, OTHER), (0x04, 0, acl._NO_ID), (0x08, 5, 7)]


def lay(path: Path, *rows: tuple[int, int, int]) -> None:
    raw = struct.pack("<I", 2) + b"".join(acl._ENTRY.pack(*row) for row in rows)
    os.setxattr(path, "system.posix_acl_access", raw)


@ROOT_ONLY
@pytest.mark.parametrize("mode", [0o700, 0o710, 0o701, 0o755, 0o770, 0o750, 0o500])
def test_the_computed_right_to_enter_is_the_kernels_for_modes(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    (directory / "control").touch()
    for uid in (0, MINE):
        assert acl.may_enter(str(directory), uid, [uid]) == can("-e", directory / "control", uid)
    assert acl.is_only_for(str(directory), MINE) == (mode & 0o077 == 0)


@ROOT_ONLY
@pytest.mark.parametrize("mask", [7, 5, 4, 0])
def test_the_computed_right_to_enter_is_the_kernels_for_lists(directory: Path, mask: int) -> None:
    (directory / "control").touch()
    lay(directory, *NAMED, (0x10, mask, acl._NO_ID), (0x20, 0, acl._NO_ID))
    for uid in (MINE, OTHER, 7, 8):
        assert acl.may_enter(str(directory), uid, [uid]) == can("-e", directory / "control", uid), uid
    # OTHER may list it, and group 7 may enter.
    assert acl.is_only_for(str(directory), MINE) == (mask == 0)


@ROOT_ONLY
def test_a_directory_is_for_one_user_alone(directory: Path) -> None:
    assert not acl.is_only_for(str(directory), MINE)
    acl.only_for(str(directory), MINE)
    assert acl.is_only_for(str(directory), MINE)
    assert not acl.is_only_for(str(directory), OTHER)
    # Root enters anyway, so an entry for it opens nothing.
    lay(directory, *NAMED[:2], (0x02, 5, 0), (0x04, 0, acl._NO_ID), (0x10, 5, 0), (0x20, 0, acl._NO_ID))
    assert acl.is_only_for(str(directory), MINE)
    lay(directory, *NAMED[:2], (0x04, 0, acl._NO_ID), (0x10, 5, 0), (0x20, 1, acl._NO_ID))
    assert not acl.is_only_for(str(directory), MINE)


def refusing(number: int) -> Callable[..., None]:
    def setxattr(path: str, *_: object) -> None:
        raise OSError(number, os.strerror(number), path)

    return setxattr


def test_a_file_system_without_lists_leaves_the_directory_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    monkeypatch.setattr(os, "setxattr", refusing(errno.ENOTSUP))
    assert not pipedir.prepare(str(pipe), str(log), private_to=OTHER)
    assert stat.S_IMODE(pipe.stat().st_mode) == 0o755
    assert not pipedir.is_private(str(pipe), OTHER)
    # The user's own directory needs no list.
    assert pipedir.prepare(str(pipe), str(log), private_to=os.geteuid())
    assert pipedir.is_private(str(pipe), os.geteuid())


def test_any_other_error_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    monkeypatch.setattr(os, "setxattr", refusing(errno.EPERM))
    with pytest.raises(ConfigError, match=f"cannot make directory {pipe}: Operation not permitted"):
        pipedir.prepare(str(pipe), str(log), private_to=OTHER)
    # It stays closed.
    assert stat.S_IMODE(pipe.stat().st_mode) == 0o700


def test_whether_a_file_system_has_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not pipedir.lacks_acls(str(tmp_path / "gone"))
    monkeypatch.setattr(os, "getxattr", refusing(errno.ENOTSUP))
    assert pipedir.lacks_acls(str(tmp_path)) and not acl.supported(str(tmp_path))
    monkeypatch.setattr(os, "getxattr", refusing(errno.ENODATA))
    assert acl.supported(str(tmp_path))


def test_a_shared_directory_is_open_and_not_private(tmp_path: Path) -> None:
    assert not pipedir.prepare(str(tmp_path / "pipe"), str(tmp_path / "log"))
    assert not pipedir.is_private(str(tmp_path / "pipe"), None)
    assert acl.may_enter(str(tmp_path / "pipe"), OTHER, ())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_a_private_directory_is_recognised_and_nothing_else_is(directory: Path) -> None:
    path = str(directory)
    assert not acl.is_only_for(path, MINE), "every user may enter it"
    directory.chmod(0o750)
    assert not acl.is_only_for(path, MINE), "a group may have any members"
    directory.chmod(0o700)
    assert acl.is_only_for(path, MINE)
    os.chown(path, OTHER, OTHER)
    assert not acl.is_only_for(path, MINE) and acl.is_only_for(path, OTHER)
    os.chown(path, 0, 0)
    assert not acl.is_only_for(f"{path}/no-such", MINE)
    link = directory / "link"
    link.symlink_to(path)
    assert not acl.is_only_for(str(link), MINE)


def test_an_acl_that_admits_a_further_user_or_group_is_not_private(directory: Path) -> None:
    path = str(directory)
    try:
        acl.only_for(path, MINE)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        pytest.skip("this file system has no ACLs")
    assert acl.is_only_for(path, MINE) and not acl.is_only_for(path, OTHER)
    value = os.getxattr(path, "system.posix_acl_access")
    head, rows = value[:4], [value[n : n + 8] for n in range(4, len(value), 8)]
    user, group = (acl._ENTRY.pack(tag, 5, OTHER) for tag in (0x02, 0x08))
    for further in (rows[:1] + sorted([rows[1], user]) + rows[2:], [*rows[:3], group, *rows[3:]]):
        os.setxattr(path, "system.posix_acl_access", head + b"".join(further))
        assert not acl.is_only_for(path, MINE)
    # The mask takes their rights away.
    mask = acl._ENTRY.pack(0x10, 0, 0xFFFFFFFF)
    masked = [mask if acl._ENTRY.unpack(row)[0] == 0x10 else row for row in rows]
    os.setxattr(path, "system.posix_acl_access", head + b"".join([*masked[:3], group, *masked[3:]]))
    assert acl.is_only_for(path, MINE)
