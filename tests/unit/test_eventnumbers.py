"""Events: numbers that are never used twice, and the gap that a late reader sees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpsd.base.conditions import Code
from mpsd.records.bulletin import EVENTS_KEPT, Bulletin, Moment
from mpsd.records.eventnumbers import BLOCK, EventNumbers
from mpsd.records.journal import Journal
from mpsd.wire.messages import Gap


def bulletin(directory: Path) -> Bulletin:
    return Bulletin(Journal.open(directory, 10, 65536), None, EventNumbers(directory))


def publish(bulletin: Bulletin, count: int) -> None:
    for _ in range(count):
        bulletin.publish("x", frozenset(), {}, Moment.now())


@pytest.mark.parametrize("given", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_number_is_given_once_however_a_life_ends(tmp_path: Path, given: int) -> None:
    first = EventNumbers(tmp_path)
    assert [first.next() for _ in range(given)] == list(range(1, given + 1))
    # Nothing records the end of this life.
    second = EventNumbers(tmp_path)
    assert second.first == second.next() > given
    assert not second.problem


@pytest.mark.parametrize(
    "content", [b"x", b"{}", b"", b'{"kind": "mpsd-events", "level": 9, "crc32": 0}\n{}\n']
)
def test_a_damaged_file_is_told_and_kept_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "events.json").write_bytes(content)
    numbers = EventNumbers(tmp_path)
    assert (numbers.first, numbers.next()) == (1, 1)
    assert "events.json" in numbers.problem
    (aside,) = [name for name in os.listdir(tmp_path) if name != "events.json"]
    assert (tmp_path / aside).read_bytes() == content
    assert EventNumbers(tmp_path).first > 1


def test_what_cannot_be_reserved_is_told_and_numbers_go_on(tmp_path: Path) -> None:
    (tmp_path / "events.json.new").mkdir()
    numbers = EventNumbers(tmp_path)
    assert [numbers.next() for _ in range(BLOCK + 2)][-1] == BLOCK + 2
    assert "cannot write" in numbers.problem
    # It is reserved as soon as possible, before further numbers are used.
    (tmp_path / "events.json.new").rmdir()
    assert numbers.file.retry() and not numbers.problem
    assert EventNumbers(tmp_path).first > numbers.last


def test_what_a_reader_cannot_be_told(tmp_path: Path) -> None:
    earlier = bulletin(tmp_path)
    assert earlier.gap_after(0) is Gap.NONE
    assert earlier.gap_after(1) is Gap.NEVER
    publish(earlier, 3)
    assert [earlier.gap_after(seq) for seq in range(4)] == [Gap.NONE] * 4
    earlier.close()
    later = bulletin(tmp_path)
    assert later.gap_after(3) is Gap.EARLIER
    publish(later, 2)
    first = later.events_since(0)[0][0]
    told = {seq: later.gap_after(seq) for seq in (0, 1, 3, first - 1, first, first + 1, first + 2)}
    assert told == {
        0: Gap.NONE,
        1: Gap.EARLIER,
        3: Gap.EARLIER,
        first - 1: Gap.EARLIER,
        first: Gap.NONE,
        first + 1: Gap.NONE,
        first + 2: Gap.NEVER,
    }
    publish(later, EVENTS_KEPT)
    assert later.gap_after(first) is Gap.FORGOTTEN
    assert later.gap_after(first + 1) is Gap.NONE
    later.close()


@pytest.mark.parametrize("given", [0, 3, BLOCK, BLOCK + 1])
def test_an_orderly_end_leaves_no_gap(tmp_path: Path, given: int) -> None:
    first = bulletin(tmp_path)
    publish(first, given)
    first.close()
    second = EventNumbers(tmp_path)
    assert second.next() == given + 1
    # An event after the end, such as that of a request still in progress, gets a number of its own, too.
    late = EventNumbers(tmp_path)
    late.close()
    assert late.next() < EventNumbers(tmp_path).first


def test_files_that_cannot_be_written_are_conditions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    place = tmp_path / "plain"
    bulletin = Bulletin(Journal.open(place), None, EventNumbers(place))
    bulletin.journal.append({"id": 1})
    found = bulletin.conditions()
    assert [(c.code, Path(c.subject).parent) for c in found] == [(Code.FILE_NOT_KEPT, place)] * 2
    assert all("cannot write" in c.detail or "Not a directory" in c.detail for c in found)
    bulletin.close()
