"""Clients of the software GPU: processes of their own, for the kernel may kill them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from emulator.guest import gpu, uvm
from emulator.guest.check import expect
from emulator.guest.child import READY, becomes_readable, child
from mpsd.gpu.nvidia import uvm_abi as abi


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
        return becomes_readable(self.pidfd)


def be_client(hold: int, tell: int, handle: int, channel: int, external: tuple[int, int] | None) -> None:
    """Registers, says so, and does nothing until the other side closes."""
    space = uvm.open_space()
    uvm.pin_memory(space)
    gpu.register_client(space, handle, channel)
    if external is not None:
        given = bytes(abi.encode_external_range(*external))
        expect("external range", uvm.call(space, abi.UVM_CREATE_EXTERNAL_RANGE, given, 16), abi.STATUS_OK)
    os.write(tell, READY)
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
    named = gpu.channel_handle(number, veid=veid, copies=copies)
    with child(lambda hold, tell: be_client(hold, tell, handle, named, external)) as made:
        yield GpuClient(made.pid, made.pidfd, handle, number, veid)
