"""The real GPU node: UVM, NVML, the kernel log and the stock control binary."""

from __future__ import annotations

import os

from mpsd.base.errors import MpsdError, UnsupportedError
from mpsd.gpu.base import Backend, Check, KernelLog, NoIsolation
from mpsd.gpu.nvidia.checks import (
    CONTROL_BINARY,
    addressing,
    find_binary,
    kernel_isolation,
    nvidia_checks,
)
from mpsd.gpu.nvidia.exported import NvidiaMemory
from mpsd.gpu.nvidia.kernel import NvidiaIsolation, absence
from mpsd.gpu.nvidia.nvml import Nvml
from mpsd.gpu.nvidia.work import NvidiaWork
from mpsd.os.kmsg import KernelRing

TERMINATE_DEADLINE_S = 0.05
# Variables that stock binaries need in addition, if the driver is not in the loader's standard paths.
_PASSED_ON = ("LD_LIBRARY_PATH",)


def open_nvidia() -> Backend:
    """Return the GPUs of this machine. Opens no GPU context and loads no CUDA.

    Raises UnsupportedError without driver, NVML, UVM or control binary. An unreadable kernel log is a
    lost capability, not an error: `doctor` reports it.
    """
    from mpsd.gpu.nvidia.uvm import NvidiaUvm

    binary = find_binary(CONTROL_BINARY)
    if binary is None:
        raise UnsupportedError(
            f"{CONTROL_BINARY} was not found on PATH",
            remedy="install the driver's compute utilities; for a trial without a GPU, run "
            "mpsd run --backend simulated",
        )
    nvml = Nvml()
    isolation, no_isolation = _isolation()
    try:
        return Backend(
            name="nvidia",
            uvm=NvidiaUvm(),
            devices=nvml,
            kernel_log=_kernel_log(),
            control_binary=binary,
            control_environment={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            terminate_deadline_s=TERMINATE_DEADLINE_S,
            work=NvidiaWork(),
            memory=NvidiaMemory({gpu.uuid: gpu.memory_bytes for gpu in nvml.gpus()}),
            checks=nvidia_checks(nvml),
            host_pointers_work=any(addressing(nvml, gpu) != "none" for gpu in nvml.gpus()),
            isolation=isolation,
            no_isolation=no_isolation,
        )
    except BaseException:
        if isolation is not None:
            isolation.close()
        nvml.close()
        raise


def checks() -> list[Check]:
    """Return the checks of this machine, even if open_nvidia() fails."""
    isolation = kernel_isolation()
    try:
        nvml = Nvml()
    except MpsdError as error:
        return [*nvidia_checks(None, error), isolation]
    try:
        return [*nvidia_checks(nvml), isolation]
    finally:
        nvml.close()


def _isolation() -> tuple[NvidiaIsolation | None, NoIsolation]:
    """Return the kernel module, or the reason for its absence."""
    try:
        return NvidiaIsolation(), NoIsolation("")
    except MpsdError as error:
        return None, absence(error)


def _kernel_log() -> KernelLog | None:
    try:
        return KernelRing()
    except MpsdError:
        return None
