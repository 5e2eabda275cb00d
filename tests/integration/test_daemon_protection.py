"""The protection level of a whole daemon on the simulated node: by default, by the setting, and by user."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mpsd.vault.messages import Kind, Message
from tests.support.site import DEFAULTS, OTHER_UID, Program, Site, as_user
from tests.support.vaulting import VaultClient

THIRD_UID = 65533
DRIVER = {"failover__driver": '"/bin/true"'}
"""A file stands for the driver: these tests load no copy of it."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")


def env(site: Site, uid: int | None = None) -> Mapping[str, Any]:
    return site.ask(lambda client: client.call("env"), uid)


def sockets(reply: Mapping[str, Any]) -> tuple[str, str]:
    """Return the file names of the vault's and the fail-over socket."""
    return os.path.basename(reply["vault"]), os.path.basename(reply["failover"])


def losses(status: Mapping[str, Any]) -> list[str]:
    """Return the problems that say that the level is lower than it should be."""
    return [text for text in status["problems"] if text.startswith("the protection level")]


def first_check(site: Site) -> Mapping[str, Any]:
    checks = site.ask(lambda client: client.doctor())
    assert checks[0]["name"] == "protection"
    return checks[0]


def mode_given(site: Site, program: Program) -> str | None:
    """Let a program ask for fail-over. Return its mode; None if it is no participant."""
    said = program.do(f"failover({str(site.run_dir / 'failover.sock')!r}, 'exact')")["result"]
    assert said[0] == "WELCOME"
    (row,) = (c for c in site.status()["clients"] if c["pid"] == program.pid and c["state"] == "attached")
    return None if row["failover"] is None else str(row["failover"]["mode"])


def vault_answers(site: Site, uid: int) -> bool:
    """Return whether the vault's socket accepts a connection of this user."""
    with as_user(uid):
        client = VaultClient(site.run_dir / "vault.sock", greet=False)
    try:
        return client.ask(Message(Kind.HELLO)).status == 0
    except EOFError:
        return False
    finally:
        client.socket.close()


def test_without_a_setting_a_proven_node_has_fail_over() -> None:
    with Site(**DEFAULTS, **DRIVER) as site:
        site.start()
        status = site.status()
        shown = status["protection"]
        assert (shown["setting"], shown["level"], shown["why"]) == ("auto", "failover", "")
        assert shown["gpu"] == "Simulated GPU" and shown["evidence"] and not losses(status)
        assert status["gpus"][0]["protection"] == shown
        reply = env(site)
        assert reply["protection"] == {"level": "failover", "why": "", "remedy": ""}
        assert sockets(reply) == ("vault.sock", "failover.sock")
        check = first_check(site)
        assert (check["ok"], check["finding"]) == (True, "failover (the simulated GPU: proven)")
        assert mode_given(site, site.join()) == "exact"


def test_without_a_driver_to_copy_auto_is_guard_and_no_problem() -> None:
    with Site(**DEFAULTS, failover__driver='"/nowhere/libcuda.so.1"') as site:
        site.start()
        status = site.status()
        assert status["protection"]["level"] == "guard" and not losses(status)
        assert "/nowhere/libcuda.so.1" in status["protection"]["why"] and status["protection"]["remedy"]
        reply = env(site)
        assert reply["protection"]["level"] == "guard"
        # The socket stays on offer: the level rises while programs run once the driver can be copied.
        assert sockets(reply) == ("vault.sock", "failover.sock")
        assert first_check(site)["ok"] is None


def test_a_level_that_was_asked_for_and_is_prevented_is_a_problem() -> None:
    with Site(protect='"failover"', failover__driver='"/nowhere/libcuda.so.1"') as site:
        site.start()
        (problem,) = losses(site.status())
        assert problem.startswith("the protection level of GPU 0 is guard instead of failover")
        assert first_check(site)["ok"] is False


@pytest.mark.slow
def test_the_level_follows_the_driver_s_file(tmp_path: Path) -> None:
    driver = tmp_path / "libcuda.so.1"
    driver.write_bytes(b"driver")
    with Site(**DEFAULTS, failover__driver=f'"{driver}"') as site:
        site.start()
        assert site.status()["protection"]["level"] == "failover"
        driver.unlink()
        status = site.until(
            lambda s: s["protection"]["level"] == "guard", "the loss is seen", deadline_s=60.0
        )
        (problem,) = losses(status)
        assert "guard instead of failover" in problem and str(driver) in problem
        assert env(site)["protection"]["level"] == "guard"


def test_the_level_follows_the_compute_mode() -> None:
    with Site(**DEFAULTS, **DRIVER) as site:
        site.start()
        site.node(op="inject", fault="mode", mode="exclusive-process")
        assert env(site)["protection"]["level"] == "guard"
        shown = site.status()["protection"]
        assert shown["level"] == "guard" and "EXCLUSIVE_PROCESS of GPU 0" in shown["why"]


def test_at_observe_no_door_opens() -> None:
    with Site() as site:
        site.start()
        reply = env(site)
        assert reply["protection"]["why"] == 'protect = "observe"' and sockets(reply) == ("", "")
        assert not {"vault.sock", "failover.sock"} & set(os.listdir(site.run_dir))
        assert not losses(site.status())


@needs_root
def test_users_have_lower_levels() -> None:
    users = f'{{ {OTHER_UID} = "observe", {THIRD_UID} = "guard", no-such-user = "guard" }}'
    with Site(**DEFAULTS, **DRIVER, users=users) as site:
        site.start()
        assert sockets(env(site)) == ("vault.sock", "failover.sock")
        assert sockets(env(site, OTHER_UID)) == ("", "")
        assert env(site, OTHER_UID)["protection"] == {
            "level": "observe",
            "why": '[users] sets "observe" for this user',
            "remedy": "ask for another level in [users]",
        }
        assert sockets(env(site, THIRD_UID)) == ("vault.sock", "")
        # Programs that know the sockets get no more by asking there.
        assert mode_given(site, site.join(uid=THIRD_UID)) is None
        assert vault_answers(site, THIRD_UID) and not vault_answers(site, OTHER_UID)
        assert site.status()["counters"]["vault_closed_level"] == 1
        status = site.status()
        assert not losses(status) and [text for text in status["problems"] if "no-such-user" in text]


def test_keys_of_an_earlier_release_work_and_are_logged_once() -> None:
    with Site(**DEFAULTS, vault__enabled="true") as site:
        site.start()
        assert sockets(env(site)) == ("vault.sock", "")
        (line,) = site.said("key of an earlier release")
        assert 'write protect = "guard" instead' in line["what"]
