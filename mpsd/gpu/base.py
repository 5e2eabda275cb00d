"""What mpsd needs of a GPU node, as small interfaces with a real and a simulated version.

Both versions pass tests/contract. Methods block for milliseconds at most, never longer than the
deadline they are given; none of them loads CUDA. A `Source` joins the daemon's one poll loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mpsd.model import (
    ComputeMode,
    Gpu,
    GpuProcess,
    IsolationMode,
    KernelFault,
    KernelXid,
    NvmlXid,
    ProcessInstance,
    TrackerBatch,
)


class Tracker(Protocol):
    """The UVM event queue of one client address space. Readable means: call drain()."""

    def fileno(self) -> int: ...
    def report_serviced(self) -> None:
        """From now on also GPU faults that were serviced (`fatal` false). Raises GpuError."""
        ...

    def drain(self) -> TrackerBatch: ...
    def close(self) -> None: ...


class AddressSpace(Protocol):
    """Duplicates of the descriptors that keep one client's GPU address space alive.

    While they are open the address space outlives its process. `fds` maps a role ("va", "mm") to
    a close-on-exec descriptor; the same numbers go to the descriptor store. Nothing else needs to
    be kept to rebuild the object (`Uvm.adopt`).
    """

    @property
    def fds(self) -> Mapping[str, int]: ...

    def track(self) -> Tracker:
        """A new tracker for fatal faults. Raises GpuError."""
        ...

    def map_sparse(self, base: int, length: int, gpu_uuid: str) -> None:
        """Lay a silent guard over [base, base+length), multiples of 64 KiB. Raises GpuError."""
        ...

    def unmap_sparse(self, base: int, length: int) -> None:
        """Take a guard away that map_sparse laid with the same bounds. Raises GpuError."""
        ...

    def close(self) -> None:
        """Close the duplicates. If they were the last, the address space ends here."""
        ...


class Uvm(Protocol):
    """The UVM driver as seen by a root process that owns no GPU context."""

    def open(self, process: ProcessInstance, pidfd: int) -> Sequence[AddressSpace]:
        """Duplicate what the process holds.

        Raises NotReadyError while the process has no initialised address space yet (call again),
        UnsupportedError when this machine does not allow it (rights, seccomp, unknown ABI).
        """
        ...

    def adopt(self, fds: Mapping[str, int]) -> AddressSpace:
        """Rebuild an address space from descriptors that a descriptor store kept."""
        ...


class WorkView(Protocol):
    """A look at what one client has on the GPU, that goes on after its death while it is leased.

    `fds` are close-on-exec descriptors that the descriptor store keeps with the lease, by role.
    """

    @property
    def fds(self) -> Mapping[str, int]: ...

    @property
    def located(self) -> bool:
        """Whether it is known where its work lies; until then its context may yet come."""
        ...

    def refresh(self) -> None:
        """While the client lives, from time to time: learn where to look."""
        ...

    def leave_out(self, spans: Sequence[tuple[int, int]]) -> None:
        """Pages, from and to, of a context that it has left: what they say of its work is not so."""
        ...

    def pending(self) -> str | None:
        """What has not ended yet; empty when everything has; None when this machine cannot tell.

        Only for a client that is dead: a living one may launch more at any moment.
        """
        ...

    def close(self) -> None: ...


class WorkInspector(Protocol):
    """Tells when a dead client's kernels have ended: no driver list does."""

    def open(self, process: ProcessInstance, pidfd: int) -> WorkView:
        """Raises GpuError when this machine does not allow it."""
        ...

    def adopt(self, process: ProcessInstance, fds: Mapping[str, int]) -> WorkView:
        """Rebuild a view from descriptors that a descriptor store kept. Owns them from then on."""
        ...

    def is_present(self, process: ProcessInstance, fds: Mapping[str, int]) -> bool:
        """Whether kept descriptors are of the program that a living process runs now.

        False when they are of one before an exec; True where nothing shows that.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExportedMemory:
    """What a descriptor is. `size` in bytes."""

    size: int
    gpu_uuid: str


class MemoryInspector(Protocol):
    """Says whether a descriptor from a stranger is GPU memory that a program exported."""

    def identify(self, fd: int, claimed: ExportedMemory) -> ExportedMemory:
        """Its true values as far as they can be told, else the claimed ones within bounds.

        Asks nothing of a file system that could make it wait. Raises GpuError for anything else than
        exported memory, and for a claim that cannot be true.
        """
        ...


class XidSource(Protocol):
    """Critical Xids as NVML reports them."""

    def fileno(self) -> int: ...
    def drain(self) -> Sequence[NvmlXid]: ...
    def close(self) -> None: ...


class KernelLog(Protocol):
    """Xid lines of the kernel log, from the moment it was opened on. Bounded per drain."""

    def fileno(self) -> int: ...
    def drain(self) -> Sequence[KernelXid]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class IsolationState:
    """What the kernel part says of itself. `driver`: the version of the modules that it is built into;
    `loaded_ns` (CLOCK_BOOTTIME): when. `written`: records since then."""

    mode: IsolationMode
    driver: str
    deadline_ms: int
    loaded_ns: int
    written: int


class Isolation(Protocol):
    """The door of a patched nvidia-uvm: its records, and what it is told. Readable means: call drain()."""

    def fileno(self) -> int: ...
    def state(self) -> IsolationState:
        """Raises GpuError."""
        ...

    def set_mode(self, mode: IsolationMode) -> None:
        """Of the module, for everybody. Raises GpuError."""
        ...

    def drain(self) -> Sequence[KernelFault]:
        """Records since the last call, in order; a gap in `seq` is what came too fast. Raises GpuError."""
        ...

    def acknowledge(self, space: int) -> bool:
        """Say that who made this space is being put out: the module waits longer before it kills. False:
        there is nothing to wait for, it has gone or is being killed. Raises GpuError."""
        ...

    def kill(self, space: int) -> bool:
        """Let the module do that now; False as above. Raises GpuError."""
        ...

    def close(self) -> None:
        """Takes acknowledgements back. Idempotent."""
        ...


class DeviceManager(Protocol):
    """NVML, or its stand-in."""

    def gpus(self) -> Sequence[Gpu]: ...
    def driver_version(self) -> str: ...
    def compute_mode(self, gpu_uuid: str) -> ComputeMode: ...
    def memory_used(self, gpu_uuid: str) -> int: ...
    def processes(self, gpu_uuid: str) -> Sequence[GpuProcess]: ...
    def watch_xids(self) -> XidSource: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `doctor`. `ok` is None where the question does not apply."""

    name: str
    ok: bool | None
    finding: str
    remedy: str = ""


def isolation_check(state: IsolationState) -> Check:
    """`doctor` on a kernel part that answers."""
    on = state.mode is IsolationMode.ISOLATE
    finding = f"{'on' if on else 'off'} (driver {state.driver}, mode {state.mode})"
    return Check(
        "kernel isolation", True if on else None, finding, "" if on else "mpsd sets the mode: [kernel]"
    )


@dataclass(frozen=True, slots=True)
class NoIsolation:
    """Why there is no kernel part to work with. Not `known`: one may be loaded, isolate and kill."""

    why: str
    remedy: str = ""
    known: bool = True

    def check(self) -> Check:
        """`doctor` without the kernel part."""
        if not self.known:
            return Check("kernel isolation", None, f"not known: {self.why}", self.remedy)
        instead = "a memory fault ends every client of its domain; guards and fail-over are what protects"
        return Check("kernel isolation", None, f"off: {self.why}: {instead}", self.remedy)


@dataclass(frozen=True, slots=True)
class Backend:
    """A GPU node: what the daemon is assembled from.

    `control_binary` is the stock nvidia-cuda-mps-control or its stand-in: both are driven through
    the same adapter. `control_environment` is added to the environment of control daemons.
    `host_pointers_work`: kernels may use ordinary host memory (HMM, ATS), so no outer guard there.
    `isolation`: None without the kernel part; `no_isolation` says why.
    """

    name: str
    uvm: Uvm
    devices: DeviceManager
    kernel_log: KernelLog | None
    control_binary: str
    control_environment: Mapping[str, str]
    terminate_deadline_s: float
    work: WorkInspector
    memory: MemoryInspector
    checks: Sequence[Check] = ()
    host_pointers_work: bool = False
    isolation: Isolation | None = None
    no_isolation: NoIsolation = NoIsolation("")
