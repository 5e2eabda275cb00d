"""mpsd dies before its N-th effect after the order to fault, beside programs protected by fail-over.

The programs stay for all N of a kind of fault. A scenario ends when every program has a standby context
again and mpsd knows neither the offender nor the domain that faulted.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from faultinject.campaigns.failover.command import main_settings
from faultinject.campaigns.failover.records import is_settled
from faultinject.campaigns.failover.reports import keeps_growing
from faultinject.campaigns.failover.rounds import FAULT_S, POLL_S, QUIET_S, UP_S
from faultinject.campaigns.outages.course import Outages, Outcome
from faultinject.registry.history import History, clock
from faultinject.rig.leftovers import open_descriptors
from faultinject.rig.libraries import Libraries
from faultinject.rig.node import Node
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.base import debug
from mpsd.base.errors import DeadlineError, MpsdError

SCENARIO_S, OVER_S = 150.0, 60.0
"""Deadlines of a scenario, and of its end after the order to fault and after each start of mpsd."""
NEVER = 1_000_000
"""More effects than mpsd performs for one fault."""
LAST_WORDS = "mpsd kills itself before an effect"
"""The log line of mpsd.daemon.runtime."""


@dataclass(slots=True)
class Death(Outcome):
    """One N. `before`: the kind of effect that was not performed, from mpsd's log.

    effects: what mpsd performed from the order to fault until it was over, if it did not die. unsettled:
    fail-over records without the outcome of each client. descriptors: of the program with most, afterwards.
    """

    effect: int = 0
    died: bool = False
    before: str = ""
    effects: int = 0
    unsettled: int = 0
    descriptors: int | None = None
    complaints: list[str] = field(default_factory=list)


class EffectDeaths(Outages):
    """The programs of Outages; one N after the other."""

    def __init__(self, rig: Rig, libraries: Libraries, tell: Callable[[str], None]) -> None:
        super().__init__(rig, libraries, tell, clock() + SCENARIO_S)
        self._launched_for = self._next = 0
        self._unsettled: set[int] = set()
        self._counts = False

    def death(self, kind: str, effect: int, following: int) -> Death:
        """Let mpsd die before this effect, counted from the order to fault, and start it again.

        `following`: the effect of the next death, for which mpsd is started after this one.
        """
        self._end, self._next = clock() + SCENARIO_S, following
        death = Death(kind, effect=effect)
        offender: Worker | None = None
        try:
            if self._launched_for != effect:
                self._rig.mpsd.kill()
                self._launch(effect)
            self._replace_lost()
            offender = self._rig.spawn(f"offender-{kind}-{effect}", "offender", kind)
            self._wait_until_ready(self._servers)
            offender.require("ready", timeout=self._left(UP_S))
            self._reset_reports()
            self._bystander.stall()
            faulting, before = self._active_domain(), self._arm()
            at = offender.tell("go")
            self._follow(death, offender, faulting)
            met = offender.wait("outcome", "gone", timeout=self._left(FAULT_S))
            death.faulted = int(met is not None and (met.what == "gone" or met.data["code"] != 0))
            try:
                self._collect_death(death, at, before)
            except MpsdError:
                if death.died or not self._rig.mpsd.ended:
                    raise
                # It performs some effects later, and died before one of them.
                self._follow(death, offender, faulting)
                self._collect_death(death, at, before)
        except (DeadlineError, MpsdError) as error:
            death.problem = str(error)
        finally:
            if offender is not None:
                offender.end()
            self._replace_counting()
        death.complaints += complaints(death)
        self._tell(f"{kind}, effect {effect} {death.before}: {'; '.join(death.complaints) or 'valid'}")
        return death

    def _collect_death(self, death: Death, at: float, before: int) -> None:
        """`before`: the effects that mpsd had performed until the order. Raises DeadlineError, MpsdError."""
        if not death.died:
            death.effects = self._performed() - before
        self._collect_programs(death, at)
        self._collect_rest(death, at)

    def _launch(self, effect: int) -> None:
        """Start an mpsd that will die before this effect, counted from the signal. Raises MpsdError."""
        self._rig.mpsd.launch(debug.variable(die_after_signal=effect))
        self._launched_for, self._counts = effect, False
        self._rig.mpsd.wait_ready(self._left(UP_S))

    def _arm(self) -> int:
        """Begin to count while mpsd has nothing to do; return what it has performed. Raises MpsdError."""
        last, since = self._performed(), clock()
        while clock() - since < QUIET_S and self._left(UP_S):
            time.sleep(POLL_S)
            if (now := self._performed()) != last:
                last, since = now, clock()
        self._counts = True
        os.kill(self._rig.mpsd.pid, signal.SIGUSR2)
        # The answer comes after the signal: one loop handles both. An effect of another cause may be N.
        with suppress(MpsdError):
            last = self._performed()
        return last

    def _replace_counting(self) -> None:
        """Replace an mpsd that did not die: it would die of the effects of its own end."""
        if self._counts:
            with suppress(MpsdError):
                self._rig.mpsd.kill()
                self._launch(self._next)

    def _performed(self) -> int:
        return int(self._rig.mpsd.status()["counters"]["effects_performed"])

    def _active_domain(self) -> str:
        """Return the domain that the programs and the offender are in. Raises DeadlineError."""
        for slot in self._rig.mpsd.status()["slots"]:
            if slot["programs"] and slot["active"]:
                return str(slot["active"])
        raise DeadlineError("the programs are in no domain")

    def _follow(self, death: Death, offender: Worker, faulting: str) -> None:
        """Start mpsd again when it has died, until the fault is over. Raises DeadlineError, MpsdError."""
        service, end, why = self._rig.mpsd, clock() + self._left(OVER_S), "mpsd does not answer"
        while clock() < end:
            if service.ended and not death.died:
                death.died, death.before = True, last_words(service.tail())
                self._launch(self._next)
                end = clock() + self._left(OVER_S)
            with suppress(MpsdError):
                why = self._open_end(offender, faulting)
                if not why:
                    return
            time.sleep(POLL_S)
        raise DeadlineError(f"{OVER_S:.0f} s after the fault, or after the start of mpsd, {why}")

    def _open_end(self, offender: Worker, faulting: str) -> str:
        """Return what is still to come after the fault; empty for nothing. Raises MpsdError."""
        status = self._rig.mpsd.status()
        if any(domain["id"] == faulting for domain in status["domains"]):
            return f"mpsd still has the domain {faulting}"
        if any(client["pid"] == offender.pid for client in (*status["clients"], *status["dead"])):
            return "mpsd still has the offender"
        running = {server.pid: server.name for server in self._servers if server.running}
        for slot in status["slots"]:
            for program in slot["programs"]:
                name = running.pop(program["pid"], None)
                if name is not None and not (program["standing"] == "ready" and slot["survivable"]):
                    return f"{name} has no standby context: {program['standing']} {program['reason']}"
        return f"mpsd does not know {', '.join(running.values())}" if running else ""

    def _collect_rest(self, death: Death, at: float) -> None:
        """Raises DeadlineError if the bystander was lost, MpsdError."""
        _, wrong = self._bystander.stall(at)
        if wrong:
            death.complaints.append("the bystander saw wrong results")
        records = self._rig.mpsd.ask(lambda c: c.failovers())
        unsettled = {record["id"] for record in records if not is_settled(record)}
        death.unsettled = len(unsettled - self._unsettled)
        self._unsettled |= unsettled
        with suppress(OSError):
            death.descriptors = max(open_descriptors(server.pid) for server in self._servers)


@dataclass(slots=True)
class Sweep:
    """The deaths of one kind of fault. `effects`: what mpsd performs for one fault if it does not die.

    leftovers: processes that had to be ended, and descriptors that each fault left open, in words.
    """

    effects: int = 0
    deaths: list[Death] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)


def sweep_of_kind(
    node: Node,
    libraries: Libraries,
    kind: str,
    chosen: Callable[[int], list[int]],
    last: int,
    tell: Callable[[str], None],
    *,
    sampled: bool,
    out: Path | None = None,
) -> Sweep:
    """Try all deaths at one kind of fault, beside the same programs unless a scenario does not end.

    `chosen`: the N to try, of so many. `last` 0: a first fault without a death counts the effects. Without a
    sample and a last N, it continues until mpsd survives its N. Raises MpsdError if there is no rig.
    """
    sweep, pending = Sweep(last), chosen(last) if last else [NEVER]
    settings = main_settings(libraries)
    while pending:
        logs, opened = out and out / f"{kind}-{pending[0]}", list[int]()
        with History() as history, Rig(node, "mpsd", history, settings=settings, logs_to=logs) as rig:
            course = EffectDeaths(rig, libraries, tell)
            course.start()
            usable = True
            while pending and usable:
                effect = pending.pop(0)
                death = course.death(kind, effect, pending[0] if pending else effect + 1)
                usable, good = not death.problem, not death.complaints
                opened += [death.descriptors] if death.descriptors is not None else []
                if effect != NEVER or not good:
                    sweep.deaths.append(death)
                if effect == NEVER and good:
                    sweep.effects, pending = death.effects, chosen(death.effects)
                elif not (pending or sampled or last) and death.died:
                    # Runs differ by a few effects.
                    pending = [effect + 1]
            if usable:
                _end(course, death)
        sweep.leftovers += rig.leftovers
        if keeps_growing(opened):
            sweep.leftovers.append(f"{kind}: descriptors of a program after each fault: {opened}")
    return sweep


def _end(course: EffectDeaths, last: Death) -> None:
    """End the programs; a failure is a complaint about the last death."""
    try:
        problem = course.end()
    except MpsdError as error:
        problem = str(error)
    last.complaints += [problem] if problem else []


def complaints(death: Death) -> list[str]:
    """Return each reason why mpsd did not survive this death as it should."""
    found = [death.problem] if death.problem else []
    found += [f"lost: {error}" for error in death.errors]
    counts = {
        "programs met an error": death.told,
        "programs saw wrong results": death.wrong,
        "innocent programs were named": death.innocent,
    }
    found += [f"{count} {what}" for what, count in counts.items() if count]
    if death.unsettled:
        found.append(f"{death.unsettled} fail-over records lack the outcome of a program")
    if not found and not death.faulted:
        found.append("the fault had no effect")
    return found


def last_words(log: str) -> str:
    """Return the kind of effect before which mpsd has killed itself; empty if its log does not say."""
    for line in reversed(log.splitlines()):
        with suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and entry.get("event") == LAST_WORDS:
                return str(entry.get("effect", ""))
    return ""
