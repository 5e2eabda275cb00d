"""The report of the serving campaign: form, verdicts, tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from faultinject.campaigns.serving.answers import Answer, Served
from faultinject.evidence import files, schema, tables

KIND, SCHEMA_VERSION = "serving", 1
MODES = ("moved", "restarted")

SCHEMA: Mapping[str, tuple[type, ...]] = {
    **schema.ENVELOPE,
    "seed": (int,),  # of the requests, and of when faults come
    "model": (str,),
    "slots": (int,),  # requests that are in the batch at once
    "undisturbed": (dict,),  # Undisturbed
    "served": (dict,),  # mode: list of Served
}

HEAD = ["mode", "kind", "faults", "in flight", "completed", "lost", "wrong", "errors", "twice", "median"]
HEAD += ["at the fault", "GPU stall", "ended", "restarted", "verdict"]


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """The run without faults, for comparison. Times between tokens in ms."""

    requests: int
    tokens: int
    median: float
    longest: float


def undisturbed(requests: Sequence[Answer]) -> dict[str, Any]:
    gaps = [long for answer in requests for _, long in answer.gaps()]
    tokens = sum(len(answer.tokens) for answer in requests)
    return asdict(Undisturbed(len(requests), tokens, round(median(gaps), 3), round(max(gaps), 3)))


def load(data: Any, path: Path) -> dict[str, Any] | None:
    """Return the report that a file's JSON is; None for anything else. Raises UsageError."""
    return files.load_of_kind(data, KIND, path, _problems)


def _problems(data: Mapping[str, Any]) -> Iterator[str]:
    yield from schema.report_violations(SCHEMA, SCHEMA_VERSION, data)
    yield from schema.missing_fields(data["undisturbed"], Undisturbed, "report.undisturbed")
    for mode, faults in data["served"].items():
        if mode not in MODES or not isinstance(faults, list):
            yield f"report.served.{mode} is no list of faults in a mode that is known"
            continue
        for number, fault in enumerate(faults):
            yield from schema.missing_fields(fault, Served, f"report.served.{mode}[{number}]")


def judge(mode: str, faults: Sequence[Mapping[str, Any]]) -> str:
    """Return valid, or invalid with the first reason. Times are not judged."""
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
            return "invalid: the server got an error, or was restarted"
        if mode == "restarted" and not fault["starts"]:
            return "invalid: the server was not restarted"
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
        *(tables.spread([fault[name] for fault in faults]) for name in ("median", "longest", "stall")),
        *(tables.spread([fault[name] for fault in faults]) for name in ("ended", "again")),
        judge(mode, faults),
    ]


def table(finished: Mapping[str, Any]) -> list[list[str]]:
    rows = [HEAD]
    for mode, faults in finished["served"].items():
        for kind in dict.fromkeys(fault["kind"] for fault in faults):
            rows.append(row(mode, kind, [fault for fault in faults if fault["kind"] == kind]))
    return rows


def verdicts(finished: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the verdict on each mode and kind, computed from the figures."""
    return [(f"{each[0]} {each[1]}", each[-1]) for each in table(finished)[1:]]


def passed(finished: Mapping[str, Any]) -> bool:
    return tables.passed(finished, [verdict for _, verdict in verdicts(finished)])


def without_faults(finished: Mapping[str, Any]) -> str:
    """Return one line about the run without faults, which the others are compared with."""
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
        tables.provenance(finished),
        "",
        f"A server with continuous batching ({finished['slots']} slots; {finished['model']}) answers",
        "requests, and a neighbour faults in the middle of them. `moved`: under mpsd-run, in mode exact, it",
        "fails over to a standby context. `restarted`: without mpsd's libcuda it ends, restarts at once, and",
        "gets every unanswered request again. Every token is compared with that of a run without faults.",
        "",
        "`in flight`: requests between their first and their last token at the fault. `completed` and",
        "`lost`: of these and of waiting requests. `errors`: of the server. `twice`: tokens that were",
        "computed twice. Times in ms, median / worst of the faults. `median`: between two tokens of a",
        "request before the fault. `at the fault`: the longest such time that ended after it. `GPU stall`:",
        "the longest step of a bystander in another domain. `ended`, `restarted`: from the order to the",
        "offender until the server had ended, and until the first token of the next server. Times are not",
        "judged.",
        "",
        *(["Simulated, with a toy in place of a model: these times are no GPU's.", ""] if simulated else []),
        without_faults(finished),
        "",
        tables.markdown_table(table(finished)),
        "",
        tables.left_behind(finished),
    ]
    return "\n".join(lines) + "\n"
