"""The proxy and the stand-in under gcc's sanitizers: any report ends the program with an error."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.support.libcudas import Libraries, build_libraries, run


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def sanitized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    return build_libraries(tmp_path_factory.mktemp("sanitized"), request.param)


def start() -> list[str]:
    """ThreadSanitizer of older compilers knows no address spaces as random as those of newer kernels."""
    fixed = ["setarch", "-R"]
    can = shutil.which("setarch") and run([*fixed, "true"], os.environ).returncode == 0
    return fixed if can else []


@pytest.mark.parametrize("how", ["dlsym", "getproc"])
@pytest.mark.parametrize("program", ["sequence", "threads"])
def test_no_report(sanitized: Libraries, program: str, how: str) -> None:
    done = run([*start(), sanitized.program(program), how], sanitized.environment(proxied=True))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] in ("ok", "cuCtxSynchronize 709")
