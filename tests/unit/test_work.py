"""Views of the work of real processes: notes of them, and when a view reports that it does not know."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from mpsd.base.errors import UnsupportedError
from mpsd.base.model import ProcessInstance
from mpsd.gpu.nvidia import work
from mpsd.gpu.nvidia.semaphores import BUSY, Area, Signs
from mpsd.gpu.nvidia.work import NvidiaWork, areas_noted, record_of
from mpsd.os import processes

FEW, MANY = [Area(1 << 21, 1 << 22)], [Area(n << 21, (n + 1) << 21) for n in range(1, 90, 2)]
# Prints a line, then executes itself again for each line that it receives.
PROGRAM = "import os, sys; print(flush=True); sys.stdin.readline(); os.execv(sys.executable, sys.orig_argv)"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        hear(process)
        yield process
        process.kill()


def hear(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline()


def instance(child: subprocess.Popen[str]) -> ProcessInstance:
    return processes.facts(child.pid).instance


def copies(view: work.ProcessWork) -> dict[str, int]:
    return {role: os.dup(fd) for role, fd in view.fds.items()}


def changed(view: work.ProcessWork) -> None:
    """Let the mappings look different from those of the last look."""
    view._found = None


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory at any address read as unwritten, as under a lease."""
    monkeypatch.setattr(work, "_memory", lambda mem, at, size: bytes(size))


def notes(text: bytes) -> int:
    fd = os.memfd_create("notes", os.MFD_CLOEXEC)
    os.write(fd, text)
    return fd


@pytest.mark.parametrize("found", [[], FEW, MANY, None])
def test_areas_are_read_back_as_they_were_noted(found: list[Area] | None) -> None:
    assert areas_noted(record_of(found)) == found


def test_what_one_look_alone_saw_is_noted_as_that() -> None:
    once = record_of(FEW, settled=False)
    assert areas_noted(once) == FEW
    assert (work.noted_once(once), work.noted_once(record_of(FEW))) == (True, False)
    assert areas_noted(record_of(None, settled=False)) is None


@pytest.mark.usefixtures("readable")
def test_a_context_seen_once_by_a_daemon_that_was_killed_is_not_taken_for_whole(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "areas", lambda rows: FEW)
    process = instance(child)
    view = NvidiaWork().open(process, -1)
    once = copies(view)
    once["areas"] = notes(os.pread(view.fds["areas"], 1 << 16, 0))
    changed(view)
    view.refresh()
    twice = copies(view)
    child.kill()
    child.wait()
    assert NvidiaWork().adopt(process, once).pending() is None
    assert NvidiaWork().adopt(process, twice).pending() is not None
    view.close()


def test_areas_that_an_earlier_mpsd_noted_are_read() -> None:
    assert areas_noted(b"[[2097152, 4194304]]") == FEW
    assert areas_noted(b"null") is None


def test_records_that_are_not_whole_say_nothing() -> None:
    for torn in (b"", b"[[1", b"[1]", b"{}", b'"x"', b"7", record_of(FEW)[:-1], record_of(FEW) + b"]"):
        assert areas_noted(torn) is None


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize("steps", [0, 1])
def test_a_daemon_killed_while_it_notes_leaves_no_lie(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The daemon dies after `steps` writes: the next one knows the areas, or knows that it does not."""
    view = NvidiaWork().open(instance(child), -1)
    kept = os.dup(view.fds["areas"])
    for before, after in ((MANY, FEW), (FEW, MANY)):
        monkeypatch.setattr(work, "areas", lambda rows, found=before: found)
        changed(view)
        view.refresh()
        changed(view)
        left = steps

        def step(real: object) -> object:
            def call(*arguments: object) -> object:
                nonlocal left
                left -= 1
                if left < 0:
                    raise InterruptedError("killed")
                return real(*arguments)  # type: ignore[operator]

            return call

        with monkeypatch.context() as patch:
            patch.setattr(work, "areas", lambda rows, found=after: found)
            patch.setattr(os, "pwrite", step(os.pwrite))
            patch.setattr(os, "ftruncate", step(os.ftruncate))
            with pytest.raises(InterruptedError):
                view.refresh()
        assert areas_noted(os.pread(kept, 1 << 16, 0)) in (None, before, after)
        view._areas = []
    os.close(kept)
    view.close()


@pytest.mark.parametrize("text", [b"", b"null", b"[[1"])
def test_after_no_completed_look_nothing_is_known(child: subprocess.Popen[str], text: bytes) -> None:
    process = instance(child)
    mem = os.open(f"/proc/{process.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    child.kill()
    child.wait()
    view = NvidiaWork().adopt(process, {"mem": mem, "areas": notes(text)})
    assert view.pending() is None
    view.close()
    assert view.pending() is None


@pytest.mark.parametrize(("soon_s", "expected"), [(3600.0, ""), (0.0, None)])
def test_without_a_context_only_a_look_just_before_the_death_counts(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, soon_s: float, expected: str | None
) -> None:
    monkeypatch.setattr(work, "SOON_S", soon_s)
    view = NvidiaWork().open(instance(child), -1)
    child.kill()
    child.wait()
    assert view.pending() == expected
    view.close()


def test_a_look_at_the_dead_that_comes_in_time_is_the_last(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the process still exists, as under a lease: here the process has not died at all."""
    monkeypatch.setattr(work, "SOON_S", 0.0)
    view = NvidiaWork().open(instance(child), -1)
    assert view.pending() == ""
    seen: list[Area] = []
    monkeypatch.setattr(work, "areas", lambda rows: seen)
    again = NvidiaWork().open(instance(child), -1)
    seen += FEW
    changed(again)
    assert again.pending() == ""
    assert again._areas == FEW
    for one in (view, again):
        one.close()


@pytest.mark.usefixtures("readable")
def test_areas_that_two_looks_agreed_on_are_known(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "SOON_S", 0.0)
    monkeypatch.setattr(work, "areas", lambda rows: FEW)
    inspector = NvidiaWork()
    once, twice = (inspector.open(instance(child), -1) for _ in range(2))
    twice.refresh()
    kept = copies(twice)
    child.kill()
    child.wait()
    adopted = inspector.adopt(ProcessInstance(child.pid, 1), kept)
    assert once.pending() is None
    assert twice.pending() is not None and adopted.pending() is not None
    for view in (once, twice, adopted):
        view.close()


def test_areas_that_cannot_be_read_while_their_client_lives_tell_nothing_of_it_when_it_is_dead(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is mapped there: the kernel may also forbid another process to read such a mapping."""
    monkeypatch.setattr(work, "areas", lambda rows: FEW)
    view = NvidiaWork().open(instance(child), -1)
    view.refresh()
    kept = copies(view)
    assert areas_noted(os.pread(kept["areas"], 1 << 16, 0)) is None
    adopted = NvidiaWork().adopt(ProcessInstance(child.pid, 1), kept)
    assert view.pending() is None and adopted.pending() is None
    for one in (view, adopted):
        one.close()


def noted(view: work.ProcessWork) -> list[Area] | None:
    return areas_noted(os.pread(view.fds["areas"], 1 << 16, 0))


@pytest.mark.usefixtures("readable")
def test_pages_of_a_context_that_was_left_are_left_out_until_they_are_not_named_any_more(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The context in use has the next pages; named spans may surround mapped areas or cover part of them.
    old, new, half = Area(1 << 21, 2 << 21), Area(2 << 21, 3 << 21), Area(5 << 21, 7 << 21)
    monkeypatch.setattr(work, "areas", lambda rows: [old, new, half])
    view = NvidiaWork().open(instance(child), -1)
    assert noted(view) == [old, new, half]
    view.leave_out([(1 << 20, 2 << 21), (5 << 21, 6 << 21)])
    assert noted(view) == [new, half]
    view.refresh()
    assert noted(view) == [new, half]
    view.leave_out([])
    view.refresh()
    assert noted(view) == [old, new, half]
    view.close()


@pytest.mark.usefixtures("readable")
def test_what_is_to_be_left_out_waits_for_no_look_that_hangs(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "areas", lambda rows: FEW)
    view = NvidiaWork().open(instance(child), -1)
    inside, go_on = threading.Event(), threading.Event()

    def hangs(self: work.ProcessWork, there: object) -> bool:
        inside.set()
        return go_on.wait(10)

    monkeypatch.setattr(work.ProcessWork, "_can_be_read", hangs)
    changed(view)
    look = threading.Thread(target=view.refresh)
    look.start()
    assert inside.wait(10)
    view.leave_out([(FEW[0].start, FEW[0].end)])
    go_on.set()
    look.join()
    # The next look applies the span, though no mapping has changed.
    assert noted(view) == FEW
    view.refresh()
    assert noted(view) == []
    view.close()


@pytest.mark.usefixtures("readable")
def test_what_it_says_last_counts_though_its_commands_were_read(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "areas", lambda rows: FEW)
    view = NvidiaWork().open(instance(child), -1)
    changed(view)
    view.refresh()
    child.kill()
    child.wait()
    mark = FEW[0].start + 64
    signs = Signs({mark}, {mark: {1}})
    monkeypatch.setattr(view, "_scan", lambda: signs)
    monkeypatch.setattr(view, "_word", lambda address: BUSY)
    assert view.pending() == f"kernel {mark:#x}"
    view.leave_out([(FEW[0].start, FEW[0].end)])
    assert [view.pending(), view.pending()] == ["checking once more", ""]
    view.close()


@pytest.mark.usefixtures("readable")
def test_what_was_unmapped_since_has_no_commands_but_what_has_gone_altogether_tells_nothing(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "areas", lambda rows: FEW)
    left, gone = (NvidiaWork().open(instance(child), -1) for _ in range(2))
    for view in (left, gone):
        changed(view)
        view.refresh()
    monkeypatch.undo()
    assert left.pending() == ""
    child.kill()
    child.wait()
    with pytest.raises(UnsupportedError, match="memory map ended"):
        gone.pending()
    for view in (left, gone):
        view.close()


def test_what_is_kept_of_a_program_before_an_exec_is_not_present(child: subprocess.Popen[str]) -> None:
    inspector, process = NvidiaWork(), instance(child)
    view = inspector.open(process, -1)
    kept = copies(view)
    assert inspector.is_present(process, view.fds)
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()
    hear(child)
    assert instance(child) == process
    assert not inspector.is_present(process, view.fds)
    # A kept view never shows the mappings of the next program.
    adopted = inspector.adopt(process, kept)
    after = inspector.open(process, -1)
    assert inspector.is_present(process, after.fds)
    assert not adopted._probe() and after._probe()
    for one in (view, adopted, after):
        one.close()


def test_nothing_kept_tells_nothing(child: subprocess.Popen[str]) -> None:
    assert NvidiaWork().is_present(instance(child), {})
    assert NvidiaWork().is_present(ProcessInstance(child.pid, 1), {"mem": 0})


MARKED = struct.pack("<I", 0x200426C0) + struct.pack("<III", 0, FEW[0].start, 1)


@pytest.mark.parametrize(
    ("memory", "expected"), [(b"", False), (MARKED, True), (b"commands of a form that is not known", None)]
)
def test_whether_a_living_client_has_launched_work_is_read_from_its_commands(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, memory: bytes, expected: bool | None
) -> None:
    monkeypatch.setattr(
        work,
        "_memory",
        lambda mem, at, size: memory.ljust(size, b"\0") if at == FEW[0].start else bytes(size),
    )
    monkeypatch.setattr(work, "areas", lambda rows: FEW)
    view = NvidiaWork().open(instance(child), -1)
    assert view.launched() is expected
    # What is read of a living client says nothing about it when it has exited.
    assert not view._wrote_commands and view._signs is None
    view.close()


@pytest.mark.usefixtures("readable")
def test_a_view_is_settled_once_two_looks_agree(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [*FEW]
    monkeypatch.setattr(work, "areas", lambda rows: [*seen])
    view = NvidiaWork().open(instance(child), -1)
    settled = [view.settled]
    for change in (False, True, False):
        if change:
            seen.append(Area(9 << 21, 10 << 21))
        changed(view)
        view.refresh()
        settled.append(view.settled)
    assert settled == [False, True, False, True]
    view.close()


def test_a_living_client_without_a_context_has_launched_nothing(child: subprocess.Popen[str]) -> None:
    view = NvidiaWork().open(instance(child), -1)
    assert view.launched() is False
    view.close()


@pytest.mark.usefixtures("readable")
def test_a_client_that_has_left_a_context_may_have_launched_work(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "areas", lambda rows: FEW)
    view = NvidiaWork().open(instance(child), -1)
    view.leave_out([(FEW[0].start, FEW[0].end)])
    assert view.launched() is None
    view.close()
