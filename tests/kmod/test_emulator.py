"""The harness around the virtual machine: messages of the guest, its disk image, its stub."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator import image, stub, vm
from emulator.guest.check import Check
from emulator.lines import Line, MessageKind, encode, parse
from kmod.errors import KmodError

NAMES = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1)
LINES = st.one_of(
    st.builds(Line, st.sampled_from([MessageKind.PASS, MessageKind.FAIL]), NAMES, st.text()),
    st.builds(Line, st.just(MessageKind.BEGIN), NAMES),
    st.just(Line(MessageKind.DONE)),
)


@given(LINES)
def test_a_line_comes_back_as_it_was_said(line: Line) -> None:
    said = encode(line)
    assert said.endswith("\n") and "\n" not in said[:-1] and said.isascii()
    assert parse(said.replace("\n", "\r\n")) == line


@given(LINES, st.integers(0, 200))
def test_a_line_that_is_cut_off_is_none(line: Line, kept: int) -> None:
    cut = encode(line)[:-1][:kept]
    # A truncated name is still a name; a line that says how a check ended must be whole.
    found = parse(cut)
    assert found is None or cut == encode(line)[:-1] or found.word in (MessageKind.BEGIN,)


@pytest.mark.parametrize("text", ["", "[ 1.0] BUG: oops", "mpsd-vm1", "mpsd-vm2 done", "mpsd-vm1 pass x 1"])
def test_anything_else_is_none(text: str) -> None:
    assert parse(text) is None


def never() -> str:
    raise AssertionError("the host runs no check")


CHECKS = tuple(Check(name, never, deadline_s=0.0) for name in ("a", "b", "c"))


def collected(*said: Line, ends: bool = True) -> list[tuple[str, bool, str, bool]]:
    """Return what the host makes of lines; `ends`: the guest closes its port behind them."""
    read_end, write_end = os.pipe()
    try:
        for line in said:
            os.write(write_end, encode(line).encode())
        if ends:
            os.close(write_end)
        checks = [Check(check.name, never, 60.0 if ends else -vm.BOOT_DEADLINE_S) for check in CHECKS]
        found = vm.collect(vm.Reader(read_end), checks)
    finally:
        os.close(read_end)
        if not ends:
            os.close(write_end)
    return [(result.name, result.passed, result.text, result.ended) for result in found]


def passed(name: str) -> Line:
    return Line(MessageKind.PASS, name, "fine")


def test_every_check_has_its_own_result() -> None:
    said = [
        passed("a"),
        Line(MessageKind.BEGIN, "b"),
        Line(MessageKind.FAIL, "b", "why"),
        passed("c"),
        Line(MessageKind.DONE),
    ]
    assert collected(*said) == [
        ("a", True, "fine", True),
        ("b", False, "why", True),
        ("c", True, "fine", True),
    ]


def test_a_missing_line_is_a_failure() -> None:
    found = collected(passed("a"), Line(MessageKind.DONE))
    assert found[1:] == [
        ("b", False, "the guest sent nothing instead", False),
        ("c", False, "not reached", False),
    ]


def test_a_line_out_of_turn_is_a_failure() -> None:
    assert [result[1] for result in collected(passed("a"), passed("c"))] == [True, False, False]


def test_silence_is_a_failure_at_the_deadline() -> None:
    begun = time.monotonic()
    found = collected(Line(MessageKind.BEGIN, "a"), ends=False)
    assert [result[1:3] for result in found] == [
        (False, "no answer within 0 s"),
        *[(False, "not reached")] * 2,
    ]
    assert time.monotonic() - begun < 60


@pytest.mark.skipif(shutil.which("cpio") is None, reason="cpio is missing")
def test_the_archive_is_what_the_kernel_unpacks(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"five!")
    os.utime(tmp_path / "odd", (7, 7))
    (tmp_path / "odd").chmod(0o754)
    archive = image.Archive()
    archive.folder("/proc")
    archive.file("/a/b/odd", tmp_path / "odd")
    archive.device("/dev/console", os.makedev(5, 1))
    listed = subprocess.run(
        ["cpio", "--list", "--verbose", "--numeric-uid-gid", "--quiet"],
        input=archive.end(),
        capture_output=True,
        check=True,
        timeout=60,
    )
    rows = [line.split() for line in listed.stdout.decode().splitlines()]
    assert [(row[0], row[-1]) for row in rows] == [
        ("drwxr-xr-x", "proc"),
        ("drwxr-xr-x", "a"),
        ("drwxr-xr-x", "a/b"),
        ("-rwxr-xr--", "a/b/odd"),
        ("drwxr-xr-x", "dev"),
        ("crw-------", "dev/console"),
    ]
    assert rows[3][4] == "5"
    assert rows[5][4:6] == ["5,", "1"]
    content = ["cpio", "--extract", "--to-stdout", "--quiet", "a/b/odd"]
    taken = subprocess.run(content, input=archive.end(), capture_output=True, check=True, timeout=60)
    assert taken.stdout == b"five!"


def test_the_stub_has_each_function_once() -> None:
    answers = frozenset({"nvUvmInterfaceB", "nvUvmInterfaceGone"})
    imports = ("nvUvmInterfaceA", "nvUvmInterfaceB", "nvUvmInterfaceC")
    refused = stub.refusals(imports, answers)
    assert refused.count("MPSD_STUB_REFUSES") == 2
    assert "(nvUvmInterfaceA)" in refused and "(nvUvmInterfaceC)" in refused
    header = stub.calls_header(imports, answers)
    assert [header.count(f"CALL_{name},") for name in (*imports, "nvUvmInterfaceGone")] == [1] * 4
    assert [header.count(f"CALL({name})") for name in (*imports, "nvUvmInterfaceGone")] == [1] * 4


def test_answers_are_found_in_the_sources() -> None:
    found = stub.answered(path.read_text() for path in stub.SOURCES.glob("*.c"))
    assert {"nvUvmInterfaceSessionCreate", "nvUvmInterfaceRegisterUvmCallbacks"} <= found
    for name in found:
        assert stub.FUNCTION.fullmatch(name)


def test_headers_are_asked_for_what_differs(tmp_path: Path) -> None:
    for header, word in stub.FEATURES.values():
        (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / header).write_text(f"int {word}2;\n")
    assert stub.features(tmp_path) == []
    header, word = stub.FEATURES["MPSD_RM_ATS"]
    (tmp_path / header).write_text(f"int f(int {word});\n")
    assert stub.features(tmp_path) == ["MPSD_RM_ATS"]


def object_file(folder: Path, source: str) -> Path:
    (folder / "x.c").write_text(source)
    subprocess.run(["gcc", "-c", "-o", folder / "x.o", folder / "x.c"], check=True, timeout=60)
    return folder / "x.o"


def test_imports_are_asked_of_the_module(tmp_path: Path) -> None:
    source = (
        "int nvUvmInterfaceB(void); int printk(void); int f(void) { return nvUvmInterfaceB() + printk(); }"
    )
    made = object_file(tmp_path, source)
    assert stub.imported(made, frozenset({"printk"})) == ("nvUvmInterfaceB",)


def test_an_import_that_no_stub_can_answer_is_an_error(tmp_path: Path) -> None:
    made = object_file(tmp_path, "int drm_open(void); int f(void) { return drm_open(); }")
    with pytest.raises(KmodError, match="drm_open"):
        stub.imported(made, frozenset())


def test_the_image_holds_an_interpreter_that_can_import_the_checks(tmp_path: Path) -> None:
    files = image.python_files()
    assert image.GUEST_MAIN in files
    assert f"{image.GUEST_ROOT}/mpsd/gpu/nvidia/uvm.py" in files
    assert str(image.interpreter()) in files
    assert any("ld-linux" in name for name in files)
    assert not [name for name in files if "site-packages" in name or ".venv" in name]
