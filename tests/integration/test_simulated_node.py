"""A whole simulated node: the GPU process, control and server stand-ins, clients, adapters. Real processes.

No test waits without a deadline, and what is started here is gone at the end: `node` proves it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from mpsd.errors import GpuError, NotFoundError, NotReadyError, NotRunningError
from mpsd.gpu.base import Backend
from mpsd.gpu.simulated import packets, paths
from mpsd.gpu.simulated.adapters import SimulatedDevices, SimulatedSpace, SimulatedUvm
from mpsd.gpu.simulated.backend import open_simulated, stop_simulated
from mpsd.gpu.simulated.client import GpuFailure, SimulatedDevice
from mpsd.linux import procfs
from mpsd.model import ProcessInstance, UvmFaultType
from tests.support.descriptors import inheritable, open_descriptors

T = TypeVar("T")
DEADLINE_S = 20.0
ROOT = Path(__file__).resolve().parents[2]

# A client that obeys: each line of its input is a Python expression on `dev`; the answer is a JSON line.
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
        """The next line it says."""
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
        until(lambda: self.run("get_server_list")[0] == 0)

    def run(
        self, text: str, *, arguments: tuple[str, ...] = (), deadline_s: float = DEADLINE_S
    ) -> tuple[int, str]:
        """Exit status and output of the front end, given `text` on its standard input."""
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
        return int(until(lambda: self.say("get_server_list")))

    def status(self) -> str:
        return self.say(f"get_server_status {self.server()}")

    @property
    def log(self) -> str:
        return (self.base / "control.log").read_text()

    def close(self) -> None:
        for client in self.clients:
            client.kill()
        if self.control is not None:
            self.control.kill()
            self.control.wait(DEADLINE_S)
        shutil.rmtree(self.base)


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    """A node for this file. At its end no process of it is left."""
    with tempfile.TemporaryDirectory(prefix="simnode") as base:
        opened = open_simulated(Path(base) / "n", gpus=2)
        try:
            yield opened
        finally:
            opened.devices.close()
            if opened.kernel_log is not None:
                opened.kernel_log.close()
            stop_simulated(Path(base) / "n")
        assert processes_of(base) == []
        assert not os.path.exists(paths.gpu_socket(f"{base}/n"))


def processes_of(directory: str) -> list[str]:
    """Command lines that mention the directory, zombies left out."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if directory in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found


@pytest.fixture
def domain(backend: Backend) -> Iterator[Domain]:
    made = short_domain(backend)
    try:
        made.start()
        yield made
    finally:
        made.close()
        until(lambda: processes_of(str(made.base)) == [])


@pytest.fixture
def second(backend: Backend) -> Iterator[Domain]:
    made = short_domain(backend)
    try:
        made.start()
        yield made
    finally:
        made.close()


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


# -- a node that works ----------------------------------------------------------------------------------


def test_a_client_joins_and_computes(domain: Domain) -> None:
    client = domain.client()
    assert client.listen() == {"pid": client.pid, "on_mps": True}
    address = client.number("dev.alloc(100)")
    client.ask(f"dev.write({address}, bytes(400))")
    for _ in range(3):
        client.ask(f"dev.launch('increment', address={address}, words=100)")
    assert client.ask(f"dev.read({address}, 400)")["result"] == (b"\3\0\0\0" * 100).hex()
    assert domain.status() == "ACTIVE"
    assert domain.say(f"get_client_list {domain.server()}") == str(client.pid)
    assert str(client.pid) in domain.say("ps").splitlines()[1].split()


def test_without_a_control_daemon_a_client_runs_outside_mps(backend: Backend) -> None:
    with tempfile.TemporaryDirectory(prefix="simnone") as nowhere:
        client = Client({"CUDA_MPS_PIPE_DIRECTORY": nowhere, **backend.control_environment})
        try:
            assert client.listen()["on_mps"] is False
            (listed,) = backend.devices.processes(uuid(backend))
            assert (listed.pid, listed.mps) == (client.pid, False)
        finally:
            client.kill()


def test_no_node_is_never_started_silently() -> None:
    with tempfile.TemporaryDirectory(prefix="simnone") as nowhere:
        with pytest.raises(NotRunningError):
            open_simulated(nowhere, start=False)
        with pytest.raises(GpuFailure) as failure:
            SimulatedDevice.open({"MPSD_SIM_DIR": nowhere, "CUDA_MPS_PIPE_DIRECTORY": nowhere})
        assert failure.value.code == 100


def test_two_openers_share_one_gpu_process(backend: Backend) -> None:
    directory = backend.control_environment["MPSD_SIM_DIR"]
    before = processes_of(directory)
    again = open_simulated(directory)
    assert again.devices.gpus() == backend.devices.gpus()
    again.devices.close()
    assert again.kernel_log is not None
    again.kernel_log.close()
    assert processes_of(directory) == before


def test_a_node_ends_with_its_directory() -> None:
    with tempfile.TemporaryDirectory(prefix="simgone") as base:
        opened = open_simulated(base)
        opened.devices.close()
        assert opened.kernel_log is not None
        opened.kernel_log.close()
        assert processes_of(base)
    until(lambda: processes_of(base) == [])


@pytest.mark.parametrize("how", ["stop", "SIGKILL"])
def test_everything_ends_with_the_gpu(how: str) -> None:
    with tempfile.TemporaryDirectory(prefix="simend") as base:
        backend = open_simulated(base)
        domain = Domain(Path(tempfile.mkdtemp(prefix="simdom")), backend)
        try:
            domain.start()
            client = domain.client().ready()
            server = domain.server()
            watch = backend.devices.watch_xids()
            if how == "stop":
                stop_simulated(base)
            else:
                with packets.connect(paths.gpu_socket(base)) as sock:
                    os.kill(int(packets.call(sock, {"op": "node"})[0]["pid"]), signal.SIGKILL)
            assert domain.control is not None
            domain.control.wait(DEADLINE_S)
            until(lambda: not os.path.exists(f"/proc/{server}"))
            assert client.error() in (46, 806)
            with pytest.raises(GpuError):
                watch.drain()
            with pytest.raises(GpuError):
                backend.devices.gpus()
            watch.close()
        finally:
            domain.close()
            stop_simulated(base)
            backend.devices.close()
            assert backend.kernel_log is not None
            backend.kernel_log.close()
        until(lambda: processes_of(base) == [])


# -- the control stand-in -------------------------------------------------------------------------------


def test_commands_come_by_standard_input_or_as_arguments(domain: Domain) -> None:
    for text in ("get_default_active_thread_percentage", "get_default_active_thread_percentage\n"):
        assert domain.run(text) == (0, "100.0")
    assert domain.run("", arguments=("get_default_active_thread_percentage",)) == (0, "100.0")
    assert domain.run("get_server_list\nget_default_client_priority\n") == (0, "0")


@pytest.mark.parametrize(
    ("command", "reply"),
    [
        ("nonsense 1", 'Unknown command "nonsense"'),
        ("ps", "Server not found"),
        ("get_server_status 999999", "Server 999999 not found"),
        ("get_client_list 999999", "Server 999999 not found"),
        ("get_server_status", "Invalid arguments for get_server_status"),
        ("set_default_active_thread_percentage 50", "50.0"),
        ("set_default_device_pinned_mem_limit 99 2G", ""),
        ("terminate_client 999999 1", "Server 999999 not found\nServer 999999 not found!\n1"),
    ],
)
def test_replies(domain: Domain, command: str, reply: str) -> None:
    assert domain.run(command) == (0, reply)


def test_nobody_there_is_exit_status_1(backend: Backend) -> None:
    absent = short_domain(backend)
    assert absent.run("get_server_list") == (1, "Cannot find MPS control daemon process")
    absent.close()


def test_a_second_daemon_does_not_start(domain: Domain) -> None:
    assert domain.run("", arguments=("-f",)) == (1, "An instance of this daemon is already running")


def test_files_and_audit_lines(domain: Domain) -> None:
    assert domain.control is not None
    names = {path.name for path in (domain.base / "p").iterdir()}
    assert names == {"control", "control_privileged", "control_lock", "log", "nvidia-cuda-mps-control.pid"}
    assert (domain.base / "p/nvidia-cuda-mps-control.pid").read_text() == f"{domain.control.pid}\n"
    assert f" Control {domain.control.pid:5}] Cmd:get_server_list\n" in domain.log
    assert domain.backend.control_binary in procfs.command_line(domain.control.pid)[:3]
    assert Path(f"/proc/{domain.control.pid}/comm").read_text() == "nvidia-cuda-mps\n"


def test_settings_reach_clients(domain: Domain) -> None:
    domain.say("set_default_device_pinned_mem_limit 0 1G")
    assert domain.say("get_default_device_pinned_mem_limit 0") == "1G"
    client = domain.client().ready()
    assert client.error("dev.alloc(1 << 28)") == 2
    assert client.number("dev.alloc(1 << 20)")


def test_in_the_background_it_returns_when_it_answers_and_logs_to_files(backend: Backend) -> None:
    domain = short_domain(backend)
    (domain.base / "p").mkdir()
    assert domain.run("", arguments=("-d",)) == (0, "")
    pid = int((domain.base / "p/nvidia-cuda-mps-control.pid").read_text())
    pidfd = os.pidfd_open(pid)
    client = domain.client().ready()
    assert "NEW CLIENT" in (domain.base / "control.log").read_text()
    assert "Server has started" in (domain.base / "server.log").read_text()
    client.kill()
    assert domain.run("quit") == (0, "")
    assert select.select([pidfd], [], [], DEADLINE_S)[0], "quit did not end the daemon"
    os.close(pidfd)
    assert [path.name for path in (domain.base / "p").iterdir()] == ["control_lock"]
    domain.close()


def test_quit_waits_for_clients_but_not_longer_than_told(domain: Domain) -> None:
    assert domain.control is not None
    client = domain.client().ready()
    with pytest.raises(subprocess.TimeoutExpired):
        domain.run("quit", deadline_s=0.5)
    client.kill()
    assert domain.control.wait(DEADLINE_S) == 0


def test_a_forced_quit_breaks_the_clients_connection(domain: Domain) -> None:
    client = domain.client().ready()
    domain.say("quit -t 0")
    assert client.error() == 806


def test_a_dead_server_is_replaced_for_the_next_client(domain: Domain) -> None:
    client = domain.client().ready()
    old = domain.server()
    os.kill(old, signal.SIGKILL)
    until(lambda: client.error() == 806)
    domain.client().ready()
    assert domain.server() != old
    assert f"Server {old} exited with status 0" in domain.log


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_server_dies_with_its_control_daemon(domain: Domain, how: signal.Signals) -> None:
    assert domain.control is not None
    client = domain.client().ready()
    domain.control.send_signal(how)
    assert domain.control.wait(DEADLINE_S) == -how
    until(lambda: client.error() == 806)
    assert (domain.base / "p/control").exists(), "nobody cleans up"
    assert domain.client().listen()["on_mps"] is False
    domain.start()
    assert domain.client().listen()["on_mps"] is True


def as_another_user(domain: Domain, uid: int) -> tuple[int, int]:
    """A process of this user that joins: its pid and a pipe that gives one byte once it has."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        # No exec: the interpreter may be out of that user's reach.
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        SimulatedDevice.open(domain.environment)
        os.write(writer, b"!")
        signal.pause()
    finally:
        os._exit(1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
def test_a_second_user_waits_for_the_first_and_gets_a_server_of_its_own(domain: Domain) -> None:
    for directory in (domain.base, Path(domain.backend.control_environment["MPSD_SIM_DIR"]).parent):
        directory.chmod(0o755)
    first = domain.client().ready()
    server = domain.server()
    pid, joined = as_another_user(domain, 65534)
    try:
        until(lambda: "from user 65534: Server is not ready, push client to pending list" in domain.log)
        assert not select.select([joined], [], [], 0.2)[0]
        first.kill()
        assert select.select([joined], [], [], DEADLINE_S)[0]
        assert os.read(joined, 1) == b"!"
        assert domain.server() != server
        assert os.stat(f"/proc/{domain.server()}").st_uid == 65534
    finally:
        os.close(joined)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# -- faults ---------------------------------------------------------------------------------------------


def test_a_stray_store_kills_both_and_is_seen_first_by_the_tracker(domain: Domain, backend: Backend) -> None:
    innocent, offender = domain.client().ready(), domain.client().ready()
    space = lease(backend, offender)
    tracker = space.track()
    xids = backend.devices.watch_xids()
    assert backend.kernel_log is not None
    backend.kernel_log.drain()
    offender.ask("dev.launch('store', address=0x7e0000000000)")
    assert select.select([tracker], [], [], DEADLINE_S)[0]
    ((event,), dropped) = (tracker.drain().events, tracker.drain().dropped)
    assert (event.fault_type, event.address, dropped) == (UvmFaultType.INVALID_PDE, 0x7E0000000000, 0)
    assert innocent.error("dev.launch('spin', duration_s=5) or dev.synchronize()") == 700
    assert offender.error() == 700
    assert select.select([xids], [], [], DEADLINE_S)[0]
    assert [(x.gpu_uuid, x.xid) for x in xids.drain()] == [(uuid(backend), 31)]
    assert select.select([backend.kernel_log], [], [], DEADLINE_S)[0]
    (line,) = backend.kernel_log.drain()
    assert (line.xid, line.pid, line.pci) == (31, innocent.pid, backend.devices.gpus()[0].pci)
    assert domain.status() == "FAULT"
    assert domain.client().listen() == {"error": 807}
    for client in (innocent, offender):
        client.kill()
    tracker.close()
    space.close()
    xids.close()
    until(lambda: domain.status() == "ACTIVE")
    assert "Server is handling a fatal GPU error." in domain.log
    domain.client().ready()


def test_terminate_client_spares_the_others(domain: Domain) -> None:
    innocent, offender = domain.client().ready(), domain.client().ready()
    offender.ask("dev.launch('forever')")
    assert domain.say(f"terminate_client {domain.server()} {offender.pid}") == "0"
    assert offender.error() == 810
    offender.kill()
    assert innocent.error("dev.launch('spin', duration_s=0.3) or dev.synchronize()") is None
    assert (
        domain.say(f"terminate_client {domain.server()} {offender.pid}")
        == f"Invalid process {offender.pid}!\n1"
    )
    assert domain.say(f"terminate_client {domain.server()} {os.getpid()}") == "201"


def test_terminate_of_a_stopped_client_blocks_the_daemon_and_the_others_until_it_dies(domain: Domain) -> None:
    innocent, offender = domain.client().ready(), domain.client().ready()
    server = domain.server()
    os.kill(offender.pid, signal.SIGSTOP)
    until(lambda: procfs.stat(offender.pid).state == "T")
    terminate = subprocess.Popen(
        [domain.backend.control_binary, f"terminate_client {server} {offender.pid}"],
        env=domain.environment,
        stdout=subprocess.PIPE,
    )
    until(lambda: "requesting client" in domain.log)
    assert domain.run("get_server_list") == (1, "Cannot send command to MPS control daemon process")
    innocent.tell("dev.launch('spin') or dev.synchronize()")
    assert innocent.process.stdout is not None
    assert not select.select([innocent.process.stdout], [], [], 0.3)[0]
    offender.kill()
    assert innocent.listen() == {"result": None}
    assert terminate.communicate(timeout=DEADLINE_S)[0] == b"0\n"


def test_terminate_in_fault_blocks(domain: Domain) -> None:
    innocent, offender = domain.client().ready(), domain.client().ready()
    offender.ask("dev.launch('pbdma')")
    assert innocent.error("dev.launch('spin', duration_s=5) or dev.synchronize()") == 719
    server = domain.server()
    with pytest.raises(subprocess.TimeoutExpired):
        domain.run(f"terminate_client {server} {offender.pid}", deadline_s=0.5)


# -- leases ---------------------------------------------------------------------------------------------


def test_a_lease_keeps_a_killed_clients_kernel_from_harming_anybody(domain: Domain, backend: Backend) -> None:
    innocent, victim = domain.client().ready(), domain.client().ready()
    free = backend.devices.memory_used(uuid(backend))
    victim.number("dev.alloc(1 << 20)")
    held = backend.devices.memory_used(uuid(backend))
    assert held > free
    space = lease(backend, victim)
    instance = victim.instance()
    work = backend.work.open(instance, -1)
    victim.ask("dev.launch('spin', duration_s=1.0)")
    victim.kill()
    assert work.pending()
    until(lambda: not work.pending())
    assert backend.devices.memory_used(uuid(backend)) == held
    assert victim.pid not in {process.pid for process in backend.devices.processes(uuid(backend))}
    space.close()
    until(lambda: backend.devices.memory_used(uuid(backend)) < free)
    assert innocent.error("dev.launch('spin', duration_s=0.3) or dev.synchronize()") is None
    assert domain.status() == "ACTIVE"


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 11)"])
def test_without_a_lease_an_end_in_mid_kernel_kills_the_others(domain: Domain, end: str) -> None:
    innocent, victim = domain.client().ready(), domain.client().ready()
    victim.ask("dev.launch('spin', duration_s=5.0)")
    victim.tell(f"[__import__('resource').setrlimit(4, (0, 0)), {end}]")
    victim.process.wait(DEADLINE_S)
    assert innocent.error("dev.launch('spin', duration_s=5.0) or dev.synchronize()") == 700


def test_closing_the_lease_of_an_endless_kernel_kills_the_others(domain: Domain, backend: Backend) -> None:
    innocent, victim = domain.client().ready(), domain.client().ready()
    space = lease(backend, victim)
    victim.ask("dev.launch('forever')")
    victim.kill()
    assert innocent.error("dev.launch('spin', duration_s=0.3) or dev.synchronize()") is None
    space.close()
    assert innocent.error("dev.launch('spin', duration_s=5.0) or dev.synchronize()") == 700


def test_a_lease_survives_being_handed_over(domain: Domain, backend: Backend) -> None:
    innocent, victim = domain.client().ready(), domain.client().ready()
    space = lease(backend, victim)
    kept = {role: os.dup(fd) for role, fd in space.fds.items()}
    space.close()
    victim.ask("dev.launch('spin', duration_s=0.5)")
    victim.kill()
    adopted = backend.uvm.adopt(kept)
    assert innocent.error("dev.launch('spin', duration_s=1.0) or dev.synchronize()") is None
    adopted.close()
    assert innocent.error("dev.launch('spin', duration_s=0.3) or dev.synchronize()") is None


def test_a_forked_child_is_no_client_and_exec_ends_one(domain: Domain) -> None:
    innocent, victim = domain.client().ready(), domain.client().ready()
    server = domain.server()
    victim.ask("__import__('subprocess').run(['true']) and None")
    assert victim.error() is None
    victim.tell("os.execv('/bin/cat', ['cat'])")
    until(lambda: domain.say(f"get_client_list {server}") == str(innocent.pid))
    assert victim.process.poll() is None
    assert innocent.error("dev.launch('spin', duration_s=0.3) or dev.synchronize()") is None


# -- the adapters ---------------------------------------------------------------------------------------


def test_who_has_no_context_is_not_ready_and_who_is_gone_is_not_found(backend: Backend) -> None:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    instance = ProcessInstance(process.pid, procfs.start_ticks(process.pid))
    pidfd = os.pidfd_open(process.pid)
    with pytest.raises(NotReadyError):
        backend.uvm.open(instance, pidfd)
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    with pytest.raises(NotFoundError):
        backend.uvm.open(instance, pidfd)
    os.close(pidfd)


def test_descriptors_are_close_on_exec_and_none_is_left(domain: Domain, backend: Backend) -> None:
    client = domain.client().ready()
    backend.devices.gpus()
    before, given = open_descriptors(), inheritable()
    space = lease(backend, client)
    tracker = space.track()
    watch = backend.devices.watch_xids()
    assert inheritable() == given
    assert set(space.fds) == {"va", "mm"}
    for made in (tracker, watch, space):
        made.close()
        made.close()
    assert open_descriptors() == before


def test_where_duplication_is_refused_the_gpu_process_is_asked(
    domain: Domain, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpsd.gpu.simulated import adapters

    def refused(_pidfd: int, _number: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(adapters, "_pidfd_getfd", refused)
    client = domain.client().ready()
    space = lease(backend, client)
    assert space.on_request
    assert isinstance(backend.uvm, SimulatedUvm)
    assert backend.uvm.duplication == "request"
    client.ask("dev.launch('forever')")
    client.kill()
    innocent = domain.client().ready()
    assert innocent.error("dev.launch('spin', duration_s=0.3) or dev.synchronize()") is None
    space.close()


def test_guards_absorb_and_break_only_what_they_cover(domain: Domain, backend: Backend) -> None:
    client = domain.client().ready()
    space = lease(backend, client)
    tracker = space.track()
    with pytest.raises(GpuError):
        space.map_sparse(0, 1 << 16, uuid(backend))
    space.map_sparse(1 << 16, 1 << 20, uuid(backend))
    with pytest.raises(GpuError) as taken:
        space.map_sparse(1 << 17, 1 << 20, uuid(backend))
    assert taken.value.status == 0x68
    assert client.error("dev.launch('guard_low') or dev.synchronize()") is None
    assert client.error("dev.host_register(0x40000, 4096)") == 1
    space.unmap_sparse(1 << 16, 1 << 20)
    assert client.error("dev.host_register(0x40000, 4096)") is None
    assert tracker.drain().events == ()
    assert client.error("dev.launch('guard_low') or dev.synchronize()") == 700
    assert select.select([tracker], [], [], DEADLINE_S)[0]
    assert tracker.drain().events[0].address == 0x40000
    tracker.close()
    space.close()


def test_events_that_nobody_reads_are_counted(domain: Domain, backend: Backend) -> None:
    from mpsd.gpu.simulated.adapters import SimulatedTracker

    near, far = packets.pair()
    near.setblocking(False)
    far.setblocking(False)
    tracker = SimulatedTracker(near)
    event = (True, 1, "write", 1, 4096, 5, 0)
    packets.send(far, {"event": event, "dropped": 0})
    packets.send(far, {"event": event, "dropped": 3})
    batch = tracker.drain()
    assert (len(batch.events), batch.dropped) == (2, 3)
    far.close()
    with pytest.raises(GpuError):
        tracker.drain()
    tracker.close()


def test_nvml_lists_servers_and_clients(domain: Domain, backend: Backend) -> None:
    client = domain.client().ready()
    listed = {p.pid: p.mps for p in backend.devices.processes(uuid(backend))}
    assert listed == {client.pid: True, domain.server(): False}
    with pytest.raises(NotFoundError):
        backend.devices.memory_used("GPU-nowhere")


def test_scripted_faults_of_the_device(domain: Domain, backend: Backend) -> None:
    client = domain.client().ready()
    xids = backend.devices.watch_xids()
    devices(backend).inject("xid", number=63)
    assert select.select([xids], [], [], DEADLINE_S)[0]
    assert [x.xid for x in xids.drain()] == [63]
    assert client.error() is None
    devices(backend).inject("xid", number=79)
    assert client.error() == 999
    xids.close()
    with pytest.raises(GpuError):
        devices(backend).inject("nonsense")


def test_a_crashed_server_is_a_dead_server(domain: Domain, backend: Backend) -> None:
    client = domain.client().ready()
    devices(backend).inject("server_crash", server=domain.server())
    until(lambda: client.error() == 806)


def test_a_domain_on_another_gpu_is_out_of_reach(domain: Domain, second: Domain, backend: Backend) -> None:
    one, two = (gpu.uuid for gpu in backend.devices.gpus())
    domain.extra, second.extra = {"CUDA_VISIBLE_DEVICES": one}, {"CUDA_VISIBLE_DEVICES": two}
    innocent, offender = second.client().ready(), domain.client().ready()
    assert offender.error("dev.launch('store') or dev.synchronize()") == 700
    assert innocent.error("dev.launch('spin', duration_s=0.05) or dev.synchronize()") is None
    assert innocent.pid in {p.pid for p in backend.devices.processes(two)}


def test_hostile_messages_do_not_stop_the_gpu(backend: Backend) -> None:
    directory = backend.control_environment["MPSD_SIM_DIR"]
    for data in (b"", b"\0", b"[1]", b"{}", b'{"op":"attach","gpu":[]}', b'{"op":"terminate"}', b"x" * 70000):
        with packets.connect(paths.gpu_socket(directory)) as sock, contextlib.suppress(OSError):
            sock.send(data)
    with packets.connect(paths.gpu_socket(directory)) as sock:
        assert packets.call(sock, {"op": "inject", "fault": "stall"})[0]["error"] == 1
    assert len(backend.devices.gpus()) == 2


def test_many_clients_with_churn(domain: Domain) -> None:
    clients = [domain.client() for _ in range(30)]
    for client in clients:
        client.ready()
    for client in clients[::2]:
        client.kill()
    assert [c.error("dev.launch('spin', duration_s=0.2) or dev.synchronize()") for c in clients[1::2]] == [
        None
    ] * 15
    until(lambda: len(domain.say(f"get_client_list {domain.server()}").split()) == 15)
