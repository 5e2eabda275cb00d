"""Processes of a simulated node for tests: clients under command, domains, waits with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from mpsd.base.model import ProcessInstance
from mpsd.gpu.base import Backend
from mpsd.gpu.simulated import packets, paths
from mpsd.gpu.simulated.adapters import SimulatedDevices, SimulatedSpace
from mpsd.os import procfs

T = TypeVar("T")
DEADLINE_S = 60.0
ROOT = Path(__file__).resolve().parents[2]

# A client under command: each line of its input is a Python expression on `dev`; the answer is a JSON line.
PROGRAM = """
import json, os, sys
from mpsd.gpu.simulated.client import GpuFailure, SimulatedDevice
def say(**what):
    os.write(1, json.dumps(what).encode() + b"\\n")
try:
    dev = SimulatedDevice.open(os.environ)
except GpuFailure as failure:
    say(error=failure.code)
    sys.exit(7)
say(pid=os.getpid(), on_mps=dev.on_mps)
for line in sys.stdin:
    try:
        result = eval(line)
        say(result=result.hex() if isinstance(result, bytes) else result)
    except GpuFailure as failure:
        say(error=failure.code)
"""


def until(what: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
    """Poll until `what` is truthy. A missed deadline is a failure."""
    end = time.monotonic() + deadline_s
    while not (value := what()):
        assert time.monotonic() < end, "deadline missed"
        select.select([], [], [], 0.005)
    return value


class Client:
    """One client process."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", PROGRAM],
            env={"PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._buffer = b""

    def listen(self, deadline_s: float = DEADLINE_S) -> dict[str, object]:
        """Return the next line of its output."""
        assert self.process.stdout is not None
        end = time.monotonic() + deadline_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))
            assert ready, "the client said nothing in time"
            chunk = os.read(self.process.stdout.fileno(), 4096)
            assert chunk, "the client ended without a word"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        said = json.loads(line)
        assert isinstance(said, dict)
        return said

    def tell(self, expression: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(expression.encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, expression: str) -> dict[str, object]:
        self.tell(expression)
        return self.listen()

    def number(self, expression: str) -> int:
        value = self.ask(expression)["result"]
        assert isinstance(value, int)
        return value

    def error(self, expression: str = "dev.synchronize()") -> object:
        return self.ask(expression).get("error")

    def ready(self) -> Client:
        assert "pid" in self.listen()
        return self

    @property
    def pid(self) -> int:
        return self.process.pid

    def instance(self) -> ProcessInstance:
        return ProcessInstance(self.pid, procfs.start_ticks(self.pid))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@dataclass
class Domain:
    """One control stand-in on its own pipe directory."""

    base: Path
    backend: Backend
    extra: dict[str, str] = field(default_factory=dict)
    clients: list[Client] = field(default_factory=list)
    control: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.base / "p"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.base),
            **self.extra,
        }

    def start(self) -> None:
        (self.base / "p").mkdir(parents=True, exist_ok=True)
        with (self.base / "control.log").open("ab") as log:
            self.control = subprocess.Popen(
                [self.backend.control_binary, "-f"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until(self._answers)

    def _answers(self) -> bool:
        try:
            self.ask("get_server_list")
        except OSError:
            return False
        return True

    def ask(self, text: str) -> str:
        """Ask the control daemon without a front end. Return its answer. Raises OSError."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect(str(self.base / "p" / "control"))
            sock.send(f"ui {text}".encode())
            return sock.recv(1 << 16).decode().strip()

    def run(
        self, text: str, *, arguments: tuple[str, ...] = (), deadline_s: float = DEADLINE_S
    ) -> tuple[int, str]:
        """Return exit status and output of the front end, given `text` on its standard input."""
        done = subprocess.run(
            [self.backend.control_binary, *arguments],
            input=text,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
        return done.returncode, (done.stdout + done.stderr).strip()

    def say(self, text: str) -> str:
        status, reply = self.run(text)
        assert status == 0, reply
        return reply

    def client(self) -> Client:
        client = Client(
            {**self.environment, "MPSD_SIM_DIR": self.backend.control_environment["MPSD_SIM_DIR"]}
        )
        self.clients.append(client)
        return client

    def server(self) -> int:
        return int(until(lambda: self.ask("get_server_list")))

    def status(self) -> str:
        return self.ask(f"get_server_status {self.server()}")

    def is_as_it_was(self, deadline_s: float = 0.5) -> bool:
        """Return whether the domain is unharmed and empty, which it is a moment after its clients' exits."""
        end = time.monotonic() + deadline_s
        try:
            while time.monotonic() < end:
                servers = self.ask("get_server_list").split()
                stand = [self._stand(int(server)) for server in servers]
                if len(servers) > 1 or any(s["faulting"] or s["status"] != "ACTIVE" for s in stand):
                    return False
                if not any(s["clients"] for s in stand):
                    return True
                select.select([], [], [], 0.005)
        except OSError:
            pass
        return False

    def _stand(self, server: int) -> packets.Message:
        """Return the simulated GPU's row of a server. Raises OSError."""
        with packets.connect(paths.gpu_socket(self.backend.control_environment[paths.SIM_DIR])) as sock:
            return packets.call(sock, {"op": "server_info", "server": server})[0]

    @property
    def log(self) -> str:
        return (self.base / "control.log").read_text()

    def kill_clients(self) -> None:
        for client in self.clients:
            client.kill()
        self.clients.clear()

    def close(self) -> None:
        self.kill_clients()
        if self.control is not None:
            self.control.kill()
            self.control.wait(DEADLINE_S)
        shutil.rmtree(self.base)


def processes_of(directory: str) -> list[str]:
    """Return command lines that mention the directory, zombies excluded."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if directory in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found


def short_domain(backend: Backend) -> Domain:
    # Not tmp_path: a socket's path must fit in 107 bytes.
    return Domain(Path(tempfile.mkdtemp(prefix="simdom")), backend)


def devices(backend: Backend) -> SimulatedDevices:
    assert isinstance(backend.devices, SimulatedDevices)
    return backend.devices


def uuid(backend: Backend) -> str:
    return backend.devices.gpus()[0].uuid


def lease(backend: Backend, client: Client) -> SimulatedSpace:
    pidfd = os.pidfd_open(client.pid)
    try:
        (space,) = backend.uvm.open(client.instance(), pidfd)
    finally:
        os.close(pidfd)
    assert isinstance(space, SimulatedSpace)
    return space
