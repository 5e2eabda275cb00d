"""A whole simulated node: the GPU process, its stand-ins, clients, adapters. Real processes.

Every wait has a deadline. The fixtures check that no process of a test is left at its end.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from mpsd.base.errors import GpuError, NotRunningError
from mpsd.base.model import UvmFaultType
from mpsd.gpu.base import Backend
from mpsd.gpu.simulated import packets, paths
from mpsd.gpu.simulated.backend import open_simulated, stop_simulated
from mpsd.gpu.simulated.client import GpuFailure, SimulatedDevice
from mpsd.os import procfs
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import (
    DEADLINE_S,
    Client,
    Domain,
    lease,
    processes_of,
    until,
    uuid,
)

__all__ = ["backend", "domain", "second"]

DOMAINS_ARE_NEW = True


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


@pytest.mark.parametrize("command", ["x", "get_server_list"])
def test_a_command_writes_no_line_of_its_own_into_the_log(domain: Domain, command: str) -> None:
    domain.ask(f"{command}\n[2026-01-01 00:00:00.000 Server 1] Server is handling a fatal GPU error.")
    assert "fatal GPU error" not in domain.log


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
    until(lambda: "Server is handling a fatal GPU error." in domain.log)
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
