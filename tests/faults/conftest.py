"""The matrix is run once for all chosen tests, a few runs at a time; each test judges one of its rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from faultinject.matrix import Matrix, Plan
from faultinject.stage import Options

SEED = 11
DEADLINE_S = 90.0

Entries = Mapping[tuple[str, str], "Future[dict[str, Any]]"]


@pytest.fixture(scope="session")
def entries(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Entries:
    """The report's entry of every chosen (fault, mode), by name, as they come in."""
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    pairs = [(p["fault"], p["mode"]) for p in chosen if {"fault", "mode"} <= p.keys()]
    out: Path = tmp_path_factory.mktemp("matrix")
    plan = Plan("simulated", (), (), Options(seed=SEED), deadline_s=DEADLINE_S, out=out)
    matrix = Matrix(plan)
    pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1))
    request.addfinalizer(lambda: pool.shutdown(wait=True, cancel_futures=True))
    return {(f.name, m): pool.submit(matrix.one, f, m, "simulated", out) for f, m in pairs}
