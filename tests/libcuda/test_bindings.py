"""cuda-bindings programs, which find every function by cuGetProcAddress, work with the proxy."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.support.libcudas import PROGRAMS, Libraries, run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="no cuda-bindings: scripts/setup --with cuda installs it"
)


@pytest.mark.parametrize("vault", ["0", "1"])
def test_a_program_of_cuda_bindings_sees_no_difference(libraries: Libraries, vault: str) -> None:
    command = [sys.executable, PROGRAMS / "bindings.py"]
    without = run(command, libraries.environment(proxied=False))
    assert without.stdout.split("\n")[:2] == [
        "0700000007000000 True 4096",
        "CUDA_ERROR_INVALID_VALUE CUDA_SUCCESS",
    ], without.stderr
    done = run(command, libraries.environment(proxied=True, vault=vault))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", without.stdout)
