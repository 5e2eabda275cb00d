"""Peer access between two GPUs: the same with the proxy, whether or not it owns the memory, as without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faultinject.rig.libraries import Libraries
from faultinject.rig.node import Node
from faultinject.rig.worker import REPOSITORY, python_environment
from mpsd.base import debug

pytestmark = pytest.mark.timeout(300)
DEADLINE_S = 60.0
PROGRAM = REPOSITORY / "tests" / "gpu" / "peers.py"

EXPECTED = {
    "can": 1,
    "never": [0, 5],
    "before": [0, 5],
    "twice": 704,
    "after": [0, 5],
    "large": [0, 5],
    "copied": [0, 5],
    "disabled": 0,
    "again": 705,
    "unreachable": 700,
}
"""`never`: copied by the driver before peer access is enabled.

The others: bytes that a kernel read, and codes.
"""

SIDES = {
    "plain": None,
    "forward": debug.variable(vault=0),
    "vault": debug.variable(vault=1, zone_budget=4 << 30),
}


def environment(node: Node, libraries: Libraries, nowhere: Path, side: str) -> dict[str, str]:
    """Return an environment outside MPS, since the program's last access faults."""
    variables = SIDES[side]
    found = python_environment() | dict(node.environment) | {"CUDA_MPS_PIPE_DIRECTORY": str(nowhere)}
    folder = libraries.driver if variables is None else libraries.proxy
    if folder is not None:
        found["LD_LIBRARY_PATH"] = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    if libraries.driver is not None:
        found |= {"MPSD_REAL_LIBCUDA": str(libraries.driver / "libcuda.so.1"), "MPSD_STANDIN_DEVICES": "2"}
    return found | (variables or {})


def seen(node: Node, libraries: Libraries, nowhere: Path, side: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=environment(node, libraries, nowhere, side),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_a_peer_reaches_the_same_with_the_proxy_and_without(
    node: Node, gpus: list[str], libraries: Libraries, tmp_path: Path
) -> None:
    found = {side: seen(node, libraries, tmp_path / "none", side) for side in SIDES}
    plain = found["plain"]
    if not plain["can"]:
        pytest.skip("these two GPUs cannot reach each other's memory")
    windowed = {side: answer.pop("windowed") for side, answer in found.items()}
    assert windowed == {"plain": 0, "forward": 0, "vault": 4}
    assert plain == EXPECTED
    assert found["forward"] == plain
    assert found["vault"] == plain
