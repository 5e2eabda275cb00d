"""Fixtures of tests on a simulated node: `backend` for a module, `domain`, `second`, `third` for a test.

Tests of a file share a domain that the test before left intact, since starting and ending it is most of a
short test's cost. A file about domains as such sets DOMAINS_ARE_NEW.
"""

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

_UNUSED: dict[str, list[Domain]] = {}
"""Unused domains, by the control binary of their node."""


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A node for this file. At its end no process of it is left."""
    with tempfile.TemporaryDirectory(prefix="simnode") as base:
        opened = open_simulated(Path(base) / "n", gpus=2)
        unused: list[Domain] = []
        if not getattr(request.module, "DOMAINS_ARE_NEW", False):
            _UNUSED[str(opened.control_binary)] = unused
        try:
            yield opened
        finally:
            for domain in unused:
                _end(domain)
            _UNUSED.pop(str(opened.control_binary), None)
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
    unused = _UNUSED.get(str(backend.control_binary))
    made = unused.pop() if unused else short_domain(backend)
    try:
        if made.control is None:
            made.start()
        yield made
    finally:
        made.kill_clients()
        if unused is not None and not made.extra and made.is_as_it_was():
            (made.base / "p" / "gate").unlink(missing_ok=True)
            unused.append(made)
        else:
            _end(made)


def _end(domain: Domain) -> None:
    domain.close()
    until(lambda: processes_of(str(domain.base)) == [])
