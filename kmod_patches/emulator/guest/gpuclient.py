"""Clients of the software GPU, in processes of their own, because the kernel may kill them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from emulator.guest import gpu, uvm
from emulator.guest.check import expect
from emulator.guest.child import READY, becomes_readable, child, wait_for
from mpsd.gpu.nvidia import uvm_abi as abi

# Offset from the number of a client's copy channel to that of its channel for kernels.
BESIDE = 16


@dataclass(frozen=True, slots=True)
class GpuClient:
    """`handle`: the stub's name of its address space; `channel`: the number of the channel that it uses."""

    pid: int
    pidfd: int
    handle: int
    channel: int
    veid: int
    tell: int = -1
    hear: int = -1

    def ask(self, word: bytes) -> None:
        """Send a command; `answered` waits for its end."""
        os.write(self.tell, word)

    def answered(self) -> bytes:
        """Return the answer. Raises CheckError if it does not come within a check's waiting time."""
        wait_for(self.hear, "the client's answer")
        return os.read(self.hear, 1)

    def ended(self) -> bool:
        """Return whether the process ends within a check's waiting time."""
        return becomes_readable(self.pidfd)


@dataclass(frozen=True, slots=True)
class Client:
    """The program of a client's process. `handle`: the stub's name of its address space; `channel`: a handle.

    `second`: the handle of a second channel (0: none). `external`: (base, bytes) of a reserved address range
    without mappings; `buffers`: the same for its channel's context buffers. `prepare` is called with the
    descriptor of its address space after registration, `obey` with that and each received byte; its result is
    sent back.
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
        """Register, report it, and obey commands until the other side closes."""
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
    """Yield a registered client, and kill it at the end. All clients share a channel group, as under MPS.

    With `copies` it has a channel for kernels too: only kernel channels are in a subcontext. `plain`: not
    even they, as in a process outside MPS. Other arguments as in Client.
    """
    kernels = gpu.channel_handle(0, group=group, veid=veid, plain=plain)
    named = kernels | gpu.channel_handle(number, group=0, copies=copies, buffers=buffers != (0, 0))
    second = kernels | number + BESIDE if copies else 0
    body = Client(handle, named, second, external, buffers, shared, prepare, obey)
    with child(body.be) as made:
        yield GpuClient(made.pid, made.pidfd, handle, number, veid, made.tell, made.hear)
