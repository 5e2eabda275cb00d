"""A simulated node as a Backend of mpsd: started if absent, stopped on request."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

from mpsd.base.errors import DeadlineError, GpuError, NotRunningError, UnsupportedError
from mpsd.base.limits import SOCKET_PATH_LIMIT
from mpsd.gpu.base import Backend, Check, NoIsolation
from mpsd.gpu.simulated import packets, paths
from mpsd.gpu.simulated.adapters import NodeLink, SimulatedDevices, SimulatedUvm
from mpsd.gpu.simulated.exported import SimulatedMemory
from mpsd.gpu.simulated.kernelmodule import SimulatedIsolation
from mpsd.gpu.simulated.work import SimulatedWork
from mpsd.os.kmsg import KernelFile

# On a loaded machine with two cores even the start of the control front end takes long.
TERMINATE_DEADLINE_S = 2.0
START_DEADLINE_S = 20.0


def open_simulated(
    directory: Path | str,
    *,
    gpus: int = 1,
    start: bool = True,
    isolation: bool = False,
    terminate_deadline_s: float = TERMINATE_DEADLINE_S,
) -> Backend:
    """Return the node in `directory`. Start its GPU process if none runs, unless `start` is False.

    Raises NotRunningError, DeadlineError, GpuError.
    """
    where = os.path.abspath(directory)
    if len(os.fsencode(paths.gpu_socket(where))) > SOCKET_PATH_LIMIT:
        raise GpuError(f"{where} is too long for a socket path", remedy="choose a shorter directory")
    if not _answers(where):
        if not start:
            raise NotRunningError(
                f"no simulated GPU runs in {where}", remedy="run python -m mpsd.gpu.simulated gpu --detach"
            )
        _start(where, gpus, isolation=isolation)
    # One connection for all three adapters: closing `devices` closes it.
    link = NodeLink(where)
    devices = SimulatedDevices(link)
    isolation_device, no_isolation = _kernel_module(where)
    return Backend(
        name="simulated",
        uvm=SimulatedUvm(link),
        devices=devices,
        kernel_log=KernelFile(paths.kernel_log(where)),
        control_binary=paths.launcher(where, paths.CONTROL_NAME),
        control_environment={paths.SIM_DIR: where},
        terminate_deadline_s=terminate_deadline_s,
        work=SimulatedWork(link),
        memory=SimulatedMemory({gpu.uuid: gpu.memory_bytes for gpu in devices.gpus()}),
        checks=(
            Check("simulated GPU", True, f"{len(devices.gpus())} simulated GPU(s) in {where}, no real GPU"),
        ),
        isolation=isolation_device,
        no_isolation=no_isolation,
    )


def stop_simulated(directory: Path | str, *, deadline_s: float = 10.0) -> None:
    """End the GPU process, and with it control daemons, servers and contexts. Does nothing without one.

    Raises DeadlineError if the GPU process still runs at the deadline.
    """
    where = os.path.abspath(directory)
    try:
        sock = packets.connect(paths.gpu_socket(where), deadline_s)
    except packets.Gone:
        return
    with sock:
        try:
            pid = int(packets.call(sock, {"op": "node"})[0]["pid"])
            pidfd = os.pidfd_open(pid)
        except (packets.Gone, ProcessLookupError):
            return
        try:
            _end(sock, pidfd, where, deadline_s)
        finally:
            os.close(pidfd)


def _end(sock: socket.socket, pidfd: int, where: str, deadline_s: float) -> None:
    try:
        packets.call(sock, {"op": "stop"})
    except packets.Gone:
        pass
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(deadline_s * 1000):
        raise DeadlineError(f"the simulated GPU in {where} did not end within {deadline_s:g} s")


def _answers(where: str) -> bool:
    try:
        packets.connect(paths.gpu_socket(where)).close()
    except packets.Gone:
        return False
    return True


def _kernel_module(where: str) -> tuple[SimulatedIsolation | None, NoIsolation]:
    """Return the kernel module of this node, or the reason for its absence."""
    try:
        return SimulatedIsolation(where), NoIsolation("")
    except UnsupportedError as error:
        return None, NoIsolation(error.message, error.remedy)


def _start(where: str, gpus: int, *, isolation: bool) -> None:
    """Start the GPU process, or use one that another process has started meanwhile."""
    command = [
        sys.executable,
        "-m",
        "mpsd.gpu.simulated",
        "gpu",
        "--detach",
        "--dir",
        where,
        "--gpus",
        str(gpus),
        *(["--isolation"] if isolation else []),
    ]
    root = str(Path(__file__).resolve().parents[3])
    try:
        done = subprocess.run(
            command,
            cwd=root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_DEADLINE_S,
            check=False,
            # Ctrl-C at the terminal must reach only the starting program.
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            f"the simulated GPU in {where} did not start within {START_DEADLINE_S:g} s"
        ) from error
    except OSError as error:
        raise GpuError(
            f"the simulated GPU did not start: {error.strerror}: {error.filename}",
            remedy="make every directory of the path to mpsd's Python accessible to this user",
        ) from error
    if done.returncode == 0:
        return
    # Another process holds the lock and is about to listen.
    end = time.monotonic() + START_DEADLINE_S
    while "already serves" in done.stderr and time.monotonic() < end:
        if _answers(where):
            return
        time.sleep(0.005)
    raise GpuError(
        f"the simulated GPU did not start: {done.stderr.strip()}", remedy="see gpu.err in its directory"
    )
