"""Reports of served requests: their form, their verdicts, their tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from faultinject import report
from faultinject.serving.measure import Heard, Served

KIND, SCHEMA_VERSION = "serving", 1
MODES = ("moved", "restarted")

SCHEMA: Mapping[str, tuple[type, ...]] = {
    **report.ENVELOPE,
    "seed": (int,),  # of the requests, and of when faults come
    "model": (str,),
    "slots": (int,),  # requests that are in the batch at once
    "undisturbed": (dict,),  # Undisturbed
    "served": (dict,),  # mode: list of Served
}

HEAD = ["mode", "kind", "faults", "in flight", "completed", "lost", "wrong", "told", "twice", "median"]
HEAD += ["at the fault", "GPU's", "ended", "again", "verdict"]


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """The run without faults, which the others are compared with. Times between tokens in ms."""

    requests: int
    tokens: int
    median: float
    longest: float


def undisturbed(requests: Sequence[Heard]) -> dict[str, Any]:
    gaps = [long for heard in requests for _, long in heard.gaps()]
    tokens = sum(len(heard.tokens) for heard in requests)
    return asdict(Undisturbed(len(requests), tokens, round(median(gaps), 3), round(max(gaps), 3)))


def load(path: Path) -> dict[str, Any] | None:
    """The report in this file; None if it is something else. Raises UsageError."""
    return report.load_sound(path, KIND, _problems)


def _problems(data: Mapping[str, Any]) -> Iterator[str]:
    yield from report.against_version(SCHEMA, SCHEMA_VERSION, data)
    yield from report.missing_fields(data["undisturbed"], Undisturbed, "report.undisturbed")
    for mode, faults in data["served"].items():
        if mode not in MODES or not isinstance(faults, list):
            yield f"report.served.{mode} is no list of faults in a mode that is known"
            continue
        for number, fault in enumerate(faults):
            yield from report.missing_fields(fault, Served, f"report.served.{mode}[{number}]")


def judge(mode: str, faults: Sequence[Mapping[str, Any]]) -> str:
    """valid, or what was seen that must not be. Times are told, and not judged."""
    for fault in faults:
        if fault["problem"]:
            return f"invalid: {fault['problem'][:300]}"
        if not fault["in_flight"]:
            return "invalid: no request was in flight at a fault"
        if fault["lost"]:
            return "invalid: requests were not answered"
        if fault["wrong"]:
            return "invalid: tokens differ from those without faults"
        if mode == "moved" and (fault["told"] or fault["starts"]):
            return "invalid: the server met an error, or was started anew"
        if mode == "restarted" and not fault["starts"]:
            return "invalid: the server was not started anew"
    return "valid" if faults else "invalid: there was no fault"


def row(mode: str, kind: str, faults: Sequence[Mapping[str, Any]]) -> list[str]:
    def total(*names: str) -> str:
        return str(sum(fault[name] for fault in faults for name in names))

    return [
        mode,
        kind,
        str(len(faults)),
        total("in_flight"),
        total("completed"),
        *(total(name) for name in ("lost", "wrong", "told", "twice")),
        *(report.spread([fault[name] for fault in faults]) for name in ("median", "longest", "stall")),
        *(report.spread([fault[name] for fault in faults]) for name in ("ended", "again")),
        judge(mode, faults),
    ]


def table(finished: Mapping[str, Any]) -> list[list[str]]:
    rows = [HEAD]
    for mode, faults in finished["served"].items():
        for kind in dict.fromkeys(fault["kind"] for fault in faults):
            rows.append(row(mode, kind, [fault for fault in faults if fault["kind"] == kind]))
    return rows


def passed(finished: Mapping[str, Any]) -> bool:
    return report.passed(finished, [each[-1] for each in table(finished)[1:]])


def without_faults(finished: Mapping[str, Any]) -> str:
    """One line of the run that the others are compared with."""
    found = finished["undisturbed"]
    return (
        f"Without faults: {found['requests']} requests, {found['tokens']} tokens, "
        f"{found['median']:.1f} ms between two tokens of one request (median), "
        f"{found['longest']:.1f} at worst."
    )


def markdown(finished: Mapping[str, Any]) -> str:
    simulated = finished["backend"] == "simulated"
    lines = [
        f"# Serving through faults: {finished['device']}, driver {finished['driver']}",
        "",
        f"{finished['date']}; again: `{finished['command']}`",
        "",
        f"A server with continuous batching ({finished['slots']} slots; {finished['model']}) answers",
        "requests, and a neighbour faults in the middle of them. `moved`: under mpsd-run, in mode exact, it",
        "goes on in a second domain. `restarted`: without mpsd's libcuda it ends, is started anew at once,",
        "and is asked again for all that it had not answered. Every token is compared with that of a run",
        "without faults.",
        "",
        "`in flight`: requests that had had their first token and not their last when the fault came;",
        "`completed` and `lost` are of these and of those that waited. `told`: errors that the server met.",
        "`twice`: tokens that were computed twice. Times in ms, median / worst of the faults: the median",
        "between two tokens of a request before the fault; the longest that ended after it (at the fault);",
        "the longest step of a bystander in another domain, which is how long the GPU itself stood still;",
        "from the order to the offender until the server's process had ended, and until the first token of",
        "the next one (again). Times are told, and not judged.",
        "",
        *(["Simulated, with a toy in place of a model: these times are no GPU's.", ""] if simulated else []),
        without_faults(finished),
        "",
        report.markdown_table(table(finished)),
        "",
        report.left_behind(finished),
    ]
    return "\n".join(lines) + "\n"
