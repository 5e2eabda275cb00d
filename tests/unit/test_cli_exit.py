"""mpsd ends once it has closed everything, whatever hangs in its threads; and with the right status."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

# A daemon of which nothing is left but threads: one of each kind, or none.
SCRIPT = """
import asyncio, sys, threading
from concurrent.futures import ThreadPoolExecutor
from mpsd import cli, daemon
from mpsd.errors import NotFoundError

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

daemon.Daemon = Daemon
devices = type("D", (), {"close": lambda self: None})()
cli.open_backend = lambda config: type("B", (), {"isolation": None, "devices": devices})()
sys.exit(cli.main(["run", "--config", sys.argv[3]]))
"""


@pytest.mark.parametrize("hang", ["hang", "calm"])
@pytest.mark.parametrize(("fail", "status"), [("fail", 1), ("well", 0)])
def test_it_ends_with_the_right_status(hang: str, fail: str, status: int) -> None:
    # A socket's path must be short.
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
