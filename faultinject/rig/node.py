"""The GPU node of a run: the real one, or a simulated one for each run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpsd.base.errors import UnsupportedError, UsageError
from mpsd.gpu.base import Backend

BACKENDS = ("nvidia", "simulated")
SIMULATED_DIR = "simulated.dir"


@dataclass(frozen=True, slots=True)
class Node:
    """`environment`: for every process of a run; `settings`: for mpsd's configuration (section.key).

    bars: whether the stated time limits are judged.

    busy_s: the duration of a kernel that ends.

    quiet_s: how long after a fault a loss can still come; loss_s: how long to wait for one that must come.

    churn_s: how long clients start and end.

    memory: of an offender [bytes]; clients: the limit of one server.
    """

    name: str
    backend: Backend
    device: str
    driver: str
    environment: Mapping[str, str]
    settings: Mapping[str, str]
    bars: bool
    busy_s: float
    quiet_s: float
    loss_s: float
    churn_s: float
    memory: int
    clients: int
    shared: bool
    close: Callable[[], None] = field(default=lambda: None)

    def gpu_memory_used(self) -> int:
        devices = self.backend.devices
        return sum(devices.memory_used(gpu.uuid) for gpu in devices.gpus())


def _close_backend(backend: Backend) -> None:
    if backend.kernel_log is not None:
        backend.kernel_log.close()
    if backend.isolation is not None:
        backend.isolation.close()
    backend.devices.close()


_SETTINGS = {
    # Campaigns of guards and of fail-over say so.
    "protect": '"observe"',
    "lease.linger_limit_s": "2.0",
    "domains.stop_deadline_s": "3.0",
    "log.format": '"json"',
}
# Managed addresses are expensive for a real UVM driver: the harness needs no hundreds of GiB.
_FEW_ZONES = {"guard.zones_bytes_per_gpu": str(48 << 30)}


def open_simulated_node(base: Path, gpus: int = 1) -> Node:
    """Start a simulated node with this many GPUs under `base`, with the patched kernel module.

    Raises MpsdError.
    """
    from mpsd.gpu.simulated.backend import open_simulated, stop_simulated

    directory = base / "g"
    directory.mkdir(parents=True, exist_ok=True)
    backend = open_simulated(directory, gpus=gpus, isolation=True)

    def close() -> None:
        _close_backend(backend)
        stop_simulated(directory)

    return Node(
        name="simulated",
        backend=backend,
        device="SIMULATED",
        driver=backend.devices.driver_version(),
        environment={**backend.control_environment, "MPSD_SIM_DIR": str(directory)},
        settings={**_SETTINGS, SIMULATED_DIR: f'"{directory}"'},
        bars=False,
        busy_s=0.4,
        quiet_s=0.5,
        loss_s=1.5,
        churn_s=3.0,
        memory=1 << 20,
        clients=60,
        shared=False,
        close=close,
    )


def open_nvidia_node(base: Path) -> Node:
    """Open the machine's own GPU and compile the kernels once. Raises MpsdError."""
    try:
        from faultinject.programs.devices.nvidia import CUBIN, prepare_kernels
    except ImportError as error:
        raise UnsupportedError(
            f"the harness cannot use CUDA: {error}",
            remedy="scripts/setup --with cuda; where there is no GPU use --backend simulated",
        ) from error
    from mpsd.gpu.nvidia.backend import open_nvidia

    backend = open_nvidia()
    isolation = backend.isolation
    before = isolation.state().mode if isolation is not None else None

    def close() -> None:
        # The kernel module keeps the mode that an mpsd of the harness has set, for all processes.
        try:
            if isolation is not None and before is not None:
                isolation.set_mode(before)
        finally:
            _close_backend(backend)

    base.mkdir(parents=True, exist_ok=True)
    cubin = base / "kernels.cubin"
    prepare_kernels(cubin)
    return Node(
        name="nvidia",
        backend=backend,
        device=backend.devices.gpus()[0].name,
        driver=backend.devices.driver_version(),
        environment={**backend.control_environment, CUBIN: str(cubin)},
        settings={**_SETTINGS, **_FEW_ZONES},
        bars=True,
        busy_s=1.0,
        quiet_s=0.8,
        loss_s=4.0,
        churn_s=8.0,
        memory=256 << 20,
        clients=_client_limit(backend.devices.driver_version()),
        shared=True,
        close=close,
    )


def _client_limit(driver: str) -> int:
    """Return the client limit of a server: 48 up to branch 580, 60 from 610 on, less a margin."""
    return (60 if int(driver.split(".")[0]) >= 610 else 48) - 4


def without_settings(node: Node) -> Node:
    """Return the node with mpsd's defaults: of its settings only those without which mpsd does not run."""
    needed = {name: value for name, value in node.settings.items() if name == SIMULATED_DIR}
    return replace(node, settings=needed)


def open_node(name: str, base: Path) -> Node:
    """Open a node. Raises UsageError for an unknown backend, MpsdError when the machine does not offer it."""
    match name:
        case "simulated":
            return open_simulated_node(base)
        case "nvidia":
            return open_nvidia_node(base)
        case _:
            raise UsageError(f"there is no backend {name!r}", remedy="use nvidia or simulated")


def may_map_null() -> bool:
    """Return whether a process of this user may map address 0 (CAP_SYS_RAWIO, or a limit of 0)."""
    limit = Path("/proc/sys/vm/mmap_min_addr")
    return os.geteuid() == 0 or (limit.exists() and limit.read_text().strip() == "0")


def may_choose_pids() -> bool:
    """Return whether the next pid can be set (CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE)."""
    return os.access("/proc/sys/kernel/ns_last_pid", os.W_OK) and os.geteuid() == 0
