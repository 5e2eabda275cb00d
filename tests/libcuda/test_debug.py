"""MPSD_DEBUG, as the proxy reads it: fields, wrong fields, and the variables of the previous release."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from mpsd.base import debug
from tests.support.libcudas import FOLDER, run, standalone

SOURCES = FOLDER / "src"
TABLE = re.compile(
    r'^\t\[MPSD_DEBUG_([A-Z_]+)\] = \{ "([a-z_]+)", (?:"(MPSD_[A-Z_]+)"|NULL) \},$', re.MULTILINE
)
NOBODY = 65534


@pytest.fixture(scope="module", params=["", "address,undefined"], ids=["plain", "sanitized"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("debug")
    return standalone(folder, "debug", ("debug.c",), sanitize=request.param)


def read(program: Path, **environment: str) -> tuple[dict[str, str], int, list[str]]:
    """Return the fields by name, zone_bytes as a number, and the lines on stderr."""
    done = run([program], environment)
    assert done.returncode == 0, done.stderr
    *texts, number = done.stdout.splitlines()
    split = (text.partition(" ") for text in texts)
    fields = {debug.FIELDS[int(index)]: value for index, _, value in split}
    return fields, int(number), done.stderr.splitlines()


def test_both_readers_know_the_same_names() -> None:
    table = TABLE.findall((SOURCES / "debug.c").read_text())
    enum = re.findall(r"^\tMPSD_DEBUG_([A-Z_]+),", (SOURCES / "debug.h").read_text(), re.MULTILINE)
    assert [name for _, name, _ in table] == list(debug.FIELDS)
    assert [member for member, _, _ in table] == enum == [name.upper() for name in debug.FIELDS]
    retired = {old: f"MPSD_DEBUG={name}=VALUE" for _, name, old in table if old}
    for source in SOURCES.rglob("*.c"):
        found = re.findall(r'mpsd_debug_retired\("(\w+)", (VARIABLE )?"([^"]+)"\)', source.read_text())
        retired |= {old: ("MPSD_FAILOVER_KERNELS" if own else "") + new for old, own, new in found}
    assert retired == debug.RETIRED


def test_no_variable_is_read_that_a_setuid_program_must_ignore() -> None:
    for source in SOURCES.rglob("*.c"):
        assert not re.search(r'(?<!secure_)\bgetenv\("MPSD', source.read_text()), source


def test_without_the_variable_there_are_defaults_and_silence(program: Path) -> None:
    assert read(program) == ({}, 7, [])
    assert read(program, MPSD_DEBUG="") == ({}, 7, [])


def test_fields_are_separated_by_commas_and_the_last_value_counts(program: Path) -> None:
    given = "zone_bytes=0x10,,relay=off,zone_bytes=12,"
    assert read(program, MPSD_DEBUG=given) == ({"zone_bytes": "12", "relay": "off"}, 12, [])
    assert debug.fields({"MPSD_DEBUG": given}) == {"zone_bytes": "12", "relay": "off"}


@pytest.mark.parametrize("value", ["6", "68", "0", "-4", " 8", "8k", "99999999999999999999"])
def test_a_number_out_of_range_is_reported(program: Path, value: str) -> None:
    _, number, said = read(program, MPSD_DEBUG=f"zone_bytes={value}")
    assert number == 7
    assert said == [f"MPSD_DEBUG: zone_bytes={value} is not a multiple of 4 from 4 to 64: using the default"]


def test_unknown_names_and_missing_values_are_reported_once(program: Path) -> None:
    fields, _, said = read(program, MPSD_DEBUG="zone=1,relay,settle_ms=5")
    assert fields == {"settle_ms": "5"}
    assert said == [
        'MPSD_DEBUG: the name zone is unknown and ignored; "mpsd help knobs" lists the names',
        "MPSD_DEBUG: relay has no value and is ignored; write name=value",
    ]


def test_a_variable_that_is_too_long_is_ignored_as_a_whole(program: Path) -> None:
    longest = "zone_bytes=8,relay=" + "x" * (1023 - 19)
    assert read(program, MPSD_DEBUG=longest)[1:] == (8, [])
    fields, number, said = read(program, MPSD_DEBUG=longest + "x")
    assert (fields, number) == ({}, 7)
    assert said == [
        "MPSD_DEBUG is ignored: all debug settings are limited to 1023 bytes; shorten it",
    ]


@pytest.mark.parametrize("old", [old for old, new in debug.RETIRED.items() if new.startswith("MPSD_DEBUG=")])
def test_a_variable_of_the_previous_release_still_works_and_is_reported(program: Path, old: str) -> None:
    field = debug.RETIRED[old].split("=")[1]
    line = f"{old} is deprecated and the next release ignores it; set MPSD_DEBUG={field}=VALUE instead"
    fields, _, said = read(program, **{old: "8"})
    assert (fields, said) == ({field: "8"}, [line])
    fields, _, said = read(program, **{old: "8", "MPSD_DEBUG": f"{field}=12"})
    assert (fields, said) == ({field: "12"}, [line])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a program to another user")
def test_a_setuid_program_ignores_it(tmp_path: Path) -> None:
    if os.statvfs(tmp_path).f_flag & os.ST_NOSUID:
        pytest.skip("the temporary folder is on a nosuid file system")
    program = standalone(tmp_path, "debug", ("debug.c",))
    os.chown(program, NOBODY, NOBODY)
    program.chmod(0o4755)
    assert read(program, MPSD_DEBUG="zone_bytes=8", MPSD_FAR_BYTES="8") == ({}, 7, [])
