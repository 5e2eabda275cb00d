"""Limits in `status`: answers of the domains that serve, never the configuration where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

from mpsd.api.limitsview import of_domains, of_gpus
from mpsd.base.model import Gpu
from mpsd.config.schema import Limits
from mpsd.core.state import Domain, DomainState, Policy, Slot, State
from mpsd.limits.book import LimitBook, Owner
from mpsd.limits.values import Key, Kind

GPUS = (Gpu(0, "GPU-a", "", "", 1), Gpu(1, "GPU-b", "", "", 1))
PERCENTAGE, PRIORITY = Key(Kind.PERCENTAGE), Key(Kind.PRIORITY)
STOCK = {PERCENTAGE: "100.0", PRIORITY: "0"}
BOOK = LimitBook(Limits(25.0, None, MappingProxyType({"0": "2G"})), GPUS)


def memory(gpu: str) -> Key:
    return Key(Kind.MEMORY, gpu)


def state(*domains: tuple[str, str, int | None, DomainState]) -> State:
    """Return a state with an active domain (name, GPU, user, state) in each slot."""
    slots = {f"s-{name}": Slot(f"s-{name}", (gpu,), uid, active=name) for name, gpu, uid, _ in domains}
    rows = {name: Domain(name, f"s-{name}", (gpu,), uid, is_in, 0.0) for name, gpu, uid, is_in in domains}
    return State(policy=Policy(), slots=slots, domains=rows)


def keeper(answers: Mapping[str, Mapping[Key, str]], book: LimitBook = BOOK) -> Any:
    return SimpleNamespace(book=book, answers=lambda name: answers.get(name, {}))


def test_an_answer_that_differs_from_the_configuration_is_shown_with_its_user() -> None:
    here = state(("d1", "GPU-a", 7, DomainState.ACTIVE), ("d2", "GPU-a", 8, DomainState.ACTIVE))
    answers = {
        "d1": STOCK | {PERCENTAGE: "40.0", memory("GPU-a"): "2G"},
        "d2": STOCK | {PERCENTAGE: "25.0", PRIORITY: "1", memory("GPU-a"): "512M"},
    }
    assert of_gpus(here, keeper(answers), GPUS)["GPU-a"] == {
        "active_thread_percentage (user 7)": "40",
        "active_thread_percentage": "25",
        "client_priority (user 8)": "1",
        "device_pinned_mem_limit": "2048M",
        "device_pinned_mem_limit (user 8)": "512M",
    }


def test_the_configuration_is_not_shown_where_a_domain_answers_otherwise() -> None:
    here = state(("d1", "GPU-a", None, DomainState.ACTIVE))
    assert of_gpus(here, keeper({"d1": STOCK}), GPUS)["GPU-a"] == {}


def test_without_a_domain_that_serves_the_next_limits_are_shown() -> None:
    book = LimitBook(Limits(25.0, None, MappingProxyType({"0": "2G"})), GPUS)
    book.learn(Owner(("GPU-b",), 7), memory("GPU-b"), "512M")
    here = state(("d1", "GPU-a", 7, DomainState.STARTING), ("d2", "GPU-b", 7, DomainState.FAULTED))
    assert of_gpus(here, keeper({"d1": STOCK, "d2": STOCK}, book), GPUS) == {
        "GPU-a": {"active_thread_percentage": "25", "device_pinned_mem_limit": "2048M"},
        "GPU-b": {"active_thread_percentage": "25", "device_pinned_mem_limit (user 7)": "512M"},
    }


def test_before_the_first_answer_the_limits_set_by_hand_are_shown() -> None:
    book = LimitBook(Limits(), GPUS)
    book.learn(Owner(("GPU-a",), 7), PERCENTAGE, "40")
    here = state(("d1", "GPU-a", 7, DomainState.ACTIVE))
    assert of_gpus(here, keeper({}, book), GPUS)["GPU-a"] == {"active_thread_percentage (user 7)": "40"}


def test_a_domains_row_has_numbers_and_none_for_what_is_not_known() -> None:
    here = state(("d1", "GPU-a", 7, DomainState.ACTIVE), ("d2", "GPU-b", 7, DomainState.STARTING))
    answers = {"d1": {PERCENTAGE: "33.3", PRIORITY: "1", memory("GPU-a"): "2G"}}
    assert of_domains(here, keeper(answers)) == {
        "d1": {
            "active_thread_percentage": 33.3,
            "client_priority": 1,
            "device_memory_bytes": {"GPU-a": 2 << 30},
        },
        "d2": {"active_thread_percentage": None, "client_priority": None, "device_memory_bytes": {}},
    }
