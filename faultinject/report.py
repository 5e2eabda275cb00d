"""The report: one JSON object with a stable schema, and the table that is rendered from it.

SCHEMA below is the description; `validate` holds a report to it. Null means "not measured" (or: does
not apply in this mode), never zero. Numbers are milliseconds.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any

from faultinject.faults import Fault
from faultinject.observation import Observation
from faultinject.verdict import Finding, Verdict
from mpsd.errors import StoreError, UsageError

SCHEMA_VERSION = 1

NUMBER = (int, float, type(None))
TEXT = (str, type(None))

SCHEMA: Mapping[str, tuple[type, ...]] = {
    "schema": (int,),  # SCHEMA_VERSION
    "device": (str,),  # as NVML names it, or SIMULATED
    "driver": (str,),
    "backend": (str,),  # nvidia or simulated
    "date": (str,),  # ISO 8601, UTC, of the first run
    "command": (str,),  # repeats the whole report
    "seed": (int,),
    "runs": (list,),
}

ENVELOPE: Mapping[str, tuple[type, ...]] = {
    "schema": (int,),
    "kind": (str,),
    "device": (str,),
    "driver": (str,),
    "backend": (str,),
    "date": (str,),  # ISO 8601, UTC
    "command": (str,),
    "leftovers": (list,),  # processes that had to be ended, in words
}
"""What every report of another kind has, besides its results."""

RUN_SCHEMA: Mapping[str, tuple[type, ...]] = {
    "kind": (str,),  # faultinject.kinds.ALL
    "variant": (str,),  # how the kind was committed, "" where there is one way
    "title": (str,),
    "mode": (str,),  # stock, mpsd, kmod
    "fault_class": TEXT,  # as mpsd classed it
    "expected_classes": (list,),
    "survivors": (int,),  # how many there were
    "lost": NUMBER,  # how many of them got an error or died
    "wrong_results": NUMBER,  # how many of them computed something wrong
    "named": TEXT,  # right, wrong, unknown: by mpsd; by the kernel log in mode stock
    "confidence": TEXT,  # certain, likely, unknown
    "record_ms": NUMBER,  # the driver's event to mpsd's record
    "fire_to_record_ms": NUMBER,  # the misdeed to the record's arrival at the harness
    "evict_ms": NUMBER,  # the request until SIGKILL was sent, its GPU work ended before (mpsd's answer)
    "off_gpu_ms": NUMBER,  # the request until the offender's own error, or its death, as the harness saw it
    "gone_ms": NUMBER,  # the request to the death of the offender's process
    "stall_ms": NUMBER,  # longest step of a survivor that lived, from the fault (or request) on
    "lost_after_ms": NUMBER,  # the misdeed to the first survivor's error
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
        "date": date,
        "command": command,
        "seed": seed,
        "runs": runs,
    }


def validate(report: Any) -> list[str]:
    """What is wrong with it, in words; an empty list for a report that keeps to the schema."""
    if not isinstance(report, dict):
        return ["a report is an object"]
    problems = against(SCHEMA, report, "report")
    if report.get("schema") != SCHEMA_VERSION:
        problems.append(f"report.schema is {report.get('schema')!r}, this program reads {SCHEMA_VERSION}")
    runs = report.get("runs")
    for i, run in enumerate(runs if isinstance(runs, list) else []):
        where = f"report.runs[{i}]"
        problems += against(RUN_SCHEMA, run, where) if isinstance(run, dict) else [f"{where} is no object"]
    return problems


def _is_foreign_bool(value: object, types: tuple[type, ...]) -> bool:
    """A bool is an int too, and no number."""
    return isinstance(value, bool) and bool not in types


def against(schema: Mapping[str, tuple[type, ...]], value: Mapping[str, Any], where: str) -> list[str]:
    """What of an object's keys and types is not as the schema has it, in words."""
    missing = [f"{where}.{key} is missing" for key in schema if key not in value]
    foreign = [f"{where}.{key} is not in the schema" for key in value if key not in schema]
    mistyped = [
        f"{where}.{key} is {type(value[key]).__name__}"
        for key, types in schema.items()
        if key in value and (not isinstance(value[key], types) or _is_foreign_bool(value[key], types))
    ]
    return missing + foreign + mistyped


def load(path: Path) -> dict[str, Any]:
    """Read a report. Raises UsageError naming the file and its first problem."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the report {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    problems = validate(report)
    if problems:
        raise UsageError(
            f"{path} is no report of run, proxy, failover, takeover or serving: {problems[0]}",
            remedy="bench, sweep and measure write their texts beside their JSON themselves",
        )
    checked: dict[str, Any] = report
    return checked


def passed(finished: Mapping[str, Any], verdicts: Sequence[str]) -> bool:
    """Something was run, all of it is valid, and nothing was left behind."""
    return not finished["leftovers"] and bool(verdicts) and all(verdict == "valid" for verdict in verdicts)


def left_behind(finished: Mapping[str, Any]) -> str:
    """The last line of a text."""
    return "Left behind: " + ("; ".join(finished["leftovers"]) or "nothing") + "."


def load_of_kind(path: Path, kind: str) -> dict[str, Any] | None:
    """The JSON object in this file whose `kind` that is; None if it is something else. Raises UsageError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        return None
    return data if isinstance(data, dict) and data.get("kind") == kind else None


def file_name(device: str, driver: str, what: str, suffix: str = "json") -> str:
    """DEVICE-DRIVER-WHAT.suffix with nothing in it that a shell would mind."""
    parts = (re.sub(r"[^A-Za-z0-9.]+", "-", p).strip("-") for p in (device, driver, what))
    return "-".join(parts) + f".{suffix}"


def placed(path: Path, report: Mapping[str, Any], what: str, suffix: str) -> Path:
    """`path` itself, or where it is a directory the standard name in it."""
    if not path.is_dir():
        return path
    return path / file_name(report["device"], report["driver"], what, suffix)


def load_sound(
    path: Path, kind: str, problems: Callable[[Mapping[str, Any]], Iterator[str]]
) -> dict[str, Any] | None:
    """As load_of_kind. Raises UsageError, too, for the first of what `problems` finds in it."""
    data = load_of_kind(path, kind)
    problem = next(problems(data), None) if data else None
    if problem:
        raise UsageError(f"{path} is no report of this program: {problem}")
    return data


def against_version(
    schema: Mapping[str, tuple[type, ...]], version: int, data: Mapping[str, Any]
) -> Iterator[str]:
    """What a whole report lacks, one by one; its version is looked at when it has one."""
    yield from against(schema, data, "report")
    if data["schema"] != version:
        yield f"report.schema is {data['schema']!r}, this program reads {version}"


def missing_fields(value: Any, of: type, where: str, optional: Sequence[str] = ()) -> Iterator[str]:
    """What an object lacks of a dataclass, in words; `optional`: what earlier reports do not have."""
    if not isinstance(value, dict):
        yield f"{where} is no object"
        return
    for each in fields(of):
        if each.name not in (*value, *optional):
            yield f"{where}.{each.name} is missing"


def heading(finished: Mapping[str, Any]) -> str:
    """The line that stands above a table."""
    whose = f"{finished['device']}, driver {finished['driver']}, {finished['date']}"
    return f"{whose}; again: {finished['command']}"


def spread(values: Sequence[float | None], places: int = 1) -> str:
    """Median / worst of those that were measured."""
    known = [value for value in values if value is not None]
    return f"{median(known):z.{places}f} / {max(known):z.{places}f}" if known else "-"


def deliver(
    report: Mapping[str, Any],
    what: str,
    json_path: Path | None,
    markdown_path: Path | None,
    markdown: str,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Write a report as JSON and as text, where paths are given, under its standard name in a directory.

    `tell` is called with each file that was written. Raises StoreError, which names the file.
    """
    if json_path is not None:
        path = placed(json_path, report, what, "json")
        save(report, path)
        tell(f"wrote {path}")
    if markdown_path is not None:
        path = placed(markdown_path, report, what, "md")
        write_text(path, markdown)
        tell(f"wrote {path}")


def check_target(path: Path | None, option: str) -> None:
    """Before hours of runs: can a report be written there? Raises UsageError. Makes nothing."""
    if path is None:
        return
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {folder}", remedy="make it first")
    target = path if path.exists() else folder
    if not os.access(target, os.W_OK | (os.X_OK if target.is_dir() else 0)):
        raise UsageError(f"{option} {path}: {target} may not be written", remedy="choose another place")


def save(report: Mapping[str, Any], path: Path) -> None:
    write_text(path, json.dumps(report, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Raises StoreError, which names the file."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}", remedy="choose another place") from error


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


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of a terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in lines)


def markdown(report: Mapping[str, Any]) -> str:
    """The report for people: where and how it was made, the table, every complaint."""
    head = (
        f"# {report['device']}, driver {report['driver']}\n\n"
        f"{report['date']}, backend {report['backend']}, seed {report['seed']}:\n\n"
        f"    {report['command']}\n\n"
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
    tail = "\n\n## What did not hold or was not run\n\n" + "\n".join(complaints) if complaints else ""
    return head + "\n" + markdown_table(table(report["runs"])) + tail + "\n"
