"""`mpsd-faultinject takeover`: faults beside a program under mpsd-standby, and the time until it continues.

The program has no proxy: when its domain faults, its process is lost. A bystander in the domain that all
users share measures the GPU stall.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from faultinject.campaigns.failover.rounds import SETTINGS as WITHOUT_GUARDS
from faultinject.evidence import files, schema, tables
from faultinject.evidence.files import tell_stderr
from faultinject.registry import kinds
from faultinject.registry.history import Entry, History, clock
from faultinject.rig.bystander import Bystander
from faultinject.rig.libraries import Libraries, find_libraries
from faultinject.rig.node import open_node
from faultinject.rig.rig import Rig
from mpsd.base.errors import DeadlineError, MpsdError, UsageError

KIND, SCHEMA_VERSION = "takeover", 1
KINDS = ("trap", "misaligned", "shared_window", "store")
MODES = ("warm", "cold")
_WITHOUT_GUARDS = {name: value for name, value in WITHOUT_GUARDS.items() if not name.startswith("failover.")}
SETTINGS = {**_WITHOUT_GUARDS, "protect": '"guard"'}
BAR_MS: Mapping[str, float] = {"warm": 81.0, "cold": 600.0}
"""The limits [ms] beyond the GPU stall: of a process that waits, and of one that starts."""
LOOK_S = 0.005
UP_S, GOES_ON_S, REPORT_S, SETTLED_S = 60.0, 30.0, 20.0, 5.0
HEAD = ["mode", "kind", "faults", "lost", "wrong", "heard", "left", "ended", "settled", "continues after"]
HEAD += ["GPU stall", "beyond it", "bar", "verdict"]
STAGES = ("heard", "left", "ended", "settled", "after")

SCHEMA: Mapping[str, tuple[type, ...]] = {
    **schema.ENVELOPE,
    "takeovers": (dict,),  # mode: list of Takeover
}


@dataclass(slots=True)
class Takeover:
    """One fault. Times in ms from the order to the offender; None where the event was not seen.

    `heard`: mpsd-standby learned that the domain had faulted. `left`: the old process released its buffers.
    `ended`: the old process ended. `settled`: nothing of it was on the GPU. `after`: the first kernel of the
    next process had ended, which need not come last. `stall`: the longest step of the bystander until then.
    `lost`: counts that are missing or came twice. `wrong`: values that differ from what they must be.
    """

    kind: str
    problem: str = ""
    heard: float | None = None
    left: float | None = None
    ended: float | None = None
    settled: float | None = None
    after: float | None = None
    stall: float | None = None
    lost: int = 0
    wrong: int = 0


class Takeovers:
    """One program under mpsd-standby, and a bystander, with a rig that has an mpsd."""

    def __init__(self, rig: Rig, libraries: Libraries, mode: str) -> None:
        self._rig, self._libraries, self._mode = rig, libraries, mode
        self._device = "standin" if libraries.driver else None

    def start(self) -> None:
        """Raises DeadlineError."""
        service = self._rig.mpsd
        environment = self._libraries.plain({**service.environment, "MPSD_SOCKET": str(service.socket)})
        self._bystander = Bystander(self._rig)
        command = [sys.executable, "-m", "mpsd_client.standby", "--json", "--restarts", "1000"]
        command += ["--cold"] if self._mode == "cold" else []
        self._program = self._rig.spawn(
            "program", "standby", environment=environment, device=self._device, through=command
        )
        self._bystander.ready()
        self._program.require("turn", timeout=UP_S)

    def end(self) -> None:
        """Raises DeadlineError."""
        self._bystander.end()
        self._program.signal(signal.SIGTERM)
        self._program.require("gone", timeout=REPORT_S)

    def run(self, kind: str, faults: int, deadline_s: float) -> list[Takeover]:
        """Inject as many faults as fit into the deadline, up to the first problem."""
        end, found = clock() + deadline_s, list[Takeover]()
        for number in range(faults):
            takeover = Takeover(kind)
            found.append(takeover)
            try:
                if clock() > end:
                    raise DeadlineError(f"the deadline passed after {number} of {faults}")
                self._inject_one(takeover, number)
            except MpsdError as error:
                takeover.problem = f"{error}; {self._rig.error_text(self._program, 200)}"
            tell_stderr(
                f"{self._mode} {kind} {number + 1}/{faults}: {takeover.problem or f'{takeover.after} ms'}"
            )
            if takeover.problem:
                break
        return found

    def _inject_one(self, takeover: Takeover, number: int) -> None:
        name = f"offender-{self._mode}-{takeover.kind}-{number}"
        offender = self._rig.spawn(name, "offender", takeover.kind)
        offender.require("ready", timeout=UP_S)
        turns = self._program.count("turn")
        if self._mode == "warm" and self._program.count("waits") <= turns:
            self._await_message("waits", turns)
        self._bystander.stall()
        at = offender.tell("go")
        self._await_message("turn", turns)
        before, first = self._steps_around(turns)
        takeover.after = round((first.t - at) * 1e3, 3)
        takeover.lost = abs(int(first.data["number"]) - int(before.data["number"]) - 1)
        takeover.stall, wrong = self._bystander.stall(at)
        rows = self._program.messages("turn", "step")
        takeover.wrong = sum(int(entry.data["wrong"]) for entry in rows) + wrong
        self._fill_in_stages(takeover, time.time() - (clock() - at), SETTLED_S)

    def _fill_in_stages(self, takeover: Takeover, at: float, patience_s: float) -> None:
        """Fill in the stages from the messages of mpsd-standby since the order.

        The old process may end after the turn of the next one. `at`: the order [s since the epoch], the clock
        of the messages. A program that ends before its domain is known to have faulted gets no `lost`
        message.
        """
        end = clock() + patience_s
        while "settled" not in (messages := self._messages_since(at)) and clock() < end:
            time.sleep(LOOK_S)
        for name, kind in (("heard", "lost"), ("left", "left")):
            if kind in messages:
                setattr(takeover, name, round((messages[kind]["at"] - at) * 1e3, 3))
        if (settled := messages.get("settled")) is not None:
            takeover.settled = round((settled["at"] - at) * 1e3, 3)
            takeover.ended = round(takeover.settled - settled["ms"] + settled["ended_ms"], 3)

    def _messages_since(self, at: float) -> Mapping[str, Mapping[str, Any]]:
        """Return the last message of each kind."""
        lines = self._rig.error_text(self._program, 1 << 16).splitlines()
        messages = [json.loads(line) for line in lines if line.startswith('{"kind": ') and line.endswith("}")]
        return {line["kind"]: line for line in messages if line["at"] >= at}

    def _await_message(self, what: str, after: int) -> Entry:
        entry = self._program.wait(what, timeout=GOES_ON_S, after=after)
        if entry is None:
            raise DeadlineError(f"the program said no further {what!r} within {GOES_ON_S:.0f} s")
        return entry

    def _steps_around(self, turn: int) -> tuple[Entry, Entry]:
        """Return the last step before that turn, and its first step. Turns count from 0."""
        end = clock() + GOES_ON_S
        while clock() < end:
            rows = self._program.messages("turn", "step")
            places = [i for i, entry in enumerate(rows) if entry.what == "turn"]
            at = places[turn]
            if len(rows) > at + 1 and rows[at + 1].what == "step":
                return rows[at - 1], rows[at + 1]
            self._await_message("step", self._program.count("step"))
        raise DeadlineError(f"the program took no step within {GOES_ON_S:.0f} s of its turn")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run each mode in a rig of its own. Raises MpsdError if the rig cannot be set up."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    found: dict[str, list[dict[str, Any]]] = {}
    leftovers: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        libraries = find_libraries(args.backend, args.libcuda, args.driver, Path(base))
        node = open_node(args.backend, Path(base))
        try:
            for mode in args.modes:
                logs = args.out and args.out / mode
                with History() as history, Rig(node, "mpsd", history, settings=SETTINGS, logs_to=logs) as rig:
                    takeovers = Takeovers(rig, libraries, mode)
                    takeovers.start()
                    rows = [
                        takeover
                        for kind in args.kinds
                        for takeover in takeovers.run(kind, args.faults, args.deadline)
                    ]
                    takeovers.end()
                found[mode] = [asdict(takeover) for takeover in rows]
                leftovers += rig.leftovers
        finally:
            node.close()
    words = ["mpsd-faultinject", "takeover", "--backend", args.backend, "--modes", ",".join(args.modes)]
    words += ["--kinds", ",".join(args.kinds), "--faults", str(args.faults)]
    return {
        **schema.envelope(KIND, SCHEMA_VERSION, (node.device, node.driver), args.backend, date, words),
        "leftovers": leftovers,
        "takeovers": found,
    }


def load(data: Any, path: Path) -> dict[str, Any] | None:
    """Return the report that a file's JSON is; None for anything else. Raises UsageError."""
    return files.load_of_kind(data, KIND, path, _problems)


def _problems(data: Mapping[str, Any]) -> Iterator[str]:
    yield from schema.report_violations(SCHEMA, SCHEMA_VERSION, data)
    for mode, faults in data["takeovers"].items():
        # Older reports have no stages.
        names = {field.name for field in fields(Takeover)} - {*STAGES[:-1]}
        whole = isinstance(faults, list) and all(isinstance(f, dict) and names <= {*f} for f in faults)
        if mode not in MODES or not whole:
            yield f"report.takeovers.{mode} is no list of faults with {', '.join(names)}"


def judge(mode: str, faults: Sequence[Mapping[str, Any]], *, timed: bool) -> str:
    """`timed`: the times are those of a GPU, and are judged."""
    for fault in faults:
        if fault["problem"]:
            return f"invalid: {fault['problem'][:300]}"
        # A kernel may have ended before the program could report its count.
        if fault["lost"] > 1 or fault["wrong"]:
            return "invalid: counts were lost or came twice, or values were wrong"
    beyond = median(_excess_over_stall(fault) for fault in faults)
    if timed and beyond > BAR_MS[mode]:
        return f"invalid: {beyond:.0f} ms beyond the stall"
    return "valid"


def _excess_over_stall(fault: Mapping[str, Any]) -> float:
    return float(fault["after"]) - float(fault["stall"])


def table(finished: Mapping[str, Any]) -> list[list[str]]:
    timed = finished["backend"] != "simulated"
    rows = [HEAD]
    for mode, faults in finished["takeovers"].items():
        for kind in dict.fromkeys(fault["kind"] for fault in faults):
            faults_of_kind = [fault for fault in faults if fault["kind"] == kind]
            whole = [
                fault for fault in faults_of_kind if fault["after"] is not None and fault["stall"] is not None
            ]
            rows.append(
                [
                    mode,
                    kind,
                    str(len(faults_of_kind)),
                    str(sum(fault["lost"] for fault in faults_of_kind)),
                    str(sum(fault["wrong"] for fault in faults_of_kind)),
                    *(tables.spread([f.get(name) for f in whole]) for name in STAGES),
                    tables.spread([f["stall"] for f in whole]),
                    tables.spread([_excess_over_stall(f) for f in whole]),
                    f"{BAR_MS[mode]:g}",
                    judge(mode, faults_of_kind, timed=timed),
                ]
            )
    return rows


def verdicts(finished: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the verdict on each mode and kind, computed from the figures."""
    return [(f"{row[0]} {row[1]}", row[-1]) for row in table(finished)[1:]]


def passed(finished: Mapping[str, Any]) -> bool:
    return tables.passed(finished, [verdict for _, verdict in verdicts(finished)])


def markdown(finished: Mapping[str, Any]) -> str:
    lines = [
        f"# Taking over: {finished['device']}, driver {finished['driver']}",
        "",
        tables.provenance(finished),
        "",
        "A program under mpsd-standby, without mpsd's libcuda, counts by kernels in memory of the vault. A",
        "neighbour faults repeatedly, and another process of the program continues: one that waits (warm),",
        "or one that starts then (cold). Times in ms, median / worst, from the order to the offender.",
        "`heard`: mpsd-standby learned that the domain had faulted. `left`: the old process released its",
        "buffers. `ended`: it ended. `settled`: nothing of it was on the GPU. `continues after`: the first",
        "kernel of the next process had ended; the old one need not have ended by then. `GPU stall`: the",
        "longest step of a bystander in another domain until then. `beyond it`: the difference. `bar`: its",
        "limit at the median. `lost`: counts that were never reported, at most one for each fault.",
        ""
        if finished["backend"] != "simulated"
        else "Simulated: these times are no GPU's, and do not count.",
        "",
        tables.markdown_table(table(finished)),
        "",
        tables.left_behind(finished),
    ]
    return "\n".join(lines) + "\n"


def _run_command(args: argparse.Namespace) -> int:
    for value, known in ((args.kinds, kinds.GPU_KINDS), (args.modes, MODES)):
        if wrong := next((name for name in value if name not in known), None):
            raise UsageError(f"there is no {wrong!r} here", remedy=f"of: {', '.join(known)}")
    finished = run(args)
    print(tables.heading(finished))
    print(tables.aligned(table(finished)))
    files.deliver(finished, KIND, args.json, args.markdown, markdown(finished), tell_stderr)
    return 0 if passed(finished) else 1


def add_parser(commands: Any, types: Any) -> None:
    """Add the options of the subcommand. `types`: the readers of names, numbers and seconds."""
    parser = commands.add_parser(
        "takeover", help="faults beside a program under mpsd-standby, which continues"
    )
    types.fault_runs(parser, "mode", libcuda="not used, but for the stand-in's build")
    parser.add_argument("--kinds", type=types.names, default=list(KINDS), help=f"default: {', '.join(KINDS)}")
    parser.add_argument("--modes", type=types.names, default=list(MODES), help="default: warm,cold")
    parser.set_defaults(go=_run_command)
