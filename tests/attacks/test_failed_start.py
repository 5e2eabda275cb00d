"""Starts that fail: a server tells why in its own words, and a silent keeper stops nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpsd.base.errors import NotReadyError
from mpsd.gpu.simulated import paths
from tests.support.site import Site, until

# As in the report: the server says why, and ends, within milliseconds.
FAILING_SERVER = """#!/bin/sh
D=$(date +"%Y-%m-%d %H:%M:%S.000")
echo "[$D Other $$] Startup"
echo "[$D Legacy Server $$] Failed to start : invalid argument"
exit 1
"""
WORDS = "ended with status 1: Failed to start : invalid argument"


def replace_server(site: Site, text: str) -> str:
    """Put another server in the place of the node's. Return the text of the former."""
    path = Path(paths.launcher(str(site.node_dir), paths.SERVER_NAME))
    before = path.read_text()
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.chmod(0o755)
    draft.rename(path)
    return before


def test_the_words_of_a_server_that_fails_reach_the_user_at_once(site: Site) -> None:
    """Case 06: the reason is in status, the log, `env` and mpsd-run, and a mended server is started."""
    site.start()
    before = replace_server(site, FAILING_SERVER)
    began = time.monotonic()
    with pytest.raises(NotReadyError, match=WORDS) as refused:
        site.client_environ()
    took_s = time.monotonic() - began
    # `env` reports the first failure, without a second attempt. Its deadline of 20 s plays no part.
    assert len(site.said("the domain did not start")) == 1 and took_s < 10
    assert refused.value.message.startswith("no domain starts for ")
    status = site.until(lambda s: any(WORDS in p for p in s["problems"]), "status names the reason")
    assert not any("within 0." in problem for problem in status["problems"])
    (failed,) = site.said("the domain did not start")[:1]
    assert WORDS in failed["reason"] and "server " in failed["reason"]
    told = mpsd_run(site)
    assert WORDS in told.stderr and told.returncode != 0
    until(lambda: len(site.said("the domain did not start")) > 1, "mpsd tries again")
    replace_server(site, before)
    site.until(lambda s: any(d["state"] == "active" for d in s["domains"]), "the mended server is started")
    assert site.join().do("dev.on_mps") == {"result": True}


def test_mpsd_starts_without_a_keeper_that_does_not_answer(site: Site) -> None:
    """S11: clients are leased and status shows the problem; the keeper gets the leases once it answers."""
    site.start()
    old = site.join("work")
    keeper = site.keeper()
    assert keeper is not None
    os.kill(keeper.pid, signal.SIGSTOP)
    try:
        site.kill()
        site.start()
        text = "leases end with mpsd: the keeper does not hold descriptors"
        site.until(lambda s: any(text in p for p in s["problems"]), "status shows that no store answers")
        assert site.attached(old, site.join())["counters"]["leases_held"] == 2
    finally:
        os.kill(keeper.pid, signal.SIGCONT)
    site.until(lambda s: not any("leases" in p for p in s["problems"]), "the keeper has the leases")
    assert old.finish()["rounds"] > 0


def mpsd_run(site: Site) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mpsd_client.run", "--socket", site.socket, "--", "true"],
        env=site.environ(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
