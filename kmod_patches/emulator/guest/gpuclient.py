"""Clients of the software GPU: processes of their own, for the kernel may kill them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from emulator.guest import gpu, uvm
from emulator.guest.check import expect
from emulator.guest.child import READY, becomes_readable, child, wait_for
from mpsd.gpu.nvidia import uvm_abi as abi

# From the number of a client's copy channel to that of its channel for kernels.
BESIDE = 16


@dataclass(frozen=True, slots=True)
class GpuClient:
    """`handle` names its address space to the stub, `channel` is the number of the channel that it uses."""

    pid: int
    pidfd: int
    handle: int
    channel: int
    veid: int
    tell: int = -1
    hear: int = -1

    def ask(self, word: bytes) -> None:
        """Has it obey; `answered` waits for the end of that."""
        os.write(self.tell, word)

    def answered(self) -> bytes:
        """Raises CheckError where it does not answer within the time that a check waits."""
        wait_for(self.hear, "the client's answer")
        return os.read(self.hear, 1)

    def ended(self) -> bool:
        """Whether it is gone within the time that a check waits."""
        return becomes_readable(self.pidfd)


@dataclass(frozen=True, slots=True)
class Client:
    """What a client's process does. `handle`: names its address space; `channel`: by handle, too, and so is
    `second`, which it has with that (0: none).

    `external` is (base, bytes) of an address range that it has reserved, with nothing mapped in it; `buffers`
    the same for its channel's context buffers. `prepare` is called with the descriptor of its address space
    once it is registered, `obey` with that and each byte that it is told; what that says is told back.
    """

    handle: int
    channel: int
    second: int = 0
    external: tuple[int, int] | None = None
    buffers: tuple[int, int] = (0, 0)
    shared: bool = False
    prepare: Callable[[int], None] | None = None
    obey: Callable[[int, bytes], bytes] | None = None

    def be(self, hear: int, tell: int) -> None:
        """Registers, says so, and does what it is told until the other side closes."""
        space = uvm.open_space(shared=self.shared)
        if not self.shared:
            uvm.pin_memory(space)
        gpu.register_client(space, self.handle, self.channel, self.buffers)
        if self.second:
            gpu.register_channel(space, self.handle, self.second)
        if self.external is not None:
            given = bytes(abi.encode_external_range(*self.external))
            expect("external range", uvm.call(space, abi.UVM_CREATE_EXTERNAL_RANGE, given, 16), abi.STATUS_OK)
        if self.prepare is not None:
            self.prepare(space)
        os.write(tell, READY)
        while word := os.read(hear, 1):
            if self.obey is not None:
                os.write(tell, self.obey(space, word))


@contextmanager
def client(
    handle: int,
    number: int,
    *,
    group: int = 1,
    veid: int = 0,
    copies: bool = False,
    plain: bool = False,
    external: tuple[int, int] | None = None,
    buffers: tuple[int, int] = (0, 0),
    shared: bool = False,
    prepare: Callable[[int], None] | None = None,
    obey: Callable[[int, bytes], bytes] | None = None,
) -> Iterator[GpuClient]:
    """A client that is registered; killed at the end. All are of one channel group, as under MPS.

    One that `copies` has a channel for kernels, too: only those are in a subcontext. `plain`: not even they,
    as in a process outside MPS. The rest is as in Client.
    """
    kernels = gpu.channel_handle(0, group=group, veid=veid, plain=plain)
    named = kernels | gpu.channel_handle(number, group=0, copies=copies, buffers=buffers != (0, 0))
    second = kernels | number + BESIDE if copies else 0
    body = Client(handle, named, second, external, buffers, shared, prepare, obey)
    with child(body.be) as made:
        yield GpuClient(made.pid, made.pidfd, handle, number, veid, made.tell, made.hear)
