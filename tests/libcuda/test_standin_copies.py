"""Several copies of the stand-in driver in one process, as on a GPU: see faultinject/reports (-failover)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from faultinject.measure.failover_copy import build_helper
from tests.support.libcudas import PROGRAMS, ROOT, Libraries, run


@pytest.fixture(scope="module")
def helper(libraries: Libraries, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_helper(libraries.real, tmp_path_factory.mktemp("helper") / "helper.so")


def environment(libraries: Libraries, **extra: str) -> dict[str, str]:
    found = f"{ROOT}:{ROOT / 'clients'}:{ROOT / 'clients' / 'libcuda'}"
    return (
        libraries.environment(
            proxied=False,
            PYTHONPATH=found,
            CUDA_MPS_PIPE_DIRECTORY="/nonexistent/a",
            SECOND_PIPE_DIRECTORY="/nonexistent/b",
        )
        | extra
    )


@pytest.mark.parametrize("what", ["names", "memory", "live", "strays", "unmapped", "host", "cycles"])
def test_two_copies(libraries: Libraries, helper: Path, tmp_path: Path, what: str) -> None:
    done = run([sys.executable, PROGRAMS / "copies.py", what, tmp_path, helper], environment(libraries))
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
