"""How mpsd ends, with its domains or without them, and what the next mpsd does with the remains."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.site import Site, until


def both(site: Site) -> None:
    """Wait for an active domain and its standby domain."""
    site.until(lambda s: sorted(d["state"] for d in s["domains"]) == ["active", "warm"], "both domains")


@contextmanager
def terminals(handler: signal.Handlers) -> Iterator[None]:
    """Set the handler of SIGHUP for processes started meanwhile, however these tests were started."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["told", "its terminal ends"])
def test_stop_domains_ends_everything(number: int) -> None:
    with terminals(signal.SIG_DFL), Site() as site:
        site.start("--stop-domains")
        client = site.join()
        held = site.join()
        held.busy(0.5)
        both(site)
        assert site.terminate(number) == 0
        for program in (client, held):
            assert program.wait() == -signal.SIGKILL
        gpu = int(site.node(op="node")["pid"])
        # The GPU belongs to the machine, not to mpsd.
        until(lambda: [p.pid for p in site.processes()] == [gpu], "nothing but the GPU is left")
        assert not list((site.run_dir / "d").iterdir())
        assert not list((site.run_dir / "s").iterdir())


def test_under_nohup_it_outlives_its_terminal() -> None:
    with terminals(signal.SIG_IGN), Site() as site:
        site.start()
        assert site.process is not None
        site.process.send_signal(signal.SIGHUP)
        site.join()
        both(site)
        assert site.terminate() == 0


def test_after_stop_domains_a_domain_is_started_for_whoever_asks_and_nobody_else() -> None:
    with Site() as site:
        site.start("--stop-domains")
        path = site.client_environ()["CUDA_MPS_PIPE_DIRECTORY"]
        both(site)
        assert site.terminate() == 0
        site.start()
        assert site.status()["domains"] == []
        assert not os.path.lexists(path)
        # The path is the same, so a program that kept it in its environment can join again.
        assert site.client_environ()["CUDA_MPS_PIPE_DIRECTORY"] == path
        site.join()


def test_a_stop_without_its_domains_keeps_the_paths() -> None:
    with Site() as site:
        site.start()
        path = site.client_environ()["CUDA_MPS_PIPE_DIRECTORY"]
        both(site)
        assert site.terminate() == 0
        assert os.path.exists(path)
        site.start()
        assert len(site.status()["domains"]) == 2
