"""Judge reports and histories again, and render reports, whichever campaign they are of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faultinject.campaigns import bench, matrixreport, numerics, sources, sweep, takeover
from faultinject.campaigns.attacks import command as attacks
from faultinject.campaigns.crowd import command as crowd
from faultinject.campaigns.defaults import reports as defaults
from faultinject.campaigns.ends import command as ends
from faultinject.campaigns.failover import reports as failover
from faultinject.campaigns.measure import report as measure
from faultinject.campaigns.outages import command as outages
from faultinject.campaigns.proxy import reports as proxy
from faultinject.campaigns.serving import reports as serving
from faultinject.evidence import files
from faultinject.registry.checkers import check
from faultinject.registry.faults import by_name
from faultinject.registry.history import History, load
from faultinject.registry.observation import observe
from faultinject.registry.verdicts import Finding, Verdict
from mpsd.base.errors import UsageError

Report = Mapping[str, Any]
JudgedPart = tuple[str, str | None]
"""The judged part, and its verdict with a reason; None: not run."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How the reports of one campaign are read, judged and rendered.

    `load` returns None for a report of another kind. `verdicts` computes each verdict from the report's own
    figures with the code that judged the run; empty where a report has figures alone.
    """

    name: str
    load: Callable[[Any, Path], dict[str, Any] | None]
    verdicts: Callable[[Report], list[Any]]
    markdown: Callable[[Report], str]


KINDS = (
    Kind(
        "proxy",
        proxy.load,
        lambda data: proxy.verdicts_with_reasons(proxy.judged(data)),
        lambda data: proxy.markdown(data),
    ),
    Kind("failover", failover.load, failover.verdicts, failover.markdown),
    Kind("takeover", takeover.load, takeover.verdicts, takeover.markdown),
    Kind("sources", sources.load, sources.verdicts, sources.markdown),
    Kind("numerics", numerics.load, numerics.verdicts, numerics.markdown),
    Kind("serving", serving.load, serving.verdicts, serving.markdown),
    Kind("attacks", attacks.load, attacks.verdicts, attacks.markdown),
    Kind("defaults", defaults.load, defaults.verdicts, defaults.markdown),
    Kind("crowd", crowd.load, crowd.verdicts, crowd.markdown),
    Kind("ends", ends.load, ends.verdicts, ends.markdown),
    Kind("outages", outages.load, outages.verdicts, outages.markdown),
    Kind("sweep", sweep.load, sweep.verdicts, sweep.markdown),
    Kind("bench", bench.load, lambda data: [], bench.markdown),
    Kind("measure", measure.load, lambda data: [], measure.markdown),
    Kind("run", matrixreport.load, matrixreport.verdicts, matrixreport.markdown),
)


def read(path: Path) -> tuple[Kind, dict[str, Any]]:
    """Return the report in this file and its kind. Raises UsageError."""
    data = files.read(path)
    for kind in KINDS:
        if (report := kind.load(data, path)) is not None:
            return kind, report
    raise UsageError(f"{path} is no report of mpsd-faultinject ({_describe_kind(data)})")


def _describe_kind(data: Any) -> str:
    if not isinstance(data, dict):
        return f"a JSON {type(data).__name__}"
    return f"its kind is {data['kind']!r}" if "kind" in data else "it has no kind, runs or figures"


def render(path: Path) -> str:
    """Return the report in this file as Markdown. Raises UsageError."""
    kind, report = read(path)
    return kind.markdown(report) + files.digest_line(path.read_bytes())


def judge(path: Path) -> Iterator[JudgedPart]:
    """Yield the verdicts on a report or a history, computed again. Raises UsageError."""
    if _is_history(path):
        yield from _history_verdicts(path)
        return
    kind, report = read(path)
    yield from _report_verdicts(kind, report)


def _report_verdicts(kind: Kind, report: Report) -> Iterator[JudgedPart]:
    try:
        found = kind.verdicts(report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"the report lacks something that its verdict needs: {error!r}") from error
    yield from ((f"{kind.name} {name}", verdict) for name, verdict in found)
    leftovers = report.get("leftovers")
    if leftovers:
        yield f"{kind.name} processes left behind", f"invalid: {'; '.join(leftovers)}"
    if not found:
        yield kind.name, NO_VERDICT if kind.name in FIGURES else "invalid: nothing was run"


FIGURES = ("bench", "measure")
"""Kinds with reports of figures alone, in which nothing could be invalid."""
NO_VERDICT = f"{Verdict.VALID}: figures alone, without a verdict"


def _is_history(path: Path) -> bool:
    """Return whether this is a history: one JSON object a line, the first of which says when and what."""
    try:
        with path.open(encoding="utf-8", errors="replace") as opened:
            first = opened.readline()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return first.startswith('{"t"')


def findings(history: History, path: Path) -> Sequence[Finding]:
    """Return what each law says about a history. Raises UsageError."""
    begin, node = history.first("begin"), history.first("node")
    if begin is None:
        raise UsageError(f"{path} is no history of a run", remedy="give a history.jsonl of --out")
    name = begin.data["kind"] + (f"@{begin.data['variant']}" if begin.data["variant"] else "")
    return check(by_name(name), observe(history), bars=bool(node and node.data["bars"]))


def _history_verdicts(path: Path) -> Iterator[JudgedPart]:
    for finding in findings(load(path), path):
        yield finding.law, f"{finding.verdict}" + (f": {finding.text}" if finding.text else "")


def is_accepted(verdict: str | None) -> bool:
    return verdict is None or verdict.split(":")[0] == Verdict.VALID


def verdict_lines(path: Path) -> tuple[list[str], bool]:
    """Return a line for each verdict, and whether all are valid. Raises UsageError."""
    judged = list(judge(path))
    lines = [f"{name}: {verdict or 'not run'}" for name, verdict in judged]
    are_valid = all(is_accepted(verdict) for _, verdict in judged) and any(verdict for _, verdict in judged)
    return lines, are_valid
