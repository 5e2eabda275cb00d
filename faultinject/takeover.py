"""`mpsd-faultinject takeover`: faults beside a program under mpsd-standby, and how long until it goes on.

The program has no libcuda of mpsd's: when its domain is lost, its process is. A bystander in the domain that
all users share has no part in it, and measures what the GPU itself was held up for.
"""

from __future__ import annotations

import argparse
import json
import shlex
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

from faultinject import kinds, report
from faultinject.bystander import Bystander
from faultinject.failover.rounds import SETTINGS as WITHOUT_GUARDS
from faultinject.history import Entry, History, clock
from faultinject.matrix import tell_stderr
from faultinject.node import open_node
from faultinject.proxy.library import Libraries, find_libraries
from faultinject.rig import Rig
from mpsd.errors import DeadlineError, MpsdError, UsageError

KIND, SCHEMA_VERSION = "takeover", 1
KINDS = ("trap", "misaligned", "shared_window", "store")
MODES = ("warm", "cold")
SETTINGS = {name: value for name, value in WITHOUT_GUARDS.items() if not name.startswith("failover.")}
BAR_MS: Mapping[str, float] = {"warm": 81.0, "cold": 600.0}
"""Beyond the stall: what the published system takes, and what a cold restart may."""
LOOK_S = 0.005
UP_S, GOES_ON_S, REPORT_S, SETTLED_S = 60.0, 30.0, 20.0, 5.0
HEAD = ["mode", "kind", "faults", "lost", "wrong", "heard", "left", "ended", "settled", "goes on after"]
HEAD += ["stall", "beyond it", "bar", "verdict"]
STAGES = ("heard", "left", "ended", "settled", "after")

SCHEMA: Mapping[str, tuple[type, ...]] = {
    **report.ENVELOPE,
    "takeovers": (dict,),  # mode: list of Takeover
}


@dataclass(slots=True)
class Takeover:
    """One fault. Times in ms, from the offender's order: until mpsd-standby had `heard` that the domain is
    lost (None where the process ended before that), until the process that worked there had `left` its
    buffers (None where it did not say so), until it had `ended`, until nothing of it was on the GPU any more
    (`settled`; None for both where that was not seen in time), and until the first kernel of the next process
    had ended (`after`), which need not come last. `stall`: the longest step of the bystander until then.
    `lost`: counts that are missing, or came twice. `wrong`: words with another value than they must have."""

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
            "program", "turns", environment=environment, device=self._device, through=command
        )
        self._bystander.ready()
        self._program.must("turn", timeout=UP_S)

    def end(self) -> None:
        """Raises DeadlineError."""
        self._bystander.end()
        self._program.signal(signal.SIGTERM)
        self._program.must("gone", timeout=REPORT_S)

    def run(self, kind: str, faults: int, deadline_s: float) -> list[Takeover]:
        """As far as the time reaches; the first problem is the last."""
        end, found = clock() + deadline_s, list[Takeover]()
        for number in range(faults):
            one = Takeover(kind)
            found.append(one)
            try:
                if clock() > end:
                    raise DeadlineError(f"the deadline passed after {number} of {faults}")
                self._one(one, number)
            except MpsdError as error:
                one.problem = f"{error}; {self._rig.error_text(self._program, 200)}"
            tell_stderr(f"{self._mode} {kind} {number + 1}/{faults}: {one.problem or f'{one.after} ms'}")
            if one.problem:
                break
        return found

    def _one(self, one: Takeover, number: int) -> None:
        name = f"offender-{self._mode}-{one.kind}-{number}"
        offender = self._rig.spawn(name, "offender", one.kind)
        offender.must("ready", timeout=UP_S)
        turns = self._program.count("turn")
        if self._mode == "warm" and self._program.count("waits") <= turns:
            self._heard("waits", turns)
        self._bystander.stall()
        at = offender.tell("go")
        self._heard("turn", turns)
        before, first = self._steps_around(turns)
        one.after = round((first.t - at) * 1e3, 3)
        one.lost = abs(int(first.data["number"]) - int(before.data["number"]) - 1)
        one.stall, wrong = self._bystander.stall(at)
        rows = self._program.said("turn", "step")
        one.wrong = sum(int(entry.data["wrong"]) for entry in rows) + wrong
        self._stages(one, time.time() - (clock() - at), SETTLED_S)

    def _stages(self, one: Takeover, at: float, patience_s: float) -> None:
        """By what mpsd-standby has said since: the end of the process before may come after the next one's
        turn. `at`: of the order, in seconds since the epoch, as it dates them. A program that ends before its
        domain is known to be lost is not heard of as lost."""
        end = clock() + patience_s
        while "settled" not in (said := self._said_since(at)) and clock() < end:
            time.sleep(LOOK_S)
        for name, kind in (("heard", "lost"), ("left", "left")):
            if kind in said:
                setattr(one, name, round((said[kind]["at"] - at) * 1e3, 3))
        if (settled := said.get("settled")) is not None:
            one.settled = round((settled["at"] - at) * 1e3, 3)
            one.ended = round(one.settled - settled["ms"] + settled["ended_ms"], 3)

    def _said_since(self, at: float) -> Mapping[str, Mapping[str, Any]]:
        """The last of each kind."""
        lines = self._rig.error_text(self._program, 1 << 16).splitlines()
        every = [json.loads(line) for line in lines if line.startswith('{"kind": ') and line.endswith("}")]
        return {line["kind"]: line for line in every if line["at"] >= at}

    def _heard(self, what: str, after: int) -> Entry:
        entry = self._program.wait(what, timeout=GOES_ON_S, after=after)
        if entry is None:
            raise DeadlineError(f"the program said no further {what!r} within {GOES_ON_S:.0f} s")
        return entry

    def _steps_around(self, turn: int) -> tuple[Entry, Entry]:
        """The last step before that turn, and the first of it. Turns are counted from 0."""
        end = clock() + GOES_ON_S
        while clock() < end:
            rows = self._program.said("turn", "step")
            places = [i for i, entry in enumerate(rows) if entry.what == "turn"]
            at = places[turn]
            if len(rows) > at + 1 and rows[at + 1].what == "step":
                return rows[at - 1], rows[at + 1]
            self._heard("step", self._program.count("step"))
        raise DeadlineError(f"the program took no step within {GOES_ON_S:.0f} s of its turn")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Each mode in a rig of its own. Raises MpsdError where the rig itself cannot be had."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    found: dict[str, list[dict[str, Any]]] = {}
    left: list[str] = []
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
                        one for kind in args.kinds for one in takeovers.run(kind, args.faults, args.deadline)
                    ]
                    takeovers.end()
                found[mode] = [asdict(one) for one in rows]
                left += rig.left
        finally:
            node.close()
    words = ["mpsd-faultinject", "takeover", "--backend", args.backend, "--modes", ",".join(args.modes)]
    words += ["--kinds", ",".join(args.kinds), "--faults", str(args.faults)]
    return {
        "schema": SCHEMA_VERSION,
        "kind": KIND,
        "device": node.device,
        "driver": node.driver,
        "backend": args.backend,
        "date": date,
        "command": shlex.join(words),
        "leftovers": left,
        "takeovers": found,
    }


def load(path: Path) -> dict[str, Any] | None:
    """The report in this file; None if it is something else. Raises UsageError."""
    return report.load_sound(path, KIND, _problems)


def _problems(data: Mapping[str, Any]) -> Iterator[str]:
    yield from report.against_version(SCHEMA, SCHEMA_VERSION, data)
    for mode, faults in data["takeovers"].items():
        # The first reports say nothing of what came between.
        names = {field.name for field in fields(Takeover)} - {*STAGES[:-1]}
        whole = isinstance(faults, list) and all(isinstance(f, dict) and names <= {*f} for f in faults)
        if mode not in MODES or not whole:
            yield f"report.takeovers.{mode} is no list of faults with {', '.join(names)}"


def judge(mode: str, faults: Sequence[Mapping[str, Any]], *, timed: bool) -> str:
    """`timed`: times are those of a GPU, and count."""
    for fault in faults:
        if fault["problem"]:
            return f"invalid: {fault['problem'][:300]}"
        # A kernel may have ended whose count was not told any more.
        if fault["lost"] > 1 or fault["wrong"]:
            return "invalid: counts were lost or came twice, or words were wrong"
    beyond = median(_beyond(fault) for fault in faults)
    if timed and beyond > BAR_MS[mode]:
        return f"invalid: {beyond:.0f} ms beyond the stall"
    return "valid"


def _beyond(fault: Mapping[str, Any]) -> float:
    return float(fault["after"]) - float(fault["stall"])


def table(finished: Mapping[str, Any]) -> list[list[str]]:
    timed = finished["backend"] != "simulated"
    rows = [HEAD]
    for mode, faults in finished["takeovers"].items():
        for kind in dict.fromkeys(fault["kind"] for fault in faults):
            mine = [fault for fault in faults if fault["kind"] == kind]
            whole = [fault for fault in mine if fault["after"] is not None and fault["stall"] is not None]
            rows.append(
                [
                    mode,
                    kind,
                    str(len(mine)),
                    str(sum(fault["lost"] for fault in mine)),
                    str(sum(fault["wrong"] for fault in mine)),
                    *(report.spread([f.get(name) for f in whole]) for name in STAGES),
                    report.spread([f["stall"] for f in whole]),
                    report.spread([_beyond(f) for f in whole]),
                    f"{BAR_MS[mode]:g}",
                    judge(mode, mine, timed=timed),
                ]
            )
    return rows


def passed(finished: Mapping[str, Any]) -> bool:
    return report.passed(finished, [row[-1] for row in table(finished)[1:]])


def markdown(finished: Mapping[str, Any]) -> str:
    lines = [
        f"# Taking over: {finished['device']}, driver {finished['driver']}",
        "",
        f"{finished['date']}; again: `{finished['command']}`",
        "",
        "A program under mpsd-standby, without mpsd's libcuda, counts by kernels in memory of the vault; a",
        "neighbour faults again and again, and another process of it goes on: one that waited (warm), or one",
        "that is started then (cold). Times in ms, median / worst, from the order to the offender: until",
        "mpsd-standby had heard that the domain is lost, until the process there had let go of its buffers",
        "(left; of those that said so), until it had ended, until nothing of it was on the GPU, until the",
        "first kernel of the next process had ended (goes on after), for which one that has let go need not",
        "have ended; the longest step of a bystander in another domain until then; the difference of these",
        "two. `bar`: what that may be at the median. `lost`: counts that nobody said, one at each fault at",
        "most.",
        ""
        if finished["backend"] != "simulated"
        else "Simulated: these times are no GPU's, and do not count.",
        "",
        report.markdown_table(table(finished)),
        "",
        report.left_behind(finished),
    ]
    return "\n".join(lines) + "\n"


def _go(args: argparse.Namespace) -> int:
    for value, known in ((args.kinds, kinds.GPU_KINDS), (args.modes, MODES)):
        if wrong := next((name for name in value if name not in known), None):
            raise UsageError(f"there is no {wrong!r} here", remedy=f"of: {', '.join(known)}")
    finished = run(args)
    print(report.heading(finished))
    print(report.aligned(table(finished)))
    report.deliver(finished, KIND, args.json, args.markdown, markdown(finished), tell_stderr)
    return 0 if passed(finished) else 1


def add_parser(commands: Any, types: Any) -> None:
    """The subcommand's options. `types` has the harness's readers of names, numbers and seconds."""
    parser = commands.add_parser("takeover", help="faults beside a program under mpsd-standby, which goes on")
    types.fault_runs(parser, "mode", libcuda="not used, but for the stand-in's build")
    parser.add_argument("--kinds", type=types.names, default=list(KINDS), help=f"default: {', '.join(KINDS)}")
    parser.add_argument("--modes", type=types.names, default=list(MODES), help="default: warm,cold")
    parser.set_defaults(go=_go)
