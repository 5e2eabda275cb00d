"""mpsd dies before effect N, for every N until no effect is left; no other process may die of it.

The daemon performs every decision in one place and kills itself there before the N-th effect, as its
environment says. A supervisor (this program in the place of systemd) restarts it at once. Meanwhile clients
start, one is killed with its kernel running, one hangs and is evicted. With --failover a neighbour of
programs that fail over faults instead (outages.effects).
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
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faultinject.campaigns.outages.course import KINDS as FAULTS
from faultinject.campaigns.outages.effects import Death, sweep_of_kind
from faultinject.evidence import files, revision, schema, tables
from faultinject.evidence.files import tell_stderr
from faultinject.registry.checkers import check, verdict
from faultinject.registry.faults import Fault, Recording, Story
from faultinject.registry.history import History, clock
from faultinject.registry.observation import observe
from faultinject.registry.verdicts import Finding, Verdict, merge
from faultinject.rig.libraries import find_libraries
from faultinject.rig.node import Node, open_node
from faultinject.rig.rig import Rig
from faultinject.rig.service import MpsdService
from faultinject.rig.worker import Worker
from mpsd.base import debug
from mpsd.base.errors import DeadlineError, MpsdError, NotFoundError, NotReadyError, UsageError

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


SCHEMA: Mapping[str, tuple[type, ...]] = {
    "schema": (int,),
    "device": (str,),
    "driver": (str,),
    "revision": (str,),  # of the code (evidence.revision)
    "date": (str,),  # ISO 8601, UTC
    "command": (str,),
    "leftovers": (list,),  # with --failover: processes that had to be ended, in words
    "sweep": (list,),  # of ROW
}
ROW: Mapping[str, tuple[type, ...]] = {
    "effect": (int,),
    "died": (bool,),  # whether mpsd performed that many effects, and died before this one
    "verdict": (str,),
    "complaints": (list,),  # the broken laws, and the text of each
    "fault": (str,),  # in flight, with --failover; N counts from the order to fault then
    "before": (str,),  # the kind of effect that mpsd did not perform, with --failover
}


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """`last` 0: until no effect is left; `sample` 0: every N between.

    failover: a fault is in flight beside programs that fail over. libcuda, driver: their libraries.
    """

    backend: str
    seed: int = 1
    first: int = 1
    last: int = 0
    sample: int = 0
    survivors: int = 2
    jobs: int = 1
    out: Path | None = None
    failover: bool = False
    libcuda: Path | None = None
    driver: Path | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One N. `died` is False when the whole script performed fewer effects than that."""

    effect: int
    died: bool
    effects: int
    verdict: Verdict
    findings: Sequence[Finding]
    fault: str = ""
    before: str = ""


class DyingService(MpsdService):
    """A daemon that dies once, before effect N, and is restarted by a supervisor."""

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
        ask_until_answered(self._ready)
        self._watch()

    def _ready(self) -> None:
        if self.active() is None:
            self.client_environment()
            raise NotReadyError("no domain is active yet")

    def _supervise(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until it kills itself, and restart it without that order."""
        status = process.wait()
        with self._turn:
            if self._stopping.is_set():
                return
            self._history.add("mpsd", "died", status=status)
            self.died = True
            self.launch()

    def stop(self) -> list[str]:
        """Stop it as always; restart and stop it again if it kills itself meanwhile."""
        with self._turn:
            self._stopping.set()
        leftovers = super().stop()
        if self._process is not None and self._process.returncode == -signal.SIGKILL and not self.died:
            self.died = True
            self.launch()
            ask_until_answered(self._ready)
            leftovers = super().stop()
        return leftovers

    def effects(self) -> int:
        return int(self.status()["counters"]["effects_performed"])


def ask_until_answered(ask: Callable[[], Any]) -> Any:
    """Repeat the request until the daemon answers. Raises DeadlineError."""
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
    """The script that runs while the daemon dies. Every step is repeated until it has happened."""

    def __init__(self, rig: Rig, service: DyingService, seed: int) -> None:
        self.rig, self.service, self.seed = rig, service, seed
        self.survivors: list[Worker] = []

    def play(self, survivors: int) -> None:
        self.survivors = [
            self._spawn(f"survivor-{i}", "survivor", "--seed", str(self.seed + i)) for i in range(survivors)
        ]
        busy = ("--busy-s", str(self.rig.node.busy_s))
        killed = self._spawn("offender-0", "offender", "sigkill_running", *busy)
        hung_client = self._spawn("offender-1", "offender", "endless", *busy)
        self._await_attached(killed, hung_client, *self.survivors)
        for offender in (killed, hung_client):
            offender.tell("go")
        killed.wait("gone", timeout=PATIENCE_S)
        hung_client.wait("fire", timeout=PATIENCE_S)
        self._evict(hung_client)
        newcomer = self._spawn("newcomer-0", "newcomer", "--spawned", str(clock()))
        newcomer.wait("gone", timeout=PATIENCE_S)
        self._wait_until_quiet()
        self._finish()

    def _spawn(self, name: str, module: str, *args: str) -> Worker:
        environment = ask_until_answered(self.service.client_environment)
        worker = self.rig.spawn(name, module, *args, environment=environment)
        if module != "newcomer":
            worker.require("ready", "error", "outcome", timeout=PATIENCE_S)
        return worker

    def _await_attached(self, *workers: Worker) -> None:
        own_pids = {w.pid for w in workers}

        def attached(status: Mapping[str, Any]) -> bool:
            return own_pids <= {c["pid"] for c in status["clients"] if c["state"] == "attached"}

        if self.service.until(attached, PATIENCE_S) is None:
            raise DeadlineError(f"clients {sorted(own_pids)} were not attached again")

    def _evict(self, hung_client: Worker) -> None:
        ready = hung_client.require("ready", timeout=PATIENCE_S)
        ticks = int(ready.data["start_ticks"])
        while hung_client.running:
            try:
                ask_until_answered(lambda: self.service.evict(hung_client, ticks))
            except NotFoundError:
                # Not a client of this daemon: it has ended already, or is not adopted yet.
                hung_client.wait("gone", timeout=0.1)
        hung_client.require("gone", timeout=PATIENCE_S)

    def _wait_until_quiet(self) -> None:
        """Wait until all survivors are attached and the living daemon holds nothing of exited clients."""
        own_pids = {w.pid for w in self.survivors}

        def quiet(status: Mapping[str, Any]) -> bool:
            attached = {c["pid"] for c in status["clients"] if c["state"] == "attached"}
            held = status["dead"] or status["counters"]["leases_held"] < len(own_pids)
            return attached == own_pids and not held

        at = self.service.until(quiet, PATIENCE_S)
        self.rig.history.add("mpsd", "readopted", all=at is not None, pids=sorted(own_pids))

    def _finish(self) -> None:
        for survivor in self.survivors:
            survivor.tell("stop")
        for survivor in self.survivors:
            survivor.wait("done", "error", "gone", timeout=PATIENCE_S)
        ask_until_answered(self.service.collect)


def run_one(plan: SweepPlan, effect: int, node: Node | str) -> Outcome:
    """Let mpsd die before this effect. A failure of the run is a verdict; nothing is raised."""
    where = plan.out / f"effect-{effect:04}" if plan.out else None
    if where is not None:
        where.mkdir(parents=True, exist_ok=True)
    service: DyingService | None = None
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
        rig.service_kind = DyingService
        rig.service_environment = debug.variable(die_before_effect=effect)
        try:
            with rig:
                service = rig.mpsd if isinstance(rig.mpsd, DyingService) else None
                assert service is not None
                history.add("rig", "fire", effect=effect)
                Script(rig, service, plan.seed).play(plan.survivors)
                effects = ask_until_answered(service.effects)
        except MpsdError as error:
            history.add("rig", "failed", text=f"{error.code}: {error}")
        except Exception as error:  # a broken rig must not look like a product that failed, or passed
            history.add("rig", "failed", text=f"the rig failed: {error!r}")
        history.add("rig", "end", leftovers=rig.leftovers)
        findings = check(DEATH, observe(history), bars=False)
        died = service is not None and service.died
    return Outcome(effect, died, effects, verdict(findings), findings)


def effects_to_try(plan: SweepPlan, last: int) -> list[int]:
    effects = range(plan.first, last + 1)
    if plan.sample and plan.sample < len(effects):
        return sorted(random.Random(plan.seed).sample(effects, plan.sample))
    return list(effects)


def sweep(plan: SweepPlan, json_path: Path | None, markdown_path: Path | None = None) -> int:
    """Run the sweep with progress and a table; return the exit status. Raises MpsdError."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        node = open_node(plan.backend, Path(base))
        try:
            device, driver, leftovers = node.device, node.driver, list[str]()
            if plan.failover:
                outcomes, leftovers = run_with_failover(plan, node, Path(base))
            else:
                outcomes = run(plan, node if plan.backend != "simulated" else plan.backend)
        finally:
            node.close()
    bad = [o for o in outcomes if o.verdict is not Verdict.VALID]
    command = (
        f"mpsd-faultinject sweep --backend {plan.backend} --seed {plan.seed} "
        f"--from {plan.first} --to {plan.last} --sample {plan.sample}" + " --failover" * plan.failover
    )
    finished = {
        "schema": 1,
        "device": device,
        "driver": driver,
        "revision": revision.current(),
        "date": date,
        "command": command,
        "leftovers": leftovers,
        "sweep": [_row(o) for o in outcomes],
    }
    print(f"repeat: {command}")
    print(tables.aligned(table(finished)))
    print(f"{len(outcomes)} deaths tried, {len(bad)} not survived as they should")
    if leftovers:
        print(tables.left_behind(finished))
    files.deliver(finished, "sweep", json_path, markdown_path, markdown(finished))
    return 1 if bad or leftovers or not outcomes else 0


def table(finished: Mapping[str, Any]) -> list[list[str]]:
    has_fault = any(row["fault"] for row in finished["sweep"])
    head = ["effect", "daemon died", "verdict"]
    rows = [["fault", *head[:2], "before", head[2]] if has_fault else head]
    for row in finished["sweep"]:
        cells = [str(row["effect"]), "yes" if row["died"] else "no", row["verdict"]]
        rows.append([row["fault"], *cells[:2], row["before"] or "-", cells[2]] if has_fault else cells)
    return rows


def markdown(finished: Mapping[str, Any]) -> str:
    lines = [
        f"# {finished['device']}, driver {finished['driver']}: mpsd dies before effect N",
        "",
        tables.provenance(finished),
        "",
        tables.markdown_table(table(finished)),
    ]
    return "\n".join(lines) + "\n"


def load(data: Any, path: Path) -> dict[str, Any] | None:
    """Return the report that a file's JSON is; None for anything else. Raises UsageError."""
    if not isinstance(data, dict) or "sweep" not in data:
        return None
    whole = {"revision": revision.UNKNOWN, "leftovers": [], **data}
    problems = schema.violations(SCHEMA, whole, "report")
    if isinstance(whole["sweep"], list):
        # Older reports have no fault.
        earlier = {"fault": "", "before": ""}
        whole["sweep"] = [{**earlier, **row} if isinstance(row, dict) else row for row in whole["sweep"]]
    rows = whole["sweep"] if isinstance(whole["sweep"], list) else []
    for number, row in enumerate(rows):
        where = f"report.sweep[{number}]"
        problems += schema.violations(ROW, row, where) if isinstance(row, dict) else [f"{where} is no object"]
    if problems:
        raise UsageError(f"{path} is no report of this program: {problems[0]}")
    return whole


def verdicts(finished: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the verdict on each death of mpsd, computed from its complaints."""

    def judged(row: Mapping[str, Any]) -> str:
        if not row["complaints"]:
            return Verdict.VALID.value
        found = row["verdict"] if row["verdict"] != Verdict.VALID else Verdict.INVALID.value
        return f"{found}: {row['complaints'][0]}"

    def named(row: Mapping[str, Any]) -> str:
        return f"{row['fault']}, effect {row['effect']}" if row["fault"] else f"effect {row['effect']}"

    return [(named(row), judged(row)) for row in finished["sweep"]]


def _row(outcome: Outcome) -> dict[str, Any]:
    complaints = [f"{f.law}: {f.text}" for f in outcome.findings if f.verdict is not Verdict.VALID]
    return {
        "effect": outcome.effect,
        "died": outcome.died,
        "verdict": outcome.verdict.value,
        "complaints": complaints,
        "fault": outcome.fault,
        "before": outcome.before,
    }


def run(plan: SweepPlan, node: Node | str) -> list[Outcome]:
    """Count the effects of the script in a first run, unless `last` is given; then run all the deaths."""
    last = plan.last
    if not last:
        whole = run_one(plan, MOST_EFFECTS, node)
        _progress_line(whole)
        if whole.verdict is not Verdict.VALID:
            return [whole]
        last = whole.effects
        tell_stderr(f"the script makes mpsd perform {last} effects")
    jobs = plan.jobs if isinstance(node, str) else 1
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for outcome in pool.map(lambda n: run_one(plan, n, node), effects_to_try(plan, last)):
            _progress_line(outcome)
            outcomes.append(outcome)
    while not (plan.last or plan.sample) and outcomes and outcomes[-1].died:
        # Runs differ by a few effects: continue until a daemon survives its N.
        outcomes.append(run_one(plan, outcomes[-1].effect + 1, node))
        _progress_line(outcomes[-1])
    return outcomes


def run_with_failover(plan: SweepPlan, node: Node, base: Path) -> tuple[list[Outcome], list[str]]:
    """Run the deaths at each kind of fault; return them and what was left behind. Raises MpsdError."""
    libraries = replace(find_libraries(plan.backend, plan.libcuda, plan.driver, base), looks=True)
    outcomes, leftovers = list[Outcome](), list[str]()
    for kind in FAULTS:
        found = sweep_of_kind(
            node,
            libraries,
            kind,
            lambda last: effects_to_try(plan, last),
            plan.last,
            tell_stderr,
            sampled=plan.sample > 0,
            out=plan.out,
        )
        if not plan.last:
            tell_stderr(f"{kind}: mpsd performs {found.effects} effects for one fault")
        outcomes += map(outcome_of, found.deaths)
        leftovers += found.leftovers
    return outcomes, leftovers


def outcome_of(death: Death) -> Outcome:
    """Return the verdict on a death of mpsd at a fault."""
    kind = Verdict.INVALID if death.faulted or death.problem else Verdict.UNKNOWN
    findings = [Finding("protected programs", kind, text) for text in death.complaints]
    verdict_of_all = merge([Verdict.VALID, *(finding.verdict for finding in findings)])
    return Outcome(
        death.effect, death.died, death.effects, verdict_of_all, findings, death.kind, death.before
    )


def _progress_line(outcome: Outcome) -> None:
    state = "died" if outcome.died else "was never reached"
    why = "; ".join(f"{f.law}: {f.text}" for f in outcome.findings if f.verdict is not Verdict.VALID)
    tell_stderr(f"effect {outcome.effect} ({state}): {outcome.verdict}" + (f"\n    {why}" if why else ""))
