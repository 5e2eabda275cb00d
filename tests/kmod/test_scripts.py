"""scripts/test-kmod --ci on an unsuitable machine: it gives the reason, and passes unless told to run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The tools of the scripts themselves; apt-get is not among them, so nothing is installed.
SHELL = ("bash", "sh", "dirname", "id", "env")


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Return an environment with a PATH that lacks every tool that the kernel module needs."""
    for name in SHELL:
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    kept = {name: value for name, value in os.environ.items() if name != "MPSD_TEST_KMOD"}
    return {**kept, "PATH": str(tmp_path)}


def script(environment: dict[str, str], name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / name, *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60.0,
    )


def test_what_is_missing_is_named_and_nothing_is_installed(bare: dict[str, str]) -> None:
    done = script(bare, "setup-kmod")
    assert (done.returncode, done.stdout) == (3, "")
    assert "missing: coccinelle sparse qemu-system-x86" in done.stderr


def test_without_it_ci_is_skipped_with_the_reason(bare: dict[str, str]) -> None:
    done = script(bare, "test-kmod", "--ci")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("test-kmod: skipped: missing: coccinelle ")


def test_without_it_ci_fails_where_it_must_run(bare: dict[str, str]) -> None:
    done = script({**bare, "MPSD_TEST_KMOD": "1"}, "test-kmod", "--ci")
    assert done.returncode == 3
    assert "missing: coccinelle " in done.stdout


def test_it_can_be_left_out_by_name(bare: dict[str, str]) -> None:
    done = script({**bare, "MPSD_TEST_KMOD": "0"}, "test-kmod", "--ci")
    assert (done.returncode, done.stdout) == (0, "test-kmod: skipped: MPSD_TEST_KMOD=0\n")
