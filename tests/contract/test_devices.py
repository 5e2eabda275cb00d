"""DeviceManager: the GPUs, their memory and processes."""

from __future__ import annotations

import re

import pytest

from mpsd.base.errors import NotFoundError
from mpsd.base.model import ComputeMode, GpuProcess
from tests.support.gpunode import MEMORY, Node
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(300)


def processes(node: Node) -> dict[int, GpuProcess]:
    return {process.pid: process for process in node.backend.devices.processes(node.gpu.uuid)}


def test_the_gpus_are_described(node: Node) -> None:
    gpus = node.backend.devices.gpus()
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))
    assert len({gpu.uuid for gpu in gpus}) == len({gpu.pci for gpu in gpus}) == len(gpus)
    for gpu in gpus:
        assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", gpu.uuid)
        assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", gpu.pci)
        assert gpu.name
        assert 0 < node.backend.devices.memory_used(gpu.uuid) < gpu.memory_bytes
        assert node.backend.devices.compute_mode(gpu.uuid) is ComputeMode.DEFAULT


def test_the_driver_has_a_version(node: Node) -> None:
    assert re.fullmatch(r"\d{3,}\.\d+(\.\d+)?", node.backend.devices.driver_version())


def test_a_gpu_that_is_not_there_is_not_found(node: Node) -> None:
    devices = node.backend.devices
    for ask in (devices.memory_used, devices.compute_mode, devices.processes):
        with pytest.raises(NotFoundError):
            ask("GPU-00000000-0000-0000-0000-00000000dead")


def test_clients_servers_and_outsiders_are_told_apart(node: Node) -> None:
    nowhere = {"CUDA_MPS_PIPE_DIRECTORY": str(node.base / "none"), "CUDA_VISIBLE_DEVICES": node.gpu.uuid}
    client, outsider = node.offender("clean_exit"), node.offender("clean_exit", environment=nowhere)
    assert client.ready().require("ready").data["on_mps"] is not False
    assert outsider.ready().require("ready").data["on_mps"] is not True
    listed = processes(node)
    assert listed[client.pid].mps
    assert not listed[outsider.pid].mps
    assert not listed[node.domain.server].mps
    for pid in (client.pid, outsider.pid):
        memory = listed[pid].memory_bytes
        assert memory is None or memory > MEMORY


@pytest.mark.parametrize("kind", ["clean_exit", "sigkill_idle"])
def test_who_has_left_is_listed_no_longer(node: Node, kind: str) -> None:
    client = node.offender(kind).ready()
    assert client.pid in processes(node)
    client.go()
    client.gone()
    until(lambda: client.pid not in processes(node), "the process off the list")


def test_memory_comes_and_goes_with_a_client(node: Node) -> None:
    before = node.memory_used()
    client = node.offender("clean_exit").ready()
    assert node.memory_used() >= before + MEMORY
    client.go()
    client.gone()
    until(lambda: node.memory_used() <= before + MEMORY // 4, "its memory given back")
