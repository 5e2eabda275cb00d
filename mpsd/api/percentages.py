"""Thread percentages of domains and clients, judged by the measured tables: conditions, doctor, config check.

The percentage of a domain is the default that its control daemon gives to clients. A client may have a lower
one in its environment. mpsd reads the environment that the process was started with, so a program that sets
the variable by itself is judged by its domain's percentage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import MpsdError
from mpsd.base.model import Gpu, ProcessInstance
from mpsd.base.percentages import VARIABLE, Finding, Measured, effective, read, together, verdict
from mpsd.config.schema import Config
from mpsd.core.events import Event
from mpsd.core.state import SERVING, Client, Domain, State
from mpsd.gpu import numerics
from mpsd.gpu.base import Backend, Check
from mpsd.os import procfs
from mpsd.os.probes import ProbePool
from mpsd.os.tasks import Tasks

READ_S = 5.0
Limit = Callable[[Domain], float | None]
"""Returns the percentage that a domain's control daemon gives to clients; None if there is none."""


class Percentages:
    """The tables of this node's GPUs, and the percentages in clients' environments, read in threads.

    Lives on the event loop.
    """

    def __init__(self, backend: Backend, gpus: Sequence[Gpu], post: Callable[[Event], None]) -> None:
        try:
            driver = backend.devices.driver_version()
        except MpsdError:
            driver = ""
        self._driver = driver or "unknown"
        self._gpus = gpus
        self._tables = numerics.by_gpu(backend.name, driver, gpus)
        self._own: dict[ProcessInstance, float | None] = {}
        self._probes = ProbePool("client-percentages")
        self._tasks = Tasks(post)

    def follow(self, clients: Iterable[Client]) -> None:
        """Read the environments of new clients, and forget clients that have ended. Does not wait."""
        users = {client.id.process: client.facts.uid for client in clients if client.living}
        self._own = {process: own for process, own in self._own.items() if process in users}
        for process, uid in users.items():
            if process not in self._own:
                self._own[process] = None
                self._tasks.spawn(self._read(process, uid))

    async def _read(self, process: ProcessInstance, uid: int) -> None:
        try:
            found = await self._probes.run(uid, partial(own_percentage, process), READ_S)
        except MpsdError:
            return
        if process in self._own:
            self._own[process] = found

    def conditions(self, state: State, limit: Limit) -> list[Condition]:
        """Return the domains whose clients get wrong results."""
        return list(wrong_percentages(state, self._table, limit, self._own))

    def _table(self, gpus: Iterable[str]) -> Measured | None:
        """Return the table for a client of these GPUs."""
        found = (self._tables.get(uuid) for uuid in gpus)
        return together(table for table in found if table is not None)

    def offer(self, domain: Domain, limit: Limit) -> Mapping[str, Any] | None:
        """Return what mpsd-run judges a program's percentage by; None if nothing is measured."""
        table = self._table(domain.gpus)
        return None if table is None else {"limit": limit(domain), "table": table.view()}

    def check(self) -> Check:
        """Return the result for `doctor`: what is measured on this node."""
        name = "thread percentages"
        unknown = sorted({gpu.name for gpu in self._gpus if self._tables[gpu.uuid] is None})
        if unknown:
            what = f"not measured for {', '.join(unknown)} with driver {self._driver}"
            why = "at some percentages cuBLAS computes wrong results without an error"
            remedy = "before you limit threads, run mpsd-faultinject numerics --backend nvidia on an idle GPU"
            return Check(name, None, f"{what}: {why}", remedy)
        table = self._table(gpu.uuid for gpu in self._gpus)
        assert table is not None
        wrong = ", ".join(map(str, sorted(table.wrong))) or "none"
        return Check(name, True, f"measured; cuBLAS {table.cublas} computes wrong results at: {wrong}")

    async def close(self) -> None:
        await self._tasks.cancel()
        self._probes.close()


def own_percentage(process: ProcessInstance) -> float | None:
    """Return the percentage in the environment of a process; None without one, or if it cannot be read.

    Blocks while the process changes its mappings.
    """
    try:
        text = procfs.environment(process.pid).get(VARIABLE, "")
        return read(text) if procfs.start_ticks(process.pid) == process.start_ticks else None
    except OSError:
        return None


def wrong_percentages(
    state: State,
    table_of: Callable[[Iterable[str]], Measured | None],
    limit: Limit,
    own: Mapping[ProcessInstance, float | None],
) -> Iterator[Condition]:
    """Yield a condition for the limit of each domain that takes clients, and for lower limits of clients.

    Only the first degrades the status: a client states its own limit, as it likes.
    """
    for domain in state.domains.values():
        table, most = table_of(domain.gpus), limit(domain)
        slot = state.slots.get(domain.slot)
        if most is not None and domain.state in SERVING and slot is not None and slot.active == domain.id:
            for text in _wrong(most, table):
                yield Condition(Code.BAD_THREAD_PERCENTAGE, domain.id, f"its limit, {text}")
        processes = {client.id.process for client in state.living_of(domain.id) if state.at_home(client)}
        lower = {effective(most, own.get(process)) for process in processes} - {most, None}
        for percentage in sorted(filter(None, lower)):
            for text in _wrong(percentage, table):
                yield Condition(Code.CLIENT_THREAD_PERCENTAGE, domain.id, f"its {VARIABLE}, {text}")


def _wrong(percentage: float, table: Measured | None) -> list[str]:
    """Return the text on a percentage if it is wrong."""
    judged = verdict(percentage, table)
    return [judged.text] if judged.finding is Finding.WRONG else []


def configuration_notes(config: Config) -> list[str]:
    """Return a warning for each measured GPU of the backend on which the configured percentage is wrong."""
    limit = config.limits.active_thread_percentage
    if limit is None:
        return []
    known = [each for each in numerics.tables() if each.backend == config.backend.value]
    judged = [(each, verdict(limit, each.measured)) for each in known]
    return [
        f"limits.active_thread_percentage: cuBLAS {each.measured.cublas} computes wrong results without an "
        f"error ({each.title}): {found.text}"
        for each, found in judged
        if found.finding is Finding.WRONG
    ]
