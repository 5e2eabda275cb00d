"""The soft limit of descriptors is raised as far as allowed."""

from __future__ import annotations

import resource

import pytest

from mpsd.os import descriptors


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), 4096),
        ((4096, 4096), 4096),
        ((1024, 1 << 30), descriptors.MAX_DESCRIPTORS),
        ((1024, resource.RLIM_INFINITY), descriptors.MAX_DESCRIPTORS),
        ((1 << 21, 1 << 30), 1 << 21),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), resource.RLIM_INFINITY),
    ],
)
def test_it_is_raised_to_the_hard_one_within_reason(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: int
) -> None:
    now = [before]
    monkeypatch.setattr(resource, "getrlimit", lambda which: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: now.append(pair))
    assert descriptors.raise_limit() == after
    assert now[-1] == (after, before[1])


def test_a_refusal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, pair: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (10, 20))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert descriptors.raise_limit() == 10
