"""One compiled policy for all tests; each test begins with a new space."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kmod.policydriver import Policy


@pytest.fixture(scope="session")
def compiled_policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    policy = Policy(tmp_path_factory.mktemp("policy"))
    yield policy
    policy.close()


@pytest.fixture
def policy(compiled_policy: Policy) -> Policy:
    compiled_policy.begin()
    return compiled_policy
