"""Check the README and the operator's pages against the tree: sizes, links, commands, keys, variables."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from faultinject.__main__ import parser as faultinject_parser
from mpsd import docs
from mpsd.base.errors import UsageError
from mpsd.config.basic import BASIC
from mpsd.config.reader import keys
from mpsd.config.schema import Config
from mpsd.ctl.parser import build as ctl_parser
from mpsd.daemon import cli

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = ROOT / "mpsd" / "docs"
MAX_README, MAX_PAGE, MAX_WIDTH = 150, 200, 140

OPERATOR = (
    *("quickstart", "concepts", "protection", "operate", "status", "guards"),
    *("failover", "memory", "kernel-module", "limits", "knobs", "containers"),
)
ALL = [README, *sorted(PAGES.glob("*.md"))]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
KEY = re.compile(r"^\[(\w+)\] (\w+)")
COMMAND = re.compile(r"\b(mpsd|mpsd-ctl|mpsd-faultinject) ([a-z][a-z-]*)\b")
VARIABLE = re.compile(r"\bMPSD_[A-Z][A-Z_]*[A-Z]\b")

each_page = pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)


def code(path: Path) -> Iterator[str]:
    """Yield the code of a page: inline code, and the lines of code blocks without their comments."""
    text = path.read_text()
    for block in FENCE.findall(text):
        for line in block.splitlines()[1:-1]:
            yield re.split(r"\s#", line)[0]
    yield from inline_code(path)


def inline_code(path: Path) -> list[str]:
    return CODE.findall(FENCE.sub("", path.read_text()))


def prose(path: Path) -> str:
    return CODE.sub("", FENCE.sub("", path.read_text()))


def verbs(parser: argparse.ArgumentParser) -> set[str]:
    return {
        name
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name in action.choices
    }


@cache
def variables() -> frozenset[str]:
    """Return every name in a source file that begins with MPSD_."""
    folders = ("mpsd", "clients", "faultinject", "kmod_patches", "tests")
    suffixes = {".py", ".c", ".h"}
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return frozenset(name for path in files for name in VARIABLE.findall(path.read_text()))


def test_the_readme_is_one_page() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= MAX_README


@each_page
def test_pages_are_short(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= MAX_PAGE
    assert [number for number, line in enumerate(lines, 1) if len(line) > MAX_WIDTH] == []


@each_page
def test_a_page_begins_with_its_title(path: Path) -> None:
    assert path.read_text().startswith("# ")


def test_the_readme_lists_every_page() -> None:
    listed = set(re.findall(r"\[[\w-]+\]\(mpsd/docs/([\w-]+)\.md\)", README.read_text()))
    assert listed == set(docs.names())


@each_page
def test_links_lead_somewhere(path: Path) -> None:
    links = [link for link in LINK.findall(FENCE.sub("", path.read_text())) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


@each_page
def test_evidence_tables_exist(path: Path) -> None:
    named = re.findall(r"`evidence/([a-z-]+\.md)`", path.read_text())
    assert [name for name in named if not (ROOT / "faultinject" / "evidence" / name).exists()] == []


@each_page
def test_commands_exist(path: Path) -> None:
    known = {
        "mpsd": verbs(cli.parser()),
        "mpsd-ctl": verbs(ctl_parser()),
        "mpsd-faultinject": verbs(faultinject_parser()),
    }
    named = {found for text in code(path) for found in COMMAND.findall(text)}
    assert {(program, verb) for program, verb in named if verb not in known[program]} == set()


def test_the_page_of_keys_has_both_lists() -> None:
    """The first table has the basic keys, the second one the advanced keys of each section."""
    page = (PAGES / "knobs.md").read_text()
    first, second = (
        part.split("\n## ")[0] for part in re.split(r"^## (?:Keys|Advanced keys)$", page, flags=re.M)[1:]
    )
    named: set[tuple[str, str]] = set()
    for cell in re.findall(r"^\| (`.*?`) \|", first, re.MULTILINE):
        for text in CODE.findall(cell):
            section, key = match.groups() if (match := KEY.match(text)) else ("", text)
            named.add((section, key))
    assert named == BASIC
    listed = {
        ("" if row[1] == "top" else row[1].strip("`[]"), key)
        for row in re.finditer(r"^\| (top|`\[\w+\]`) \| (.*) \|$", second, re.MULTILINE)
        for key in CODE.findall(row[2])
    }
    assert listed == {(section, key) for section, key, _ in keys()} - BASIC


@each_page
def test_configuration_keys_exist(path: Path) -> None:
    config = Config()
    named = {found for text in inline_code(path) for found in KEY.findall(text)}
    keys = {
        (section.name, key.name)
        for section in dataclasses.fields(config)
        if dataclasses.is_dataclass(value := getattr(config, section.name))
        for key in dataclasses.fields(value)
    }
    assert named - keys == set()


@each_page
def test_variables_exist(path: Path) -> None:
    config = Config()
    keys = {f"MPSD_{field.name.upper()}" for field in dataclasses.fields(config)}
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if dataclasses.is_dataclass(value):
            keys |= {f"MPSD_{section.name}_{key.name}".upper() for key in dataclasses.fields(value)}
    named = set(VARIABLE.findall(path.read_text()))
    assert named - keys - variables() == set()


@pytest.mark.parametrize("path", [README, *(PAGES / f"{name}.md" for name in OPERATOR)], ids=lambda p: p.name)
def test_a_page_names_the_evidence_table_instead_of_a_figure(path: Path) -> None:
    found = re.findall(r"\b\d+(?:\.\d+)? ?(?:ms|µs|us|%)(?!\w)", prose(path))
    assert found == []


# mpsd help


def test_help_lists_every_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == docs.names()
    assert all(len(row) == 2 for row in rows)
    assert {row[0] for row in rows} == {path.stem for path in PAGES.glob("*.md")}


def test_help_prints_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "failover"]) == 0
    assert capsys.readouterr().out == (PAGES / "failover.md").read_text()
    assert docs.text("Failover.md") == docs.text("failover")


def test_an_unknown_page_is_one_line_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "failovr"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "mpsd: no help page 'failovr' (did you mean 'failover'?)\n"
    assert cli.main(["help", "qqqq"]) == 2
    assert capsys.readouterr().err == "mpsd: no help page 'qqqq' (mpsd help lists the pages)\n"


@pytest.mark.parametrize("name", ["../../README", "/etc/passwd", "", "__init__.py"])
def test_a_page_is_a_name_and_no_path(name: str) -> None:
    with pytest.raises(UsageError):
        docs.text(name)
