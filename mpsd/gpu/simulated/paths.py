"""Paths of a simulated node's files. Standard library only, no other module of mpsd."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SIM_DIR = "MPSD_SIM_DIR"
PIPE_DIR = "CUDA_MPS_PIPE_DIRECTORY"
LOG_DIR = "CUDA_MPS_LOG_DIRECTORY"
# Names that tools search for in process lists (A6 of the MPS guide's file list, Slurm's epilogs).
CONTROL_NAME = "nvidia-cuda-mps-control"
SERVER_NAME = "nvidia-cuda-mps-server"


def run_directory(environ: Mapping[str, str]) -> str:
    """Return the node's directory: MPSD_SIM_DIR, else one per user."""
    if named := environ.get(SIM_DIR):
        return named
    runtime = environ.get("XDG_RUNTIME_DIR")
    return os.path.join(runtime, "mpsd-sim") if runtime else f"/tmp/mpsd-sim-{os.getuid()}"


def gpu_socket(directory: str) -> str:
    return os.path.join(directory, "gpu.sock")


def kernel_log(directory: str) -> str:
    return os.path.join(directory, "kmsg")


def launcher(directory: str, name: str) -> str:
    return os.path.join(directory, "bin", name)


def pipe_directory(environ: Mapping[str, str]) -> str:
    return environ.get(PIPE_DIR) or "/tmp/nvidia-mps"


def log_directory(environ: Mapping[str, str]) -> str:
    return environ.get(LOG_DIR) or "/var/log/nvidia-mps"


def default_dir() -> Path:
    """Return run_directory() for this process's environment."""
    from pathlib import Path

    return Path(run_directory(os.environ))
