"""The library as users get it: a wheel with libcuda.so.1 that mpsd-run finds."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from libcuda_build.compile import FOLDER
from tests.support.libcudas import Libraries, quick_compiler, run
from tests.support.waiting import BUILD_S

CODE = "import sys; from hatchling.build import build_{0}; print(build_{0}(sys.argv[1]))"
USE_IT = """
import ctypes, json, os, sys
from mpsd_client.driver import find_proxy
import mpsd_libcuda
found = find_proxy({})
library = ctypes.CDLL(found + "/libcuda.so.1")
state = mpsd_libcuda.read_stats(os.getpid()).state.name
print(json.dumps([found == str(mpsd_libcuda.library_directory()), library.cuInit(0), state]))
"""


def test_the_wheel_brings_the_library(
    libraries: Libraries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", quick_compiler(tmp_path))
    # The build starts from a copy, as from an sdist, and leaves the source tree unchanged.
    source = tmp_path / "source"
    kept = shutil.ignore_patterns("__pycache__", "lib", "standin", "README.md")
    shutil.copytree(FOLDER, source, ignore=kept)
    done = run([sys.executable, "-c", CODE.format("wheel"), tmp_path], os.environ, source, BUILD_S)
    assert done.returncode == 0, done.stderr
    wheel = tmp_path / done.stdout.splitlines()[-1]
    assert "linux" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        libraries_in_it = {name for name in archive.namelist() if "/lib/" in name}
        archive.extractall(tmp_path / "site")
    assert libraries_in_it == {"mpsd_libcuda/lib/libcuda.so.1", "mpsd_libcuda/lib/libcuda.so"}
    environment = libraries.environment(proxied=True)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(tmp_path / "site"), str(FOLDER.parent), str(FOLDER.parents[1])]
    )
    used = run([sys.executable, "-c", USE_IT], environment)
    assert used.returncode == 0, used.stderr
    assert json.loads(used.stdout) == [True, 0, "ACTIVE"]
