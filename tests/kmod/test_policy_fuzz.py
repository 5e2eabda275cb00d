"""Garbage in every field of the policy's structures, and counters at their limits.

A fixed number of cases runs under the sanitizers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kmod import native

STEPS = 500_000


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native.build(tmp_path_factory.mktemp("fuzz"), "policy_fuzz", *native.POLICY)


@pytest.mark.parametrize("seed", [1, 2, 3, 0xFFFF_FFFF_FFFF_FFFF])
def test_garbage_breaks_no_law(seed: int, fuzz: Path) -> None:
    assert native.run(fuzz, seed, STEPS) == b""


def test_counters_at_their_end(tmp_path: Path) -> None:
    assert native.run(native.build(tmp_path, "policy_limits", *native.POLICY)) == b""
