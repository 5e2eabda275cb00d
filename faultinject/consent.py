"""Before faults go into a real GPU: who uses it, and does somebody want this?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from faultinject import report
from mpsd import procs
from mpsd.errors import BusyError, DeniedError, MpsdError, UsageError
from mpsd.gpu.base import DeviceManager
from mpsd.text import printable

SPARED = "--backend simulated needs no GPU and harms nobody"
Ask = Callable[[str], str]


def users_of(devices: DeviceManager) -> list[list[str]]:
    """One row for each process on each GPU: GPU, pid, user, memory, command. Raises GpuError."""
    rows = []
    for gpu in devices.gpus():
        for process in devices.processes(gpu.uuid):
            uid, command = "?", "? (not visible from here)"
            try:
                facts = procs.facts(process.pid)
                uid, command = str(facts.uid), printable(facts.command)
            except MpsdError:
                pass
            known = process.memory_bytes is not None
            memory = f"{(process.memory_bytes or 0) >> 20} MiB" if known else "?"
            rows.append([str(gpu.index), str(process.pid), uid, memory, command])
    return rows


def require(devices: DeviceManager, *, yes: bool, ask: Ask | None, tell: Callable[[str], None]) -> None:
    """Return when faults may be injected here. `ask` puts a question to a person; None: nobody is there.

    Raises BusyError when somebody uses a GPU, UsageError when nobody can be asked, DeniedError for a no;
    none of them with `yes`.
    """
    names = ", ".join(gpu.name for gpu in devices.gpus())
    users = users_of(devices)
    if users:
        tell(f"Processes on {names}:")
        tell(report.aligned([["gpu", "pid", "uid", "memory", "command"], *users]))
    else:
        tell(f"No process is on {names}.")
    if yes:
        return
    if users:
        raise BusyError(
            f"faults would be injected into {names}, which {_count(users)}: they could die of it",
            remedy=f"{SPARED}; --yes injects all the same",
        )
    if ask is None:
        raise UsageError(
            f"faults would be injected into {names}, and nobody is at a terminal to be asked",
            remedy=f"--yes injects; {SPARED}",
        )
    if ask(f"Inject faults into {names}? [y/N] ").strip().lower() not in ("y", "yes"):
        raise DeniedError("no fault was injected", remedy=SPARED)


def at_terminal() -> Ask | None:
    """How to ask the person at the terminal; None where there is none."""
    if sys.stdin is None or not sys.stdin.isatty():
        return None

    def ask(question: str) -> str:
        print(question, end="", file=sys.stderr, flush=True)
        return sys.stdin.readline()

    return ask


def _count(users: Sequence[Sequence[str]]) -> str:
    pids = len({row[1] for row in users})
    return "1 process uses" if pids == 1 else f"{pids} processes use"
