"""Every semantic patch states in DEP-3's fields its purpose, its target, and when it was last checked."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from kmod.changes import FOLDER, HOOKS, PCI_RESIZE
from kmod.tree import TESTED

PATCHES = sorted([*FOLDER.glob("hooks/*.cocci"), *FOLDER.glob("mends/*.cocci")])
REPORT = FOLDER / "reports/test-kmod-full.txt"
FIELD = re.compile(r"// ([A-Z][A-Za-z-]*): (\S.*)")
FIELDS = (
    "SPDX-License-Identifier",
    "Description",
    "Applies-To",
    "Origin",
    "Forwarded",
    "Last-Update",
    "Last-Checked",
)


def header(path: Path) -> dict[str, str]:
    """Return the fields of the comment that begins the file; lines with one more blank continue a field."""
    fields: dict[str, str] = {}
    last = ""
    for line in path.read_text().splitlines():
        if not line.startswith("//"):
            break
        match = FIELD.fullmatch(line)
        if match:
            last = match[1]
            assert last not in fields
            fields[last] = match[2]
        else:
            assert last and line.startswith("//  "), f"{path.name}: {line}"
            fields[last] += " " + line[2:].strip()
    return fields


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_the_header_is_whole(path: Path) -> None:
    fields = header(path)
    assert tuple(fields) == FIELDS
    assert fields["SPDX-License-Identifier"] == "GPL-2.0 OR MIT"
    assert fields["Origin"].split(",")[0] in ("vendor", "upstream", "backport", "other")
    assert fields["Forwarded"] in ("no", "not-needed")
    assert len(fields["Description"]) > 80
    assert date.fromisoformat(fields["Last-Update"]) <= datetime.now(UTC).date()


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_it_is_for_the_file_that_it_changes(path: Path) -> None:
    (change,) = [change for change in (*HOOKS, PCI_RESIZE) if Path(change.semantic_patch).name == path.name]
    assert header(path)["Applies-To"].startswith(change.file + " of ")


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_what_it_was_last_checked_with_is_what_the_trial_had(path: Path) -> None:
    """The committed report has a line for each suite: its name, and the version with Debian's number."""
    assert tuple(header(path)["Last-Checked"].split()) == TESTED
    lines = [line.split() for line in REPORT.read_text().splitlines()]
    suites = ("bookworm", "trixie", "sid", "experimental")
    tried = {words[1].rsplit("-", 1)[0] for words in lines if words and words[0] in suites}
    assert tried == set(TESTED)
