"""State of a simulated GPU. `machine` changes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mpsd.base.model import Gpu, UvmEvent
from mpsd.gpu.simulated.machine.halts import Halt
from mpsd.gpu.simulated.machine.memory import AddressMap

# Cost of a context and a server on the GPU before they allocate anything, as NVML counts it.
CONTEXT_BYTES = 64 << 20
SERVER_BYTES = 66 << 20


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch. `address` is absolute; `words` are 32 bits; `value` is what fill and store write."""

    name: str
    address: int = 0
    words: int = 0
    value: int = 0
    duration_s: float = 0.0
    fill_gpu: bool = False


@dataclass(eq=False, slots=True)
class Unit:
    """One GPU of the node."""

    gpu: Gpu
    compute_mode: str = "default"
    stall_until: float = 0.0
    slowdown_s: float = 0.0


@dataclass(eq=False, slots=True)
class Server:
    """One MPS server.

    `fault` is set while get_server_status answers FAULT, `faulting` from the bad instruction on. `landing`
    counts faults with errors still to be delivered. While `held` is not 0, none of its clients runs.
    """

    pid: int
    uid: int
    units: tuple[Unit, ...]
    fault: bool = False
    faulting: bool = False
    held: int = 0
    landing: int = 0
    recovering: bool = False
    spaces: list[Space] = field(default_factory=list)

    @property
    def status(self) -> str:
        return "FAULT" if self.fault else "ACTIVE"


@dataclass(eq=False, slots=True)
class Space:
    """One client context and its GPU address space.

    connected: its process still holds the context. va, mm: open duplicates of its two descriptors; trackers
    hold the space too. held: by the kernel module. waiting: requests to answer once nothing is in flight.
    start_ticks: of its process. launched: it has launched a kernel, or may have done so unseen. halt: for a
    context that runs its work in its own process.
    """

    id: int
    pid: int
    uid: int
    command: str
    unit: Unit
    server: Server | None
    limit_bytes: int | None = None
    memory: AddressMap = field(default_factory=AddressMap)
    queue: deque[Kernel] = field(default_factory=deque)
    running: Kernel | None = None
    waiting: list[int] = field(default_factory=list)
    error: int = 0
    faulting: bool = False
    connected: bool = True
    ended: bool = False
    terminating: bool = False
    held: bool = False
    start_ticks: int = 0
    launched: bool = False
    va: int = 0
    mm: int = 0
    trackers: int = 0
    halt: Halt | None = None

    @property
    def busy(self) -> bool:
        return self.running is not None or bool(self.queue)

    @property
    def writes(self) -> bool:
        """Whether work of its own process may be running, even after the end of its channels."""
        return self.connected and self.halt is not None and not self.halt.is_still

    def forget_halt(self) -> None:
        if self.halt is not None:
            self.halt.close()
            self.halt = None

    @property
    def leased(self) -> bool:
        return self.held or (self.va > 0 and self.mm > 0)

    @property
    def bytes_used(self) -> int:
        return CONTEXT_BYTES + self.memory.bytes_used


class MachineOutput(Protocol):
    """Output of the machine: sockets and files, or a test's lists."""

    def uvm_event(self, space: Space, event: UvmEvent) -> None: ...
    def idle(self, space: Space, request: int, error: int) -> None: ...
    def server_notice(self, server: Server, notice: dict[str, object]) -> None: ...
    def xid(self, unit: Unit, number: int, pid: int | None, name: str, text: str) -> None: ...
    def nvml_xid(self, unit: Unit, number: int) -> None: ...
    def kernel_record(self, record: Mapping[str, Any]) -> None: ...
    def kill(self, space: Space) -> None:
        """Send SIGKILL to a context's process."""
        ...


class Refused(Exception):
    """A CUDA error code as the answer to a request, without harm to the context."""

    def __init__(self, code: int) -> None:
        super().__init__(f"CUDA error {code}")
        self.code = code
