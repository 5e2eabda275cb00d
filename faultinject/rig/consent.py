"""Consent before faults go into a real GPU: which processes use it, and does the user agree?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from faultinject.evidence import tables
from mpsd.base.errors import BusyError, DeniedError, MpsdError, UnsupportedError, UsageError
from mpsd.base.text import printable
from mpsd.gpu.base import DeviceManager
from mpsd.os import processes

NO_GPU_NEEDED = "--backend simulated needs no GPU and harms no process"
Ask = Callable[[str], str]


def users_of(devices: DeviceManager) -> list[list[str]]:
    """Return one row for each process on each GPU: GPU, pid, user, memory, command. Raises GpuError."""
    rows = []
    for gpu in devices.gpus():
        for process in devices.processes(gpu.uuid):
            uid, command = "?", "? (not visible from here)"
            try:
                facts = processes.facts(process.pid)
                uid, command = str(facts.uid), printable(facts.command)
            except MpsdError:
                pass
            known = process.memory_bytes is not None
            memory = f"{(process.memory_bytes or 0) >> 20} MiB" if known else "?"
            rows.append([str(gpu.index), str(process.pid), uid, memory, command])
    return rows


def require(
    devices: DeviceManager,
    *,
    yes: bool,
    ask: Ask | None,
    tell: Callable[[str], None],
    instead: str = NO_GPU_NEEDED,
) -> None:
    """Return when faults may be injected here. `ask` asks the user; None: there is no terminal.

    Raises BusyError when a process uses a GPU, UsageError without a terminal, DeniedError for a no; none of
    them with `yes`.
    """
    names = ", ".join(gpu.name for gpu in devices.gpus())
    users = users_of(devices)
    if users:
        tell(f"Processes on {names}:")
        tell(tables.aligned([["gpu", "pid", "uid", "memory", "command"], *users]))
    else:
        tell(f"No process is on {names}.")
    if yes:
        return
    if users:
        raise BusyError(
            f"faults would be injected into {names}, which {_count(users)}: they could be lost",
            remedy=f"{instead}; --yes injects anyway",
        )
    if ask is None:
        raise UsageError(
            f"faults would be injected into {names}, and there is no terminal to ask on",
            remedy=f"--yes injects; {instead}",
        )
    if ask(f"Inject faults into {names}? [y/N] ").strip().lower() not in ("y", "yes"):
        raise DeniedError("no fault was injected", remedy=instead)


def require_on_gpu(*, yes: bool, tell: Callable[[str], None], instead: str = NO_GPU_NEEDED) -> None:
    """Return when faults may be injected into this machine's GPU. Raises as require(), and without a GPU.

    `instead`: the remedy that needs no GPU.
    """
    from mpsd.gpu.nvidia.nvml import Nvml

    try:
        nvml = Nvml()
    except UnsupportedError as error:
        raise UnsupportedError(error.message, remedy=instead) from error
    try:
        require(nvml, yes=yes, ask=at_terminal(), tell=tell, instead=instead)
    finally:
        nvml.close()


def at_terminal() -> Ask | None:
    """Return how to ask the user at the terminal; None without a terminal."""
    if sys.stdin is None or not sys.stdin.isatty():
        return None

    def ask(question: str) -> str:
        print(question, end="", file=sys.stderr, flush=True)
        return sys.stdin.readline()

    return ask


def _count(users: Sequence[Sequence[str]]) -> str:
    pids = len({row[1] for row in users})
    return "1 process uses" if pids == 1 else f"{pids} processes use"
