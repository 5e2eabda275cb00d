"""The examples and fault callbacks under an mpsd: memory that outlives its program, and received events."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from faultinject.rig.libraries import MPSD_RUN, Libraries
from faultinject.rig.rig import Rig
from faultinject.rig.worker import REPOSITORY, Worker
from tests.support.waiting import DEADLINE_S, until

pytestmark = pytest.mark.timeout(300)

CACHE = REPOSITORY / "clients" / "examples" / "cache_service.py"
TENSOR = """
import sys, torch, mpsd_client
with mpsd_client.session() as session:
    buffer = session.attach("tensor", 4 << 20)
    tensor = torch.from_dlpack(buffer.view("float32", (1024, 1024)))
    print("found" if buffer.found else "new", float(tensor.sum()), flush=True)
    tensor.copy_(torch.arange(1 << 20, device="cuda").reshape(1024, 1024) % 7)
    torch.cuda.synchronize()
    print(float(tensor.sum()), flush=True)
    for line in sys.stdin:
        buffer.forget()
        print("forgotten", flush=True)
"""


class Talking:
    """A program that answers a line with a line; its stderr is in `errors`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], errors: Path) -> None:
        self.errors = errors
        with errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, self.errors.read_text()
        return line

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def until_said(self, *words: str) -> str:
        """Wait for a line of its stderr with all these words."""

        def look() -> str | None:
            lines = self.errors.read_text(errors="replace").splitlines()
            return next((line for line in lines if all(word in line for word in words)), None)

        return until(look, f"{' '.join(words)} is said")


@contextmanager
def talking(command: Sequence[str], environment: Mapping[str, str], errors: Path) -> Iterator[Talking]:
    program = Talking(command, environment, errors)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.communicate(timeout=DEADLINE_S)


def environment(rig: Rig, libraries: Libraries, *, proxied: bool) -> dict[str, str]:
    service = rig.mpsd
    tag = {"MPSD_FAULTINJECT_RUN": str(rig.base), "MPSD_SOCKET": str(service.socket)}
    if proxied:
        return libraries.proxied(service.environment, service.socket, vault=True) | tag
    return libraries.plain(service.client_environment()) | tag


def cache(
    rig: Rig, libraries: Libraries, *, proxied: bool, life: int
) -> tuple[list[str], dict[str, str], Path]:
    command = [*(MPSD_RUN if proxied else ()), sys.executable, str(CACHE)]
    return command, environment(rig, libraries, proxied=proxied), rig.base / f"cache-{life}.err"


def offender(rig: Rig, libraries: Libraries) -> Worker:
    """A program under the proxy that will store past the end of its allocation."""
    worker = rig.spawn(
        "offender-0",
        "offender",
        *("zone_past_end", "--variant", "one", "--memory", str(1 << 20)),
        environment=environment(rig, libraries, proxied=True),
        through=MPSD_RUN,
        device="standin" if libraries.driver else None,
    )
    worker.require("ready", timeout=DEADLINE_S)
    return worker


def has_zones(rig: Rig, pid: int) -> bool:
    zones = (c["guard_zones"] for c in rig.mpsd.status()["clients"] if c["pid"] == pid)
    return bool((next(zones, None) or {}).get("managed"))


@pytest.mark.parametrize("proxied", [False, True], ids=["plain", "proxied"])
def test_the_cache_survives_its_death(rig: Rig, libraries: Libraries, *, proxied: bool) -> None:
    with talking(*cache(rig, libraries, proxied=proxied, life=1)) as first:
        assert first.hear() == "ready: 0 entries, kept"
        assert {first.ask(f"put key{n} value{n}") for n in range(100)} == {"ok"}
        first.process.send_signal(signal.SIGKILL)
        assert first.process.wait(DEADLINE_S) == -signal.SIGKILL
    with talking(*cache(rig, libraries, proxied=proxied, life=2)) as second:
        assert second.hear() == "ready: 100 entries, kept"
        assert [second.ask(f"get key{n}") for n in (0, 99)] == ["value0", "value99"]
        assert second.ask("forget").startswith("ok")
    until(lambda: not rig.mpsd.ask(lambda c: c.vault_list()), "nothing is held any more")


@pytest.mark.parametrize("proxied", [False, True], ids=["plain", "proxied"])
def test_a_program_hears_who_strayed_and_works_on(rig: Rig, libraries: Libraries, *, proxied: bool) -> None:
    with talking(*cache(rig, libraries, proxied=proxied, life=1)) as service:
        assert service.hear() == "ready: 0 entries, kept"
        assert service.ask("put colour red") == "ok"
        stray = offender(rig, libraries)
        until(lambda: has_zones(rig, stray.pid), "it has guard zones")
        stray.tell("go")
        assert "guard zone was hit" in service.until_said("mpsd:", f"client {stray.pid}", "being evicted")
        service.until_said("mpsd:", "lost a client", str(stray.pid))
        stray.require("gone", timeout=DEADLINE_S)
        assert service.ask("get colour") == "red"


def test_a_tensor_of_pytorch_survives_its_program(rig: Rig, libraries: Libraries) -> None:
    if libraries.driver is not None or importlib.util.find_spec("torch") is None:
        pytest.skip("needs a real GPU and PyTorch")
    command, where = [*MPSD_RUN, sys.executable, "-c", TENSOR], environment(rig, libraries, proxied=True)
    with talking(command, where, rig.base / "torch-1.err") as first:
        assert first.hear() == "new 0.0"
        total = first.hear()
        first.process.send_signal(signal.SIGKILL)
        assert first.process.wait(DEADLINE_S) == -signal.SIGKILL
    with talking(command, where, rig.base / "torch-2.err") as second:
        assert second.hear() == f"found {total}"
        assert second.hear() == total
        assert second.ask("end") == "forgotten"
