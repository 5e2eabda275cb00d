"""Every environment variable that code reads is on the page knobs, with at most eight for users."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from mpsd.base import debug
from mpsd.config import reader
from tests.support.site import ROOT

PAGE = ROOT / "mpsd" / "docs" / "knobs.md"
MOST = 8
NAME = re.compile(r"MPSD_[A-Z0-9_]*[A-Z0-9]")
IN_A_STRING = re.compile(rf'"({NAME.pattern})"')
IN_TESTS = re.compile(rf'environ(?:\.get\(|\.pop\(|\[)"({NAME.pattern})"')
IN_SHELL = re.compile(rf"\$\{{?({NAME.pattern})")
CELL = re.compile(r"`([^`]+)`")
# Prefixes of a list of the reader, and names of C constants.
NO_VARIABLES = {"MPSD_CONTRACT_TEST", "MPSD_PORT", "MPSD_RM_ATS", "MPSD_RM_VIDMEM_PAGES"}


def section(title: str) -> str:
    text = PAGE.read_text()
    assert f"\n## {title}\n" in text
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def names(title: str) -> list[str]:
    """Return the names in the first column of a section's table."""
    rows = re.findall(r"^\| (`[^|]+) \|", section(title), re.MULTILINE)
    return [name for row in rows for name in CELL.findall(row)]


def is_key(variable: str) -> bool:
    """Return whether the variable sets a key of the configuration."""
    other = variable in reader.OTHER_VARIABLES or variable.startswith(reader._OTHER_PREFIXES)
    return not other and not reader.unknown_variables({variable: "1"})


@cache
def read() -> dict[str, set[str]]:
    """Return the files by variable that they read, or set for another program."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: dict[str, set[str]] = {}
    for name in listed.split("\n"):
        if not name.startswith("tests/data/"):
            for variable in variables(name, ROOT / name) - NO_VARIABLES:
                found.setdefault(variable, set()).add(name)
    return found


def variables(name: str, path: Path) -> set[str]:
    if path.suffix not in ("", ".py", ".c", ".h", ".sh", ".service") or not path.is_file():
        return set()
    text = path.read_text(errors="replace")
    if name.startswith("tests/"):
        return set(IN_TESTS.findall(text))
    if path.suffix == ".py":
        nodes = ast.walk(ast.parse(text))
        texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        return set(filter(NAME.fullmatch, texts))
    return set((IN_A_STRING if path.suffix in (".c", ".h") else IN_SHELL).findall(text))


def test_there_are_at_most_eight_variables_for_users() -> None:
    users = [name for name in names("Environment variables for users") if name.startswith("MPSD_")]
    assert users == list(reader.OTHER_VARIABLES[: len(users)])
    assert 0 < len(users) <= MOST
    assert all(name in read() for name in users)


def test_every_variable_that_code_reads_is_documented() -> None:
    listed = ["for users", "that mpsd sets", "of tests"]
    documented = {name for part in listed for name in names(f"Environment variables {part}")}
    exact = {name for name in documented if not name.endswith("*")} | {debug.VARIABLE}
    prefixes = tuple(name.removesuffix("*") for name in documented if name.endswith("*"))
    known = exact | debug.RETIRED.keys()
    unknown = {name: files for name, files in read().items() if name not in known and not is_key(name)}
    assert not {name: files for name, files in unknown.items() if not name.startswith(prefixes)}
    assert is_key("MPSD_RUN_DIR") and not is_key("MPSD_RUN_DIRECTORY")
    assert {
        "MPSD_REAL_LIBCUDA",
        "MPSD_FAILOVER",
        "MPSD_STANDIN_GPU",
        "MPSD_VENV",
        "MPSD_TURN",
    } <= read().keys()


def test_every_documented_variable_is_read() -> None:
    listed = ["for users", "that mpsd sets", "of tests"]
    documented = {name for part in listed for name in names(f"Environment variables {part}")}
    for name in documented:
        if name.startswith("MPSD_"):
            assert any(variable.startswith(name.removesuffix("*")) for variable in read()), name


def test_every_field_of_the_debug_variable_is_documented() -> None:
    assert sorted(names(debug.VARIABLE)) == sorted(debug.FIELDS)


@pytest.mark.parametrize("name", debug.RETIRED)
def test_a_variable_of_the_previous_release_is_on_no_page_and_has_a_remedy(name: str) -> None:
    whole = re.compile(rf"\b{name}\b")
    for page in (*(ROOT / "mpsd" / "docs").glob("*.md"), ROOT / "README.md"):
        assert not whole.search(page.read_text()), page
    ((told, remedy),) = reader.unknown_variables({name: "1"})
    assert (told, remedy) == (name, f"set {debug.RETIRED[name]} instead")
    assert remedy.split()[1].split("=")[0] in reader.OTHER_VARIABLES


def test_unknown_fields_of_the_debug_variable_are_named() -> None:
    assert not reader.unknown_variables({"MPSD_DEBUG": "relay=off,die_before_effect=3"})
    told = reader.unknown_variables({"MPSD_DEBUG": "relay=off,rely=on"})
    assert told == [("MPSD_DEBUG=rely", "mpsd help knobs lists the names")]
