"""One daemon for all tests of a file; a file whose tests kill theirs has a `site` of its own."""

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
    """The daemon, with nobody left in it afterwards."""
    yield served
    served.empty()
