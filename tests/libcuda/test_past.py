"""Calls that bypass the proxy, in a program on the stand-in driver
(faultinject/programs/pairing/bypass.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.libcudas import DEADLINE_S, PATHS, PROGRAMS, Libraries, run


def told(libraries: Libraries, *arguments: str, proxied: bool = True, **extra: str) -> dict[str, Any]:
    environment = libraries.environment(proxied=proxied, PYTHONPATH=PATHS, **extra)
    done = run([sys.executable, PROGRAMS / "past.py", *arguments], environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_calls_go_past_the_proxy_and_come_back(libraries: Libraries) -> None:
    found = told(libraries, vault="1")
    # The ledger counts launches through the proxy: one, then none of two, then three.
    assert found["launched"] == [1, 0, 3]
    # All launches have written, and all other words are unchanged.
    assert found["read"] == [0, 1, 11, 12, 21, 22, 23]
    assert found["functions"] > 10
    assert found["past"] == 0 and found["restored"]


def test_a_proxy_that_passes_all_on_has_no_functions_of_its_own_there(libraries: Libraries) -> None:
    """A pass-through proxy without a ledger has no functions of its own there."""
    found = told(libraries, "functions", vault="0")
    assert found == {"functions": 0}


@pytest.mark.parametrize(
    ("arguments", "proxied", "error"),
    [
        ([], False, "there is no proxy in this process"),
        (["foreign"], True, "no stub of the proxy's: "),
        (["driver-first"], True, "the proxy of this process is aside: the program opened the driver"),
    ],
)
def test_where_calls_cannot_go_past_a_proxy_that_is_said(
    libraries: Libraries, arguments: list[str], proxied: bool, error: str
) -> None:
    found = told(libraries, *arguments, proxied=proxied, vault="1")
    assert set(found) == {"error"} and found["error"].startswith(error)


def test_a_paired_program_without_a_proxy_says_so_and_goes_on(libraries: Libraries) -> None:
    command = [sys.executable, "-m", "faultinject.programs.paired", "calls", "--backend", "simulated"]
    environment = libraries.environment(proxied=False, PYTHONPATH=PATHS)
    orders = (
        {"do": "begin", "steps": 1},
        {"do": "round", "blocks": ["past"], "warm": 0, "steps": 1},
        {"do": "block", "steps": 1},
        {"do": "stop"},
    )
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        assert program.stdin is not None and program.stdout is not None and program.stderr is not None
        # The input stays open: the program exits when the harness closes it.
        program.stdin.write(b"".join(json.dumps(order).encode() + b"\n" for order in orders))
        program.stdin.flush()
        assert (program.wait(DEADLINE_S), program.stderr.read()) == (0, b"")
        words = [json.loads(line) for line in program.stdout.read().splitlines()]
    assert [word["what"] for word in words] == ["imported", "begun", "cannot", "working", "block", "closed"]
    assert words[2]["text"].startswith("there is no proxy in this process")
