"""More clients than one domain takes: each slot path leads to a domain with a place (cases 14, N14)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.support.site import Site

TAKES = 3


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(limits__clients=str(TAKES)) as made:
        yield made.start()


def states(status: Mapping[str, Any]) -> dict[str, str]:
    return {row["id"]: row["state"] for row in status["domains"]}


def homes(status: Mapping[str, Any]) -> Counter[str]:
    return Counter(row["domain"] for row in status["clients"])


def crowd(site: Site, count: int) -> None:
    """Start so many clients, each after the slot leads to a domain with a place."""
    for number in range(1, count + 1):
        site.join()
        if number % TAKES == 0:
            full = number // TAKES
            site.until(
                lambda s, full=full: (
                    list(states(s).values()).count("full") == full  # type: ignore[misc]
                    and any(d["role"] == "spare" and d["state"] == "warm" for d in s["domains"])
                ),
                "the next domain serves, beside a standby domain",
            )


def test_every_client_gets_a_place_and_full_domains_end_with_theirs(site: Site) -> None:
    crowd(site, 7)
    status = site.status()
    assert sorted(homes(status).values()) == [1, TAKES, TAKES]
    assert sorted(states(status).values()) == ["active", "full", "full", "warm"]
    assert all(c["state"] == "attached" for c in status["clients"])
    site.empty()
    site.until(lambda s: sorted(states(s).values()) == ["active", "warm"], "the full domains have ended")


def test_a_fault_ends_the_clients_of_one_domain_alone(site: Site) -> None:
    crowd(site, 4)
    first = homes(site.status()).most_common(1)[0][0]
    inside = {row["pid"] for row in site.status()["clients"] if row["domain"] == first}
    offender = next(p for p in site.programs if p.pid in inside)
    other = next(p for p in site.programs if p.pid not in inside)
    offender.fault("trap")
    record = site.until_fault("sm-trap")
    assert record["domain"] == first and other.pid not in record["victims"]
    assert other.do("dev.launch('nop')")


def test_the_next_daemon_keeps_a_full_domain(site: Site) -> None:
    crowd(site, 4)
    before = homes(site.status())
    site.kill()
    site.start()
    found = site.until(lambda s: homes(s) == before, "all clients are known again")
    assert states(found)[before.most_common(1)[0][0]] == "full"
    fifth = site.join()
    rows = [c["domain"] for c in site.status()["clients"] if c["pid"] == fifth.pid]
    assert rows == [before.most_common()[-1][0]], "a newcomer goes to the domain with a place"
