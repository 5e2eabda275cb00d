"""Pins: the processes that logs and client lists name, held by pidfd.

A line of a log is a claim. A process is pinned because of a line only if its user may be in that domain; any
process is pinned that the server lists. Core forgets a process that is never listed.

A process can die, exec or be forgotten between any two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial

import structlog

from mpsd.base.errors import DeadlineError, MpsdError
from mpsd.base.logs import Repeated
from mpsd.base.model import ProcessFacts, ProcessInstance
from mpsd.clients.fairqueue import FairQueue
from mpsd.core import events as ev
from mpsd.os import processes
from mpsd.os.descriptors import REMEDY, DescriptorBudget, Purpose
from mpsd.os.probes import ProbePool
from mpsd.os.sweeps import Sweep
from mpsd.os.tasks import Tasks

log = structlog.get_logger("mpsd.pins")

Post = Callable[[ev.Event], None]
Knows = Callable[[str, ProcessInstance, bool], bool]
MayJoin = Callable[[str, int], bool]
SETTLE_S = 5.0
FACTS_DEADLINE_S = 0.25
MAX_INTRODUCTIONS = 128
"""The number of processes of one domain that are described at a time because of log lines."""
MAX_UNPINNED = 1024
"""The number of refused pids of one domain that are remembered. Log lines can name more."""
MAX_UNPINNED_DOMAINS = 512
"""The number of domains with refused pids. Only domains that have ended exceed it."""
NO_DESCRIPTOR = f"no descriptor left: raise {REMEDY}"


@dataclass(slots=True, eq=False)
class Pin:
    """One pinned process of a client. `uid`: the user that its probes are charged to.

    `exited` is set when the process has ended or is no client any more. `introduced` is set when core knows
    the process, and so will say when to forget it. `introducing`: the domains for which that is under way,
    and whether the server listed the process. `exec_count`: the execs seen. `attaching`: its value for each
    task.
    """

    process: processes.Pinned
    uid: int
    identity: processes.ExecIdentity | None = None
    comparing: bool = False
    compare_again: bool = False
    introduced: bool = False
    introducing: set[tuple[str, bool]] = field(default_factory=set)
    attaching: dict[asyncio.Task[None], int] = field(default_factory=dict)
    exec_count: int = 0
    exited: asyncio.Event = field(default_factory=asyncio.Event)


class Pins:
    """All pins of one daemon. Lives on the event loop; posts events, decides nothing."""

    def __init__(
        self,
        post: Post,
        tasks: Tasks,
        probes: ProbePool,
        budget: DescriptorBudget,
        is_known: Knows | None = None,
        may_join: MayJoin | None = None,
    ) -> None:
        """`is_known`: whether core has this process as a client of that domain already, as listed or not.

        `may_join`: whether a process of this user may be in that domain.
        """
        self._post, self._tasks, self._probes, self._budget = post, tasks, probes, budget
        self._pins: dict[ProcessInstance, Pin] = {}
        self._noticing: set[asyncio.Task[None]] = set()
        self._introductions: Counter[str] = Counter()
        self._is_known: Knows = is_known or (lambda domain, process, listed: False)
        self._may_join: MayJoin = may_join or (lambda domain, uid: True)
        # By domain: each pid that the budget refused, and whether the server listed the process.
        self._unpinned: dict[str, dict[int, bool]] = {}
        self._repeated = Repeated(log)
        self._named = FairQueue[tuple[int, bool]](
            lambda domain, named: self._notice(domain, *named),
            lambda domain, named: self._missed(domain, named[0], "the log names too many processes"),
        )
        self._pids_to_check: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._sweep: Sweep[ProcessInstance, processes.ExecIdentity | None] = Sweep("identity")

    def get(self, process: ProcessInstance) -> Pin | None:
        return self._pins.get(process)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    # -- notices -----------------------------------------------------------------------------------------

    def notice(self, domain: str, pid: int, *, listed: bool = False) -> None:
        """Pin a process that a domain's log or client list names; core learns of it once it is described.

        `listed`: the server named it in its client list. A log can name any number of processes at once: a
        few per domain are pinned in this iteration of the loop, the rest in later ones.
        """
        self._named.ask(domain, (pid, listed))

    def listed(self, domain: str, pids: Collection[int]) -> None:
        """Take a list of a domain's clients: a pid that it lacks is no client that waits for a pin."""
        refused = self._unpinned.pop(domain, {})
        if kept := {pid: listed for pid, listed in refused.items() if pid in pids}:
            self._unpinned[domain] = kept
        if refused:
            self._report_unpinned(domain)

    def _notice(self, domain: str, pid: int, listed: bool) -> None:
        try:
            pin = self._pinned(domain, pid, listed)
        except MpsdError as error:
            self._missed(domain, pid, str(error))
            return
        if pin is None:
            return
        process = pin.process.instance
        under_way = {(domain, True), (domain, listed)} & pin.introducing
        if under_way or self._is_known(domain, process, listed):
            return
        if not listed and self._introductions[domain] >= MAX_INTRODUCTIONS:
            self._missed(domain, pid, "the log names too many processes")
            self._forget_unknown(process, pin)
            return
        pin.introducing.add((domain, listed))
        self._introductions[domain] += 1
        task = self._tasks.spawn(self._introduce(domain, pin, listed=listed))
        self._noticing.add(task)
        task.add_done_callback(self._noticing.discard)

    def _pinned(self, domain: str, pid: int, listed: bool) -> Pin | None:
        """Return the pin of a process; None if its user may not be in that domain. Raises MpsdError."""
        process = processes.Pinned.open(pid)
        try:
            # Not by pid: the pin of a dead client with a held lease may have had the same number.
            pin = self._pins.get(process.instance)
            uid = pin.uid if pin is not None else processes.users(process.instance).real
            if not listed and not self._may_join(domain, uid):
                self._post(ev.ForeignNoticed(domain))
                text = "not pinned: only a log line names this process, and its user is not in that domain"
                self._repeated.warning(text, domain, domain=domain, pid=pid, uid=uid)
                return None
            if pin is not None:
                self._admitted(domain, pid)
                return pin
            if not self._budget.take(Purpose.CLIENT):
                self._refused(domain, pid, listed)
                return None
            pin = self._pins[process.instance] = Pin(process, uid)
            self._loop.add_reader(process.fileno(), self._exited, process.instance)
            self._admitted(domain, pid)
            return pin
        finally:
            if process.instance not in self._pins or self._pins[process.instance].process is not process:
                process.close()

    def _refused(self, domain: str, pid: int, listed: bool) -> None:
        """Remember a process that the budget refused: it is counted once, and reported once it is listed."""
        refused = self._unpinned.setdefault(domain, {})
        if len(self._unpinned) > MAX_UNPINNED_DOMAINS:
            del self._unpinned[next(iter(self._unpinned))]
        if pid not in refused:
            if len(refused) >= MAX_UNPINNED and not listed:
                return
            self._missed(domain, pid, NO_DESCRIPTOR)
        elif refused[pid] or not listed:
            return
        refused[pid] = listed
        if listed:
            self._report_unpinned(domain)

    def _admitted(self, domain: str, pid: int) -> None:
        refused = self._unpinned.get(domain, {})
        if refused.pop(pid, False):
            self._report_unpinned(domain)

    def _report_unpinned(self, domain: str) -> None:
        self._post(ev.ClientsUnpinned(domain, sum(self._unpinned.get(domain, {}).values())))

    def _missed(self, domain: str, pid: int, reason: str) -> None:
        self._repeated.info("client missed", domain, domain=domain, pid=pid, reason=reason)
        self._post(ev.Counted({"clients_missed": 1}))

    async def _introduce(self, domain: str, pin: Pin, *, listed: bool) -> None:
        process = pin.process.instance
        try:
            facts = await self._described(pin)
            problem = "the process has ended" if pin.exited.is_set() or facts.instance != process else ""
        except MpsdError as error:
            problem = str(error)
        finally:
            pin.introducing.discard((domain, listed))
            self._introductions[domain] -= 1
            if not self._introductions[domain]:
                del self._introductions[domain]
        if self._pins.get(process) is not pin:
            return
        if problem:
            self._missed(domain, process.pid, problem)
            self._forget_unknown(process, pin)
            return
        pin.introduced = True
        self._post(ev.ClientNoticed(domain, facts, listed))
        if pin.identity is None:
            self._compare(process, pin)

    def _forget_unknown(self, process: ProcessInstance, pin: Pin) -> None:
        """Drop a pin that core does not know: core will not ask to forget it."""
        if not pin.introduced and not pin.introducing:
            self.forget(process)

    async def _described(self, pin: Pin) -> ProcessFacts:
        """Describe a process in a thread: reading its command line can wait for changes of its mappings."""
        pid = pin.process.pid
        try:
            return await self._probes.run(pin.uid, partial(processes.facts, pid), FACTS_DEADLINE_S)
        except DeadlineError:
            return processes.facts(pid, "[not readable in time]")

    async def noticed(self) -> None:
        """Wait until core knows every noticed process, for SETTLE_S at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._named.caught_up()
                while self._noticing:
                    await asyncio.wait(set(self._noticing))

    # -- ends --------------------------------------------------------------------------------------------

    def _exited(self, process: ProcessInstance) -> None:
        pin = self._pins[process]
        self._loop.remove_reader(pin.process.fileno())
        pin.exited.set()
        if pin.attaching:
            self._tasks.spawn(self._report_exit(process, pin))
        else:
            self._post(ev.ClientDied(process))

    async def _report_exit(self, process: ProcessInstance, pin: Pin) -> None:
        """Report a death. A lease that is being taken goes to core first: else core would not keep it."""
        if under_way := set(pin.attaching):
            await asyncio.wait(under_way, timeout=SETTLE_S)
        self._post(ev.ClientDied(process))

    def forget(self, process: ProcessInstance) -> None:
        """Drop the pin of a process that is no client any more."""
        pin = self._pins.pop(process, None)
        if pin is None:
            return
        pin.exited.set()
        # The reader of an exited process has been removed, which remove_reader() allows.
        self._loop.remove_reader(pin.process.fileno())
        pin.process.close()
        self._budget.release(Purpose.CLIENT)

    # -- signals -----------------------------------------------------------------------------------------

    def kill(self, process: ProcessInstance, owner: int | None = None) -> str:
        """Send SIGKILL by pidfd; return the outcome. `owner`: only if the process is entirely this user's."""
        return self._signal(process, signal.SIGKILL, owner, ev.KillRefused)

    def freeze(self, process: ProcessInstance, owner: int | None = None) -> str:
        """Send SIGSTOP by pidfd. `owner`, the result: as for `kill`."""
        return self._signal(process, signal.SIGSTOP, owner, ev.FreezeRefused)

    def _signal(
        self,
        process: ProcessInstance,
        number: signal.Signals,
        owner: int | None,
        refusal: type[ev.KillRefused | ev.FreezeRefused],
    ) -> str:
        """Send a signal, or tell core with `refusal` that a living process did not get it."""
        pin = self._pins.get(process)
        if pin is not None and owner is not None:
            try:
                users = processes.users(process)
            except MpsdError:
                # The process has ended; its pidfd reports that.
                return "ended before"
            if not users.all_are(owner):
                now = f"real {users.real}, effective {users.effective}, saved {users.saved}"
                reason = f"the process does not belong to uid {owner} alone ({now})"
                log.warning(f"{number.name} withheld", pid=process.pid, reason=reason)
                self._post(refusal(process, reason))
                return f"withheld: {reason}"
        return "sent" if pin is not None and pin.process.signal(number) else "ended before"

    # -- exec --------------------------------------------------------------------------------------------

    def check_identities(self, pid: int | None = None) -> None:
        """Notice clients that replaced their program: exec ends a client, but its pidfd stays silent.

        `pid`: check only this one.
        """
        if pid is None:
            self._tasks.spawn(self._check_all())
            return
        # A log can report any number of departed clients: one check each, in the next iteration of the loop.
        if not self._pids_to_check:
            self._loop.call_soon(self._check_pids)
        self._pids_to_check.add(pid)

    def _check_pids(self) -> None:
        pids, self._pids_to_check = self._pids_to_check, set()
        for process, pin in self._pins.items():
            if process.pid in pids and pin.introduced:
                self._compare(process, pin)

    async def _check_all(self) -> None:
        probes = {p: (pin.uid, partial(_identity, p)) for p, pin in self._pins.items() if pin.introduced}
        for process, now in (await self._sweep.run(probes)).items():
            pin = self._pins.get(process)
            if now is not None and pin is not None and now != pin.identity:
                self._compare(process, pin)

    def _compare(self, process: ProcessInstance, pin: Pin) -> None:
        """Take or compare the identity of a process. A request during a probe causes one more probe."""
        pin.compare_again = pin.comparing
        if not pin.comparing:
            pin.comparing = True
            self._tasks.spawn(self._compared(process, pin))

    async def _compared(self, process: ProcessInstance, pin: Pin) -> None:
        """Compare in a thread: the program file of a process may be on a dead file server."""
        try:
            now = await self._probes.run(pin.uid, partial(_identity, process))
        finally:
            pin.comparing = False
        if self._pins.get(process) is not pin:
            return
        if now is not None and now != pin.identity:
            before, pin.identity = pin.identity, now
            if before is not None:
                pin.exec_count += 1
                self._post(ev.ClientLeft(process, "exec"))
        if pin.compare_again:
            self._compare(process, pin)

    # -- the end -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Pin nothing more, and end the waiting for address spaces."""
        self._named.close()
        for pin in self._pins.values():
            pin.exited.set()

    def close(self) -> None:
        for process in tuple(self._pins):
            self.forget(process)
        self._sweep.close()


def _identity(process: ProcessInstance) -> processes.ExecIdentity | None:
    try:
        return processes.exec_identity(process)
    except MpsdError:
        return None
