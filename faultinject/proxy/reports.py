"""The report of the proxy's evidence: one JSON object, and its text. It holds all that a verdict needs.

`kind` is "proxy"; a part of SCHEMA (`programs`, `numba`, ...) that was not asked for is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from faultinject import report
from faultinject.proxy import crowded, deaths, entries, memory_end, numba_suite
from faultinject.proxy.judge import VALIDATED
from faultinject.verdict import Verdict
from mpsd.errors import UsageError

SCHEMA_VERSION = 1
KIND = "proxy"
SCHEMA: Mapping[str, tuple[type, ...]] = {
    **report.ENVELOPE,
    "seed": (int,),
    "bars": (int,),  # 1: the bounds on time and memory are judged; 0 on the simulated GPU
    "programs": (list, type(None)),
    "numba": (dict, type(None)),
    "deaths": (dict, type(None)),
    "memory_end": (dict, type(None)),
    "crowded": (dict, type(None)),
}
PARTS = (
    ("numba", numba_suite.judge),
    ("deaths", deaths.judge),
    ("memory_end", memory_end.judge),
    ("crowded", crowded.judge),
)


def load(path: Path) -> dict[str, Any] | None:
    """The report in this file; None if it is JSON of another kind. Raises UsageError."""
    data = report.load_of_kind(path, KIND)
    if data is None:
        return None
    # Reports that were made before there were these parts.
    for part in ("memory_end", "crowded"):
        data.setdefault(part, None)
    problems = report.against(SCHEMA, data, "report")
    if data.get("schema") != SCHEMA_VERSION:
        problems.append(f"report.schema is {data.get('schema')!r}, this program reads {SCHEMA_VERSION}")
    if problems:
        raise UsageError(f"{path} is no report of this program: {problems[0]}")
    return data


def judged(data: Mapping[str, Any]) -> dict[str, Any]:
    """The report with every verdict computed anew from what was measured. Raises UsageError."""
    try:
        found = dict(data)
        if data["programs"] is not None:
            found["programs"] = [entries.judged(e, bars=bool(data["bars"])) for e in data["programs"]]
        for part, judge in PARTS:
            if data[part] is not None and not data[part].get("not_run"):
                found[part] = {**data[part], **_said(judge(data[part]))}
        return found
    except (KeyError, TypeError) as error:
        raise UsageError(f"the report lacks something that its verdict needs: {error!r}") from error


def _said(findings: Sequence[Any]) -> dict[str, Any]:
    return {
        "verdict": deaths.verdict(findings).value,
        "findings": [
            {"law": f.law, "verdict": f.verdict.value, "text": f.text}
            for f in findings
            if f.verdict is not Verdict.VALID
        ],
    }


def verdicts(data: Mapping[str, Any]) -> list[str | None]:
    """Of every part that was asked for; None for what was not run."""
    found = [e["verdict"] for e in data["programs"] or ()]
    return found + [data[part].get("verdict") for part, _ in PARTS if data[part] is not None]


def passed(data: Mapping[str, Any]) -> bool:
    """No verdict is invalid or unknown, something was run, and no process was left."""
    said = verdicts(data)
    return all(v in ("valid", None) for v in said) and "valid" in said and not data["leftovers"]


_COLUMNS = (
    "program",
    "mode",
    "results",
    "step ms",
    "proxied ms",
    "ratio",
    "half of rounds",
    "noise",
    "memory",
)


_WITHIN_COLUMNS = ("within", "half of rounds", "noise within")
_CPU_COLUMN = "CPU within"


def _has_cpu(programs: Sequence[Mapping[str, Any]] | None) -> bool:
    return any((entry.get("figures") or {}).get("within_cpu") for entry in programs or ())


def _has_within(programs: Sequence[Mapping[str, Any]] | None) -> bool:
    return any(entry.get("within") for entry in programs or ())


def table(programs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Header row and one row for each program and mode."""
    more: tuple[str, ...] = _WITHIN_COLUMNS if _has_within(programs) else ()
    more += (_CPU_COLUMN,) if _has_cpu(programs) else ()
    return [[*_COLUMNS, *more, "vaulted", "verdict"], *(_row(e, more) for e in programs)]


def _row(entry: Mapping[str, Any], more: Sequence[str]) -> list[str]:
    name = [entry["program"], entry["mode"]]
    if entry["not_run"]:
        return [*name, *["-"] * (len(_COLUMNS) + len(more) - 1), "not run"]
    figures, plain, proxied = entry["figures"], entry["plain"], entry["proxied"]
    same = "same" if plain["digest"] == proxied["digest"] and plain["digest"] else "DIFFER"
    step, noise, stats = figures["step_ratio"], figures["noise_ratio"], proxied["stats"]
    inside, still, cpu = (figures.get(f"within_{what}") for what in ("ratio", "noise", "cpu"))
    told = [_number(inside and inside["median"], 4), _half(inside), _number(still and still["median"], 4)]
    told += [_number(cpu and cpu["median"], 3)]
    return [
        *name,
        same,
        _number(figures["step_ms_plain"], 3),
        _number(figures["step_ms_proxied"], 3),
        _number(step and step["median"], 4),
        _half(step),
        _number(noise and noise["median"], 4),
        _number(figures["memory_ratio"], 4),
        *told[: len(more)],
        _mebibytes(stats),
        str(entry["verdict"]),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _half(ratio: Mapping[str, Any] | None) -> str:
    return f"{ratio['low']:.4f}-{ratio['high']:.4f}" if ratio else "-"


def _mebibytes(stats: Mapping[str, Any] | None) -> str:
    return "-" if stats is None else f"{stats['vault_bytes'] / (1 << 20):.1f} MiB"


def told(data: Mapping[str, Any]) -> list[str]:
    """Lines about the parts that are no table."""
    lines = [
        f"Validation of {e['program']}: {validation_line(e['proxied']['stats']['validation'])}"
        for e in data["programs"] or ()
        if e["mode"] == VALIDATED and not e["not_run"] and e["proxied"]["stats"]
    ]
    if (killed := data["deaths"]) is not None:
        lines.append(f"Deaths: {killed.get('verdict') or 'not run'}: {deaths_line(killed)}")
    if (numba := data["numba"]) is not None:
        lines.append(
            f"numba-cuda's own tests: {numba.get('verdict') or 'not run'}: {numba_suite.line(numba)}"
        )
    if (ends := data["memory_end"]) is not None:
        lines.append(f"Memory's end: {ends.get('verdict')}: {memory_end.line(ends)}")
    if (beside := data["crowded"]) is not None:
        lines.append(f"Memory beside others that are ready: {beside.get('verdict')}: {crowded.line(beside)}")
    return lines


def validation_line(seen: Mapping[str, Any]) -> str:
    return (
        f"{seen['operations']} operations were looked at, {seen['unsure']} others cannot be undone; "
        f"{seen['strays']} pages were written where no parameter leads, variables of modules "
        f"{seen['variables']} times; {seen['unread']} images of code could not be looked at"
    )


def deaths_line(killed: Mapping[str, Any]) -> str:
    batches = killed["batches"]
    cleared = [b["clear_s"] for b in batches if b["clear_s"] is not None]
    slowest = f"{max(cleared):.2f} s" if cleared else "-"
    return (
        f"{sum(b['deaths'] for b in batches)} of {killed['wanted']} killed in {len(batches)} batches, "
        f"{sum(b['vaulted'] for b in batches)} with memory in the vault; after the slowest batch everything "
        f"was back {slowest} later; survivors: "
        + ", ".join(f"{n} looked {t.get('steps', 0)} times" for n, t in killed["survivors"].items())
    )


def complaints(data: Mapping[str, Any]) -> list[str]:
    found = []
    for entry in data["programs"] or ():
        name = f"{entry['program']} ({entry['mode']})"
        if entry["not_run"]:
            found.append(f"{name}: not run: {entry['not_run']}")
        elif entry["untimed"]:
            found.append(f"{name}: time not judged: {entry['untimed']}")
        found += [f"{name}: {f['law']}: {f['verdict']}: {f['text']}" for f in entry["findings"]]
    for part, _ in PARTS:
        if data[part] is not None:
            found += [f"{part}: not run: {data[part]['not_run']}"] if data[part].get("not_run") else []
            found += [
                f"{part}: {f['law']}: {f['verdict']}: {f['text']}" for f in data[part].get("findings", ())
            ]
    return found + [f"left behind: {what}" for what in data["leftovers"]]


_LEGEND = (
    "forward: the proxy passes every call on; vault: memory in the window, brought to mpsd's vault; keep, "
    "exact: and a standby, in that mode of fail-over. ratio: step time with the proxy to that without, "
    "median over the rounds, and the range that holds half of them; noise: the same of two processes "
    "without the proxy; memory: what the GPU's use grew by, with the proxy to without; vaulted: held in the "
    "window when the program had come up; `-`: not measured."
)
_LEGEND_OF_BEATS = "{program}: in place of a step's time {beat}, the lowest tenth of each round."
_LEGEND_OF_BLOCKS = (
    "Within the process of {programs} a block is one of these times, of the second of two that go the same "
    "way one after the other, with nothing in flight before and after it."
)
_LEGEND_OF_WITHIN = (
    "within: step time with calls through the proxy to that with calls past it, in blocks of one and the "
    "same process, one through and two past it in each round, and the range that holds half of the "
    "rounds; noise within: the same of the two blocks past it. Step time is judged by these where they "
    "are given; ratio and noise are of processes, as elsewhere. Past it go only calls that submit, wait "
    "or ask: what others cost, where memory lies and what the proxy's own threads do is in both."
)
_LEGEND_OF_CPU = (
    "CPU within: the time that processors worked for a step, of all threads of the process, through the "
    "proxy to past it: a thread of the proxy's that waits for launches is in it."
)
_LEGEND_OF_VALIDATION = "validate: as exact, with all memory looked at after each operation."


def markdown(data: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"# {data['device']}, driver {data['driver']}: programs without and with the proxy",
        "",
        f"{data['date']}, backend {data['backend']}, seed {data['seed']}:",
        "",
        f"    {data['command']}",
        "",
        _LEGEND,
        "",
    ]
    if any(entry["mode"] == VALIDATED for entry in data["programs"] or ()):
        lines += [_LEGEND_OF_VALIDATION, ""]
    if _has_within(data["programs"]):
        lines += [_LEGEND_OF_WITHIN, ""]
    if _has_cpu(data["programs"]):
        lines += [_LEGEND_OF_CPU, ""]
    # Reports of before programs had any do not speak of them.
    beats = {e["program"]: e["beat"] for e in data["programs"] or () if e.get("beat")}
    for program, beat in beats.items():
        lines += [_LEGEND_OF_BEATS.format(program=program, beat=beat), ""]
    withins = {e["program"]: e.get("within") or {} for e in data["programs"] or ()}
    if by_beats := [program for program, found in withins.items() if found.get("beats")]:
        lines += [_LEGEND_OF_BLOCKS.format(programs=", ".join(by_beats)), ""]
    if not data["bars"]:
        lines += ["Time and memory are not judged here: this is no real GPU.", ""]
    if data["programs"] is not None:
        lines += [report.markdown_table(table(data["programs"])), ""]
    lines += [line for told_line in told(data) for line in (told_line, "")]
    wrong = complaints(data)
    if wrong:
        lines += ["## What did not hold, was not judged or was not run", "", *(f"- {w}" for w in wrong), ""]
    return "\n".join(lines).rstrip() + "\n"
