"""A pytest plugin, loaded by PYTEST_PLUGINS, that chooses tests and writes each outcome to a file.

MPSD_SUITE_OUTCOMES names the file (one JSON object a line), MPSD_SUITE_SHARD is "I/N", MPSD_SUITE_ONLY names
a file with the only tests to run. It uses the standard library and pytest alone.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

OUTCOMES, SHARD, ONLY = "MPSD_SUITE_OUTCOMES", "MPSD_SUITE_SHARD", "MPSD_SUITE_ONLY"
WHY = 160
_STATS = "/memfd:mpsd-libcuda"


@pytest.fixture(scope="class")
def initialize_from_pytest_config(request: pytest.FixtureRequest) -> None:
    """The attributes that the suite's own conftest, missing from its wheel, sets for its base class."""
    request.cls._dump_failed_filechecks = False


def in_shard(test: str, shard: str) -> bool:
    """Return whether a test belongs to shard "I/N": all tests of one class are in the same."""
    number, _, of = shard.partition("/")
    scope = test.rpartition("::")[0] or test
    return zlib.crc32(scope.encode()) % int(of) == int(number) - 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard, only = os.environ.get(SHARD), os.environ.get(ONLY)
    wanted = set(Path(only).read_text(encoding="utf-8").splitlines()) if only else None
    selected = [
        item
        for item in items
        if (not shard or in_shard(item.nodeid, shard)) and (wanted is None or item.nodeid in wanted)
    ]
    dropped = [item for item in items if item not in set(selected)]
    items[:] = selected
    config.hook.pytest_deselected(items=dropped)


def _write(**facts: Any) -> None:
    line = json.dumps(facts) + "\n"
    target = os.open(os.environ[OUTCOMES], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(target, line.encode())
    finally:
        os.close(target)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Workers of xdist pass their reports to the one process that knows all tests.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        xfail = hasattr(report, "wasxfail")
        why = report.longreprtext.strip().rpartition("\n")[2][:WHY] if report.failed else ""
        _write(test=report.nodeid, when=report.when, outcome=report.outcome, xfail=xfail, why=why)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        why = report.longreprtext.strip().rpartition("\n")[2][:WHY]
        _write(test=report.nodeid, when="collect", outcome="failed", xfail=False, why=why)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Record whether this process has the proxy, and the proxy's statistics."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        mapped = any(_STATS in line for line in maps)
    stats = _statistics() if mapped else None
    _write(process=os.getpid(), proxy=mapped, stats=stats)


def _statistics() -> dict[str, Any] | None:
    from faultinject.programs.basics.statistics import read_stats

    stats = read_stats(os.getpid())
    return None if stats is None else dict(stats)
