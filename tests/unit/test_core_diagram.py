"""The state diagrams, and the page that shows them."""

from __future__ import annotations

import re
from pathlib import Path

from mpsd.core.lifecycle import CLIENT_TABLE, DOMAIN_TABLE
from tests.support import diagram

PAGE = Path(__file__).parents[2] / "mpsd" / "docs" / "architecture.md"


def test_every_transition_is_drawn() -> None:
    for text, table in ((diagram.domain_states(), DOMAIN_TABLE), (diagram.client_states(), CLIENT_TABLE)):
        arrows = {}
        for state, to, why in re.findall(r"^    (\S+) --> (\S+): (.+)$", text, re.MULTILINE):
            arrows[state, to] = why.split(", ")
        for state, row in table.items():
            for trigger, target in row.items():
                assert trigger.value in arrows[state.value, target.value if target else "[*]"]


def test_diagrams_are_mermaid() -> None:
    domains, clients = diagram.domain_states().splitlines(), diagram.client_states().splitlines()
    assert domains[:2] == ["stateDiagram-v2", "    [*] --> starting"]
    assert clients[:2] == ["stateDiagram-v2", "    [*] --> noticed"]
    assert "    active --> faulted: fault" in domains
    assert "    lingering --> held: endless" in clients
    assert domains[-1] == "    stopping --> [*]: stopped"


def test_the_page_shows_the_tables() -> None:
    page = PAGE.read_text()
    assert "<!-- domain-states -->" in page and "<!-- client-states -->" in page
    assert page == diagram.filled(page), f"{PAGE.name} is out of date: write diagram.filled(page) to it"


def test_both_diagrams_go_between_their_markers() -> None:
    text = "a\n<!-- domain-states -->\nold\n<!-- /domain-states -->\nb\n"
    shown = f"<!-- domain-states -->\n```mermaid\n{diagram.domain_states()}\n```\n<!-- /domain-states -->"
    assert diagram.filled(text) == f"a\n{shown}\nb\n"
    assert diagram.filled("no markers <!-- client-states -->") == "no markers <!-- client-states -->"
