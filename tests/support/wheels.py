"""Wheels of PyPI that single tests need, fetched by pip and unpacked."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from functools import cache, partial
from pathlib import Path

import pytest

from tests.support.fetched import once

FETCH_S = 120.0


@cache
def unpacked(name: str, version: str) -> Path:
    """Return the folder with the files of a wheel. Skip the test, by the wheel's name, if pip has none."""
    return once(f"{name}-{version}", partial(_fetch, f"{name}=={version}"))


def _fetch(wanted: str, into: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    # One try: without a network the test is skipped at once.
    command += ["--disable-pip-version-check", "--retries", "0", "--timeout", "15"]
    command += ["--dest", str(into), wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{wanted}: pip did not fetch it in {FETCH_S:.0f} s")
    wheels = list(into.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"{wanted}: pip cannot fetch it: {(done.stderr.strip() or '-').splitlines()[-1]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(into / "files")
