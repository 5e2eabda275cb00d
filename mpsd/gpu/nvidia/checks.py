"""Checks of `doctor` on a machine with NVIDIA GPUs. Each has a remedy; none changes anything."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import TypeVar

from mpsd.base.errors import MpsdError, UnsupportedError
from mpsd.base.model import ComputeMode, Gpu
from mpsd.base.text import printable
from mpsd.gpu.base import Check, isolation_check
from mpsd.gpu.nvidia.kernel import MODULE, NvidiaIsolation, absence
from mpsd.gpu.nvidia.kernel_abi import DEVICE
from mpsd.gpu.nvidia.nvml import Nvml

VERSION_FILE = "/proc/driver/nvidia/version"
HMM_PARAMETER = "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"
NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
CONTROL_BINARY = "nvidia-cuda-mps-control"
SERVER_BINARY = "nvidia-cuda-mps-server"
T = TypeVar("T")
WELL_KNOWN = (
    "/usr/bin",
    "/usr/local/bin",
    "/usr/local/nvidia/bin",
    "/opt/nvidia/bin",
    "/run/nvidia/driver/usr/bin",
)


def find_binary(name: str, path: str | None = None) -> str | None:
    """Return the path of an executable on PATH or in a usual driver folder, with links resolved."""
    directories = (os.environ.get("PATH", "") if path is None else path).split(":")
    for directory in (*filter(None, directories), *WELL_KNOWN):
        candidate = os.path.join(directory, name)
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return os.path.realpath(candidate)
    return None


def nvidia_checks(nvml: Nvml | None, failure: MpsdError | None = None) -> list[Check]:
    """Return all checks. Without NVML, `failure` is reported in place of the checks of each GPU."""
    checks = [_driver(), *map(_node, NODES), _binary(CONTROL_BINARY), _binary(SERVER_BINARY)]
    if nvml is None:
        message, remedy = (failure.message, failure.remedy) if failure else ("not opened", "")
        return [*checks, Check("nvml", False, message, remedy)]
    try:
        gpus = nvml.gpus()
        checks.append(_gpus(gpus, nvml.driver_version()))
        for gpu in gpus:
            checks += [
                _node(f"/dev/nvidia{_minor(nvml, gpu)}"),
                _compute_mode(nvml, gpu),
                _addressing(nvml, gpu),
            ]
    except MpsdError as error:
        checks.append(Check("nvml", False, error.message, error.remedy))
    return checks


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return None


def _driver() -> Check:
    """Check for the open kernel modules, on which mpsd's mechanisms were measured."""
    text = _read(VERSION_FILE)
    if text is None:
        return Check(
            "driver",
            False,
            "the NVIDIA kernel driver is not loaded",
            "install it; load nvidia and nvidia-uvm",
        )
    first = printable(text.splitlines()[0] if text else "")
    if "Open Kernel Module" not in text:
        return Check(
            "driver",
            False,
            f"closed kernel modules: {first}",
            "install the open kernel modules (nvidia-open): mpsd is not tested with the closed ones",
        )
    return Check("driver", True, first)


def kernel_isolation(path: str = DEVICE, module: str = MODULE) -> Check:
    """Check whether the loaded nvidia-uvm is the patched one, and its mode."""
    try:
        device = NvidiaIsolation(path, module)
    except UnsupportedError as error:
        return absence(error).check()
    except MpsdError as error:
        return Check(
            "kernel isolation", False, error.message, "install the kernel module of this mpsd version"
        )
    try:
        return isolation_check(device.state())
    finally:
        device.close()


def _node(path: str) -> Check:
    name = f"device node {path}"
    try:
        if not stat.S_ISCHR(os.stat(path).st_mode):
            return Check(
                name, False, "is not a character device", "remove it and run nvidia-modprobe -c 0 -u"
            )
    except FileNotFoundError:
        return Check(name, False, "is missing", "run nvidia-modprobe -c 0 -u, or mount it into the container")
    if not os.access(path, os.R_OK | os.W_OK):
        return Check(name, False, "cannot be opened: permission denied", "run as root, or change its mode")
    return Check(name, True, "exists")


def _binary(name: str) -> Check:
    found = find_binary(name)
    if found is None:
        return Check(f"binary {name}", False, "was not found", "install the driver's compute utilities")
    return Check(f"binary {name}", True, found)


def _gpus(gpus: list[Gpu], version: str) -> Check:
    if not gpus:
        return Check(
            "gpus", False, f"driver {version} lists no GPU", "pass a GPU to this machine or container"
        )
    return Check("gpus", True, f"driver {version}: " + ", ".join(f"{gpu.index} {gpu.name}" for gpu in gpus))


def _minor(nvml: Nvml, gpu: Gpu) -> int:
    return _or(lambda: nvml.minor_number(gpu.uuid), gpu.index)


def _compute_mode(nvml: Nvml, gpu: Gpu) -> Check:
    name = f"compute mode of GPU {gpu.index}"
    match nvml.compute_mode(gpu.uuid):
        case ComputeMode.DEFAULT:
            return Check(name, True, "default")
        case ComputeMode.PROHIBITED:
            return Check(
                name,
                False,
                "prohibited: no program may use it",
                f"nvidia-smi -i {gpu.index} -c DEFAULT",
            )
        case ComputeMode.EXCLUSIVE_PROCESS:
            return Check(
                name,
                False,
                "exclusive-process: no standby domain, so after a fault new clients wait until the old end",
                f"nvidia-smi -i {gpu.index} -c DEFAULT",
            )


def _addressing(nvml: Nvml, gpu: Gpu) -> Check:
    name = f"host pointers on GPU {gpu.index}"
    mode = addressing(nvml, gpu)
    if mode == "none":
        return Check(name, True, "are no GPU addresses: the outer guard is possible")
    if mode == "hmm":
        return Check(
            name,
            False,
            "are valid on this GPU (HMM): the outer guard stays off",
            "to enable it, set the option nvidia-uvm uvm_disable_hmm=1 and reload the module",
        )
    if mode == "ats":
        return Check(
            name, None, "are valid on this GPU (ATS): the outer guard is impossible on this hardware"
        )
    return Check(
        name,
        None,
        "may be valid, because the driver does not report it: the outer guard stays off",
        "set the option nvidia-uvm uvm_disable_hmm=1 to be certain",
    )


def addressing(nvml: Nvml, gpu: Gpu) -> str:
    """Return "none", "hmm", "ats" or "unknown"; the module's parameter decides if NVML cannot tell."""
    mode = _or(lambda: nvml.addressing_mode(gpu.uuid), "unknown")
    if mode == "unknown" and (_read(HMM_PARAMETER) or "").strip() in ("Y", "1"):
        return "none"
    return mode


def _or(ask: Callable[[], T], otherwise: T) -> T:
    try:
        return ask()
    except MpsdError:
        return otherwise
