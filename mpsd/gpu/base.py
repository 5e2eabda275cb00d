"""Interfaces to a GPU node, each with a real and a simulated version.

Both versions pass tests/contract. Methods block for milliseconds at most, and never beyond a given deadline.
None of them loads CUDA. A `Source` joins the daemon's one poll loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mpsd.base.model import (
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
    """The UVM event queue of one client address space. When readable, call drain()."""

    def fileno(self) -> int: ...
    def report_serviced(self) -> None:
        """Report serviced GPU faults too from now on (`fatal` false). Raises GpuError."""
        ...

    def drain(self) -> TrackerBatch: ...
    def close(self) -> None: ...


class AddressSpace(Protocol):
    """Duplicates of the descriptors that keep one client's GPU address space alive.

    While they are open the address space outlives its process. `fds` maps a role ("va", "mm") to a
    close-on-exec descriptor; the same roles go to the descriptor store. They are all that `Uvm.adopt` needs
    to rebuild the object.
    """

    @property
    def fds(self) -> Mapping[str, int]: ...

    def track(self) -> Tracker:
        """Return a new tracker for fatal faults. Raises GpuError."""
        ...

    def map_sparse(self, base: int, length: int, gpu_uuid: str) -> None:
        """Map a sparse (silent) guard over [base, base+length), multiples of 64 KiB. Raises GpuError."""
        ...

    def unmap_sparse(self, base: int, length: int) -> None:
        """Remove a guard that map_sparse created with the same bounds. Raises GpuError."""
        ...

    def close(self) -> None:
        """Close the duplicates. The address space ends here if they were the last descriptors."""
        ...


class Uvm(Protocol):
    """The UVM driver, as a root process without a GPU context sees it."""

    def open(self, process: ProcessInstance, pidfd: int) -> Sequence[AddressSpace]:
        """Duplicate the UVM descriptors of a process.

        Raises NotReadyError while the process has no initialised address space yet (call again), and
        UnsupportedError if this machine does not allow it (rights, seccomp, unknown ABI).
        """
        ...

    def adopt(self, fds: Mapping[str, int]) -> AddressSpace:
        """Rebuild an address space from descriptors of a descriptor store."""
        ...


class WorkView(Protocol):
    """A view of one client's GPU work. While the client is leased, it works after the client's exit too.

    `fds` are close-on-exec descriptors that the descriptor store keeps with the lease, by role.
    """

    @property
    def fds(self) -> Mapping[str, int]: ...

    @property
    def located(self) -> bool:
        """Whether the location of the client's work is known; until then its context may be incomplete."""
        ...

    @property
    def settled(self) -> bool:
        """Whether two looks agreed on that location. Else it says nothing if the client exits unseen."""
        ...

    def refresh(self) -> None:
        """Locate the client's work. Called periodically while the client lives."""
        ...

    def leave_out(self, spans: Sequence[tuple[int, int]]) -> None:
        """Ignore pages [from, to) of a context that the client has left: their semaphores are stale."""
        ...

    def pending(self) -> str | None:
        """Return the work that has not ended; empty if all has ended; None if this machine cannot tell.

        Only for an exited client: a living one may launch more at any moment.
        """
        ...

    def launched(self) -> bool | None:
        """Return whether a living client has ever launched work; None if this machine cannot tell.

        Only for a client that can launch no more.
        """
        ...

    def close(self) -> None: ...


class WorkInspector(Protocol):
    """Finds the end of an exited client's kernels, which no driver list shows."""

    def open(self, process: ProcessInstance, pidfd: int) -> WorkView:
        """Open a view of a client. Raises GpuError if this machine does not allow it."""
        ...

    def adopt(self, process: ProcessInstance, fds: Mapping[str, int]) -> WorkView:
        """Rebuild a view from descriptors of a descriptor store. The view owns them from then on."""
        ...

    def is_present(self, process: ProcessInstance, fds: Mapping[str, int]) -> bool:
        """Return whether kept descriptors belong to the program that a living process runs now.

        False if they belong to a program before an exec; True if nothing shows that.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExportedMemory:
    """Identity of an exported allocation. `size` in bytes."""

    size: int
    gpu_uuid: str


class MemoryInspector(Protocol):
    """Checks whether a descriptor from an untrusted process is GPU memory that a program exported."""

    def identify(self, fd: int, claimed: ExportedMemory) -> ExportedMemory:
        """Return the true values as far as they can be determined, else the claimed ones within bounds.

        Makes no file-system call that could block. Raises GpuError for anything except exported memory, and
        for an impossible claim.
        """
        ...


class XidSource(Protocol):
    """Critical Xids as NVML reports them."""

    def fileno(self) -> int: ...
    def drain(self) -> Sequence[NvmlXid]: ...
    def close(self) -> None: ...


class KernelLog(Protocol):
    """Xid lines of the kernel log since it was opened. Bounded per drain.

    `overruns`: how many times lines were lost."""

    overruns: int

    def fileno(self) -> int: ...
    def drain(self) -> Sequence[KernelXid]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class IsolationState:
    """State of the kernel module. `driver`: version of the NVIDIA modules that it is built into.

    `loaded_ns`: load time (CLOCK_BOOTTIME). `written`: records since then."""

    mode: IsolationMode
    driver: str
    deadline_ms: int
    loaded_ns: int
    written: int


class Isolation(Protocol):
    """The control device of a patched nvidia-uvm: records out, requests in. When readable, call drain()."""

    def fileno(self) -> int: ...
    def state(self) -> IsolationState:
        """Return the module's state. Raises GpuError."""
        ...

    def set_mode(self, mode: IsolationMode) -> None:
        """Set the mode of the module, for all clients. Raises GpuError."""
        ...

    def drain(self) -> Sequence[KernelFault]:
        """Return records since the last call, in order; a gap in `seq` means lost records. Raises
        GpuError."""
        ...

    def acknowledge(self, space: int) -> bool:
        """Tell the module that mpsd evicts the owner of this space, so that it waits longer before it kills.

        False if the space has ended or the module is already killing. Raises GpuError."""
        ...

    def kill(self, space: int) -> bool:
        """Have the module kill the owner of this space now; False as above. Raises GpuError."""
        ...

    def close(self) -> None:
        """Withdraw acknowledgements and close. Idempotent."""
        ...


class DeviceManager(Protocol):
    """NVML or its stand-in."""

    def gpus(self) -> Sequence[Gpu]: ...
    def driver_version(self) -> str: ...
    def compute_mode(self, gpu_uuid: str) -> ComputeMode: ...
    def memory_used(self, gpu_uuid: str) -> int: ...
    def processes(self, gpu_uuid: str) -> Sequence[GpuProcess]: ...
    def watch_xids(self) -> XidSource: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `doctor`. `ok` is None if the check does not apply."""

    name: str
    ok: bool | None
    finding: str
    remedy: str = ""


def isolation_check(state: IsolationState) -> Check:
    """Return the `doctor` line for a kernel module that answers."""
    on = state.mode is IsolationMode.ISOLATE
    finding = f"{'on' if on else 'off'} (driver {state.driver}, mode {state.mode})"
    return Check(
        "kernel isolation", True if on else None, finding, "" if on else "set [kernel] isolation in mpsd.toml"
    )


@dataclass(frozen=True, slots=True)
class NoIsolation:
    """Reason for the missing kernel module. Not `known`: one may be loaded, isolate faults and kill."""

    why: str
    remedy: str = ""
    known: bool = True

    def check(self) -> Check:
        """Return the `doctor` line without the kernel module."""
        if not self.known:
            return Check("kernel isolation", None, f"unknown: {self.why}", self.remedy)
        instead = "a memory fault that no guard absorbs reaches every client of its domain"
        return Check("kernel isolation", None, f"off: {self.why}: {instead}", self.remedy)


@dataclass(frozen=True, slots=True)
class Backend:
    """A GPU node: the adapters from which the daemon is assembled.

    `control_binary` is the stock nvidia-cuda-mps-control or its stand-in; the same adapter drives both.
    `control_environment` is added to the environment of control daemons. `host_pointers_work`: kernels may
    use ordinary host memory (HMM, ATS), so the outer guard is impossible. `isolation`: None without the
    kernel module; `no_isolation` states the reason.
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
