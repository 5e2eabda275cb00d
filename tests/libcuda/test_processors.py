"""Whether a process may use two CPUs at once, tested without driver and GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.libcudas import run, standalone


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standalone(tmp_path_factory.mktemp("processors"), "processors", ["processors.c"])


@pytest.mark.parametrize(
    ("groups", "files", "found"),
    [
        ("", {}, "several"),
        ("0::/\n", {"cpu.max": "max 100000"}, "several"),
        ("0::/\n", {"cpu.max": "200000 100000"}, "several"),
        ("0::/\n", {"cpu.max": "199999 100000"}, "one"),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000"}, "one"),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "c/cpu.max": "100000 100000"}, "several"),
        ("0::/not/there\n", {}, "several"),
        ("no line of any kind\n", {}, "several"),
        (
            "5:cpu,cpuacct:/job\n0::/\n",
            {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"},
            "several",
        ),
        (
            "5:cpu,cpuacct:/job\n0::/\n",
            {"cpu/job/cpu.cfs_quota_us": "150000", "cpu/job/cpu.cfs_period_us": "100000"},
            "one",
        ),
        (
            "5:cpuset:/job\n",
            {"cpu/job/cpu.cfs_quota_us": "150000", "cpu/job/cpu.cfs_period_us": "100000"},
            "several",
        ),
    ],
)
def test_what_a_control_group_allows(
    program: Path, tmp_path: Path, groups: str, files: Mapping[str, str], found: str
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one processor here")
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    done = run([program, tmp_path / "groups", tmp_path / "root"], os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{found}\n", "")


def test_one_that_is_kept_on_one_has_one(program: Path, tmp_path: Path) -> None:
    one = min(os.sched_getaffinity(0))
    done = run(["taskset", "-c", str(one), program, tmp_path / "none", tmp_path], os.environ)
    assert (done.returncode, done.stdout) == (0, "one\n")
