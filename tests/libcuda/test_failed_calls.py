"""Calls that fail: the proxy gives the driver's error, and leaves the results as the driver leaves them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from libcuda_build.compile import FOLDER
from libcuda_build.header import find_include, read_functions
from libcuda_build.table import read_plan
from tests.support.libcudas import PROGRAMS, Libraries, run

STATES = ["uninitialised", "contextless", "lost"]
MODES = {
    "passed on": {"vault": "0"},
    "memory": {"vault": "1"},
    "failover": {
        "vault": "1",
        "MPSD_FAILOVER": "exact",
        "MPSD_FAILOVER_SOCKET": "/nonexistent/failover.sock",
    },
}
# The first changes the state of every later call. The second waits in the stand-in alone. Setting no
# bytes succeeds there, and the wait finds the error.
LEFT_OUT = {"cuInit", "cuMemsetD32_v2_ptds"}
LAST = ("cuCtx", "cuDevicePrimaryCtx")
"""Functions that make a context current, or end one: after all others."""


def kind(parameter: str) -> str:
    if "*" not in parameter and "[" not in parameter:
        return ""
    return "in" if parameter.startswith("const ") and parameter.count("*") == 1 else "out"


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with each function that has a wrapper in some mode, and the kinds of its parameters."""
    plan = read_plan(FOLDER, read_functions(find_include()))
    carried = {one.function.name for one in plan.carried} | {own.function.name for own in plan.per_thread}
    names = ({*plan.wrapped, *carried} & {*plan.functions}) - LEFT_OUT
    order = sorted(names, key=lambda name: (name.startswith(LAST), name))
    path = tmp_path_factory.mktemp("functions") / "functions.json"
    path.write_text(json.dumps([[name, [*map(kind, plan.functions[name].parameters)]] for name in order]))
    return path


def answers(environment: dict[str, str], state: str, functions: Path) -> dict[str, tuple[int, list[int]]]:
    done = run([sys.executable, PROGRAMS / "failed.py", state, functions], environment)
    assert done.returncode == 0, done.stderr
    return {name: (code, written) for name, (code, written) in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("mode", MODES)
def test_a_call_that_fails_leaves_what_the_driver_leaves(
    libraries: Libraries, functions: Path, state: str, mode: str
) -> None:
    expected = answers(libraries.environment(proxied=False), state, functions)
    found = answers(libraries.environment(proxied=True, **MODES[mode]), state, functions)
    assert {name: code for name, (code, _) in found.items()} == {n: code for n, (code, _) in expected.items()}
    failed = {name: written for name, (code, written) in expected.items() if code}
    assert len(failed) > 100
    assert {name: found[name][1] for name in failed} == failed
