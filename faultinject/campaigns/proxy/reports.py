"""The report of the proxy campaign: one JSON object, which holds all that a verdict needs, and its text.

A part of SCHEMA (`programs`, `numba`, ...) that was not requested is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from faultinject.campaigns.proxy import crowded, deaths, entries, memory_end, numba_suite
from faultinject.campaigns.proxy.judge import AUTO, DEFAULT_BAR, VALIDATED
from faultinject.evidence import files, schema, tables
from faultinject.registry.verdicts import Verdict
from mpsd.base.errors import UsageError

SCHEMA_VERSION = 1
KIND = "proxy"
SCHEMA: Mapping[str, tuple[type, ...]] = {
    **schema.ENVELOPE,
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


def load(data: Any, path: Path) -> dict[str, Any] | None:
    """Return the report that a file's JSON is; None for anything else. Raises UsageError."""
    if not files.is_of_kind(data, KIND):
        return None
    # Parts that older reports lack.
    whole = {"memory_end": None, "crowded": None, **data}
    return files.load_of_kind(whole, KIND, path, partial(schema.report_violations, SCHEMA, SCHEMA_VERSION))


def judged(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report with every verdict computed again from its figures. Raises UsageError."""
    try:
        found = dict(data)
        if data["programs"] is not None:
            found["programs"] = [entries.judged(e, bars=bool(data["bars"])) for e in data["programs"]]
        for part, judge in PARTS:
            if data[part] is not None and not data[part].get("not_run"):
                found[part] = {**data[part], **_findings_text(judge(data[part]))}
        return found
    except (KeyError, TypeError) as error:
        raise UsageError(f"the report lacks a figure that its verdict needs: {error!r}") from error


def _findings_text(findings: Sequence[Any]) -> dict[str, Any]:
    return {
        "verdict": deaths.verdict(findings).value,
        "findings": [
            {"law": f.law, "verdict": f.verdict.value, "text": f.text}
            for f in findings
            if f.verdict is not Verdict.VALID
        ],
    }


def verdicts(data: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Return the verdict on every requested part, as judged() computes it; None: not run."""
    found = [(f"{e['program']} {e['mode']}", e["verdict"]) for e in data["programs"] or ()]
    return found + [(part, data[part].get("verdict")) for part, _ in PARTS if data[part] is not None]


def verdicts_with_reasons(data: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Return verdicts() with the first finding that is not valid."""
    judged = [*(data["programs"] or ()), *(data[part] for part, _ in PARTS if data[part] is not None)]

    def reason(entry: Mapping[str, Any], verdict: str | None) -> str | None:
        found = next((f for f in entry.get("findings", ()) if f["verdict"] == verdict), None)
        return f"{verdict}: {found['law']}: {found['text']}" if found else verdict

    return [(name, reason(e, verdict)) for e, (name, verdict) in zip(judged, verdicts(data), strict=True)]


def passed(data: Mapping[str, Any]) -> bool:
    """Return whether no verdict is invalid or unknown, something was run, and no process was left behind."""
    found = [verdict for _, verdict in verdicts(data)]
    return all(v in ("valid", None) for v in found) and "valid" in found and not data["leftovers"]


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
    part_lines = [
        _number(inside and inside["median"], 4),
        _quartiles_text(inside),
        _number(still and still["median"], 4),
    ]
    part_lines += [_number(cpu and cpu["median"], 3)]
    return [
        *name,
        same,
        _number(figures["step_ms_plain"], 3),
        _number(figures["step_ms_proxied"], 3),
        _number(step and step["median"], 4),
        _quartiles_text(step),
        _number(noise and noise["median"], 4),
        _number(figures["memory_ratio"], 4),
        *part_lines[: len(more)],
        _mebibytes(stats),
        str(entry["verdict"]),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _quartiles_text(ratio: Mapping[str, Any] | None) -> str:
    return f"{ratio['low']:.4f}-{ratio['high']:.4f}" if ratio else "-"


def _mebibytes(stats: Mapping[str, Any] | None) -> str:
    return "-" if stats is None else f"{stats['vault_bytes'] / (1 << 20):.1f} MiB"


def part_lines(data: Mapping[str, Any]) -> list[str]:
    """Return the lines about parts without a table."""
    lines = [
        f"Validation of {e['program']}: {validation_line(e['proxied']['stats']['validation'])}"
        for e in data["programs"] or ()
        if e["mode"] == VALIDATED and not e["not_run"] and e["proxied"]["stats"]
    ]
    lines += [default_line(e) for e in data["programs"] or () if e["mode"] == AUTO and not e["not_run"]]
    if (killed := data["deaths"]) is not None:
        lines.append(f"Deaths: {killed.get('verdict') or 'not run'}: {deaths_line(killed)}")
    if (numba := data["numba"]) is not None:
        lines.append(
            f"numba-cuda's own tests: {numba.get('verdict') or 'not run'}: {numba_suite.summary(numba)}"
        )
    if (ends := data["memory_end"]) is not None:
        lines.append(f"All GPU memory: {ends.get('verdict')}: {memory_end.summary(ends)}")
    if (beside := data["crowded"]) is not None:
        lines.append(
            f"All GPU memory beside standby contexts: {beside.get('verdict')}: {crowded.summary(beside)}"
        )
    return lines


def validation_line(seen: Mapping[str, Any]) -> str:
    return (
        f"{seen['operations']} operations were checked, {seen['unsure']} others cannot be rolled back; "
        f"{seen['strays']} pages were written outside the parameters, module variables "
        f"{seen['variables']} times; {seen['unread']} code images could not be checked"
    )


def default_line(entry: Mapping[str, Any]) -> str:
    """Return the protection of a program without a configuration, and what it costs a step."""
    shown = entry["proxied"]["failover"]
    called = f"{shown['level']}{_in_brackets(shown['why'])}" if shown else "not listed"
    found, error = (entry["figures"].get(f"within_{what}") for what in ("ratio", "error"))
    if not found or error is None:
        return f"{entry['program']}: status called it {called}."
    low, high = found["median"] - error, found["median"] + error
    return (
        f"{entry['program']}: status called it {called}; a step took {found['median']:.4f} of the time past "
        f"the proxy, {low:.4f} to {high:.4f} (two standard errors); the limit is {1 + DEFAULT_BAR:.2f}."
    )


def _in_brackets(why: str) -> str:
    return f" ({why})" if why else ""


def deaths_line(killed: Mapping[str, Any]) -> str:
    batches = killed["batches"]
    cleared = [b["clear_s"] for b in batches if b["clear_s"] is not None]
    slowest = f"{max(cleared):.2f} s" if cleared else "-"
    return (
        f"{sum(b['deaths'] for b in batches)} of {killed['wanted']} killed in {len(batches)} batches, "
        f"{sum(b['vaulted'] for b in batches)} with memory in the vault; after the slowest batch everything "
        f"was released {slowest} later; survivors: "
        + ", ".join(f"{n} checked {t.get('steps', 0)} times" for n, t in killed["survivors"].items())
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
    "Modes. forward: the proxy passes every call through. vault: memory is in the window and in mpsd's "
    "vault. keep, exact: and a standby context, in that mode of fail-over. auto: as mpsd-run starts a "
    "program without a configuration. Columns. ratio: step time with the proxy to that without, median over "
    "the rounds, and the range that holds half of them. noise: the same ratio of two processes without the "
    "proxy. memory: GPU memory with the proxy to that without. vaulted: in the window once the program had "
    "started. `-`: not measured."
)
_LEGEND_OF_BEATS = "{program}: instead of the step time, {beat}, the fastest tenth of each round."
_LEGEND_OF_BLOCKS = (
    "Within the process of {programs} a block is one of these times, of the second of two that go the same "
    "way one after the other, with nothing in flight before and after it."
)
_LEGEND_OF_WITHIN = (
    "within: step time with calls through the proxy to that with calls past it, in blocks of one process: "
    "one block through it and two past it in each round, and the range that holds half of the rounds. noise "
    "within: the same ratio of the two blocks past it. Step time is judged by these where they are given. "
    "Only calls that submit, wait or query go past the proxy: the cost of others, the place of memory and "
    "the proxy's own threads are in both."
)
_LEGEND_OF_CPU = (
    "CPU within: processor time of a step, of all threads of the process, through the proxy to past it. It "
    "includes a thread of the proxy that waits for launches."
)
_LEGEND_OF_VALIDATION = "validate: as exact, with all memory compared after each operation."


def markdown(data: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = [
        f"# {data['device']}, driver {data['driver']}: programs without and with the proxy",
        "",
        f"Backend {data['backend']}, seed {data['seed']}. {tables.provenance(data)}",
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
    # Older reports have no beats.
    beats = {e["program"]: e["beat"] for e in data["programs"] or () if e.get("beat")}
    for program, beat in beats.items():
        lines += [_LEGEND_OF_BEATS.format(program=program, beat=beat), ""]
    withins = {e["program"]: e.get("within") or {} for e in data["programs"] or ()}
    if by_beats := [program for program, found in withins.items() if found.get("beats")]:
        lines += [_LEGEND_OF_BLOCKS.format(programs=", ".join(by_beats)), ""]
    if not data["bars"]:
        lines += ["Time and memory are not judged here: this is no real GPU.", ""]
    if data["programs"] is not None:
        lines += [tables.markdown_table(table(data["programs"])), ""]
    lines += [line for told_line in part_lines(data) for line in (told_line, "")]
    wrong = complaints(data)
    if wrong:
        lines += ["## Not valid, not judged or not run", "", *(f"- {w}" for w in wrong), ""]
    return "\n".join(lines).rstrip() + "\n"
