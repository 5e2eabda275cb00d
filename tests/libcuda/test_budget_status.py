"""Programs in mode exact behind the proxy and under a real mpsd: their limits, and a departure in status.

The driver is the stand-in on the simulated GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from mpsd.api.protectionview import READS
from mpsd.base.conditions import Code
from mpsd.core.failover.budgets import FIRST_SHARE, POOL_SHARE
from mpsd.core.state import TIME_BUDGET
from tests.support.conditioning import rows_of
from tests.support.libcudas import DEADLINE_S, MPSD_RUN, PATHS, PROGRAMS, Libraries
from tests.support.site import Site, Status

Ask = Callable[[str], str]
# The copy of 8 MiB takes as long as the kernel "late".
SLOW = {"MPSD_STANDIN_MEMORY_CLOCK": "1000", "MPSD_STANDIN_BUS_WIDTH": "420"}


@pytest.fixture
def site(libraries: Libraries) -> Iterator[Site]:
    driver = f'"{libraries.real}"'
    with Site(protect='"auto"', failover__driver=driver) as started:
        yield started.start()


@contextmanager
def program(site: Site, libraries: Libraries, **environ: str) -> Iterator[tuple[int, Ask]]:
    """Run a program under mpsd-run; yield its pid, and a function that evaluates an expression in it."""
    given = {
        **libraries.environment(proxied=False, vault="1"),
        "PYTHONPATH": PATHS,
        "MPSD_SOCKET": site.socket,
        "MPSD_LIBCUDA_DIR": str(libraries.proxy),
        "MPSD_STANDIN_GPU": "simulated",
        **environ,
    }
    command = [*MPSD_RUN, "-q", sys.executable, str(PROGRAMS / "moving.py")]
    with subprocess.Popen(command, env=given, stdin=-1, stdout=-1, text=True) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None

        def ask(expression: str) -> str:
            stdin.write(expression + "\n")
            stdin.flush()
            return stdout.readline().strip()

        try:
            assert stdout.readline() == f"{process.pid}\n"
            yield process.pid, ask
            stdin.close()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def row(status: Status, pid: int) -> Mapping[str, Any]:
    rows = (c for c in status["clients"] if c["pid"] == pid and (not c["failover"] or c["failover"]["here"]))
    return next(rows, {"protected": {"level": "", "why": ""}, "failover": None})


def until_level(site: Site, pid: int, level: str, why: str = "") -> Mapping[str, Any]:
    def holds(status: Status) -> bool:
        shown = row(status, pid)["protected"]
        return bool(shown["level"] == level and shown["why"].startswith(why))

    return row(site.until(holds, f"{pid} is {level} ({why})"), pid)


def test_status_shows_limits_and_the_program_that_left(site: Site, libraries: Libraries) -> None:
    first = int(site.status()["gpus"][0]["memory_total_bytes"]) // POOL_SHARE // FIRST_SHARE
    with program(site, libraries) as (usual, ask), program(site, libraries, **SLOW) as (slow, ask_slow):
        for pid in (usual, slow):
            assert until_level(site, pid, "failover")["failover"]["snapshot_limit_bytes"] == first
        assert ask("m = gpu.memory(2 << 20)") == "None"
        assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
        site.until(lambda s: row(s, usual)["failover"]["snapshot_bytes"], "its snapshot buffers are shown")
        ask_slow("m = gpu.made('cuMemAlloc_v2', 8 << 20)")
        assert ask_slow("gpu.run('late', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
        left = until_level(site, slow, "guard", "saving would slow it by ")
        assert left["protected"]["why"].endswith(f" %, the budget is {TIME_BUDGET / 10} %")
        assert (left["failover"]["left"], left["protected"]["remedy"]) == ("time", READS)
        status = site.until(
            lambda s: row(s, slow)["failover"]["snapshot_limit_bytes"] is None, "its memory is free again"
        )
        assert len(rows_of(status, Code.SNAPSHOT_BUDGET)) == 1
        assert ask_slow("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 2)"
        until_level(site, usual, "failover")
