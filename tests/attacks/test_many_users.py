"""Attacks by many users at once: each of them alone stays within its limits."""

from __future__ import annotations

import contextlib

import pytest

import mpsd_client
from tests.support.site import OTHER_UID, Site

SLOTS = 8
FEW_SLOTS = f"""
import sys
from dataclasses import replace
from mpsd.daemon import assembly
policy_of = assembly.policy_of
assembly.policy_of = lambda *given: replace(policy_of(*given), max_slots={SLOTS})
from mpsd.__main__ import main
sys.argv = ["mpsd", *sys.argv[3:]]
sys.exit(main())
"""
"""A daemon with few slots: each of them costs the test two processes."""
USERS = range(100_001, 100_001 + SLOTS + 4)


@pytest.fixture
def site() -> Site:
    return Site(domains__spare="false")


def test_users_that_ask_for_paths_and_run_nothing_lock_nobody_out(site: Site) -> None:
    """S5: more users than slots ask for a path each; the next user, and root, run programs all the same."""
    with site:
        site.launch(python=("-c", FEW_SLOTS))
        site.wait_ready()
        early = site.join(uid=OTHER_UID - 1)
        for uid in USERS:
            # A busy node may refuse some of these users.
            with contextlib.suppress(mpsd_client.MpsdError):
                site.ask(lambda client: client.env(), uid)
        newcomer = site.join(uid=OTHER_UID)
        assert newcomer.do("dev.on_mps") == {"result": True}
        assert site.join().do("dev.on_mps") == {"result": True}
        assert early.do("dev.on_mps") == {"result": True}
        counters = site.status()["counters"]
        assert counters["slots_retired"] > 0 and "slots_refused" not in counters
