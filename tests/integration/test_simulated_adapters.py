"""mpsd.gpu.base over a simulated node: descriptors, trackers, guards, the NVML stand-in, scripted faults."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess

import pytest

from mpsd.base.errors import GpuError, NotFoundError, NotReadyError
from mpsd.base.model import ProcessInstance
from mpsd.gpu.base import Backend
from mpsd.gpu.simulated import packets, paths
from mpsd.gpu.simulated.adapters import SimulatedUvm
from mpsd.os import procfs
from tests.support.descriptors import inheritable, open_descriptors
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import (
    DEADLINE_S,
    Domain,
    devices,
    lease,
    until,
    uuid,
)

__all__ = ["backend", "domain", "second"]

DOMAINS_ARE_NEW = True


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


def test_a_managed_range_of_the_client_tells_who_asks_for_serviced_faults(
    domain: Domain, backend: Backend
) -> None:
    client = domain.client().ready()
    space = lease(backend, client)
    deaf, tracker = space.track(), space.track()
    tracker.report_serviced()
    assert client.error("dev.lay_managed(0x7E0000000000, 1 << 20)") is None
    assert client.error("dev.lay_managed(0x7E0000000000, 1 << 20)") == 1
    assert client.error("dev.launch('load', address=0x7E0000003008) or dev.synchronize()") is None
    assert select.select([tracker], [], [], DEADLINE_S)[0]
    (event,) = tracker.drain().events
    assert (event.fatal, event.address, event.access) == (False, 0x7E0000003000, "read")
    assert client.error("dev.take_managed(0x7E0000000000, 1 << 20)") is None
    assert client.error("dev.launch('load', address=0x7E0000003008) or dev.synchronize()") == 700
    assert [event.fatal for event in deaf.drain().events] == [True]
    for made in (deaf, tracker, space):
        made.close()


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
