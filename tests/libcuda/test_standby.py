"""mpsd-standby with a real daemon: programs that continue in another process.

The driver is the stand-in; its contexts join the simulated GPU's MPS servers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.libcuda.test_attach import environment
from tests.support.libcudas import DEADLINE_S, ROOT, Libraries
from tests.support.site import Site, alive, until

MPSD_STANDBY = [sys.executable, "-m", "mpsd_client.standby", "--json"]
SERVICE = [sys.executable, str(ROOT / "clients" / "examples" / "warm_service.py"), "--ms", "5"]


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(protect='"guard"') as started:
        yield started.start()


class Service:
    """Run mpsd-standby with the counting example; record each number with its process, and the events."""

    def __init__(
        self,
        environ: dict[str, str],
        *options: str,
        program: Sequence[str],
        command: Sequence[str] = MPSD_STANDBY,
    ) -> None:
        self.process = subprocess.Popen(
            [*command, *options, *program],
            env={**environ, "MPSD_STANDIN_GPU": "simulated"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.counted: list[tuple[int, int]] = []
        self.printed: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.other: list[str] = []
        self._threads = [threading.Thread(target=read) for read in (self._count, self._hear)]
        for thread in self._threads:
            thread.start()

    def _count(self) -> None:
        for line in self.process.stdout or ():
            number, _, pid = line.strip().partition(" ")
            if number.isdecimal():
                self.counted.append((int(number), int(pid)))
            else:
                self.printed.append(line.strip())

    def _hear(self) -> None:
        for line in self.process.stderr or ():
            if line.startswith("{"):
                self.events.append(json.loads(line))
            else:
                self.other.append(line)

    def said(self, kind: str, times: int = 1) -> dict[str, Any]:
        def look() -> list[dict[str, Any]]:
            assert self.process.poll() is None, (self.events, self.other)
            found = [event for event in self.events if event["kind"] == kind]
            return found if len(found) >= times else []

        return until(look, f"{kind} is said {times} times")[times - 1]

    def counts(self, by: int | None = None) -> int:
        """Wait until the service has counted on; return the pid of the process that counted."""
        before = len(self.counted)
        until(lambda: any(by in (None, pid) for _, pid in self.counted[before:]), "it counts on")
        return self.counted[-1][1]

    def end(self) -> int:
        status = self.process.wait(DEADLINE_S)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        # Closing a stream that another thread still reads would block for ever.
        assert not any(thread.is_alive() for thread in self._threads), "something still has its output open"
        return status

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            # The signal ends all children too, including those that are just starting.
            self.process.terminate()
        self.end()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def whole(service: Service, to: int) -> None:
    """Check that no number came from two processes, and that at most one is missing for each death."""
    numbers = [number for number, _ in service.counted]
    assert numbers == sorted(set(numbers)) and numbers[-1] == to
    switches = len({pid for _, pid in service.counted}) - 1
    assert to - len(numbers) <= switches


def test_one_that_waits_takes_over_when_its_neighbour_breaks_the_domain(
    site: Site, libraries: Libraries
) -> None:
    with Service(environment(libraries, site), program=[*SERVICE, "--to", "100000"]) as service:
        for turn in (1, 2):
            service.said("standby", turn)
            first = service.counts()
            offender = site.join()
            offender.fault()
            service.said("took-over", turn)
            assert service.counts() != first
            # The memory stays with the domain and has exactly one holder.
            (row,) = site.ask(lambda client: client.vault_list())
            assert row["name"] == "warm-service" and row["pid"] == service.counted[-1][1]
        service.process.terminate()
        assert service.end() == 128 + signal.SIGTERM
    whole(service, service.counted[-1][0])


def test_where_no_other_server_can_be_it_goes_on_in_the_domain_that_recovers(
    site: Site, libraries: Libraries
) -> None:
    site.node(op="inject", fault="mode", mode="exclusive-process")
    site.until(lambda s: s["gpus"][0]["compute_mode"] == "exclusive-process", "the mode is known")
    program = [*SERVICE, "--to", "100000"]
    with Service(environment(libraries, site), "--cold", program=program) as service:
        for _turn in (1, 2):
            first = service.counts()
            offender = site.join()
            (domain,) = (d["id"] for d in site.status()["domains"] if d["clients"])
            offender.fault()
            offender.finish()
            until(lambda first=first: service.counted[-1][1] != first, "another one counts")  # type: ignore[misc]
            (again,) = (d["id"] for d in site.status()["domains"] if d["clients"])
            assert again == domain
    whole(service, service.counted[-1][0])


@pytest.mark.parametrize("options", [[], ["--cold"]])
def test_one_that_is_killed_is_followed_and_nothing_is_lost(
    options: list[str], site: Site, libraries: Libraries
) -> None:
    with Service(environment(libraries, site), *options, program=[*SERVICE, "--to", "300"]) as service:
        if not options:
            service.said("standby")
        first = service.counts()
        os.kill(first, signal.SIGKILL)
        until(lambda: service.counted[-1][1] != first, "another one counts")
        assert service.end() == 0
    whole(service, 300)
    assert ("took-over" in {event["kind"] for event in service.events}) == (not options)
    assert site.ask(lambda client: client.vault_list()) == []


def test_a_daemon_that_is_restarted_meanwhile_is_found_again(site: Site, libraries: Libraries) -> None:
    with Service(environment(libraries, site), program=[*SERVICE, "--to", "100000"]) as service:
        service.said("standby")
        site.kill()
        service.said("daemon-lost")
        first = service.counts()
        site.start()
        until(lambda: site.status()["clients"], "its clients are known")
        site.join().fault()
        service.said("took-over")
        assert service.counts() != first


def test_the_standby_of_a_lost_domain_is_replaced_and_the_first_works_on(
    site: Site, libraries: Libraries
) -> None:
    with Service(environment(libraries, site), program=[*SERVICE, "--to", "100000"]) as service:
        service.said("standby")
        first = service.counts()
        spare = site.ask(lambda client: client.env(standby=True))["CUDA_MPS_PIPE_DIRECTORY"]
        there = site.program(environ=site.environ() | {"CUDA_MPS_PIPE_DIRECTORY": spare})
        assert there.do("dev.on_mps") == {"result": True}
        there.fault()
        service.said("standby", 2)
        assert service.counts() == first


def test_where_no_domain_can_be_had_yet_it_says_so_and_starts_when_there_is_one(
    site: Site, libraries: Libraries
) -> None:
    site.ask(lambda client: client.drain())
    with Service(environment(libraries, site), program=[*SERVICE, "--to", "100"]) as service:
        assert "is drained" in service.said("not-yet")["text"]
        site.ask(lambda client: client.undrain())
        assert service.end() == 0
    whole(service, 100)
    assert [event["kind"] for event in service.events].count("not-yet") == 1


def test_a_program_that_fails_by_itself_is_left_with_its_status(site: Site, libraries: Libraries) -> None:
    program = [sys.executable, "-c", "raise SystemExit(7)"]
    with Service(environment(libraries, site), "--restarts", "2", program=program) as service:
        assert service.end() == 7
    kinds = [event["kind"] for event in service.events if event["kind"] != "waits"]
    assert kinds == [*["started", "settled"] * 2, "started", "given-up"]


def test_a_program_that_is_always_killed_by_a_signal_is_left_with_that(
    site: Site, libraries: Libraries
) -> None:
    program = ["sh", "-c", "kill -SEGV $$"]
    with Service(environment(libraries, site), "--restarts", "1", program=program) as service:
        assert service.end() == 128 + signal.SIGSEGV


def test_what_it_has_started_is_ended_with_it_whatever_its_session(
    site: Site, libraries: Libraries, tmp_path: Path
) -> None:
    """Children of the program end with it, including one in its own session and an orphan."""
    pids = tmp_path / "pids"
    pids.touch()
    program = f"setsid sleep 3001 & echo $! >> {pids}; (setsid sleep 3002 & echo $! >> {pids}); sleep 3003"
    with Service(environment(libraries, site), "--restarts", "1", program=["sh", "-c", program]) as service:
        for turn in (1, 2):
            service.said("started", turn)
            until(lambda turn=turn: len(pids.read_text().split()) == 2 * turn, "its children are there")  # type: ignore[misc]
            os.kill(int(service.said("started", turn)["text"].split()[1]), signal.SIGKILL)
        assert service.end() == 128 + signal.SIGKILL
    assert not [pid for pid in pids.read_text().split() if alive(int(pid))]


def test_a_stop_gives_what_a_wrapper_has_started_its_time(
    site: Site, libraries: Libraries, tmp_path: Path
) -> None:
    done, there = tmp_path / "done", tmp_path / "there"
    trap = f"trap 'sleep 0.5; echo saved > {done}; exit 0' TERM; echo > {there}; while :; do sleep 0.05; done"
    with Service(environment(libraries, site), program=["sh", "-c", f'sh -c "{trap}"; echo']) as service:
        until(there.exists, "it handles the signal")
        service.process.terminate()
        assert service.end() == 128 + signal.SIGTERM
    assert done.read_text() == "saved\n"


def test_a_standby_that_cannot_be_executed_costs_nobody_his_turn(
    site: Site, libraries: Libraries, tmp_path: Path
) -> None:
    script = tmp_path / "service"
    script.write_text(f"#!/bin/sh\nexec {' '.join(SERVICE)} --to 100000\n")
    script.chmod(0o755)
    with Service(environment(libraries, site), program=[str(script)]) as service:
        first = service.counts()
        spare = int(service.said("standby")["text"].split()[1])
        script.chmod(0o644)
        os.kill(spare, signal.SIGKILL)
        assert service.said("no-standby")["text"].startswith("no waiting process: ")
        assert service.counts() == first
        script.chmod(0o755)


def paths(site: Site) -> list[str]:
    """Return the pipe paths of the domains with clients."""
    domains = (d["id"] for d in site.status()["domains"] if d["clients"])
    return [str(site.run_dir / "d" / name) for name in domains]


@pytest.mark.parametrize("options", [[], ["--cold"]])
def test_on_two_gpus_the_next_process_is_where_the_memory_is(
    options: list[str], libraries: Libraries
) -> None:
    """The next process starts on the GPU that holds the memory, although a client without a choice gets
    the emptiest GPU."""
    with Site(protect='"guard"', simulated__gpus="2") as site:
        site.start()
        gpus: dict[str, list[str]] = {}
        with Service(environment(libraries, site), *options, program=[*SERVICE, "--to", "100000"]) as service:
            first = service.counts()
            site.until(lambda s: s["clients"], "it is a client")
            there = [site.environ() | {"CUDA_MPS_PIPE_DIRECTORY": path} for path in paths(site)]
            beside = [site.program(environ=environ) for environ in there]
            assert all(each.do("dev.on_mps") == {"result": True} for each in beside)
            if not options:
                service.said("standby")
            gpus |= {d["id"]: d["gpus"] for d in site.status()["domains"]}
            os.kill(first, signal.SIGKILL)
            until(lambda: service.counted[-1][1] != first, "another one counts")
            gpus |= {d["id"]: d["gpus"] for d in site.status()["domains"]}
            started = [e["text"].split()[4] for e in service.events if e["kind"] == "started"]
        assert len(started) >= 2 and len({tuple(gpus[domain]) for domain in started}) == 1, (started, gpus)
