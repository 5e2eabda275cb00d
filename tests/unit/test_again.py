"""Failed tests get one more run alone, a few at most, and what fails twice fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.again import MOST

ROOT = Path(__file__).parents[2]
ONCE = """
from pathlib import Path

def test_once():
    seen = Path(__file__).with_name("seen")
    was = seen.exists()
    seen.touch()
    assert was
"""
BROKEN = "def test_{0}(): assert False\n"


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTEST_ADDOPTS": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("PYTEST_CURRENT_TEST", None)
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (ONCE, 0, "again: test_it.py::test_once failed beside others and passed alone"),
        (ONCE + BROKEN.format("broken"), 1, "1 failed, 1 passed"),
        ("".join(BROKEN.format(n) for n in range(MOST + 1)), 1, f"{MOST + 1} failed tests are known"),
    ],
)
def test_what_failed_runs_once_more(tmp_path: Path, text: str, status: int, said: str) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(text)
    assert python(tmp_path, "pytest", "-q").returncode == 1
    again = python(tmp_path, "tests.support.again")
    assert (again.returncode, said in again.stdout) == (status, True), again.stdout
