"""The report of the campaign of defaults: form, verdicts, tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from faultinject.campaigns.defaults.outcomes import DefaultFault, Fate, ProgramFate, has_no_effect
from faultinject.evidence import files, schema, tables
from faultinject.registry import kinds
from mpsd.base.protection import ProtectionLevel

KIND, SCHEMA_VERSION = "defaults", 1
SCHEMA: Mapping[str, tuple[type, ...]] = {
    **schema.ENVELOPE,
    "programs": (dict,),  # name: how it was started
    "level": (str,),  # of the node; "" where mpsd did not start
    "why": (str,),  # the node has no higher level
    "settings": (list,),  # keys of the configuration file
    "faults": (list,),  # of DefaultFault
    "problem": (str,),  # what ended the run early, or what mpsd held against a program that ended
}
MAX_WITHOUT_EFFECT = 0.25
"""The largest share of faults without effect: enough others must remain."""
FAILOVER = ProtectionLevel.FAILOVER.value
ABSORBED = tuple(kind for kind in kinds.ZONE if kind not in kinds.DISTANT)
"""Kinds that the zones of the offender absorb: no program may be lost, whatever its own protection is."""


def load(data: Any, path: Path) -> dict[str, Any] | None:
    """Return the report that a file's JSON is; None for anything else. Raises UsageError."""
    return files.load_of_kind(data, KIND, path, _problems)


def _problems(data: Mapping[str, Any]) -> Iterator[str]:
    yield from schema.report_violations(SCHEMA, SCHEMA_VERSION, data)
    for number, fault in enumerate(data["faults"]):
        where = f"report.faults[{number}]"
        yield from schema.missing_fields(fault, DefaultFault, where)
        for place, program in enumerate(fault["programs"]):
            yield from schema.missing_fields(program, ProgramFate, f"{where}.programs[{place}]")


def judge(fault: Mapping[str, Any], level: str) -> str:
    """Return valid, or invalid with the first reason. `level`: of the node."""
    if fault["problem"]:
        return f"invalid: {fault['problem'][:300]}"
    if fault["innocent"]:
        return f"invalid: mpsd named {fault['innocent'][0]}, which is innocent"
    absorbed = fault["kind"] in ABSORBED and level != ProtectionLevel.OBSERVE
    for program in fault["programs"]:
        name, called = program["program"], program["called"]
        if program["fate"] == Fate.WRONG:
            return f"invalid: {name} has other results than without faults"
        if program["fate"] == Fate.LOST and called == FAILOVER:
            return f"invalid: {name} was lost, and status had called it protected: {program['error'][:200]}"
        if program["fate"] == Fate.LOST and absorbed:
            return f"invalid: {name} was lost to an access that a guard zone absorbs"
    return "valid"


def verdicts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the verdict on each fault and on the run, computed from the figures."""
    found = [(fault["kind"], judge(fault, report["level"])) for fault in report["faults"]]
    return [*found, ("the run", _judge_run(report))]


def _judge_run(report: Mapping[str, Any]) -> str:
    faults = report["faults"]
    if report["problem"]:
        return f"invalid: {report['problem'][:300]}"
    if not faults:
        return "invalid: nothing was run"
    without_effect = sum(map(has_no_effect, _effective(faults)))
    if without_effect > MAX_WITHOUT_EFFECT * len(faults):
        return f"invalid: {without_effect} of {len(faults)} faults had no effect"
    if not any(program["called"] == FAILOVER for fault in faults for program in fault["programs"]):
        return f"unknown: status called no program protected by fail-over (node: {report['level']})"
    return "valid"


def _effective(faults: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the faults that no zone absorbs."""
    return [fault for fault in faults if fault["kind"] not in ABSORBED]


def passed(report: Mapping[str, Any]) -> bool:
    return tables.passed(report, [verdict for _, verdict in verdicts(report)])


def table(report: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each fault: what each program was called, and its fate."""
    rows = [["kind", *report["programs"], "GPU stall", "class", "verdict"]]
    for fault in report["faults"]:
        cells = {program["program"]: _cell(program) for program in fault["programs"]}
        stall = "-" if fault["gpu_stall"] is None else f"{fault['gpu_stall']:.1f}"
        rows.append(
            [
                fault["kind"],
                *(cells.get(name, "-") for name in report["programs"]),
                stall,
                " ".join(fault["classes"]) or ("no effect" if has_no_effect(fault) else "-"),
                judge(fault, report["level"]),
            ]
        )
    return rows


def _cell(program: Mapping[str, Any]) -> str:
    if program["fate"] == Fate.NOT_RUNNING:
        return "-"
    pause = "" if program["pause"] is None else f" {program['pause']:.0f} ms"
    idle = ", idle" if program["idle"] else ""
    return f"{program['called'] or 'not listed'}: {program['fate']}{pause}{idle}"


def program_table(report: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each program: its protection before the first fault, and its fates."""
    rows = [["program", "started by", "called at first", "failover", "guard", "other", "pause"]]
    rows[0] += [fate.value for fate in Fate if fate is not Fate.NOT_RUNNING]
    rows[0] += ["lost of protected", "why not fail-over"]
    for name, join in report["programs"].items():
        every = [p for fault in report["faults"] for p in fault["programs"] if p["program"] == name]
        seen = [program for program in every if program["fate"] != Fate.NOT_RUNNING]
        rows.append([name, join, seen[0]["called"] if seen else "-", *_program_cells(seen)])
    return rows


def _program_cells(seen: Sequence[Mapping[str, Any]]) -> list[str]:
    levels = (FAILOVER, ProtectionLevel.GUARD.value)
    called = [sum(p["called"] == level for p in seen) for level in levels]
    pauses = [p["pause"] for p in seen if p["fate"] == Fate.MOVED]
    fates = [sum(p["fate"] == fate for p in seen) for fate in Fate if fate is not Fate.NOT_RUNNING]
    lost = sum(p["fate"] == Fate.LOST and p["called"] == FAILOVER for p in seen)
    reasons = [p["why"] for p in seen if p["called"] != FAILOVER and p["why"]]
    why = max(reasons, key=reasons.count) if reasons else "-"
    numbers = [*called, len(seen) - sum(called)]
    return [*map(str, numbers), tables.spread(pauses), *map(str, fates), str(lost), why]


def summary(report: Mapping[str, Any]) -> str:
    """Return one sentence with the counts that matter."""
    seen = [program for fault in report["faults"] for program in fault["programs"]]
    called = [program for program in seen if program["called"] == FAILOVER]
    lost = sum(program["fate"] == Fate.LOST for program in called)
    idle = sum(program["idle"] for program in called)
    without_work = f" {idle} times the program had no work at that moment." if idle else ""
    stalls = [fault["gpu_stall"] for fault in report["faults"] if fault["gpu_stall"] is not None]
    gpu = f" The GPU itself stood still for {median(stalls):.1f} ms at the median." if stalls else ""
    return (
        f"{len(report['faults'])} faults. Status called a program protected by fail-over {len(called)} "
        f"times; {lost} of these were lost.{without_work}{gpu}"
    )


def markdown(report: Mapping[str, Any]) -> str:
    why = f" ({report['why']})" if report["why"] else ""
    lines = [
        f"# Protection by default: {report['device']}, driver {report['driver']}",
        "",
        tables.provenance(report),
        "",
        "One fault of each kind beside programs that are started as users start them. The configuration",
        f"file has only what a run beside others needs: {', '.join(report['settings'])}.",
        f"Level of the node: {report['level']}{why}. {summary(report)}",
        "",
        "A cell has the level that status showed right before the fault, the fate of the program, and how",
        "much longer than a usual step its longest step took. Results are compared after every fault with",
        "those of a run without the proxy and without faults. Times are in ms.",
        "",
        tables.markdown_table(table(report)),
        "",
        "A program that was lost starts again before the next fault, three times at most. `failover`,",
        "`guard`, `other`: at how many faults status called it that. `pause`: of moves, median / worst.",
        "",
        tables.markdown_table(program_table(report)),
        "",
        *(f"{name}: {verdict}.\n" for name, verdict in verdicts(report) if verdict != "valid"),
        tables.left_behind(report),
    ]
    return "\n".join(lines) + "\n"
