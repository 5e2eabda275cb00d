"""The two state machines as mermaid diagrams, made from the tables that core decides by.

The README shows them between its markers; a test compares, so that it cannot fall behind.
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
    """A mermaid stateDiagram-v2 of DOMAIN_TABLE. A domain is forgotten once it has stopped."""
    return _diagram(DomainState.STARTING, DOMAIN_TABLE, f"    {DomainState.STOPPING.value} --> [*]: stopped")


def client_states() -> str:
    """A mermaid stateDiagram-v2 of CLIENT_TABLE."""
    return _diagram(ClientState.NOTICED, CLIENT_TABLE)


def filled(readme: str) -> str:
    """The text with both diagrams between their markers; a text without the markers stays as it is."""
    for name, diagram in (("domain-states", domain_states()), ("client-states", client_states())):
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        head, found, rest = readme.partition(begin)
        _, closed, tail = rest.partition(end)
        if found and closed:
            readme = f"{head}{begin}\n```mermaid\n{diagram}\n```\n{end}{tail}"
    return readme


def _diagram(first: S, table: Mapping[S, Mapping[T, S | None]], *more: str) -> str:
    lines = ["stateDiagram-v2", f"    [*] --> {first.value}"]
    for state, row in table.items():
        arrows: dict[str, list[str]] = {}
        for trigger, target in row.items():
            arrows.setdefault(target.value if target is not None else "[*]", []).append(trigger.value)
        lines += [f"    {state.value} --> {to}: {', '.join(why)}" for to, why in arrows.items()]
    return "\n".join((*lines, *more))
