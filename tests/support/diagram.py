"""Mermaid diagrams of the two state machines, drawn from the tables that core uses.

mpsd/docs/architecture.md shows them between its markers, and a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from mpsd.core.lifecycle import CLIENT_TABLE, DOMAIN_TABLE
from mpsd.core.state import ClientState, DomainState

S = TypeVar("S", bound=StrEnum)
T = TypeVar("T", bound=StrEnum)


def domain_states() -> str:
    """Return a mermaid stateDiagram-v2 of DOMAIN_TABLE. A stopped domain is removed from the state."""
    return _diagram(DomainState.STARTING, DOMAIN_TABLE, f"    {DomainState.STOPPING.value} --> [*]: stopped")


def client_states() -> str:
    """Return a mermaid stateDiagram-v2 of CLIENT_TABLE."""
    return _diagram(ClientState.NOTICED, CLIENT_TABLE)


def filled(page: str) -> str:
    """Return the page with both diagrams between their markers. A page without markers stays as it is."""
    for name, diagram in (("domain-states", domain_states()), ("client-states", client_states())):
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        head, found, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if found and closed:
            page = f"{head}{begin}\n```mermaid\n{diagram}\n```\n{end}{tail}"
    return page


def _diagram(first: S, table: Mapping[S, Mapping[T, S | None]], *more: str) -> str:
    lines = ["stateDiagram-v2", f"    [*] --> {first.value}"]
    for state, row in table.items():
        arrows: dict[str, list[str]] = {}
        for trigger, target in row.items():
            arrows.setdefault(target.value if target is not None else "[*]", []).append(trigger.value)
        lines += [f"    {state.value} --> {to}: {', '.join(why)}" for to, why in arrows.items()]
    return "\n".join((*lines, *more))
