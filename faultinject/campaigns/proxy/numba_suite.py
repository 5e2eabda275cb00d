"""numba-cuda's own test suite without and with the proxy: no test may change its outcome.

Both runs go at the same time, each with the same tests in as many processes. Tests with different outcomes
run again on both sides, to tell unsteady tests from changed ones.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from faultinject.registry.history import clock
from faultinject.registry.verdicts import (
    Finding,
    Verdict,
    findings,
    invalid,
    unknown,
    valid,
)
from faultinject.rig.libraries import MPSD_RUN, Libraries
from faultinject.rig.rig import Rig

SUITE = "numba.cuda.tests"
GRACE_S = 10.0
REPEATS = 2
REASONS = 8
NEEDED = ("numba_cuda", "filecheck", "cffi")
"""Without the last two the suite runs, but the children of its tests die as they start."""
COMPLETE = (0, 1, 5)
"""pytest's exit statuses after a whole run: all passed, some failed, none chosen."""


@dataclass(frozen=True, slots=True)
class Options:
    """`match`: as pytest's -k; `shard`: "I/N" or ""; `jobs`: processes on each side."""

    match: str = ""
    shard: str = ""
    jobs: int = 6
    deadline_s: float = 540.0
    suite: str = SUITE

    def words(self) -> list[str]:
        words = ["--numba", "--numba-jobs", str(self.jobs), "--numba-deadline", f"{self.deadline_s:g}"]
        words += ["--numba-filter", self.match] if self.match else []
        words += ["--numba-shard", self.shard] if self.shard else []
        return words + (["--numba-suite", self.suite] if self.suite != SUITE else [])


def shard(text: str) -> str:
    """Read I/N (for argparse)."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of) <= 1000):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard: 1/4 is the first of four")
    return text


def add_options(parser: argparse.ArgumentParser, types: Any) -> None:
    which = "only tests that match, as pytest -k"
    parser.add_argument("--numba-filter", metavar="EXPRESSION", default="", help=which)
    parser.add_argument("--numba-shard", type=shard, metavar="I/N", help="one part of the tests")
    processes = "processes on each side (default: 6)"
    parser.add_argument("--numba-jobs", type=types.number(1, 32), default=6, help=processes)
    seconds = "seconds for both runs together (default: 540)"
    parser.add_argument("--numba-deadline", type=types.seconds, default=540.0, help=seconds)
    package = f"another package with tests (default: {SUITE})"
    parser.add_argument("--numba-suite", metavar="PACKAGE", default=SUITE, help=package)


def options(args: argparse.Namespace) -> Options:
    return Options(
        args.numba_filter, args.numba_shard or "", args.numba_jobs, args.numba_deadline, args.numba_suite
    )


# ---- outcomes


def _read_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Lines that were cut off are skipped."""
    for summary in lines:
        try:
            yield json.loads(summary)
        except ValueError:
            continue


def combine(lines: Iterable[str]) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the outcome of each test, and the statistics of the suite's processes.

    A test counts when it was torn down, could not be collected, or ended its process.
    """
    outcomes: dict[str, str] = {}
    processes: list[dict[str, Any]] = []
    pending: dict[str, str] = {}
    for line in _read_lines(lines):
        if "process" in line:
            processes.append(line)
            continue
        test, when, outcome = line["test"], line["when"], _outcome(line)
        if when in ("setup", "call", "teardown"):
            if outcome != "passed" or when == "call":
                pending[test] = outcome if pending.get(test) in (None, "passed") else pending[test]
            if when == "teardown":
                outcomes[test] = pending.pop(test, "passed")
        else:
            outcomes[test] = outcome
    return outcomes, processes


def under_way(lines: Iterable[str]) -> list[str]:
    """Return the tests that were set up and not torn down: those in progress when a suite was cut short."""
    latest: dict[str, str] = {}
    for line in _read_lines(lines):
        if "test" in line:
            latest[line["test"]] = line["when"]
    return sorted(test for test, when in latest.items() if when in ("setup", "call"))


def reasons(lines: Iterable[str]) -> dict[str, int]:
    """Return the most frequent last lines of failures, with their counts."""
    found: Counter[str] = Counter()
    for line in _read_lines(lines):
        if line.get("why"):
            found[line["why"]] += 1
    return dict(found.most_common(REASONS))


def _outcome(line: Mapping[str, Any]) -> str:
    when, outcome = line["when"], line["outcome"]
    if when == "collect":
        return "not collected"
    if when not in ("setup", "call", "teardown"):
        return "crashed"
    if line["xfail"]:
        return "xfailed" if outcome == "skipped" else "xpassed"
    return "error" if outcome == "failed" and when != "call" else str(outcome)


def differing(plain: Mapping[str, str], proxied: Mapping[str, str]) -> list[str]:
    """Return the tests that ran on both sides with different outcomes."""
    return sorted(test for test in plain.keys() & proxied.keys() if plain[test] != proxied[test])


def classify_repeated(plain: Sequence[str], proxied: Sequence[str]) -> str:
    """Return what repeated outcomes of one test mean: changed, unsteady (on both sides), or doubtful."""
    if not set(plain) & set(proxied):
        return "changed"
    return "unsteady" if len(set(plain)) > 1 else "doubtful"


# ---- verdict


def judge(seen: Mapping[str, Any]) -> list[Finding]:
    """Return what must hold of the stored facts (as `run` gives them)."""
    laws = (_suite_ran, _was_proxied, _no_outcome_changed)
    return findings(laws, seen)


def _suite_ran(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    both = len(seen["plain"]["outcomes"].keys() & seen["proxied"]["outcomes"].keys())
    for side in ("plain", "proxied"):
        if seen[side]["failure"]:
            return unknown(f"{side}: {seen[side]['failure']}; {both} tests ran in both")
    if not any(o == "passed" for o in seen["plain"]["outcomes"].values()):
        return unknown("no test passed without the proxy")
    alone = seen["plain"]["outcomes"].keys() ^ seen["proxied"]["outcomes"].keys()
    if alone:
        return invalid(f"{len(alone)} tests ran on one side only, for example {min(alone)}")
    return valid()


def _was_proxied(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    stats = [p["stats"] for p in seen["proxied"]["processes"] if p["proxy"]]
    if not stats:
        return invalid("no process of the suite had the proxy")
    inactive = [s["reason"] if s else "another version" for s in stats if s is None or s["state"] != "active"]
    if inactive:
        return invalid(f"the proxy passes calls through: {inactive[0]}")
    if any(p["proxy"] for p in seen["plain"]["processes"]):
        return invalid("a process that was to run without the proxy had it")
    return valid()


def _no_outcome_changed(seen: Mapping[str, Any]) -> tuple[Verdict, str]:
    kinds = {test: classify_repeated(d["plain"], d["proxied"]) for test, d in seen["differing"].items()}
    changed = [
        f"{t} ({_outcomes_text(seen['differing'][t])})" for t, kind in kinds.items() if kind == "changed"
    ]
    if changed:
        return invalid(f"{len(changed)} changed: " + "; ".join(changed[:20]))
    doubtful = [
        f"{t} ({_outcomes_text(seen['differing'][t])})" for t, kind in kinds.items() if kind == "doubtful"
    ]
    return unknown("unsteady with the proxy alone: " + "; ".join(doubtful[:20])) if doubtful else valid()


def _outcomes_text(outcomes: Mapping[str, Sequence[str]]) -> str:
    return f"{'/'.join(outcomes['plain'])} without, {'/'.join(outcomes['proxied'])} with"


def summary(seen: Mapping[str, Any]) -> str:
    """Return the result in one line."""
    if seen.get("not_run"):
        return str(seen["not_run"])
    parts = []
    for side in ("plain", "proxied"):
        counts = Counter(seen[side]["outcomes"].values())
        counts_text = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        why = next(iter(seen[side].get("reasons", {}).items()), None)
        most = f" ({why[1]} times: {why[0]})" if why else ""
        parts.append(f"{side}: {counts_text or 'none'} in {seen[side]['took_s']:.0f} s{most}")
    kinds = Counter(classify_repeated(d["plain"], d["proxied"]) for d in seen["differing"].values())
    parts.append(", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none differs")
    return "; ".join(parts)


# ---- running


def missing_packages(suite: str) -> str | None:
    """Return what is not installed, in words."""
    for module in ("pytest", suite.partition(".")[0]):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    for module in NEEDED if suite == SUITE else ():
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: numba-cuda's own tests need {', '.join(NEEDED)}"
    return None


class Suite:
    """One run on one side; used once."""

    def __init__(self, rig: Rig, libraries: Libraries, options: Options, side: str, place: Path) -> None:
        self.options, self.side = options, side
        self.outcomes, self.log = place / f"{side}.jsonl", place / f"{side}.log"
        service = rig.mpsd
        if side == "plain":
            environment = libraries.plain(service.client_environment())
        else:
            environment = libraries.proxied(service.environment, service.socket, vault=True)
        cache = place / f"{side}-cache"
        cache.mkdir(exist_ok=True)
        environment |= {
            "PYTEST_PLUGINS": "faultinject.campaigns.proxy.numba_plugin",
            "MPSD_SUITE_OUTCOMES": str(self.outcomes),
            "MPSD_SUITE_SHARD": options.shard,
            "NUMBA_CACHE_DIR": str(cache),
            "MPSD_FAULTINJECT_RUN": str(rig.base),
        }
        self.through = () if side == "plain" else MPSD_RUN
        self.environment, self.place = environment, place
        self.process: subprocess.Popen[bytes] | None = None
        self.began = 0.0

    def start(self, only: Path | None = None) -> None:
        jobs = 1 if only else self.options.jobs
        command = [*self.through, sys.executable, "-m", "pytest", "--pyargs", self.options.suite, "-q"]
        command += ["-c", os.devnull, "--rootdir", str(self.place), "-p", "no:cacheprovider", "--tb=line"]
        # The folder of the suite has no package of its own, under a name that other packages have too.
        command += ["--import-mode=importlib", "-o", "consider_namespace_packages=true"]
        command += ["--continue-on-collection-errors"]
        if jobs > 1 and importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(jobs), "--dist", "loadscope"]
        command += ["-k", self.options.match] if self.options.match else []
        named = {"MPSD_SUITE_ONLY": str(only)} if only else {}
        self.began = clock()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.place,
                env=self.environment | named,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, end: float) -> dict[str, Any]:
        """Wait until `end`, then end it; return its outcomes so far."""
        assert self.process is not None
        failure, cut = "", False
        try:
            status = self.process.wait(max(0.0, end - clock()))
            if status not in COMPLETE:
                failure = f"pytest ended with status {status}: {self._tail()}"
        except subprocess.TimeoutExpired:
            failure, cut = f"not finished after {clock() - self.began:.0f} s", True
        took = clock() - self.began
        self._end()
        lines = self.outcomes.read_text(encoding="utf-8").splitlines() if self.outcomes.exists() else []
        if cut:
            failure += f", under way: {', '.join(under_way(lines)) or 'no test'}"
        outcomes, processes = combine(lines)
        return {
            "outcomes": outcomes,
            "processes": processes,
            "reasons": reasons(lines),
            "failure": failure,
            "took_s": round(took, 1),
        }

    def _end(self) -> None:
        assert self.process is not None
        for number, grace in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(grace)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue

    def _tail(self) -> str:
        return self.log.read_text(errors="replace").strip()[-300:]


def run(
    rig: Rig, libraries: Libraries, options: Options, base: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Run the suite on both sides, and the different tests again, within the deadline."""
    missing = missing_packages(options.suite)
    if missing is not None:
        return {"not_run": missing}
    end = clock() + options.deadline_s
    first = _both_sides(rig, libraries, options, base / "suite-0", end, None)
    differ = differing(first["plain"]["outcomes"], first["proxied"]["outcomes"])
    tell(f"numba: {len(first['plain']['outcomes'])} tests without, {len(differ)} differ with the proxy")
    found = {test: {side: [first[side]["outcomes"][test]] for side in first} for test in differ}
    only = base / "again.txt"
    only.write_text("\n".join(differ), encoding="utf-8")
    for number in range(REPEATS if differ else 0):
        repeat_options = replace(options, jobs=1, shard="")
        again = _both_sides(rig, libraries, repeat_options, base / f"suite-{number + 1}", end, only)
        for test in differ:
            for side in first:
                found[test][side] += [again[side]["outcomes"].get(test, "not run")]
    return {"not_run": None, **first, "differing": found}


def _both_sides(
    rig: Rig, libraries: Libraries, options: Options, place: Path, end: float, only: Path | None
) -> dict[str, Any]:
    place.mkdir()
    sides = {side: Suite(rig, libraries, options, side, place) for side in ("plain", "proxied")}
    try:
        for suite in sides.values():
            suite.start(only)
        return {side: suite.finish(end) for side, suite in sides.items()}
    finally:
        for suite in sides.values():
            if suite.process is not None:
                suite._end()
        shutil.rmtree(place, ignore_errors=True)
