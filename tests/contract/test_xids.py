"""XidSource and KernelLog: the driver's reports of a fault, by number and by log line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from mpsd.base.model import NvmlXid
from mpsd.gpu.base import KernelLog, XidSource
from tests.support.gpunode import Node, faulted_at
from tests.support.waiting import DEADLINE_S, readable

pytestmark = pytest.mark.timeout(300)
UNMAPPED = 0x7E0000000000


@pytest.fixture
def source(node: Node) -> Iterator[XidSource]:
    opened = node.backend.devices.watch_xids()
    try:
        yield opened
    finally:
        opened.close()


def kernel_log(node: Node) -> KernelLog:
    log = node.backend.kernel_log
    assert log is not None, "this machine's kernel log may not be read"
    return log


def test_their_descriptors_are_close_on_exec(node: Node, source: XidSource) -> None:
    assert not os.get_inheritable(source.fileno())
    assert not os.get_inheritable(kernel_log(node).fileno())


def test_without_a_fault_there_is_nothing(node: Node, source: XidSource) -> None:
    node.survivor().ready().unharmed()
    assert list(source.drain()) == []
    assert list(kernel_log(node).drain()) == []


def test_closed_twice_is_closed(node: Node) -> None:
    source = node.backend.devices.watch_xids()
    source.close()
    source.close()


def test_a_trap_is_43_on_the_server(node: Node, source: XidSource) -> None:
    guilty, innocent = node.offender("trap"), node.survivor()
    guilty.ready()
    innocent.ready()
    guilty.go()
    assert readable(source, DEADLINE_S)
    assert list(source.drain()) == [NvmlXid(node.gpu.uuid, 43)]
    (line,) = node.xids(43)
    assert (line.pci, line.pid) == (node.gpu.pci, node.domain.server)
    assert (guilty.failure(), innocent.failure()) == (719, 719)


def test_a_misaligned_store_is_13_without_pid_and_then_43(node: Node, source: XidSource) -> None:
    guilty, innocent = node.offender("misaligned"), node.survivor()
    guilty.ready()
    innocent.ready()
    guilty.go()
    lines = node.xids(43)
    assert [line.xid for line in lines] == [13, 13, 43]
    assert [line.pid for line in lines] == [None, None, node.domain.server]
    assert re.search("misaligned address", lines[0].text, re.IGNORECASE)
    assert readable(source, DEADLINE_S)
    assert NvmlXid(node.gpu.uuid, 43) in source.drain()
    assert innocent.failure() == 716


def test_a_stray_store_is_31_with_its_address_and_the_pid_of_some_client(
    node: Node, source: XidSource
) -> None:
    guilty, innocent = node.offender("store"), node.survivor()
    guilty.ready()
    innocent.ready()
    guilty.go()
    (line,) = node.xids(31)
    assert line.pci == node.gpu.pci
    assert faulted_at(line) == UNMAPPED
    assert "ACCESS_TYPE_VIRT_WRITE" in line.text
    assert line.pid in (guilty.pid, innocent.pid, node.domain.server)
    assert readable(source, DEADLINE_S)
    assert list(source.drain()) == [NvmlXid(node.gpu.uuid, 31)]
    assert (guilty.failure(), innocent.failure()) == (700, 700)


def test_an_assert_is_no_xid_and_nobody_elses_affair(node: Node, source: XidSource) -> None:
    guilty, innocent = node.offender("assert"), node.survivor()
    guilty.ready()
    innocent.ready()
    guilty.go()
    assert guilty.failure() == 710
    innocent.unharmed()
    assert list(source.drain()) == []
    assert list(kernel_log(node).drain()) == []
