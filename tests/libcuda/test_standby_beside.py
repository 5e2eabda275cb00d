"""mpsd-standby after a fault: the old process releases its named buffers, and the next process continues
while the old one ends.

As in test_standby.py: a real daemon on the stand-in driver.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.libcuda.test_attach import environment
from tests.libcuda.test_standby import Service, whole
from tests.support.libcudas import ROOT, Libraries
from tests.support.site import Site, alive, until

PROGRAM = [sys.executable, str(ROOT / "tests" / "libcuda" / "programs" / "turning.py")]
SLOWLY = [sys.executable, "-m", "tests.support.slowkill"]
PATIENT = ["--json", "--patience", "60000"]


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(protect='"guard"') as started:
        yield started.start()


class Deaths:
    """Keep processes killed under `command` alive until `allow`, at most until the end of the block."""

    def __init__(self, path: Path) -> None:
        self._path = path / "they may die"
        self.command = [*SLOWLY, str(self._path), *PATIENT]

    def allow(self) -> None:
        self._path.touch()

    def __enter__(self) -> Deaths:
        return self

    def __exit__(self, *_: object) -> None:
        self.allow()


def holders(site: Site) -> dict[str, int]:
    rows: Sequence[Any] = site.ask(lambda client: client.vault_list())
    return {row["name"]: row["pid"] for row in rows}


def break_its_domain(site: Site, service: Service, options: list[str]) -> int:
    """Make the domain of the service fault; return the pid of the process that counted there."""
    if not options:
        service.said("standby")
    pid = service.counts()
    site.join().fault()
    return pid


@pytest.mark.parametrize("options", [[], ["--cold"]])
def test_the_next_one_goes_on_beside_one_that_has_let_go(
    options: list[str], site: Site, libraries: Libraries, tmp_path: Path
) -> None:
    environ = environment(libraries, site)
    with (
        Deaths(tmp_path) as deaths,
        Service(environ, *options, program=[*PROGRAM, "count"], command=deaths.command) as service,
    ):
        first = break_its_domain(site, service, options)
        service.said("left")
        until(lambda: service.counted[-1][1] != first, "another one counts")
        second = service.counts()
        assert alive(first) and holders(site) == {"count": second}
        # In the old process the buffer appears closed, and the process cannot attach again.
        until(lambda: "closed" in service.printed, "the first one tells")
        refused, shown = ["usage", "usage", "in-use"], "<Buffer 'count' of 100 bytes at closed, persistent>"
        assert service.printed == [*(f"refused {code}" for code in refused), shown, "closed"]
        assert holders(site) == {"count": second}
        said = [event["kind"] for event in service.events]
        assert "settled" not in said and said.count("started") == 2
        deaths.allow()
        service.said("settled")
        assert not alive(first)
        if not options:
            service.said("standby", 2)
        assert service.counts() == second
        service.process.terminate()
        service.end()
    # A process that is not killed may print a number late.
    numbers = [number for number, _ in service.counted]
    assert len(set(numbers)) == len(numbers) >= max(numbers) - 1


@pytest.mark.parametrize("options", [[], ["--cold"]])
def test_a_buffer_of_a_child_is_had_when_the_child_has_ended(
    options: list[str], site: Site, libraries: Libraries, tmp_path: Path
) -> None:
    environ = environment(libraries, site)
    with (
        Deaths(tmp_path) as deaths,
        Service(environ, *options, program=[*PROGRAM, "child"], command=deaths.command) as service,
    ):
        first = break_its_domain(site, service, options)
        child = int(service.printed[0].split()[1])
        until(lambda: holders(site)["count"] not in (first, None), "the next one has what was let go of")
        assert holders(site)["child"] == child and alive(child)
        assert {pid for _, pid in service.counted} == {first}
        deaths.allow()
        until(lambda: service.counted[-1][1] != first, "another one counts")
        assert not alive(child) and holders(site) == dict.fromkeys(("count", "child"), service.counts())


def test_one_that_ends_by_itself_lets_go_before(site: Site, libraries: Libraries) -> None:
    environ = environment(libraries, site)
    with Service(environ, *PATIENT[1:], program=[*PROGRAM, "exit"]) as service:
        first = break_its_domain(site, service, [])
        service.said("left")
        service.said("took-over")
        service.said("settled")
        assert service.counts() != first
    whole(service, service.counted[-1][0])


def test_one_that_does_not_answer_is_killed_and_followed(site: Site, libraries: Libraries) -> None:
    with Service(environment(libraries, site), program=[*PROGRAM, "count"]) as service:
        service.said("standby")
        first = service.counts()
        os.kill(first, signal.SIGSTOP)
        site.join().fault()
        service.said("took-over")
        assert service.counts() != first and not alive(first)
    assert "left" not in {event["kind"] for event in service.events}
    whole(service, service.counted[-1][0])
