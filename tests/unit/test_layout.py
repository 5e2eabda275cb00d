"""The run directory: one owner, short paths, stable paths that always exist."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.base.errors import AlreadyRunningError, ConfigError
from mpsd.config.layout import Layout, claim_default_path, replace_link


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """pytest's own temporary paths are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="mpsd-", dir="/tmp") as path:
        yield Path(path)


def layout_in(path: Path) -> Layout:
    return Layout(path / "run", path / "log", path / "state")


def test_second_owner_is_refused_by_name(short_dir: Path) -> None:
    layout = layout_in(short_dir)
    layout.prepare()
    locks = layout.lock()
    with pytest.raises(AlreadyRunningError, match=str(os.getpid())):
        layout.lock()
    close(locks)
    close(layout.lock())


def close(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)


@pytest.mark.parametrize("shared", ["log", "state"])
def test_two_daemons_share_no_directory(short_dir: Path, shared: str) -> None:
    first = layout_in(short_dir)
    other = short_dir / "other"
    second = Layout(
        other / "run",
        first.log_dir if shared == "log" else other / "log",
        first.state_dir if shared == "state" else other / "state",
    )
    first.prepare()
    second.prepare()
    locks = first.lock()
    with pytest.raises(AlreadyRunningError, match=f"runs on .*/{shared}"):
        second.lock()
    close(locks)
    close(second.lock())


def test_one_directory_for_logs_and_state(short_dir: Path) -> None:
    layout = Layout(short_dir / "run", short_dir / "both", short_dir / "both")
    layout.prepare()
    close(layout.lock())


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o000])
def test_modes_do_not_depend_on_the_umask(short_dir: Path, umask: int) -> None:
    """Clients pass the run directory and the two below it; logs and state are for root alone."""
    layout = Layout(short_dir / "a" / "run", short_dir / "b" / "log", short_dir / "c" / "state")
    before = os.umask(umask)
    try:
        layout.prepare()
    finally:
        os.umask(before)
    run = layout.run_dir
    assert [p.stat().st_mode & 0o777 for p in (run.parent, run, run / "d", run / "s")] == [0o755] * 4
    assert [p.stat().st_mode & 0o777 for p in (layout.log_dir, layout.state_dir)] == [0o750] * 2


def test_directories_that_an_earlier_mpsd_left_closed_are_opened(short_dir: Path) -> None:
    layout = layout_in(short_dir)
    layout.prepare()
    for name in ("d", "s"):
        (layout.run_dir / name).chmod(0o700)
    # The mode of the run directory is the operator's.
    layout.run_dir.chmod(0o750)
    layout.prepare()
    modes = [p.stat().st_mode & 0o777 for p in (layout.run_dir, *sorted(layout.run_dir.iterdir()))]
    assert modes == [0o750, 0o755, 0o755]


def test_where_a_path_leads(short_dir: Path) -> None:
    layout = layout_in(short_dir)
    layout.prepare()
    assert layout.domain_of_slot("slot") is None
    layout.switch("slot", "d7")
    assert layout.domain_of_slot("slot") == "d7"


def test_on_a_full_disk_a_path_is_replaced_in_the_room_that_was_set_aside(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_in(short_dir)
    layout.prepare()
    layout.switch("slot", "d1")
    assert layout.create_reserve() == ""
    assert (layout.run_dir / "room").stat().st_blocks > 0
    real = Path.symlink_to

    def full(path: Path, target: Path) -> None:
        if (layout.run_dir / "room").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, target)

    monkeypatch.setattr(Path, "symlink_to", full)
    layout.switch("slot", "d2")
    assert layout.domain_of_slot("slot") == "d2"
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    assert str(layout.run_dir) in layout.create_reserve()


def test_unwritable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match=str(tmp_path / "run")) as refused:
        layout_in(tmp_path).prepare()
    assert "a file is in the way" in refused.value.remedy


def everything_in(path: Path) -> list[str]:
    return sorted(str(each.relative_to(path)) for each in path.rglob("*"))


@pytest.mark.parametrize("wrong", ["run", "log", "state"])
def test_where_one_directory_cannot_be_made_none_is(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "file").touch()
    places = {name: tmp_path / "deep" / name for name in ("run", "log", "state")}
    places[wrong] = tmp_path / "file" / "x"
    layout = Layout(places["run"], places["log"], places["state"])
    with pytest.raises(ConfigError, match=f"cannot create directory .*{tmp_path / 'file'}") as checked:
        layout.check()
    with pytest.raises(ConfigError) as prepared:
        layout.prepare()
    assert str(prepared.value) == str(checked.value)
    assert everything_in(tmp_path) == ["file"]


def test_a_start_that_fails_leaves_what_was_there_before(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir(mode=0o750)
    layout = Layout(tmp_path / "deep" / "run", tmp_path / "log", tmp_path / "state")
    layout.check()
    assert everything_in(tmp_path) == ["log"]
    layout.prepare()
    locks = layout.lock()
    (layout.state_dir / "journal").touch()
    layout.undo()
    close(locks)
    assert everything_in(tmp_path) == ["log", "log/.mpsd.lock", "state", "state/journal"]


def test_a_disk_that_is_full_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir

    def full(path: Path, mode: int = 0o777) -> None:
        if path.name == "state":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, mode)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(ConfigError, match="No space left"):
        layout_in(tmp_path).prepare()
    assert everything_in(tmp_path) == []


def test_switch_replaces_the_link_and_nothing_else(short_dir: Path) -> None:
    layout = layout_in(short_dir)
    layout.prepare()
    for domain in ("d1", "d2"):
        layout.pipe_dir(domain).mkdir()
        layout.switch("gpu-u0", domain)
        assert layout.slot_path("gpu-u0").resolve() == layout.pipe_dir(domain).resolve()
    assert [p.name for p in (layout.run_dir / "s").iterdir()] == ["gpu-u0"]


def test_replace_link_survives_a_draft_left_by_a_crash(tmp_path: Path) -> None:
    (tmp_path / ".link.new").symlink_to("nowhere")
    replace_link(tmp_path / "link", tmp_path)
    assert (tmp_path / "link").resolve() == tmp_path.resolve()


def test_default_path_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "s" / "slot"
    target.mkdir(parents=True)
    foreign = tmp_path / "nvidia-mps"
    foreign.mkdir()
    (foreign / "control").touch()
    assert "not empty" in claim_default_path(foreign, target)
    assert (foreign / "control").exists()
    other = tmp_path / "other"
    other.mkdir()
    link = tmp_path / "link"
    link.symlink_to(other)
    assert "does not belong to this mpsd" in claim_default_path(link, target)


def test_default_path_is_served_where_it_is_free_empty_or_dangling(tmp_path: Path) -> None:
    target = tmp_path / "s" / "slot"
    target.mkdir(parents=True)
    empty, dangling = tmp_path / "empty", tmp_path / "dangling"
    empty.mkdir()
    dangling.symlink_to(tmp_path / "gone")
    for path in (tmp_path / "free", empty, dangling):
        assert claim_default_path(path, target) == ""
        assert path.resolve() == target.resolve()


def test_a_slot_that_is_given_up_has_no_path(short_dir: Path) -> None:
    layout = layout_in(short_dir)
    layout.prepare()
    layout.switch("slot", "d1")
    layout.drop("slot")
    layout.drop("slot")
    assert not os.path.lexists(layout.slot_path("slot"))


def test_a_directory_that_anybody_may_write_is_refused(short_dir: Path) -> None:
    layout = layout_in(short_dir)
    layout.prepare()
    layout.run_dir.chmod(0o777)
    with pytest.raises(ConfigError, match="is writable for all users"):
        layout.prepare()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_a_directory_of_another_user_is_refused(short_dir: Path) -> None:
    layout = layout_in(short_dir)
    layout.prepare()
    os.chown(layout.state_dir, 65534, -1)
    with pytest.raises(ConfigError, match="belongs to uid 65534"):
        layout.prepare()
