"""One daemon for all tests of a file. Files with tests that kill the daemon use a `site` of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.site import Site


@pytest.fixture(scope="module")
def served() -> Iterator[Site]:
    with Site() as started:
        yield started.start()


@pytest.fixture
def site(served: Site) -> Iterator[Site]:
    """The daemon; each test ends with no client left in it."""
    yield served
    served.empty()
