"""mpsd exits with the right status after it has closed everything, even if its threads hang."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import NoReturn

import pytest

from mpsd.base.errors import DeadlineError
from mpsd.ctl import commands
from mpsd.ctl.__main__ import main

# A daemon of which only threads are left: one of each kind, or none.
SCRIPT = """
import asyncio, sys, threading
from concurrent.futures import ThreadPoolExecutor
from mpsd.daemon import assembly, cli
from mpsd.base.errors import NotFoundError

hang, fail = sys.argv[1] == "hang", sys.argv[2] == "fail"
never = threading.Event()

class Daemon:
    def __init__(self, *_): pass
    async def run(self, stop_domains):
        work = never.wait if hang else int
        looks = ThreadPoolExecutor(1, "looks")
        asyncio.get_running_loop().run_in_executor(looks, work)
        asyncio.get_running_loop().run_in_executor(None, work)
        looks.shutdown(wait=False)
        await asyncio.sleep(0)
        print("closed")
        if fail:
            raise NotFoundError("what was looked for")

assembly.Daemon = Daemon
devices = type("D", (), {"close": lambda self: None})()
cli.open_backend = lambda config: type("B", (), {"isolation": None, "devices": devices})()
sys.exit(cli.main(["run", "--config", sys.argv[3]]))
"""


@pytest.mark.parametrize("hang", ["hang", "calm"])
@pytest.mark.parametrize(("fail", "status"), [("fail", 1), ("well", 0)])
def test_it_ends_with_the_right_status(hang: str, fail: str, status: int) -> None:
    # The path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="m") as base:
        config = f"{base}/mpsd.toml"
        with open(config, "w") as file:
            for name in ("run", "log", "state"):
                file.write(f'{name}_dir = "{base}/{name}"\n')
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, hang, fail, config], capture_output=True, text=True, timeout=60
        )
    assert ended.returncode == status, ended.stderr
    assert ended.stdout == "closed\n"
    assert ("ended although threads hang" in ended.stderr) == (hang == "hang")
    assert ("what was looked for" in ended.stderr) == (fail == "fail")


NOWHERE = "/nowhere/mpsd.sock"
PRINTING = {
    "env": f"{sys.executable} -m mpsd.ctl --socket {NOWHERE} env",
    "metrics": f"{sys.executable} -m mpsd.exporter --socket {NOWHERE}",
}


@pytest.mark.parametrize("to", [">/dev/full", ">&-"])
@pytest.mark.parametrize(("program", "status"), [("env", 3), ("metrics", 1)])
def test_what_cannot_be_printed_is_no_traceback(program: str, status: int, to: str) -> None:
    command = f"{PRINTING[program]} {to}"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in ended.stderr
    assert ended.returncode == (0 if program == "metrics" and to == ">&-" else status), ended.stderr


@pytest.mark.parametrize("verb", ["version", "doctor"])
def test_where_the_daemon_hangs_it_is_found_out_here(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hangs(path: str | None) -> NoReturn:
        raise DeadlineError("mpsd gave no answer", remedy="start it again")

    monkeypatch.setattr(commands, "connect", hangs)
    assert main([verb]) in (0, 10)
    said = capsys.readouterr()
    assert "mpsd gave no answer" in said.out and not said.err


@pytest.mark.parametrize("command", ["run true", "run --env", "standby true"])
def test_a_token_that_is_too_long_is_refused_before_anything_is_begun(command: str) -> None:
    """A token that was cut would equal the token of every owner with the same first bytes."""
    environ = {**os.environ, "MPSD_VAULT_TOKEN": "x" * 40, "MPSD_SOCKET": NOWHERE}
    ended = subprocess.run(
        [sys.executable, "-m", *f"mpsd_client.{command}".split()],
        capture_output=True,
        text=True,
        env=environ,
        timeout=60,
    )
    assert ended.returncode == 69, ended
    assert "MPSD_VAULT_TOKEN has 40 bytes; the limit is 32" in ended.stderr
    assert ended.stdout == ("false\n" if "--env" in command else "")


@pytest.mark.parametrize("limit", [20, 64, 255])
def test_too_few_descriptors_are_refused_before_anything_is_made(limit: int) -> None:
    command = f"ulimit -n {limit} && exec {sys.executable} -m mpsd run --backend simulated"
    with tempfile.TemporaryDirectory() as base:
        places = {f"MPSD_{name}_DIR": f"{base}/{name}" for name in ("RUN", "LOG", "STATE")}
        ended = subprocess.run(
            ["sh", "-c", command], capture_output=True, text=True, env={**os.environ, **places}, timeout=60
        )
        assert not os.listdir(base)
    assert ended.returncode not in (0, 124) and "Traceback" not in ended.stderr, ended
    assert f"mpsd may open only {limit} files; it needs at least 256" in ended.stderr
