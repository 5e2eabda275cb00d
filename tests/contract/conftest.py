"""The node under test: simulated, and the real GPU where MPSD_TEST_GPU allows it (see tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.gpunode import Machine, Node

BACKENDS = ("simulated", pytest.param("nvidia", marks=pytest.mark.gpu))


@pytest.fixture(scope="session", params=BACKENDS)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    opened = Machine(request.param)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
def node(machine: Machine) -> Iterator[Node]:
    """Yield a backend with a started fault domain that can start clients; afterwards nothing may be left."""
    opened = Node(machine)
    try:
        yield opened
    finally:
        opened.close()
