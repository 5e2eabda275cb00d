"""The daemon never loads CUDA: a GPU fault cannot reach a process without a context."""

from __future__ import annotations

import json
import subprocess
import sys

IMPORT_ALL = """
import importlib, json, pkgutil, sys
import mpsd
names = [found.name for found in pkgutil.walk_packages(mpsd.__path__, "mpsd.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
maps = open("/proc/self/maps").read()
print(json.dumps({
    "imported": len(names),
    "cuda modules": sorted(name for name in sys.modules if name.split(".")[0] in ("cuda", "cupy", "torch")),
    "cuda libraries": sorted({line.split()[-1] for line in maps.splitlines() if "/libcuda" in line}),
}))
"""


def test_importing_all_of_mpsd_loads_no_cuda() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("imported") > 10
    assert found == {"cuda modules": [], "cuda libraries": []}
