"""Tests marked `gpu` run only where MPSD_TEST_GPU=1 says that a GPU must be there (scripts/test-gpu)."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("MPSD_TEST_GPU") == "1":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a real GPU: scripts/test-gpu"))
