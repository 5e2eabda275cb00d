"""Files of the driver instances: separate copies, renewed when the driver changes, never incomplete, and in a
folder from which every user can load them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mpsd.failover import driverfiles
from mpsd.failover.driverfiles import NAMES, DriverFiles, candidates, loading_obstacle
from mpsd.mps.reachability import with_rights
from mpsd_client import driver as client_driver


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(b"driver" * 1000)
    return path


@pytest.fixture
def open_path() -> Iterator[Path]:
    """Return a folder that every user can enter: pytest's own are closed to other users."""
    with tempfile.TemporaryDirectory(prefix="mpt-", dir="/tmp") as where:
        os.chmod(where, 0o755)
        yield Path(where)


def copies_in(folder: Path, driver: object = "") -> DriverFiles:
    """Return driver files of a daemon that serves its own user, in one folder."""
    return DriverFiles([folder], str(driver))


def content(folder: Path) -> set[bytes]:
    return {(folder / name).read_bytes() for name in NAMES}


def test_they_are_made_once_and_again_when_the_driver_changed(tmp_path: Path, driver: Path) -> None:
    made = copies_in(tmp_path / "copies", driver)
    found = made.ensure()
    assert (found.problem, found.source) == ("", str(driver)) and found.bytes >= 12000
    first = [os.lstat(made.folder / name) for name in NAMES]
    assert len({f.st_ino for f in first}) == len(NAMES) == 3 and all(f.st_nlink == 1 for f in first)
    assert {f.st_mode & 0o777 for f in first} == {0o644}
    # Another daemon finds the files unchanged.
    copies_in(tmp_path / "copies", driver).ensure()
    assert [os.lstat(made.folder / name).st_ino for name in NAMES] == [f.st_ino for f in first]
    driver.write_bytes(b"newer!")
    assert not made.ensure().problem and content(made.folder) == {b"newer!"}


def test_a_link_to_the_driver_is_followed_and_never_copied_as_one(tmp_path: Path, driver: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(driver)
    made = copies_in(tmp_path / "copies", link)
    assert made.ensure().source == str(driver)
    assert not any((made.folder / name).is_symlink() for name in NAMES)


def test_what_was_damaged_is_made_again(tmp_path: Path, driver: Path) -> None:
    made = copies_in(tmp_path / "copies", driver)
    made.ensure()
    (made.folder / NAMES[1]).unlink()
    os.link(made.folder / NAMES[0], made.folder / NAMES[1])
    assert not made.ensure().problem
    assert os.lstat(made.folder / NAMES[0]).st_nlink == 1
    (made.folder / NAMES[0]).write_bytes(b"cut")
    assert not made.ensure().problem and content(made.folder) == {driver.read_bytes()}


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = copies_in(tmp_path / "copies", driver)
    made.ensure()
    driver.write_bytes(b"newer")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    found = made.ensure()
    assert "No space left on device" in found.problem and not found.bytes
    assert not made.folder.exists()
    monkeypatch.undo()
    assert not made.ensure().problem


@pytest.mark.parametrize("place", ["absent", "folder"])
def test_a_driver_that_is_no_file_is_said(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    found = copies_in(tmp_path / "copies", tmp_path / place).ensure()
    assert str(tmp_path / place) in found.problem


def test_the_loader_s_driver_is_taken_and_never_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path("/proc/self/exe").read_bytes()[:64]
    proxy, foreign, driver = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    proxy.write_bytes(real + client_driver._MARK)
    foreign.write_bytes(b"\x7fELF\x01" + real[5:])
    driver.write_bytes(real)
    places = [str(tmp_path / "absent"), str(proxy), str(foreign), str(driver)]
    monkeypatch.setattr(client_driver, "_candidates", lambda environ: iter(places))
    assert driverfiles.find_driver() == str(driver)
    monkeypatch.setattr(client_driver, "_candidates", lambda environ: iter(places[:-1]))
    assert "failover.driver" in copies_in(tmp_path / "copies").ensure().remedy
    simulated = DriverFiles([tmp_path / "copies"], simulated=True).ensure()
    assert simulated.problem and "mpsd help quickstart" in simulated.remedy
    named = DriverFiles([tmp_path / "copies"], str(tmp_path / "absent"), simulated=True).ensure()
    assert "failover.driver" in named.remedy


def test_a_folder_in_which_others_may_write_or_nothing_loads_is_not_used(
    tmp_path: Path, driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = copies_in(tmp_path / "copies", driver)
    made.folder.mkdir()
    kept = made.folder / "kept"
    kept.write_text("else")
    made.folder.chmod(0o777)
    assert "other users may write" in made.ensure().problem
    made.folder.chmod(0o755)
    noexec = os.statvfs_result((4096,) * 8 + (os.ST_NOEXEC, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: noexec)
    found = made.ensure()
    assert "noexec" in found.problem and "set failover.copies" in found.remedy
    assert kept.read_text() == "else"


def test_the_first_usable_folder_gets_the_copies(open_path: Path, driver: Path) -> None:
    """A folder below one that is closed to other users is passed over, where users can enter run_dir."""
    closed = open_path / "state"
    closed.mkdir(mode=0o750)
    folders = [closed / "copies", open_path / "cache" / "copies"]
    made = DriverFiles(folders, str(driver), open_like=open_path)
    found = made.ensure()
    assert (found.problem, found.folder) == ("", str(folders[1])) and made.folder == folders[1]
    assert f"{closed} is closed to other users" in found.passed_over[0]
    assert content(folders[1]) == {driver.read_bytes()} and not folders[0].exists()
    assert os.stat(folders[1].parent).st_mode & 0o777 == 0o755
    # A daemon that other users cannot get to may use it.
    closed.chmod(0o700)
    assert DriverFiles(folders, str(driver), open_like=closed).ensure().folder == str(folders[0])
    assert not folders[1].exists()


def test_without_an_open_folder_the_daemon_s_user_alone_has_copies(open_path: Path, driver: Path) -> None:
    closed = open_path / "state"
    closed.mkdir(mode=0o750)
    made = DriverFiles([closed / "copies"], str(driver), open_like=open_path)
    for _ in range(2):
        found = made.ensure()
        assert (found.problem, found.closed, found.folder) == ("", str(closed), str(closed / "copies"))
    inode = os.stat(closed / "copies" / NAMES[0]).st_ino
    made.ensure()
    assert os.stat(closed / "copies" / NAMES[0]).st_ino == inode
    closed.chmod(0o755)
    assert made.ensure().closed == ""


def test_a_folder_in_use_stays_in_use(open_path: Path, driver: Path) -> None:
    first, second = open_path / "first", open_path / "second"
    first.mkdir()
    first.chmod(0o777)
    made = DriverFiles([first, second], str(driver), open_like=open_path)
    assert made.ensure().folder == str(second)
    first.chmod(0o755)
    driver.write_bytes(b"newer")
    found = made.ensure()
    assert (found.folder, found.passed_over) == (str(second), ()) and content(second) == {b"newer"}
    # The next daemon takes the best folder, and clears the other.
    assert DriverFiles([first, second], str(driver), open_like=open_path).ensure().folder == str(first)
    assert not second.exists()


def test_without_a_usable_folder_each_is_named_with_the_remedy(open_path: Path, driver: Path) -> None:
    longest = open_path / ("x" * 120)
    blocked = open_path / "file"
    blocked.write_text("")
    found = DriverFiles([longest, blocked / "copies"], str(driver), open_like=open_path).ensure()
    assert "bytes" in found.problem and f"{blocked}/copies: {blocked} is not a directory" in found.problem
    assert found.problem_text.endswith(driverfiles.REMEDY) and not found.folder


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mount a small file system on a new folder. Skip the test where that is not possible."""
    folder.mkdir(mode=0o755)
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a file system")
    mount = ["mount", "-t", "tmpfs", "-o", f"{options},mode=755", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_noexec_file_system_is_passed_over(open_path: Path, driver: Path) -> None:
    with mounted(open_path / "run", "noexec,size=1m") as noexec:
        found = DriverFiles([noexec / "copies", open_path / "c"], str(driver), open_like=open_path).ensure()
        assert found.folder == str(open_path / "c") and "noexec" in found.passed_over[0]
        # The kernel itself refuses there.
        there = noexec / "library"
        there.write_bytes(driver.read_bytes())
        assert loading_obstacle(there) == os.strerror(errno.EPERM)


def test_a_file_system_without_space_is_passed_over(open_path: Path, driver: Path) -> None:
    with mounted(open_path / "run", "size=4m") as small:
        found = DriverFiles([small / "copies", open_path / "c"], str(driver), open_like=open_path).ensure()
        assert found.folder == str(open_path / "c") and "MiB are free" in found.passed_over[0]
        assert not any((small / "copies").iterdir())


def test_a_copy_is_tried_as_a_user_without_rights(open_path: Path) -> None:
    copy = open_path / "library"
    copy.write_bytes(b"x" * 10)
    assert with_rights(None, partial(loading_obstacle, copy)) == ""
    open_path.chmod(0o750)
    refused = "" if os.geteuid() != 0 else os.strerror(errno.EACCES)
    assert with_rights(None, partial(loading_obstacle, copy)) == refused
    assert loading_obstacle(copy) == ""


def test_the_candidates_of_two_daemons_differ_outside_their_run_directories() -> None:
    first = candidates("/conf", Path("/run/mpsd"), 0, {})
    assert first[:2] == [Path("/conf"), Path("/run/mpsd/copies")]
    assert first[2].parent == Path("/var/cache/mpsd")
    other = candidates("", Path("/run/other"), 0, {})
    assert not {*first[2:]} & {*other}
    own = candidates("", Path("/run/user/7/mpsd"), 7, {"HOME": "/home/ann"})
    assert [path.parent for path in own[1:]] == [Path("/home/ann/.cache/mpsd")]
