"""The fault journal: bounded, whole after any cut, never fatal to the daemon."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpsd.records import journal as module
from mpsd.records.journal import Journal, encode
from tests.support.descriptors import open_descriptors


def record(number: int, revision: int = 1, text: str = "") -> dict[str, Any]:
    return {"id": number, "revision": revision, "title": text}


def filled(tmp_path: Path, records: list[dict[str, Any]], **bounds: int) -> Path:
    journal = Journal.open(tmp_path, **bounds)
    for entry in records:
        journal.append(entry)
    assert journal.problem is None
    journal.close()
    return journal.path


def reread(tmp_path: Path) -> list[dict[str, Any]]:
    journal = Journal.open(tmp_path)
    try:
        return journal.records()
    finally:
        journal.close()


def test_records_come_back_in_order(tmp_path: Path) -> None:
    entries = [record(n, text="line\nbreak \x00 é") for n in (1, 2, 3)]
    filled(tmp_path, entries)
    assert reread(tmp_path) == entries


def test_a_higher_revision_takes_the_place(tmp_path: Path) -> None:
    filled(tmp_path, [record(1), record(2), record(1, 3, "last"), record(1, 2, "late")])
    assert reread(tmp_path) == [record(1, 3, "last"), record(2)]


def test_cut_at_every_byte_keeps_all_complete_records(tmp_path: Path) -> None:
    entries = [record(n, text="x" * n) for n in range(1, 5)]
    path = filled(tmp_path, entries)
    content = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(content) if byte == 0x0A]
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        complete = max(sum(end <= size for end in ends) - 1, 0)
        journal = Journal.open(tmp_path)
        assert journal.records() == entries[:complete], size
        journal.append(record(9))
        journal.close()
        assert journal.problem is None
        assert reread(tmp_path) == [*entries[:complete], record(9)], size


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_in_the_middle_costs_only_what_it_hits(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tmp_path = tmp_path_factory.mktemp("journal")
    entries = [record(n, text="text") for n in range(1, 6)]
    path = filled(tmp_path, entries)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[at]))
    path.write_bytes(content)
    journal = Journal.open(tmp_path)
    lost = [entry for entry in entries if entry not in journal.records()]
    journal.close()
    assert len(lost) <= 2
    assert all(found in entries for found in journal.records())


def test_the_number_of_records_is_bounded(tmp_path: Path) -> None:
    path = filled(tmp_path, [record(n) for n in range(1, 201)], max_records=10)
    assert [entry["id"] for entry in reread(tmp_path)] == list(range(191, 201)) or len(reread(tmp_path)) <= 21
    assert path.read_bytes().count(b"\n") <= 21
    journal = Journal.open(tmp_path, max_records=10)
    assert [entry["id"] for entry in journal.records()] == list(range(191, 201))
    journal.close()


def test_the_size_is_bounded(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, max_bytes=4000)
    for number in range(1, 101):
        journal.append(record(number, text="x" * 200))
        assert journal.path.stat().st_size <= 4000
    assert len(journal.records()) == 100
    journal.close()
    assert [entry["id"] for entry in reread(tmp_path)][-1] == 100


def test_a_record_larger_than_the_journal_stays_in_memory(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, max_bytes=1000)
    journal.append(record(1))
    journal.append(record(2, text="x" * 2000))
    assert [entry["id"] for entry in journal.records()] == [1, 2]
    journal.close()
    assert [entry["id"] for entry in reread(tmp_path)] == [1]


def test_ids_never_go_back(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, max_records=2, max_bytes=600)
    for number in range(1, 30):
        journal.append(record(number, text="x" * 300))
    journal.close()
    again = Journal.open(tmp_path)
    assert again.last_id >= 28
    again.close()


class Disk:
    """os.write that accepts `room` more bytes and then reports a full disk."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.real = os.write

    def write(self, fd: int, content: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.real(fd, bytes(content)[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("room", [0, 1, 20, 70, 200])
def test_full_disk_loses_nothing_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    journal = Journal.open(tmp_path)
    journal.append(record(1))
    entries = [record(n, text="x" * 40) for n in range(2, 8)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", Disk(room).write)
        for entry in entries:
            journal.append(entry)
        assert journal.waiting > 0
        assert "No space left" in (journal.problem or "")
        assert journal.records() == [record(1), *entries]
        on_disk = reread(tmp_path)
        assert on_disk == [record(1), *entries][: len(on_disk)]
    assert journal.retry()
    assert (journal.problem, journal.waiting) == (None, 0)
    journal.close()
    assert reread(tmp_path) == [record(1), *entries]


def test_full_disk_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", Disk(0).write)
        journal = Journal.open(tmp_path)
        journal.append(record(1))
        assert journal.problem
    journal.append(record(2))
    assert journal.problem is None
    journal.close()
    assert reread(tmp_path) == [record(1), record(2)]


def test_unusable_directory_is_a_problem_not_an_exception(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    journal = Journal.open(tmp_path / "plain")
    journal.append(record(1))
    assert journal.problem
    assert journal.records() == [record(1)]
    journal.close()


def test_a_newer_journal_is_kept_aside_untouched(tmp_path: Path) -> None:
    newer = encode({"kind": module.KIND, "level": 2, "last_id": 7}) + b"something else\n"
    (tmp_path / module.NAME).write_bytes(newer)
    journal = Journal.open(tmp_path)
    assert "newer mpsd (level 2, this one knows 1)" in (journal.problem or "")
    assert (tmp_path / f"{module.NAME}.newer").read_bytes() == newer
    journal.append(record(1))
    journal.close()
    assert reread(tmp_path) == [record(1)]


def test_no_descriptor_is_left_open_or_inherited(tmp_path: Path) -> None:
    before = open_descriptors()
    journal = Journal.open(tmp_path, max_records=2)
    for number in range(1, 40):
        journal.append(record(number))
    (opened,) = set(open_descriptors()) - set(before)
    assert not os.get_inheritable(opened)
    journal.close()
    assert open_descriptors() == before
