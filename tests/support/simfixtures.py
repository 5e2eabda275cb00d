"""Fixtures of tests on a simulated node: `backend` for a module, `domain`, `second`, `third` for a test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpsd.gpu.base import Backend
from mpsd.gpu.simulated import paths
from mpsd.gpu.simulated.backend import open_simulated, stop_simulated
from tests.support.simnode import (
    Domain,
    processes_of,
    short_domain,
    until,
)


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    """A node for this file. At its end no process of it is left."""
    with tempfile.TemporaryDirectory(prefix="simnode") as base:
        opened = open_simulated(Path(base) / "n", gpus=2)
        try:
            yield opened
        finally:
            opened.devices.close()
            if opened.kernel_log is not None:
                opened.kernel_log.close()
            stop_simulated(Path(base) / "n")
        assert processes_of(base) == []
        assert not os.path.exists(paths.gpu_socket(f"{base}/n"))


@pytest.fixture
def domain(backend: Backend) -> Iterator[Domain]:
    with _running(backend) as made:
        yield made


@pytest.fixture
def second(backend: Backend) -> Iterator[Domain]:
    with _running(backend) as made:
        yield made


@pytest.fixture
def third(backend: Backend) -> Iterator[Domain]:
    with _running(backend) as made:
        yield made


@contextmanager
def _running(backend: Backend) -> Iterator[Domain]:
    made = short_domain(backend)
    try:
        made.start()
        yield made
    finally:
        made.close()
        until(lambda: processes_of(str(made.base)) == [])
