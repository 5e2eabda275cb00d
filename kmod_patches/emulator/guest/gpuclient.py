"""Clients of the software GPU: processes of their own, for the kernel may kill them."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from emulator.guest import gpu, uvm
from emulator.guest.check import CheckError, expect
from mpsd.gpu.nvidia import uvm_abi as abi

WAIT_MS = 60_000


@dataclass(frozen=True, slots=True)
class GpuClient:
    """`handle` names its address space to the stub, `channel` the one channel that it has registered."""

    pid: int
    pidfd: int
    handle: int
    channel: int
    veid: int

    def ended(self) -> bool:
        """Whether it is gone within the time that a check waits."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(WAIT_MS))


def be_client(hold: int, tell: int, handle: int, channel: int, external: tuple[int, int] | None) -> None:
    """Registers, says so, and does nothing until the other side closes."""
    space = uvm.open_space()
    uvm.pin_memory(space)
    gpu.register_client(space, handle, channel)
    if external is not None:
        given = bytes(abi.encode_external_range(*external))
        expect("external range", uvm.call(space, abi.UVM_CREATE_EXTERNAL_RANGE, given, 16), abi.STATUS_OK)
    os.write(tell, b"r")
    os.read(hold, 1)


@contextmanager
def client(
    handle: int,
    number: int,
    *,
    veid: int = 0,
    copies: bool = False,
    external: tuple[int, int] | None = None,
) -> Iterator[GpuClient]:
    """A client that is registered; killed at the end. All are of one channel group, as under MPS.

    `external` is (base, bytes) of an address range that it has reserved, with nothing mapped in it.
    """
    hold, keep = os.pipe()
    hear, tell = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(keep)
        try:
            channel = gpu.channel_handle(number, veid=veid, copies=copies)
            be_client(hold, tell, handle, channel, external)
        finally:
            os._exit(0)
    os.close(hold)
    os.close(tell)
    pidfd = os.pidfd_open(pid)
    try:
        if os.read(hear, 1) != b"r":
            raise CheckError("the client could not register")
        yield GpuClient(pid, pidfd, handle, number, veid)
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in (pidfd, keep, hear):
            os.close(fd)
