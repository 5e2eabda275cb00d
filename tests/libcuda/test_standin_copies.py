"""Several instances of the stand-in driver in one process, as on a GPU: see
evidence/mechanisms-failover.md."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faultinject.programs.devices.driverfile import build_helper
from tests.support.libcudas import DEADLINE_S, PATHS, PROGRAMS, Libraries, run
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain, until

__all__ = ["backend", "domain", "second"]


@pytest.fixture(scope="module")
def helper(libraries: Libraries, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_helper(libraries.real, tmp_path_factory.mktemp("helper") / "helper.so")


def environment(libraries: Libraries, **extra: str) -> dict[str, str]:
    return (
        libraries.environment(
            proxied=False,
            PYTHONPATH=PATHS,
            CUDA_MPS_PIPE_DIRECTORY="/nonexistent/a",
            SECOND_PIPE_DIRECTORY="/nonexistent/b",
        )
        | extra
    )


@pytest.mark.parametrize(
    "what", ["names", "memory", "live", "strays", "unmapped", "host", "handles", "cycles"]
)
def test_two_copies(libraries: Libraries, helper: Path, tmp_path: Path, what: str) -> None:
    done = run([sys.executable, PROGRAMS / "copies.py", what, tmp_path, helper], environment(libraries))
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


Ask = Callable[[str], str]


@pytest.fixture
def ask(libraries: Libraries, helper: Path, tmp_path: Path, domain: Domain, second: Domain) -> Iterator[Ask]:
    """Run a process with instance `a` in the first domain, `b` in the second, and memory of both at
    WINDOW."""
    chosen = environment(
        libraries,
        CUDA_MPS_PIPE_DIRECTORY=domain.environment["CUDA_MPS_PIPE_DIRECTORY"],
        SECOND_PIPE_DIRECTORY=second.environment["CUDA_MPS_PIPE_DIRECTORY"],
        MPSD_STANDIN_GPU="simulated",
    )
    command = [sys.executable, str(PROGRAMS / "copies.py"), "obey", str(tmp_path), str(helper)]
    with subprocess.Popen(
        command, env=chosen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            stdin, stdout = process.stdin, process.stdout
            assert stdout.readline() == f"{process.pid}\n"

            def tell(expression: str) -> str:
                stdin.write(expression + "\n")
                stdin.flush()
                return stdout.readline().strip()

            assert domain.server() != second.server()
            for one in (domain, second):
                assert one.say(f"get_client_list {one.server()}") == str(process.pid)
            yield tell
            stdin.close()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


ADD = "ran('add', WINDOW, 8, 1)"
SYNC = "code('cuCtxSynchronize')"
RESET = "code('cuDevicePrimaryCtxReset_v2', 0)"


def test_a_neighbours_fault_reaches_one_copy_of_two(domain: Domain, second: Domain, ask: Ask) -> None:
    assert (ask(f"a.{ADD}"), ask(f"b.{ADD}")) == ("0", "0")
    neighbour = domain.client().ready()
    assert neighbour.error("dev.launch('store')") is None
    until(lambda: ask(f"a.{SYNC}") == "700")
    assert ask("a.code('cuEventCreate', ctypes.byref(ctypes.c_uint64()), 0)") == "700"
    assert (domain.status(), second.status()) == ("FAULT", "ACTIVE")
    assert (ask(f"b.{ADD}"), ask("b.word(WINDOW)")) == ("0", "3")
    # The domain accepts a new context once every client has left it.
    assert ask(f"a.{RESET}") == "0"
    neighbour.kill()
    until(lambda: domain.status() == "ACTIVE")
    ask("a.ready()")
    assert (ask(f"a.{ADD}"), ask("b.word(WINDOW)")) == ("0", "4")


def test_an_own_fault_ends_one_copy_of_two(domain: Domain, second: Domain, ask: Ask) -> None:
    assert ask("a.ran('store', 0x7E0000000000, 1)") == "700"
    assert (ask(f"b.{ADD}"), domain.status(), second.status()) == ("0", "FAULT", "ACTIVE")
    assert ask("[a.code('cuDevicePrimaryCtxReset_v2', 0), a.unload()]") == "[0, None]"
    assert (ask(f"b.{ADD}"), ask("b.word(WINDOW)")) == ("0", "2")


def test_a_killed_server_ends_the_waits_of_its_copy(domain: Domain, ask: Ask) -> None:
    ask("a.run('long', WINDOW, 8, 1)")
    os.kill(domain.server(), signal.SIGKILL)
    began = time.monotonic()
    assert ask(f"a.{SYNC}") == "806"
    assert ask("a.code('cuStreamQuery', 0)") == "806"
    assert ask(f"a.{RESET}") == "0"
    assert time.monotonic() - began < 10
    assert (ask(f"b.{SYNC}"), ask("b.word(WINDOW)")) == ("0", "0")
    ask("a.ready()")
    assert (ask(f"a.{ADD}"), ask("b.word(WINDOW)")) == ("0", "1")


def test_a_query_and_queued_work_see_a_killed_server_too(domain: Domain, ask: Ask) -> None:
    ask("[a.run(kernel, WINDOW, 8, 1) for kernel in ('long', 'add', 'add')]")
    os.kill(domain.server(), signal.SIGKILL)
    until(lambda: ask("a.code('cuStreamQuery', 0)") == "806")
    # No operation of the lost context is still queued.
    assert ask(f"a.{RESET}") == "0"
    assert ask("b.word(WINDOW)") == "0"
