"""mpsd dies before effect N, for every N until no effect is left; nothing else may die of it.

The daemon performs its decisions in one place and, asked by its environment, kills itself there before
the N-th. A supervisor (this program, where systemd would be) starts it again at once. Around it goes on
what it is for: clients come, one is killed with its kernel running, one hangs and is evicted.
"""

from __future__ import annotations

import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faultinject import report
from faultinject.checkers import check, verdict
from faultinject.faults import Fault, Recording, Story
from faultinject.history import History, clock
from faultinject.matrix import tell_stderr
from faultinject.node import Node, open_node
from faultinject.observation import observe
from faultinject.rig import Rig
from faultinject.service import MpsdService
from faultinject.verdict import Finding, Verdict
from faultinject.worker import Worker
from mpsd.errors import DeadlineError, MpsdError, NotFoundError, NotReadyError

PATIENCE_S = 20.0
MOST_EFFECTS = 2000

DEATH = Fault(
    "mpsd_death",
    "mpsd dies before one of its effects and is started again",
    {"stock": None, "mpsd": True},
    classes=frozenset({"death-in-flight"}),
    recording=Recording.OPTIONAL,
    story=Story.DAEMON_DIES,
    modes=("mpsd",),
)


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """`last` 0: until no effect is left; `sample` 0: every N between."""

    backend: str
    seed: int = 1
    first: int = 1
    last: int = 0
    sample: int = 0
    survivors: int = 2
    jobs: int = 1
    out: Path | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One N. `died` is False when the whole script performed fewer effects than that."""

    effect: int
    died: bool
    effects: int
    verdict: Verdict
    findings: Sequence[Finding]


class Doomed(MpsdService):
    """A daemon that dies once, before effect N, and is started again by a supervisor."""

    def __init__(
        self, node: Node, base: Path, logs: Path, history: History, first_life: Mapping[str, str]
    ) -> None:
        super().__init__(node, base, logs, history, first_life)
        self.died = False
        self._turn = threading.Lock()

    def start(self) -> None:
        """Start it and watch over it; it may die before it is ready. Raises MpsdError."""
        self.launch()
        assert self._process is not None
        supervisor = threading.Thread(target=self._supervise, args=(self._process,), daemon=True)
        supervisor.start()
        patiently(self._ready)
        self._watch()

    def _ready(self) -> None:
        if self.active() is None:
            self.client_environment()
            raise NotReadyError("no domain is active yet")

    def _supervise(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for its death by its own hand; start it again without doom."""
        status = process.wait()
        with self._turn:
            if self._stopping.is_set():
                return
            self._history.add("mpsd", "died", status=status)
            self.died = True
            self.launch()

    def stop(self) -> list[str]:
        """As always; one that dies of its doom while it stops is started again, and stopped."""
        with self._turn:
            self._stopping.set()
        left = super().stop()
        if self._process is not None and self._process.returncode == -signal.SIGKILL and not self.died:
            self.died = True
            self.launch()
            patiently(self._ready)
            left = super().stop()
        return left

    def effects(self) -> int:
        return int(self.status()["counters"]["effects_performed"])


def patiently(ask: Callable[[], Any]) -> Any:
    """Ask until the daemon answers: it may be between two lives. Raises DeadlineError."""
    end = clock() + PATIENCE_S
    while True:
        try:
            return ask()
        except NotFoundError:
            raise
        except MpsdError as error:
            if clock() > end:
                raise DeadlineError(f"mpsd did not come back: {error}") from error
            time.sleep(0.02)


class Script:
    """What goes on while the daemon dies. Every step is repeated until it has happened."""

    def __init__(self, rig: Rig, service: Doomed, seed: int) -> None:
        self.rig, self.service, self.seed = rig, service, seed
        self.survivors: list[Worker] = []

    def play(self, survivors: int) -> None:
        self.survivors = [
            self._spawn(f"survivor-{i}", "survivor", "--seed", str(self.seed + i)) for i in range(survivors)
        ]
        busy = ("--busy-s", str(self.rig.node.busy_s))
        killed = self._spawn("offender-0", "offender", "sigkill_running", *busy)
        hung = self._spawn("offender-1", "offender", "endless", *busy)
        self._attached(killed, hung, *self.survivors)
        for offender in (killed, hung):
            offender.tell("go")
        killed.wait("gone", timeout=PATIENCE_S)
        hung.wait("fire", timeout=PATIENCE_S)
        self._evict(hung)
        newcomer = self._spawn("newcomer-0", "newcomer", "--spawned", str(clock()))
        newcomer.wait("gone", timeout=PATIENCE_S)
        self._calm()
        self._finish()

    def _spawn(self, name: str, module: str, *args: str) -> Worker:
        environment = patiently(self.service.client_environment)
        worker = self.rig.spawn(name, module, *args, environment=environment)
        if module != "newcomer":
            worker.must("ready", "error", "outcome", timeout=PATIENCE_S)
        return worker

    def _attached(self, *workers: Worker) -> None:
        ours = {w.pid for w in workers}

        def attached(status: Mapping[str, Any]) -> bool:
            return ours <= {c["pid"] for c in status["clients"] if c["state"] == "attached"}

        if self.service.until(attached, PATIENCE_S) is None:
            raise DeadlineError(f"clients {sorted(ours)} were not attached again")

    def _evict(self, hung: Worker) -> None:
        ready = hung.must("ready", timeout=PATIENCE_S)
        ticks = int(ready.data["start_ticks"])
        while hung.running:
            try:
                patiently(lambda: self.service.evict(hung, ticks))
            except NotFoundError:
                # Not a client to this daemon: gone already, or not taken over yet.
                hung.wait("gone", timeout=0.1)
        hung.must("gone", timeout=PATIENCE_S)

    def _calm(self) -> None:
        """All survivors attached to the daemon that lives now, nothing held for the dead."""
        ours = {w.pid for w in self.survivors}

        def calm(status: Mapping[str, Any]) -> bool:
            attached = {c["pid"] for c in status["clients"] if c["state"] == "attached"}
            held = status["dead"] or status["counters"]["leases_held"] < len(ours)
            return attached == ours and not held

        at = self.service.until(calm, PATIENCE_S)
        self.rig.history.add("mpsd", "readopted", all=at is not None, pids=sorted(ours))

    def _finish(self) -> None:
        for survivor in self.survivors:
            survivor.tell("stop")
        for survivor in self.survivors:
            survivor.wait("done", "error", "gone", timeout=PATIENCE_S)
        patiently(self.service.collect)


def one(plan: SweepPlan, effect: int, node: Node | str) -> Outcome:
    """Die before this effect. Never raises for what goes wrong: that is a verdict."""
    where = plan.out / f"effect-{effect:04}" if plan.out else None
    if where is not None:
        where.mkdir(parents=True, exist_ok=True)
    doomed: Doomed | None = None
    effects = 0
    with History(where / "history.jsonl" if where else None) as history:
        history.add(
            "rig",
            "begin",
            kind=DEATH.kind,
            variant="",
            mode="mpsd",
            seed=plan.seed,
            survivors=plan.survivors,
            backend=plan.backend,
            effect=effect,
        )
        rig = Rig(node, "mpsd", history, logs_to=where / "logs" if where else None)
        rig.service_kind = Doomed
        rig.service_environment = {"MPSD_DIE_BEFORE_EFFECT": str(effect)}
        try:
            with rig:
                doomed = rig.mpsd if isinstance(rig.mpsd, Doomed) else None
                assert doomed is not None
                history.add("rig", "fire", effect=effect)
                Script(rig, doomed, plan.seed).play(plan.survivors)
                effects = patiently(doomed.effects)
        except MpsdError as error:
            history.add("rig", "failed", text=f"{error.code}: {error}")
        except Exception as error:  # a broken rig must not look like a product that failed, or passed
            history.add("rig", "failed", text=f"the rig failed: {error!r}")
        history.add("rig", "end", leftovers=rig.left)
        findings = check(DEATH, observe(history), bars=False)
        died = doomed is not None and doomed.died
    return Outcome(effect, died, effects, verdict(findings), findings)


def effects_to_try(plan: SweepPlan, last: int) -> list[int]:
    every = range(plan.first, last + 1)
    if plan.sample and plan.sample < len(every):
        return sorted(random.Random(plan.seed).sample(every, plan.sample))
    return list(every)


def sweep(plan: SweepPlan, json_path: Path | None, markdown_path: Path | None = None) -> int:
    """Run it with progress and a table; the exit status. Raises MpsdError."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        node = open_node(plan.backend, Path(base))
        try:
            device, driver = node.device, node.driver
            outcomes = run(plan, node if plan.backend != "simulated" else plan.backend)
        finally:
            node.close()
    bad = [o for o in outcomes if o.verdict is not Verdict.VALID]
    command = (
        f"mpsd-faultinject sweep --backend {plan.backend} --seed {plan.seed} "
        f"--from {plan.first} --to {plan.last} --sample {plan.sample}"
    )
    finished = {
        "schema": 1,
        "device": device,
        "driver": driver,
        "date": date,
        "command": command,
        "sweep": [_row(o) for o in outcomes],
    }
    print(f"again: {command}")
    print(report.aligned(_table(outcomes)))
    print(f"{len(outcomes)} deaths tried, {len(bad)} not survived as they should")
    report.deliver(finished, "sweep", json_path, markdown_path, _markdown(finished, outcomes))
    return 1 if bad or not outcomes else 0


def _table(outcomes: Sequence[Outcome]) -> list[list[str]]:
    rows = [["effect", "daemon died", "verdict"]]
    return rows + [[str(o.effect), "yes" if o.died else "no", o.verdict.value] for o in outcomes]


def _markdown(finished: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    head, *rows = _table(outcomes)
    lines = [
        f"# {finished['device']}, driver {finished['driver']}: mpsd dies before effect N",
        "",
        f"{finished['date']}:",
        "",
        f"    {finished['command']}",
        "",
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _row(outcome: Outcome) -> dict[str, Any]:
    complaints = [f"{f.law}: {f.text}" for f in outcome.findings if f.verdict is not Verdict.VALID]
    return {
        "effect": outcome.effect,
        "died": outcome.died,
        "verdict": outcome.verdict.value,
        "complaints": complaints,
    }


def run(plan: SweepPlan, node: Node | str) -> list[Outcome]:
    """A first run counts the effects of the script, unless `last` says where to stop; then all the deaths."""
    last = plan.last
    if not last:
        whole = one(plan, MOST_EFFECTS, node)
        _tell(whole)
        if whole.verdict is not Verdict.VALID:
            return [whole]
        last = whole.effects
        tell_stderr(f"the script makes mpsd perform {last} effects")
    jobs = plan.jobs if isinstance(node, str) else 1
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for outcome in pool.map(lambda n: one(plan, n, node), effects_to_try(plan, last)):
            _tell(outcome)
            outcomes.append(outcome)
    while not (plan.last or plan.sample) and outcomes and outcomes[-1].died:
        # Runs differ by a few effects: go on until one survives its N.
        outcomes.append(one(plan, outcomes[-1].effect + 1, node))
        _tell(outcomes[-1])
    return outcomes


def _tell(outcome: Outcome) -> None:
    state = "died" if outcome.died else "was never reached"
    why = "; ".join(f"{f.law}: {f.text}" for f in outcome.findings if f.verdict is not Verdict.VALID)
    tell_stderr(f"effect {outcome.effect} ({state}): {outcome.verdict}" + (f"\n    {why}" if why else ""))
