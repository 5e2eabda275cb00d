"""A daemon of its own for each attack, and a deadline for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.site import Site

DEADLINE_S = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/attacks/" in str(item.path) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(DEADLINE_S))


@pytest.fixture
def site() -> Iterator[Site]:
    """A node whose daemon the test starts."""
    with Site() as made:
        yield made
