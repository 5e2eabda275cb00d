"""The evidence: tables that name their source, a history to compare with, pages that cite both."""

from __future__ import annotations

import csv
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "faultinject/evidence"
CAMPAIGNS = ROOT / "faultinject/campaigns.toml"
TABLES = sorted(path for path in EVIDENCE.glob("*.md") if path.name != "README.md")
PAGES = sorted((ROOT / "mpsd/docs").glob("mechanisms*.md"))
MAX_TABLES = 20
PROVENANCE = "| run | date | code revision | report committed in | SHA-256 of the raw JSON |"
ROW = re.compile(
    r"\| [^|]+ \| 20\d\d-\d\d-\d\d \| (unknown|[0-9a-f]{7}) \| ([0-9a-f]{7}|not tracked) \| `[0-9a-f]{64}` \|"
)
ONE_COMMAND = re.compile(r"^Command: `[^`]+`$", re.MULTILINE)
COMMANDS = re.compile(r"^Commands[^\n]*:\n\n((?:- [^\n]+\n)+)", re.MULTILINE)
COLUMNS = ["campaign", "kind", "revision", "date", "n", "lost", "median", "worst", "verdict"]
HISTORY = re.compile(r"-(again|last|more|before|new|oldest)\.")
TRACKED_LINES = 10_000
"""Lines of JSON, JSON Lines and CSV in the whole repository: raw reports do not belong in it."""
TRACKED_BYTES = 400_000
"""Bytes of the same files, so that a raw report on one line is noticed too."""
FILE_BYTES = 100_000


def provenance(text: str) -> list[str]:
    """Return the rows of the table that names the raw reports."""
    lines = text.splitlines()
    start = lines.index(PROVENANCE) + 2
    return lines[start : lines.index("", start)]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: str(path.stem))
def test_a_table_says_where_it_comes_from(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 80
    assert not HISTORY.search(path.name)
    assert "GPU: NVIDIA H200" in text and "Driver: 580.159.04" in text and "Reproduce: `" in text
    rows = provenance(text)
    assert rows
    assert [row for row in rows if not ROW.fullmatch(row)] == []


@pytest.mark.parametrize("path", TABLES, ids=lambda path: str(path.stem))
def test_a_table_has_the_command_of_every_run(path: Path) -> None:
    text = path.read_text()
    if ONE_COMMAND.search(text):
        return
    listed = COMMANDS.search(text)
    assert listed
    commands = re.findall(r"^- ([^`]+): `[^`]+`$", listed[1], re.MULTILINE)
    runs = {row.split("|")[1].strip() for row in provenance(text)}
    assert runs == set(commands)


def test_there_are_few_tables() -> None:
    assert len(TABLES) <= MAX_TABLES


def test_every_table_stands_in_the_readme_and_in_a_page() -> None:
    linked = set(re.findall(r"\]\(([^)]+)\.md\)", (EVIDENCE / "README.md").read_text()))
    names = {path.stem for path in TABLES}
    assert linked == names
    cited = set(
        re.findall(r"[\w-]+", " ".join(re.findall(r"\[[^\]]+\]", "".join(map(Path.read_text, PAGES)))))
    )
    assert names <= cited


def test_pages_stay_short() -> None:
    assert len((EVIDENCE / "README.md").read_text().splitlines()) <= 100
    for page in PAGES:
        assert len(page.read_text().splitlines()) <= 200, page.name


def test_the_history_is_a_table_of_numbers() -> None:
    with (EVIDENCE / "history.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == COLUMNS
    assert 100 < len(rows) < 2000
    for row in rows:
        found = dict(zip(COLUMNS, row, strict=True))
        assert re.fullmatch(r"[0-9a-f]{7}", found["revision"]), row
        assert found["n"].isdigit() and found["lost"].isdigit(), row
        assert not HISTORY.search(found["campaign"] + "."), row
        assert all(not found[name] or float(found[name]) < 1e6 for name in ("median", "worst")), row
        assert found["verdict"] in ("valid", "invalid", "unknown", "not judged"), row


def test_no_raw_reports_are_tracked() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.json", "*.jsonl", "*.csv"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this is no git checkout")
    files = [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    assert sum(len(path.read_text().splitlines()) for path in files) <= TRACKED_LINES
    sizes = [path.stat().st_size for path in files]
    assert max(sizes) <= FILE_BYTES
    assert sum(sizes) <= TRACKED_BYTES


def test_every_step_that_a_table_names_can_be_run() -> None:
    steps = {step["name"] for step in tomllib.loads(CAMPAIGNS.read_text())["campaign"]}
    cited = {
        step
        for path in EVIDENCE.glob("*.md")
        for command in re.findall(r"`scripts/reports OUT ([a-z -]+)`", path.read_text())
        for step in command.split()
    }
    assert cited and cited <= steps
    assert not [step for step in steps if HISTORY.search(f"{step}.")]
