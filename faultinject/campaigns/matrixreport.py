"""The report of a matrix of runs: one JSON object with a stable schema, and the table rendered from it.

SCHEMA below is the description; `validate` holds a report to it. Null means "not measured" (or: does
not apply in this mode), never zero. Numbers are milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from faultinject.evidence import tables
from faultinject.evidence.revision import UNKNOWN, current
from faultinject.evidence.schema import NUMBER, TEXT, violations
from faultinject.registry.faults import Fault, by_name, under_kernel_module
from faultinject.registry.kinds import KMOD
from faultinject.registry.observation import Observation
from faultinject.registry.verdicts import Finding, Verdict, merge
from mpsd.base.errors import UsageError

SCHEMA_VERSION = 1

SCHEMA: Mapping[str, tuple[type, ...]] = {
    "schema": (int,),  # SCHEMA_VERSION
    "device": (str,),  # as NVML names it, or SIMULATED
    "driver": (str,),
    "backend": (str,),  # nvidia or simulated
    "revision": (str,),  # of the code (evidence.revision)
    "date": (str,),  # ISO 8601, UTC, of the first run
    "command": (str,),  # repeats the whole report
    "seed": (int,),
    "runs": (list,),
}

RUN_SCHEMA: Mapping[str, tuple[type, ...]] = {
    "kind": (str,),  # faultinject.registry.kinds.ALL
    "variant": (str,),  # how the kind was committed, "" where there is one way
    "title": (str,),
    "mode": (str,),  # stock, mpsd, kmod, auto
    "fault_class": TEXT,  # as mpsd classed it
    "expected_classes": (list,),
    "survivors": (int,),  # how many there were
    "lost": NUMBER,  # how many of them got an error or died
    "wrong_results": NUMBER,  # how many of them computed something wrong
    "named": TEXT,  # right, wrong, unknown: by mpsd; by the kernel log in mode stock
    "confidence": TEXT,  # certain, likely, unknown
    "record_ms": NUMBER,  # the driver's event to mpsd's record
    "fire_to_record_ms": NUMBER,  # the fault to the record's arrival at the harness
    "evict_ms": NUMBER,  # the request until SIGKILL was sent, its GPU work ended before (mpsd's answer)
    "off_gpu_ms": NUMBER,  # the request until the offender's own error, or its death, as the harness saw it
    "gone_ms": NUMBER,  # the request to the death of the offender's process
    "stall_ms": NUMBER,  # longest step of a survivor that lived, from the fault (or request) on
    "lost_after_ms": NUMBER,  # the fault to the first survivor's error
    "new_client_ms": NUMBER,  # spawn of a client after the fault to the end of its first kernel
    "refused_807": NUMBER,  # how often newcomers were refused
    "fresh_ms": NUMBER,  # the record to a fresh server being ACTIVE
    "memory_back_ms": NUMBER,  # the offender's death to its memory being free
    "attach_ms": NUMBER,  # slowest attachment of a client, after it had its context (0: before it)
    "offender_saw": NUMBER,  # CUDA error code that the offender got, 0 for none
    "duration_s": NUMBER,  # of the whole run
    "verdict": TEXT,  # valid, invalid, unknown; null: not run
    "findings": (list,),  # {law, verdict, text} of every law that said more than valid
    "not_run": TEXT,  # why it was not run
    "seed": (int,),
    "command": (str,),  # repeats this run
    "notes": (dict,),
}


def run_entry(
    fault: Fault, mode: str, seen: Observation | None, findings: Sequence[Finding], **more: Any
) -> dict[str, Any]:
    """One element of `runs`. `seen` is None for a run that was not made (`not_run` says why)."""
    entry: dict[str, Any] = dict.fromkeys(RUN_SCHEMA)
    entry |= {
        "kind": fault.kind,
        "variant": fault.variant,
        "title": fault.title,
        "mode": mode,
        "expected_classes": sorted(fault.classes),
        "survivors": 0,
        "findings": [asdict(f) for f in findings if f.verdict is not Verdict.VALID],
        "notes": {},
    }
    if seen is not None:
        entry |= _measured(seen)
    return entry | more


def _measured(seen: Observation) -> dict[str, Any]:
    ready = any(s.ready for s in seen.survivors)
    return {
        "fault_class": seen.fault_class,
        "survivors": len(seen.survivors),
        "lost": seen.lost if ready else None,
        "wrong_results": sum(s.wrong > 0 for s in seen.survivors) if ready else None,
        "named": seen.named,
        "confidence": seen.confidence,
        "record_ms": seen.record_ms,
        "fire_to_record_ms": seen.fire_to_record_ms,
        "evict_ms": seen.evict_ms,
        "off_gpu_ms": seen.off_gpu_ms,
        "gone_ms": seen.gone_ms,
        "stall_ms": seen.stall_ms,
        "lost_after_ms": seen.lost_after_ms,
        "new_client_ms": seen.new_client_ms,
        "refused_807": sum(n.refused.count(807) for n in seen.newcomers) if seen.newcomers else None,
        "fresh_ms": seen.fresh_ms,
        "memory_back_ms": seen.memory_back_ms,
        "attach_ms": max(seen.attach_ms, default=None),
        "offender_saw": max(seen.offender_saw, default=None),
        "notes": dict(seen.notes),
    }


def assemble(
    *, device: str, driver: str, backend: str, date: str, command: str, seed: int, runs: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA_VERSION,
        "device": device,
        "driver": driver,
        "backend": backend,
        "revision": current(),
        "date": date,
        "command": command,
        "seed": seed,
        "runs": runs,
    }


def validate(report: Any) -> list[str]:
    """Return the violations of the schema in a report, in words; an empty list for none."""
    if not isinstance(report, dict):
        return ["a report is an object"]
    problems = violations(SCHEMA, report, "report")
    if report.get("schema") != SCHEMA_VERSION:
        problems.append(f"report.schema is {report.get('schema')!r}, this program reads {SCHEMA_VERSION}")
    runs = report.get("runs")
    for i, run in enumerate(runs if isinstance(runs, list) else []):
        where = f"report.runs[{i}]"
        problems += violations(RUN_SCHEMA, run, where) if isinstance(run, dict) else [f"{where} is no object"]
    return problems


def load(data: Any, path: Path) -> dict[str, Any] | None:
    """Return the report that a file's JSON is; None for anything else. Raises UsageError."""
    if not isinstance(data, dict) or "kind" in data or "runs" not in data:
        return None
    data = {"revision": UNKNOWN, **data}
    if problems := validate(data):
        raise UsageError(f"{path} is no report of this program: {problems[0]}")
    return dict(data)


def verdicts(report: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Return the verdict on each run, computed from its findings and figures; None for what was not run."""
    return [(f"{cell(run, 'kind')} ({run['mode']})", _judged(run)) for run in report["runs"]]


def _judged(run: Mapping[str, Any]) -> str | None:
    if run["not_run"]:
        return None
    if complaint := _figures_complaint(run):
        return f"{Verdict.INVALID}: {complaint}"
    found = merge([Verdict(each["verdict"]) for each in run["findings"]] or [Verdict.VALID])
    worst = next((each for each in run["findings"] if each["verdict"] == found), None)
    return f"{found}: {worst['law']}: {worst['text']}" if worst else str(found)


def _figures_complaint(run: Mapping[str, Any]) -> str:
    """Return what the figures of a run show that no run may show; empty: nothing."""
    if run["wrong_results"]:
        return f"wrong results in {run['wrong_results']} survivors"
    if run["mode"] == "stock":
        return ""
    if run["named"] == "wrong":
        return "a client that did nothing was named"
    fault = by_name(cell(run, "kind"))
    fault = under_kernel_module(fault) if run["mode"] == KMOD else fault
    # Whether survivors live a guard kind depends on the guard of the machine, which a report does not tell.
    if run["lost"] and fault.survive.get(run["mode"]) and not fault.kind.startswith("guard_"):
        return f"lost {run['lost']} of {run['survivors']} survivors"
    return ""


_COLUMNS: tuple[tuple[str, str], ...] = (
    ("kind", "kind"),
    ("mode", "mode"),
    ("class", "fault_class"),
    ("lost", "lost"),
    ("named", "named"),
    ("confidence", "confidence"),
    ("record ms", "record_ms"),
    ("evict ms", "evict_ms"),
    ("gone ms", "gone_ms"),
    ("stall ms", "stall_ms"),
    ("new client ms", "new_client_ms"),
    ("verdict", "verdict"),
)


def cell(run: Mapping[str, Any], key: str) -> str:
    """One cell of the table; `-` for what was not measured."""
    value = run[key]
    match key:
        case "kind":
            return str(value) + (f"@{run['variant']}" if run["variant"] else "")
        case "lost":
            return "-" if value is None else f"{value} of {run['survivors']}"
        case "verdict":
            return "not run" if value is None else str(value)
        case _ if isinstance(value, float):
            return f"{value:.1f}"
        case _:
            return "-" if value is None else str(value)


def table(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Header row and one row a run, as text."""
    return [[title for title, _ in _COLUMNS]] + [[cell(r, key) for _, key in _COLUMNS] for r in runs]


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown: how it was made, the table, every finding that is not valid."""
    head = (
        f"# {report['device']}, driver {report['driver']}\n\n"
        f"Backend {report['backend']}, seed {report['seed']}. {tables.provenance(report)}\n\n"
        "lost: survivors that got an error; stall: longest step of a survivor that lived, from the fault "
        "(or the request to evict) on; `-`: not measured. In mode stock, named is what the kernel log's "
        "Xid lines say.\n"
    )
    complaints = [
        f"- {cell(run, 'kind')} ({run['mode']}): {f['law']}: {f['verdict']}: {f['text']}"
        for run in report["runs"]
        for f in run["findings"]
    ]
    complaints += [
        f"- {cell(run, 'kind')} ({run['mode']}): not run: {run['not_run']}"
        for run in report["runs"]
        if run["not_run"]
    ]
    tail = (
        "\n\n## Failed expectations and runs that were skipped\n\n" + "\n".join(complaints)
        if complaints
        else ""
    )
    return head + "\n" + tables.markdown_table(table(report["runs"])) + tail + "\n"
