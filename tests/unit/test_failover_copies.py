"""Copies of the driver: files of their own, made again when it changed, never half there."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from mpsd.failover import copies
from mpsd.failover.copies import NAMES, Copies
from mpsd_client import driver as client_driver


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(b"driver" * 1000)
    return path


def content(folder: Path) -> set[bytes]:
    return {(folder / name).read_bytes() for name in NAMES}


def test_they_are_made_once_and_again_when_the_driver_changed(tmp_path: Path, driver: Path) -> None:
    made = Copies(tmp_path / "copies", str(driver))
    found = made.ensure()
    assert (found.problem, found.source) == ("", str(driver)) and found.bytes >= 12000
    first = [os.lstat(made.folder / name) for name in NAMES]
    assert len({f.st_ino for f in first}) == len(NAMES) == 3 and all(f.st_nlink == 1 for f in first)
    assert {f.st_mode & 0o777 for f in first} == {0o644}
    # Another daemon finds them as they are.
    Copies(tmp_path / "copies", str(driver)).ensure()
    assert [os.lstat(made.folder / name).st_ino for name in NAMES] == [f.st_ino for f in first]
    driver.write_bytes(b"newer!")
    assert not made.ensure().problem and content(made.folder) == {b"newer!"}


def test_a_link_to_the_driver_is_followed_and_never_copied_as_one(tmp_path: Path, driver: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(driver)
    made = Copies(tmp_path / "copies", str(link))
    assert made.ensure().source == str(driver)
    assert not any((made.folder / name).is_symlink() for name in NAMES)


def test_what_was_damaged_is_made_again(tmp_path: Path, driver: Path) -> None:
    made = Copies(tmp_path / "copies", str(driver))
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
    made = Copies(tmp_path / "copies", str(driver))
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
    found = Copies(tmp_path / "copies", str(tmp_path / place)).ensure()
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
    assert copies.find_driver() == str(driver)
    monkeypatch.setattr(client_driver, "_candidates", lambda environ: iter(places[:-1]))
    assert "failover.driver" in Copies(tmp_path / "copies").ensure().problem


def test_a_folder_in_which_others_may_write_or_nothing_loads_is_not_used(
    tmp_path: Path, driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Copies(tmp_path / "copies", str(driver))
    made.folder.mkdir()
    kept = made.folder / "somebody's"
    kept.write_text("else")
    made.folder.chmod(0o777)
    assert "others may write" in made.ensure().problem
    made.folder.chmod(0o755)
    noexec = os.statvfs_result((4096,) * 8 + (os.ST_NOEXEC, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: noexec)
    assert "noexec" in made.ensure().problem
    assert kept.read_text() == "else"
