"""The closed list: each producer names a code; each code has a text, a remedy, a producer, a test, a row."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from string import Formatter

import pytest

from mpsd.base.conditions import KINDS, Code, Condition, Kind, degrading_texts, refusing
from tests.support.conditioning import PAGE, TEXTS, tables

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "mpsd" / "base" / "conditions.py"
FIELDS = {"subject", "detail", "count"}

each_code = pytest.mark.parametrize("code", list(Code))


@cache
def sources() -> dict[str, ast.Module]:
    """Return the modules of mpsd, but for the list itself, by path."""
    files = (path for path in sorted((ROOT / "mpsd").rglob("*.py")) if path != LIST)
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}


def made(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that make a condition."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Condition":
            yield node


def code_of(call: ast.Call) -> str:
    """Return the name of the code that a call names; empty if it names none."""
    first = call.args[0] if call.args else None
    named = (
        isinstance(first, ast.Attribute) and isinstance(first.value, ast.Name) and first.value.id == "Code"
    )
    return first.attr if named and isinstance(first, ast.Attribute) else ""


@cache
def made_codes() -> frozenset[str]:
    """Return the names of the codes of all conditions that mpsd makes."""
    return frozenset(code_of(call) for tree in sources().values() for call in made(tree))


def producers(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the functions with the name of a producer: of conditions, or of texts as they were before."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and re.search(r"(problems|conditions?)$", node.name):
            yield node


@cache
def other_tests() -> list[str]:
    return [path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]


def makes_conditions(function: ast.FunctionDef) -> bool:
    return function.returns is not None and "Condition" in ast.unparse(function.returns)


OTHER = {
    "mpsd/ctl/commands.py:conditions",
    "mpsd/ctl/parser.py:_conditions",
    "mpsd/ctl/statustext.py:_conditions",
    "mpsd/exporter/metrics.py:_conditions",
    "mpsd/records/bulletin.py:publish_condition",
    "mpsd/daemon/views.py:_tell_condition",
}
"""Functions that show conditions."""


def test_a_producer_returns_conditions() -> None:
    found = {f"{file}:{each.name}": each for file, tree in sources().items() for each in producers(tree)}
    assert len(found) > len(OTHER) + 10
    assert {name for name, each in found.items() if not makes_conditions(each)} == OTHER


def test_a_producer_names_a_code() -> None:
    calls = [(file, call) for file, tree in sources().items() for call in made(tree)]
    assert len(calls) >= len(Code)
    assert [f"{file}:{call.lineno}" for file, call in calls if code_of(call) not in Code.__members__] == []


def test_a_text_without_a_code_is_found() -> None:
    tree = ast.parse("def problems() -> list[str]:\n    return ['no']\nCondition(code, 'x')\nCondition()\n")
    (producer,) = producers(tree)
    assert not makes_conditions(producer)
    assert [code_of(call) for call in made(tree)] == ["", ""]


@each_code
def test_a_code_has_a_producer(code: Code) -> None:
    assert code.name in made_codes()


@each_code
def test_a_code_has_a_text_and_a_remedy(code: Code) -> None:
    condition = Condition(code, "the-subject", "the-cause", 7)
    assert condition.text and condition.remedy
    assert not condition.text.endswith(".") and not condition.remedy.endswith(".")
    assert len(condition.remedy.split()) >= 2
    used = {field for _, field, _, _ in Formatter().parse(condition.kind.text + condition.kind.remedy)}
    assert used - {None} <= FIELDS


@each_code
def test_a_code_has_a_test(code: Code) -> None:
    """A test besides this one names the code."""
    names = (f"Code.{code.name}", f'"{code.value}"')
    assert any(name in text for name in names for text in other_tests())


def test_the_page_has_the_tables_of_the_list() -> None:
    """To write them anew: python -m tests.support.conditioning."""
    lines = PAGE.read_text().splitlines()
    assert lines[lines.index(TEXTS[0]) :] == tables()


def test_the_list_has_every_code_in_order() -> None:
    assert list(KINDS) == list(Code)
    assert all(isinstance(kind, Kind) for kind in KINDS.values())


def test_code_and_subject_identify_a_condition() -> None:
    one, same, other = (Condition(Code.CLIENTS_LOST, "d1", count=n) for n in (1, 2, 1))
    assert one.key == same.key == other.key and one != same
    assert one.key != Condition(Code.CLIENTS_LOST, "d2", count=1).key


def test_the_row_of_status() -> None:
    assert Condition(Code.GPU_LOST, "GPU-0", "Xid 79").view() == {
        "code": "gpu-lost",
        "subject": "GPU-0",
        "text": "GPU-0 does not work any more (Xid 79)",
        "remedy": "move its programs to another GPU, reset the GPU or restart the machine, then restart mpsd",
        "degrades": True,
    }


def test_lost_and_drained_gpus_alone_refuse() -> None:
    assert {code for code in Code if KINDS[code].refuses} == {Code.GPU_LOST, Code.GPU_DRAINED}
    silent, drained = Condition(Code.GUARD_SILENT, "low"), Condition(Code.GPU_DRAINED, "GPU-0")
    assert refusing([silent]) is None and refusing([silent, drained]) == drained


def test_what_degrades_a_status() -> None:
    rows = [Condition(Code.SIGNS_LOST, detail="x").view(), Condition(Code.GUARD_SILENT, "low").view()]
    assert degrading_texts({"conditions": rows, "problems": ["a", "b"]}) == [rows[0]["text"]]
    assert degrading_texts({"problems": ["a", "outer guard is silent: low"]}) == ["a"]
