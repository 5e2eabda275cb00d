"""Limits of running domains: learnt from their control daemons, applied to every domain of the slot.

A log line only says where to look. What the control daemon answers counts: only its own user and root can
change it. mpsd compares each answer with the last one. A difference was set by hand, so it is written to the
state file, and then set in every domain of the slot. The stock control daemon gives a default to later
servers alone, so mpsd also sets it for the running server.

A domain with a faulted server gets no command about its server: the control daemon could hang in it. If the
server faults during such a command, the command's short deadline lets mpsd see the fault soon.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from mpsd.base import audit
from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import ControlError, DeadlineError, MpsdError
from mpsd.base.model import ProcessInstance
from mpsd.limits.book import LimitBook, Owner
from mpsd.limits.questions import Claim, Question, claim, questions
from mpsd.limits.values import REMEDY, STOCK, Key, Kind, agrees, answer, said, value_of
from mpsd.os.quietperiod import QuietPeriod

log = structlog.get_logger("mpsd.limits")

STEP_S = 0.05
"""Pause [s] between two looks at a domain. Every local user can write the logs of some domains."""
STAGGER_S = 0.02
"""Pause [s] between the looks at two adopted domains."""
RETRY_S = 5.0
"""Pause [s] after a control daemon that did not answer."""
COMMAND_S = 2.0
"""Deadline [s] of a command."""
SERVER_COMMAND_S = 0.25
"""First deadline [s] of a command about a running server. A miss doubles it up to COMMAND_S: a slow machine
needs longer, and mpsd learns of a fault between two tries."""
RETRY_SERVER_S = 1.0
"""Pause [s] after such a miss."""
TRIES = 3
"""A control daemon that serves another front end can print nothing, as it does for a missing limit."""
LOOK_S = 30.0
"""Interval [s] of looks at a domain whose log does not report commands."""


class Control(Protocol):
    """The part of a ControlDaemon that limits need."""

    @property
    def gpus(self) -> tuple[str, ...]: ...

    async def command(self, text: str, deadline_s: float) -> str: ...

    def server_instances(self) -> tuple[ProcessInstance, ...]: ...

    def alive(self) -> bool: ...


class _LaterError(ControlError):
    """A command about a server missed its short deadline."""


@dataclass(slots=True)
class _Domain:
    """The limits of one running domain.

    `answers`: the last answers, those about a server from `server` (pid, 0 for none). `given`: the values
    behind rounded answers, where they are known. `intended`: the values that mpsd is about to set. `claims`:
    commands in the log that no look has followed yet. `look`: all answers are in doubt. `sent`: commands of
    mpsd that the log will report. `dirty`: a task has to run. `started`: the domain may run tasks.
    `server_command_s`: deadline of commands about its server. `compared`: mpsd has compared its answers with
    the limits of the slot, so a later difference was set by hand.
    """

    name: str
    owner: Owner
    control: Control
    answers: dict[Question, str] = field(default_factory=dict)
    server: int = 0
    given: dict[Question, str] = field(default_factory=dict)
    intended: Mapping[Key, str] = field(default_factory=dict)
    claims: dict[Question, Claim] = field(default_factory=dict)
    look: bool = False
    sent: deque[str] = field(default_factory=lambda: deque(maxlen=64))
    dirty: bool = False
    started: bool = False
    compared: bool = False
    running: bool = False
    server_command_s: float = SERVER_COMMAND_S
    retry_at: float = -math.inf
    looked_at: float = -math.inf
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`serves`: whether a domain serves, with a server that is not in FAULT. `save`: write the state now.

    `rejected`: count a command that changed nothing.
    """

    serves: Callable[[str], bool]
    save: Callable[[], object]
    rejected: Callable[[], object]
    spawn: Callable[[Coroutine[Any, Any, None]], object]


class LimitKeeper:
    """Keeps every running domain at the limits of its slot."""

    def __init__(self, book: LimitBook, around: Surroundings, quiet_period: QuietPeriod) -> None:
        self.book, self._around, self._quiet_period = book, around, quiet_period
        self._domains: dict[str, _Domain] = {}
        self._saved: dict[str, Mapping[str, Any]] = {}
        self._adopted: list[_Domain] = []
        self._loop = asyncio.get_running_loop()

    # -- domains ----------------------------------------------------------------------------------------

    async def give(self, name: str, owner: Owner, control: Control) -> None:
        """Set the defaults of a new control daemon, before it has a server. Raises MpsdError."""
        fresh: dict[Question, str] = {q: STOCK.get(q.key, "") for q in questions(control.gpus, server=False)}
        domain = self._domains[name] = _Domain(name, owner, control, fresh)
        await self._apply(domain)

    async def confirm(self, name: str) -> None:
        """Compare the limits of the first server, and those said meanwhile. Raises MpsdError."""
        domain = self._domains[name]
        domain.dirty = True
        while domain.dirty:
            domain.dirty = False
            await self._apply(domain)
        # Without a pause since the last comparison: later limits reach the domain by a task.
        domain.started = True
        if domain.claims:
            self._settle_soon(domain)

    def adopt(self, name: str, owner: Owner, control: Control) -> None:
        """Take over a running domain. begin() looks for what was said while no mpsd ran."""
        domain = self._domains[name] = _Domain(name, owner, control, look=True)
        self._adopted.append(domain)
        if (saved := self._saved.get(name)) is not None:
            domain.server, domain.compared = saved["server"], saved["compared"]
            for question in questions(control.gpus, server=True):
                if (text := saved["answers"].get(question.name)) is not None:
                    domain.answers[question] = answer(question.key.kind, text)
            intended = saved["intended"]
            domain.intended = {k: intended[str(k)] for k in _keys(control.gpus) if str(k) in intended}

    def begin(self) -> None:
        """Look at all adopted domains."""
        adopted, self._adopted = self._adopted, []
        for domain in adopted:
            domain.started = True
        self._around.spawn(self._look_in_turn(adopted))

    async def _look_in_turn(self, adopted: Sequence[_Domain]) -> None:
        """Look at one domain after the other: each look starts several processes."""
        for domain in adopted:
            if self._domains.get(domain.name) is domain:
                self._settle_soon(domain)
                await asyncio.sleep(STAGGER_S)

    def forget(self, name: str) -> None:
        self._domains.pop(name, None)

    # -- what happens -----------------------------------------------------------------------------------

    def said(self, name: str, command: str) -> None:
        """Handle a command in a domain's log: if it sets a limit, ask the control daemon."""
        domain = self._domains.get(name)
        if domain is None:
            return
        if command in domain.sent:
            domain.sent.remove(command)
            return
        try:
            found = claim(command, domain.owner.gpus)
        except ValueError as error:
            log.info("limit rejected", domain=name, command=command, reason=str(error))
            self._around.rejected()
            # Whatever the control daemon made of it.
            domain.look = True
            self._settle_soon(domain)
            return
        if found is not None:
            domain.claims.pop(found.question, None)
            domain.claims[found.question] = found
            self._settle_soon(domain)

    def server_changed(self, name: str) -> None:
        """Compare the limits of a server that its control daemon started by itself."""
        if (domain := self._domains.get(name)) is not None:
            self._settle_soon(domain)

    def check(self, unheard: Iterable[str]) -> None:
        """Run what waits, once a second. `unheard`: domains whose log may lack commands."""
        now = self._loop.time()
        for name in unheard:
            domain = self._domains.get(name)
            if domain is not None and domain.started and now - domain.looked_at >= LOOK_S:
                domain.looked_at, domain.look = now, True
                self._settle_soon(domain)
        for domain in tuple(self._domains.values()):
            if domain.dirty:
                self._settle_soon(domain)

    # -- views ------------------------------------------------------------------------------------------

    def answers(self, name: str) -> Mapping[Key, str]:
        """Return the limits of new clients of a domain, as its control daemon last answered."""
        domain = self._domains.get(name)
        found: dict[Key, str] = {}
        if domain is not None:
            for question in questions(domain.owner.gpus, server=True):
                if text := domain.answers.get(question, ""):
                    found[question.key] = text
        return found

    def conditions(self) -> list[Condition]:
        """Return the domains that take clients and lack a limit."""
        return [
            Condition(Code.LIMITS_NOT_APPLIED, domain.name, domain.problem)
            for domain in self._domains.values()
            if domain.problem and self._around.serves(domain.name)
        ]

    def to_file(self) -> dict[str, Any]:
        """Return what a later mpsd needs, for the state file."""
        return {
            "slots": self.book.rows(),
            "domains": {
                d.name: {
                    "server": d.server,
                    "compared": d.compared,
                    "answers": {question.name: text for question, text in d.answers.items()},
                    "intended": {str(key): value for key, value in d.intended.items()},
                }
                for d in self._domains.values()
            },
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of to_file(), before adopt(). Raises ValueError, LookupError and the like."""
        self._saved = {
            str(name): {
                "server": int(row["server"]),
                "compared": bool(row.get("compared", True)),
                "answers": {str(question): str(text) for question, text in row["answers"].items()},
                "intended": {str(key): str(value) for key, value in row["intended"].items()},
            }
            for name, row in saved["domains"].items()
        }
        self.book.restore(saved["slots"])

    # -- the work ---------------------------------------------------------------------------------------

    def _settle_soon(self, domain: _Domain) -> None:
        domain.dirty = True
        if domain.started and not domain.running and self._loop.time() >= domain.retry_at:
            domain.running = True
            self._around.spawn(self._settle(domain))

    async def _settle(self, domain: _Domain) -> None:
        try:
            while domain.dirty and self._domains.get(domain.name) is domain and domain.control.alive():
                serves = self._around.serves(domain.name)
                if not serves and not (domain.look or domain.claims):
                    return
                # The limits of its server wait until it serves again.
                domain.dirty = not serves
                await self._look(domain, serves)
                if serves:
                    await self._apply(domain)
                domain.server_command_s = SERVER_COMMAND_S
                await asyncio.sleep(STEP_S)
        except MpsdError as error:
            # The domain may have ended meanwhile, with its control daemon.
            if self._domains.get(domain.name) is domain and domain.control.alive():
                domain.look = domain.dirty = True
                soon = isinstance(error, _LaterError)
                domain.retry_at = self._loop.time() + (RETRY_SERVER_S if soon else RETRY_S)
                domain.problem = domain.problem if soon else error.message
        finally:
            domain.running = False

    async def _look(self, domain: _Domain, serves: bool) -> None:
        """Ask for the limits that may have changed, and keep those that have."""
        claims, domain.claims = domain.claims, {}
        everything, domain.look = domain.look, False
        if not (claims or everything):
            return
        server = self._server(domain) if serves else 0
        keys = {question.key for question in claims}
        asked = [q for q in questions(domain.owner.gpus, server=server > 0) if everything or q.key in keys]
        found: dict[Question, str] = {}
        try:
            for question in asked:
                there = question in claims or bool(domain.answers.get(question))
                found[question] = await self._ask(domain, question, TRIES if there else 1)
        except MpsdError:
            domain.claims = claims | domain.claims
            raise
        last_said = {question: place for place, question in enumerate(claims, 1)}
        changed = [q for q in asked if self._is_new(domain, q, found[q], claims.get(q))]
        domain.answers.update(found)
        self._report(domain, claims, found, changed)
        for question in sorted(changed, key=lambda question: last_said.get(question, 0)):
            self._learn(domain, question, found[question], claims.get(question))

    def _is_new(self, domain: _Domain, question: Question, answered: str, claimed: Claim | None) -> bool:
        """Return whether an answer was set by hand since the last one."""
        kind = question.key.kind
        if not answered or said(kind, value_of(kind, answered)) is None:
            return False
        if claimed is not None and claimed.value is not None and agrees(kind, claimed.value, answered):
            # Two values can have the same rounded answer.
            return claimed.value != domain.given.get(question)
        intended = domain.intended.get(question.key)
        if intended and said(kind, intended) and agrees(kind, intended, answered):
            # A mpsd that died right after its command has not stored the answer.
            return False
        if question in domain.answers:
            return not _same(kind, domain.answers[question], answered)
        wanted, stock = self.book.wanted(domain.owner).get(question.key), STOCK.get(question.key)
        if claimed is None and (wanted != stock or not domain.compared):
            # The history is unknown: the answer may be a limit that the configuration has lost meanwhile.
            return False
        return not (wanted and agrees(kind, wanted, answered))

    def _learn(self, domain: _Domain, question: Question, answered: str, claimed: Claim | None) -> None:
        kind = question.key.kind
        value = value_of(kind, answered)
        if claimed is not None and claimed.value is not None and agrees(kind, claimed.value, answered):
            # The answer is rounded.
            value = claimed.value
        domain.given[question] = value
        if not self.book.learn(domain.owner, question.key, value):
            return
        domain.sent.clear()
        # No interface names the process that gave the control daemon this command.
        text = question.write(domain.server, value)
        audit.record(
            "setting", "kept", by="control socket", domain=domain.name, uid=domain.owner.uid, setting=text
        )
        # Before any other domain shows the limit: a later mpsd must know it, too.
        self._around.save()
        for other in tuple(self._domains.values()):
            if other.owner == domain.owner:
                self._settle_soon(other)

    def _report(
        self,
        domain: _Domain,
        claims: Mapping[Question, Claim],
        found: Mapping[Question, str],
        changed: Iterable[Question],
    ) -> None:
        """Log the commands that did not do what they say."""
        new = set(changed)
        for question, claimed in claims.items():
            kind, answered = question.key.kind, found.get(question, "")
            if question not in found or (claimed.value is not None and agrees(kind, claimed.value, answered)):
                continue
            if question not in new:
                self._around.rejected()
            log.warning(
                "limit not taken as written",
                domain=domain.name,
                command=claimed.text,
                answer=answered or "nothing",
                remedy=REMEDY[kind],
            )

    async def _apply(self, domain: _Domain) -> None:
        """Set the limits of the slot where the control daemon has others."""
        wanted, server = self.book.wanted(domain.owner), self._server(domain)
        before, failed = dict(domain.answers), list[str]()
        for question in questions(domain.owner.gpus, server=server > 0):
            value = wanted.get(question.key)
            if value is None:
                continue
            kind, answered = question.key.kind, await self._known(domain, question, value)
            # Another name of the GPU is set only where it could contradict.
            known = domain.given.get(question, value) == value
            if (known and agrees(kind, value, answered)) or (question.by_uuid and not answered):
                continue
            if domain.started and await self._changed_meanwhile(domain, question):
                domain.look = domain.dirty = True
                return
            if domain.intended != wanted:
                domain.intended = wanted
                self._around.save()
            for _ in range(TRIES):
                command = question.write(server, value)
                domain.sent.append(command)
                domain.given[question] = value
                await self._command(domain, question, command)
                answered = domain.answers[question] = await self._ask(domain, question, TRIES)
                if agrees(kind, value, answered):
                    break
            else:
                failed.append(f"{question.key} {value} (the control daemon answers {answered or 'nothing'})")
        domain.problem = ", ".join(failed)
        if domain.answers != before or domain.intended:
            domain.intended = {}
            self._around.save()
        domain.compared = True
        if wanted != self.book.wanted(domain.owner):
            domain.dirty = True

    async def _changed_meanwhile(self, domain: _Domain, question: Question) -> bool:
        """Return whether the control daemon has another value than the last answer: do not overwrite it."""
        known = domain.answers.get(question, "")
        present = await self._ask(domain, question, TRIES if known else 1)
        return bool(present) and not _same(question.key.kind, known, present)

    async def _known(self, domain: _Domain, question: Question, value: str) -> str:
        """Return the last answer, or ask. A new server has the defaults, so stock ones need no question."""
        if question in domain.answers:
            return domain.answers[question]
        default = domain.answers.get(Question(question.key, question.device), "")
        if question.server and value == STOCK.get(question.key) and agrees(question.key.kind, value, default):
            return default
        tries = TRIES if question.key.kind is not Kind.MEMORY or default else 1
        answered = domain.answers[question] = await self._ask(domain, question, tries)
        return answered

    async def _ask(self, domain: _Domain, question: Question, tries: int) -> str:
        """Return the answer of the control daemon, "" if it has none after these tries."""
        for _ in range(tries):
            reply = await self._command(domain, question, question.read(domain.server))
            if text := answer(question.key.kind, reply):
                return text
        return ""

    async def _command(self, domain: _Domain, question: Question, text: str) -> str:
        """Send a command, which starts a process, so it waits for the end of a quiet period.

        Raises ControlError if the server has faulted meanwhile.
        """
        await self._quiet_period.wait()
        if not (question.server and domain.started):
            return await domain.control.command(text, COMMAND_S)
        if not self._around.serves(domain.name):
            raise ControlError(
                f"the server of domain {domain.name} does not serve", remedy="mpsd waits until it does"
            )
        deadline_s = domain.server_command_s
        try:
            return await domain.control.command(text, deadline_s)
        except DeadlineError as error:
            if deadline_s >= COMMAND_S:
                raise
            domain.server_command_s = min(2 * deadline_s, COMMAND_S)
            raise _LaterError(error.message, remedy="mpsd tries again") from error

    def _server(self, domain: _Domain) -> int:
        """Return the pid of the running server, 0 for none. Forget the answers of an earlier server."""
        instances = domain.control.server_instances()
        server = instances[-1].pid if instances else 0
        if server != domain.server:
            domain.server = server
            domain.answers = {q: text for q, text in domain.answers.items() if not q.server}
            domain.given = {q: value for q, value in domain.given.items() if not q.server}
        return server


def _keys(gpus: Sequence[str]) -> list[Key]:
    """Return the limits of a domain of these GPUs (UUIDs)."""
    return [question.key for question in questions(gpus, server=False)]


def _same(kind: Kind, first: str, second: str) -> bool:
    """Return whether two answers stand for the same value. An empty one is no value."""
    return first == second or bool(first and second and value_of(kind, first) == value_of(kind, second))
