"""Limits set by hand or configured: over faults, take-overs and deaths of mpsd, in all domains of a slot."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mpsd.daemon.adoption import KIND, LEVEL
from mpsd.gpu.simulated import paths
from mpsd.records.statefile import StateFile
from tests.support.site import DEADLINE_S, Site, Status

HALF = {"active_thread_percentage": 50.0, "client_priority": 0}
TWO_GIB = 2 << 30
WORDS = 4
"""Bytes of a word."""


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as started:
        yield started.start()


def say(site: Site, command: str, gpu: str | None = None) -> str:
    """Give a command on the slot's path, as operators do, without mpsd. Return the answer."""
    path = site.ask(lambda c: c.env(gpu=gpu))["CUDA_MPS_PIPE_DIRECTORY"]
    done = subprocess.run(
        [paths.launcher(str(site.node_dir), paths.CONTROL_NAME)],
        input=command + "\n",
        env=site.environ() | {"CUDA_MPS_PIPE_DIRECTORY": path},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return done.stdout.strip()


def settled(site: Site) -> Status:
    return site.until(
        lambda s: sorted(d["state"] for d in s["domains"]) == ["active", "warm"], "one active, one warm"
    )


def role(status: Status, wanted: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(d for d in status["domains"] if d["role"] == wanted)
    return found


def capped(status: Status) -> bool:
    """Return whether the active and the standby domain answer 50 % and 2 GiB."""
    gpu = status["gpus"][0]["uuid"]
    wanted = HALF | {"device_memory_bytes": {gpu: TWO_GIB}}
    served = [d for d in status["domains"] if d["state"] in ("active", "warm")]
    return len(served) == 2 and all(d["limits"] == wanted for d in served)


def cap(site: Site) -> Status:
    """Set 50 % and 2 GiB by hand on the slot's path, and wait until mpsd has them everywhere."""
    assert say(site, "set_default_active_thread_percentage 50") == "50.0"
    assert say(site, "set_default_device_pinned_mem_limit 0 2G") == ""
    return site.until(capped, "both domains are capped")


def holds(site: Site) -> None:
    """Check on the serving domain itself that a new client gets both limits."""
    status = site.until(capped, "both domains are capped")
    for domain in (d for d in status["domains"] if d["state"] in ("active", "warm")):
        server = domain["server_pid"]
        answers = {
            site.control(domain["id"], command)
            for command in (
                "get_default_active_thread_percentage",
                f"get_active_thread_percentage {server}",
            )
        }
        assert answers == {"50.0"}
        answers = {
            site.control(domain["id"], command)
            for command in (
                "get_default_device_pinned_mem_limit 0",
                f"get_device_pinned_mem_limit {server} 0",
            )
        }
        assert answers <= {"2G", "2048M"}
    client = site.join()
    assert client.do(f"dev.alloc({(TWO_GIB + (1 << 29)) // WORDS})") == {"error": 2}
    assert client.do(f"dev.alloc({1 << 20}) > 0") == {"result": True}
    user = f"(user {os.getuid()})"
    shown = {f"active_thread_percentage {user} 50", f"device_pinned_mem_limit {user} 2048M"}
    assert set(site.status()["gpus"][0]["limits"]) == shown


def test_limits_set_by_hand_hold_in_the_running_domain_and_its_standby_domain(site: Site) -> None:
    site.join()
    settled(site)
    cap(site)
    holds(site)


def test_limits_set_by_hand_survive_a_fault(site: Site) -> None:
    offender = site.join()
    before = settled(site)
    cap(site)
    offender.fault()
    offender.close()
    site.until(lambda s: role(s, "active")["id"] == role(before, "spare")["id"], "the standby domain serves")
    holds(site)
    # The domain after the next one has them, too.
    settled(site)
    holds(site)


@pytest.mark.parametrize("process", ["server_pid", "control_pid"])
def test_limits_set_by_hand_survive_a_take_over(site: Site, process: str) -> None:
    site.join()
    before = settled(site)
    cap(site)
    os.kill(role(before, "active")[process], signal.SIGKILL)
    site.until(lambda s: role(s, "active")["id"] == role(before, "spare")["id"], "the standby domain serves")
    holds(site)


def test_limits_set_by_hand_survive_kill_9_of_mpsd_and_a_later_fault(site: Site) -> None:
    offender = site.join()
    before = settled(site)
    cap(site)
    site.kill()
    saved = StateFile(site.run_dir / "state.json", KIND, LEVEL).load()
    # As an earlier version reads them.
    assert saved is not None and saved["settings"] == {
        str(os.getuid()): [
            "set_default_active_thread_percentage 50",
            "set_default_device_pinned_mem_limit 0 2048M",
        ]
    }
    site.start()
    holds(site)
    site.attached(offender)
    offender.fault()
    offender.close()
    site.until(lambda s: role(s, "active")["id"] == role(before, "spare")["id"], "the standby domain serves")
    holds(site)


def test_limits_set_by_hand_survive_a_restart_without_any_domain(site: Site) -> None:
    site.join()
    settled(site)
    cap(site)
    site.empty()
    assert site.terminate() == 0
    for process in site.processes(paths.CONTROL_NAME):
        process.kill()
    site.start()
    holds(site)


def test_limits_set_while_no_mpsd_ran_are_found(site: Site) -> None:
    site.join()
    active = role(settled(site), "active")
    site.kill()
    site.control(active["id"], f"set_active_thread_percentage {active['server_pid']} 50")
    site.control(active["id"], "set_default_device_pinned_mem_limit 0 2G")
    site.start()
    holds(site)


def test_an_ordinal_means_the_gpu_of_the_domain_where_it_was_said() -> None:
    limits = '{ "0" = "1G", "1" = "2G" }'
    with Site(simulated__gpus="2", limits__pinned_device_memory=limits) as site:
        site.start()
        for gpu in ("0", "1"):
            site.ask(lambda c, gpu=gpu: c.env(gpu=gpu))  # type: ignore[misc]
        uuids = [gpu["uuid"] for gpu in site.status()["gpus"]]

        def memory(status: Status, gpu: int) -> set[int | None]:
            rows = [
                d["limits"]["device_memory_bytes"] for d in status["domains"] if d["gpus"] == [uuids[gpu]]
            ]
            return {row.get(uuids[gpu]) for row in rows}

        # An index in the configuration is that of the node.
        site.until(
            lambda s: sorted(d["state"] for d in s["domains"]) == ["active"] * 2 + ["warm"] * 2, "both"
        )
        configured = site.status()
        assert (memory(configured, 0), memory(configured, 1)) == ({1 << 30}, {2 << 30})
        (told,) = site.said(
            "an index in limits.pinned_device_memory is that of nvidia-smi; in earlier versions it was the "
            "GPU's place in its domain"
        )
        assert told["indices"] == ["0", "1"] and told["level"] == "warning"
        # Device 0 of GPU 1's domain is GPU 1.
        say(site, "set_default_device_pinned_mem_limit 0 512M", gpu="1")
        changed = site.until(lambda s: memory(s, 1) == {512 << 20}, "both domains of GPU 1 have the limit")
        assert memory(changed, 0) == {1 << 30}
        first = next(d for d in changed["domains"] if d["gpus"] == [uuids[0]] and d["role"] == "active")
        os.kill(first["control_pid"], signal.SIGKILL)
        site.until(
            lambda s: (
                [d["state"] for d in s["domains"] if d["gpus"] == [uuids[0]]].count("warm")
                and first["id"] not in {d["id"] for d in s["domains"]}
            ),
            "GPU 0 has two other domains",
        )
        assert say(site, "get_default_device_pinned_mem_limit 0", gpu="0") == "1024M"
        assert say(site, "get_default_device_pinned_mem_limit 0", gpu="1") == "512M"
        status = site.status()
        assert (memory(status, 0), memory(status, 1)) == ({1 << 30}, {512 << 20})
        by_hand = f"device_pinned_mem_limit (user {os.getuid()}) 512M"
        shown = [gpu["limits"] for gpu in status["gpus"]]
        assert shown == [["device_pinned_mem_limit 1024M"], [by_hand]]


def test_a_changed_configuration_reaches_domains_that_run() -> None:
    with Site(limits__active_thread_percentage="25.0") as site:
        client = site.start().join()
        settled(site)
        assert site.terminate() == 0
        site.write_config(limits__active_thread_percentage="60.0", limits__client_priority="1")
        site.start()

        def changed(status: Status) -> bool:
            found = [
                (d["limits"]["active_thread_percentage"], d["limits"]["client_priority"])
                for d in status["domains"]
            ]
            return found == [(60.0, 1)] * 2

        status = site.until(changed, "both domains have the new limits")
        assert set(status["gpus"][0]["limits"]) == {"active_thread_percentage 60", "client_priority 1"}
        site.attached(client)


def test_a_domain_that_cannot_get_its_limits_is_shown_until_it_has_them(site: Site) -> None:
    site.join()
    standby = role(settled(site), "spare")
    os.kill(standby["control_pid"], signal.SIGSTOP)
    try:
        say(site, "set_default_active_thread_percentage 50")
        text = f"limits of domain {standby['id']} are not applied"
        site.until(lambda s: any(p.startswith(text) for p in s["problems"]), "the problem is shown")
    finally:
        os.kill(standby["control_pid"], signal.SIGCONT)

    def applied(status: Status) -> bool:
        percentages = {d["limits"]["active_thread_percentage"] for d in status["domains"]}
        return percentages == {50.0} and not any("not applied" in p for p in status["problems"])

    site.until(applied, "both domains have the limit")


def test_what_the_environment_of_a_client_says_stays_its_own(site: Site) -> None:
    site.join()
    settled(site)
    cap(site)
    environ = site.client_environ()
    assert not [name for name in environ if "PERCENTAGE" in name or "PINNED" in name or "PRIORITY" in name]
    lower = site.program(environ=environ | {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=512M"})
    assert lower.do(f"dev.alloc({(1 << 30) // WORDS})") == {"error": 2}
    higher = site.program(environ=environ | {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8G"})
    assert higher.do(f"dev.alloc({(TWO_GIB + (1 << 29)) // WORDS})") == {"error": 2}
    assert capped(site.status())
