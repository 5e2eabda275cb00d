"""The state file: written whole or not at all, whatever happens to the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mpsd.base.errors import StoreError
from mpsd.records.statefile import StateFile


def state_file(tmp_path: Path, level: int = 1) -> StateFile:
    return StateFile(tmp_path / "domains.json", "domains", level)


def test_round_trip_and_replacement(tmp_path: Path) -> None:
    file = state_file(tmp_path)
    assert file.load() is None
    assert file.save({"a": [1, "é\n"]})
    assert file.save({"a": [2]})
    assert state_file(tmp_path).load() == {"a": [2]}
    assert os.listdir(tmp_path) == ["domains.json"]
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_cut_at_every_byte_is_never_half_read(tmp_path: Path) -> None:
    file = state_file(tmp_path)
    file.save({"domains": ["d1", "d2"], "level": "text"})
    content = file.path.read_bytes()
    for size in range(len(content)):
        for aside in tmp_path.glob("*.damaged*"):
            aside.unlink()
        file.path.write_bytes(content[:size])
        reader = state_file(tmp_path)
        assert reader.load() is None
        assert reader.problem is not None
        assert (tmp_path / "domains.json.damaged").read_bytes() == content[:size]


def test_damaged_files_do_not_replace_each_other(tmp_path: Path) -> None:
    for text in (b"one", b"two"):
        (tmp_path / "domains.json").write_bytes(text)
        assert state_file(tmp_path).load() is None
    assert (tmp_path / "domains.json.damaged").read_bytes() == b"one"
    assert (tmp_path / "domains.json.damaged.1").read_bytes() == b"two"


def test_future_level_is_refused_and_left_alone(tmp_path: Path) -> None:
    state_file(tmp_path, level=2).save({"new": 1})
    content = (tmp_path / "domains.json").read_bytes()
    with pytest.raises(StoreError, match="newer mpsd"):
        state_file(tmp_path).load()
    assert (tmp_path / "domains.json").read_bytes() == content


def test_another_kind_is_refused(tmp_path: Path) -> None:
    StateFile(tmp_path / "domains.json", "other", 1).save({})
    with pytest.raises(StoreError, match="holds 'other'"):
        state_file(tmp_path).load()


@pytest.mark.parametrize("call", ["write", "replace", "open"])
def test_full_disk_keeps_the_old_file_and_the_new_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    file = state_file(tmp_path)
    file.save({"old": True})

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        assert file.save({"new": True}) is False
    assert "No space left" in (file.problem or "")
    assert state_file(tmp_path).load() == {"old": True}
    assert file.retry()
    assert file.problem is None
    assert state_file(tmp_path).load() == {"new": True}


def test_a_flush_happens_once_for_each_change_and_its_failure_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    file = state_file(tmp_path)
    file.sync()
    assert flushed == []
    file.save({"a": 1})
    file.sync()
    file.sync()
    assert len(flushed) == 2, "the file and its directory"

    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    file.save({"a": 2})
    file.sync()
    assert "Input/output error" in (file.problem or "")
    assert state_file(tmp_path).load() == {"a": 2}


def test_unwritable_place_is_a_problem_not_an_exception(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    file = StateFile(tmp_path / "plain" / "domains.json", "domains", 1)
    assert file.save({}) is False
    assert file.problem
    with pytest.raises(StoreError, match="cannot read"):
        file.load()
