"""Following a log through everything that happens to a log: no line lost, none repeated."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.base.errors import MpsdError
from mpsd.mps.logfollow import LogFollower
from mpsd.os import tail


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.fixture
def log(path: Path) -> Iterator[LogFollower]:
    follower = LogFollower(str(path))
    yield follower
    follower.close()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def readable(log: LogFollower) -> bool:
    return bool(select.select([log], [], [], 0)[0])


def test_a_log_that_comes_later_grows_and_ends_in_half_a_line(path: Path, log: LogFollower) -> None:
    assert log.drain() == []
    assert not readable(log)
    append(path, b"one\ntwo\nthr")
    assert readable(log)
    assert log.drain() == ["one", "two"]
    assert not readable(log)
    append(path, b"ee\n\n")
    assert log.drain() == ["three", ""]


def test_what_is_there_already_is_read_or_not(path: Path) -> None:
    append(path, b"old\n")
    from_start, from_now = LogFollower(str(path)), LogFollower(str(path), from_start=False)
    assert readable(from_start) and from_start.drain() == ["old"]
    append(path, b"new\n")
    assert from_start.drain() == ["new"] and from_now.drain() == ["new"]
    from_start.close()
    from_now.close()


def test_a_line_not_seen_from_its_start_is_left_out(path: Path) -> None:
    append(path, b"first line\nsecond\n")
    bounded = LogFollower(str(path), history=10)
    assert bounded.drain() == ["second"]
    bounded.close()
    append(path, b"half a ")
    from_now = LogFollower(str(path), from_start=False)
    append(path, b"line\nwhole\n")
    assert from_now.drain() == ["whole"]
    from_now.close()


def test_rename_and_recreate_reads_the_old_file_to_its_end(path: Path, log: LogFollower) -> None:
    append(path, b"one\n")
    assert log.drain() == ["one"]
    append(path, b"two\n")
    path.rename(path.with_suffix(".1"))
    # A writer with the old file open continues there until the new file exists.
    append(path.with_suffix(".1"), b"three\n")
    assert log.drain() == ["two", "three"]
    append(path.with_suffix(".1"), b"four\n")
    append(path, b"five\n")
    assert log.drain() == ["four", "five"]


def test_deletion_and_return(path: Path, log: LogFollower) -> None:
    append(path, b"one\n")
    assert log.drain() == ["one"]
    path.unlink()
    assert log.drain() == []
    append(path, b"two\n")
    assert log.drain() == ["two"]


def test_truncation_also_when_the_file_has_grown_past_its_old_length(path: Path, log: LogFollower) -> None:
    append(path, b"one\ntwo\n")
    assert log.drain() == ["one", "two"]
    os.truncate(path, 0)
    append(path, b"3\n")
    assert log.drain() == ["3"]
    os.truncate(path, 0)
    append(path, b"something much longer than before\n")
    assert log.drain() == ["something much longer than before"]


def test_a_writer_without_append_leaves_a_hole_after_truncation(path: Path, log: LogFollower) -> None:
    with path.open("wb", buffering=0) as writer:
        writer.write(b"x" * 99_999 + b"\n")
        assert len(log.drain()) == 1
        os.truncate(path, 0)
        writer.write(b"after the hole\n")
        assert log.drain() == ["after the hole"]
        writer.write(b"and on\n")
        assert log.drain() == ["and on"]


def test_any_bytes_make_text_and_a_long_line_is_cut(path: Path) -> None:
    log = LogFollower(str(path), line_limit=10)
    append(path, b"\xff\xfe\n" + "né\n".encode() + b"0123456789abc" * 20_000 + b"\nnext\n")
    assert log.drain() == ["\\xff\\xfe", "né", "0123456789", "next"]
    assert log.lines_cut == 1
    log.close()


def test_a_flood_comes_in_bounded_portions(
    path: Path, log: LogFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "DRAIN_LIMIT", tail.CHUNK)
    append(path, b"0123456\n" * (tail.CHUNK // 8 * 3))
    portions = []
    while readable(log):
        portions.append(len(log.drain()))
    assert sum(portions) == tail.CHUNK // 8 * 3
    assert max(portions) <= tail.CHUNK // 8 + 1


def test_a_missing_directory_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(MpsdError, match="cannot watch"):
        LogFollower(str(tmp_path / "no" / "server.log"))


@pytest.mark.parametrize("refused", [(), ("collapse",), ("collapse", "punch")])
@pytest.mark.parametrize("appending", [True, False])
def test_trimming_keeps_the_end_and_loses_no_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, refused: tuple[str, ...], appending: bool
) -> None:
    from mpsd.mps import logfollow

    real = logfollow._libc.fallocate

    def fallocate(fd: int, mode: int, offset: int, length: int) -> int:
        name = "collapse" if mode == logfollow._COLLAPSE else "punch"
        return -1 if name in refused else int(real(fd, mode, offset, length))

    monkeypatch.setattr(logfollow._libc, "fallocate", fallocate)
    log = LogFollower(str(path))
    seen: list[str] = []
    written: list[str] = []
    with path.open("ab" if appending else "wb", buffering=0) as writer:
        for round_number in range(12):
            for number in range(500):
                written.append(f"line {round_number}.{number} " + "x" * 50)
                writer.write(written[-1].encode() + b"\n")
            seen += log.drain()
            log.trim(64 << 10, 8 << 10)
            seen += log.drain()
    seen += log.drain()
    assert [line for line in seen if line.strip()] == written
    assert path.stat().st_blocks * 512 <= (64 << 10) + 500 * 64 + 8192
    old = Path(f"{path}.1")
    assert 0 < old.stat().st_size <= 8 << 10
    # The kept end and the log join without a gap: the last kept line comes just before the first left.
    kept = old.read_text().splitlines()
    assert kept[-1] in written
    assert len(seen) == len(written)
    log.close()


def test_a_small_log_and_unread_lines_are_not_trimmed(path: Path, log: LogFollower) -> None:
    append(path, b"unread line\n" * 1000)
    assert not log.trim(1, 100)
    assert len(log.drain()) == 1000
    assert not log.trim(1 << 20, 100)
    assert log.trim(1, 100)
    assert log.drain() == []
    append(path, b"next\n")
    assert log.drain() == ["next"]
    second = LogFollower(str(path))
    assert {line.strip() for line in second.drain()} == {"", "unread line", "next"}
    second.close()


def test_a_line_without_an_end_is_trimmed_too(path: Path) -> None:
    log = LogFollower(str(path), line_limit=1024)
    append(path, b"first\n" + b"x" * (256 << 10))
    assert log.drain() == ["first"]
    assert log.trim(64 << 10, 0)
    assert path.stat().st_blocks * 512 < 64 << 10
    append(path, b"x\nnext\n")
    assert log.drain() == ["x" * 1024, "next"]
    log.close()


def test_the_file_of_a_writer_keeps_its_name_when_it_is_trimmed(path: Path) -> None:
    with path.open("ab", buffering=0) as writer:
        log = LogFollower(str(path), writer=lambda: f"/proc/self/fd/{writer.fileno()}")
        renamed = Path(f"{path}.1")
        path.rename(renamed)
        path.touch()
        writer.write(b"line\n" * 50_000)
        assert len(log.drain()) == 50_000
        assert log.trim(64 << 10, 8 << 10)
        assert os.path.samestat(renamed.stat(), os.fstat(writer.fileno()))
        writer.write(b"next\n")
        assert log.drain() == ["next"]
        log.close()


def test_what_is_appended_while_a_hole_is_looked_for_is_not_lost(
    path: Path, log: LogFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(path, b"first\n")
    assert log.drain() == ["first"]
    seek, waiting = os.lseek, [b"second\n"]

    def late(fd: int, offset: int, whence: int) -> int:
        try:
            return seek(fd, offset, whence)
        finally:
            # The writer comes right after there was nothing to read.
            if waiting:
                append(path, waiting.pop())

    monkeypatch.setattr(tail.os, "lseek", late)
    assert log.drain() + log.drain() == ["second"]
