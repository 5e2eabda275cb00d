"""`mpsd-faultinject proxy`: options, run, table."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faultinject.campaigns.proxy import crowded, deaths, judge, memory_end, numba_suite, pairs, reports
from faultinject.evidence import files, revision, tables
from faultinject.evidence.files import tell_stderr
from faultinject.programs.workloads import NAMES, ON_SIMULATED
from faultinject.registry import kinds
from faultinject.registry.history import History
from faultinject.rig.libraries import Libraries, add_reads, find_libraries
from faultinject.rig.node import Node, open_node, without_settings
from faultinject.rig.rig import Rig
from mpsd.base.errors import UsageError

SETTINGS = {"protect": '"guard"'}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `programs` None: none; `deaths` 0: none; `numba` None: without that suite."""

    backend: str
    programs: Sequence[str] | None
    modes: Sequence[str]
    rounds: pairs.Rounds
    seed: int
    deaths: int
    at_once: int
    numba: numba_suite.Options | None
    deadline_s: float
    libcuda: Path | None = None
    driver: Path | None = None
    memory_end: bool = False
    crowded: bool = False
    cores: Sequence[int] = ()
    reads: Path | None = None
    relays: bool = True
    out: Path | None = None
    """The logs of each part are kept in a folder of it."""

    def command(self) -> str:
        """Return the command line that repeats it, without the folders of the libraries."""
        words = ["mpsd-faultinject", "proxy", "--backend", self.backend, "--seed", str(self.seed)]
        words += ["--programs", ",".join(self.programs or ["none"]), "--modes", ",".join(self.modes)]
        words += ["--pairs", str(self.rounds.least), "--pairs-most", str(self.rounds.most)]
        words += ["--within"] if self.rounds.within else []
        words += ["--cores", str(len(self.cores))] if self.cores else []
        words += ["--deaths", str(self.deaths), "--at-once", str(self.at_once)]
        words += ["--memory-end"] if self.memory_end else []
        words += ["--crowded"] if self.crowded else []
        words += ["--reads", self.reads.name] if self.reads else []
        words += [] if self.relays else ["--no-relay"]
        return shlex.join(words + (self.numba.words() if self.numba else []))


def select_programs(words: Sequence[str], backend: str) -> list[str] | None:
    """Return programs by name; `all` are those that this backend can run. Raises UsageError."""
    known = list(ON_SIMULATED if backend == "simulated" else NAMES)
    if list(words) == ["none"]:
        return None
    for word in words:
        if word not in ("all", *NAMES):
            raise UsageError(f"there is no program {word!r}", remedy=f"all, none, or of: {', '.join(NAMES)}")
        if word != "all" and word not in known:
            raise UsageError(
                f"{word} needs a real GPU", remedy=f"on the simulated one there are: {', '.join(known)}"
            )
    return known if "all" in words else [name for name in known if name in words]


def run(plan: Plan) -> dict[str, Any]:
    """Run the plan and return the judged report. Raises MpsdError if the rig cannot be set up."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        libraries = find_libraries(
            plan.backend, plan.libcuda, plan.driver, Path(base), plan.reads, relays=plan.relays
        )
        node = open_node(plan.backend, Path(base))
        try:
            found = _run_parts(node, plan, libraries, Path(base))
        finally:
            node.close()
    head = {
        "schema": reports.SCHEMA_VERSION,
        "kind": reports.KIND,
        "device": node.device,
        "driver": node.driver,
        "backend": plan.backend,
        "revision": revision.current(),
        "date": date,
        "command": plan.command(),
        "seed": plan.seed,
        "bars": int(node.bars),
    }
    return reports.judged({**head, **found})


def _run_parts(node: Node, plan: Plan, libraries: Libraries, base: Path) -> dict[str, Any]:
    """Run each part with a daemon of its own, so that no part sees the remains of another."""
    found: dict[str, Any] = dict.fromkeys(("programs", *(part for part, _ in reports.PARTS)))
    leftovers: list[str] = []
    found["leftovers"] = leftovers

    @contextmanager
    def rigged(part: str, settings: Mapping[str, str] | None) -> Iterator[Rig]:
        """Run a rig. Without `settings` mpsd has its defaults."""
        logs = plan.out / part if plan.out else None
        mode, of_node = ("mpsd", node) if settings is not None else (kinds.AUTO, without_settings(node))
        with (
            History() as history,
            Rig(of_node, mode, history, settings=settings, logs_to=logs, libraries=libraries) as rig,
        ):
            yield rig
        leftovers.extend(rig.leftovers)

    if plan.programs is not None:
        with rigged("programs", _settings(plan.modes, libraries)) as rig:
            found["programs"] = pairs.run_programs(
                rig,
                libraries,
                plan.programs,
                plan.modes,
                seed=plan.seed,
                rounds=plan.rounds,
                cores=plan.cores,
                deadline_s=plan.deadline_s,
                tell=tell_stderr,
            )
    if plan.deaths:
        with rigged("deaths", {**SETTINGS, **deaths.SETTINGS}) as rig:
            kills = deaths.Kills(rig, libraries, plan.seed, tell_stderr)
            found["deaths"] = kills.run(plan.deaths, plan.at_once).data()
    if plan.memory_end:
        with rigged("memory-end", SETTINGS) as rig:
            found["memory_end"] = memory_end.run(rig, libraries, plan.seed, tell_stderr)
    if plan.crowded:
        settings = {**SETTINGS, **libraries.failover_settings(), "failover.mode": '"exact"'}
        with rigged("crowded", settings) as rig:
            found["crowded"] = crowded.run(rig, libraries, plan.seed, tell_stderr)
    if plan.numba is not None:
        with rigged("numba", SETTINGS) as rig:
            found["numba"] = numba_suite.run(rig, libraries, plan.numba, base, tell_stderr)
    return found


def _settings(modes: Sequence[str], libraries: Libraries) -> Mapping[str, str] | None:
    """Return the settings for programs in these modes; None for mpsd's defaults."""
    if judge.AUTO in modes:
        return None
    moved = any(mode in judge.STANDBY_MODES for mode in modes)
    return {**SETTINGS, **(libraries.failover_settings() if moved else {})}


def execute(plan: Plan, json_path: Path | None, markdown_path: Path | None) -> int:
    """Run it with progress, write table, JSON and Markdown, and return the exit status."""
    finished = run(plan)
    print(tables.heading(finished))
    show(finished)
    files.deliver(finished, "proxy", json_path, markdown_path, reports.markdown(finished), tell_stderr)
    return 0 if reports.passed(finished) else 1


def show(finished: dict[str, Any]) -> None:
    """Print tables and complaints to a terminal."""
    if finished["programs"] is not None:
        print(tables.aligned(reports.table(finished["programs"])))
    for line in (*reports.part_lines(finished), *reports.complaints(finished)):
        print(line)


def add_parser(commands: Any, types: Any) -> None:
    """Add the options of the subcommand. `types`: the readers of names, numbers and seconds."""
    proxy = commands.add_parser("proxy", help="programs without and with mpsd's libcuda, in pairs")
    proxy.add_argument("--backend", choices=types.backends, default="simulated", help="(default: simulated)")
    types.common(proxy)
    programs = f"all, none, or by commas: {', '.join(NAMES)}"
    proxy.add_argument("--programs", type=types.names, default=["all"], help=programs)
    modes = f"of: {', '.join(pairs.MODES)} (default: {','.join(pairs.DEFAULT_MODES)})"
    proxy.add_argument("--modes", type=types.names, default=list(pairs.DEFAULT_MODES), help=modes)
    proxy.add_argument(
        "--pairs", type=types.number(1, 1000), default=9, help="rounds that are timed (default: 9)"
    )
    proxy.add_argument(
        "--pairs-most",
        type=types.number(1, 1000),
        default=0,
        help="at most so many rounds, until the medians are known to a quarter of a percent",
    )
    proxy.add_argument(
        "--within",
        action="store_true",
        help="rounds within each proxied process: blocks of steps past the proxy and through it, alternating "
        "(for programs whose processes differ by more than the proxy costs; not with validate)",
    )
    proxy.add_argument(
        "--cores",
        type=types.number(0, 1024),
        default=0,
        help="run all processes of a program on the same number of processor cores, with the same hash seed, "
        "so that they differ less by chance (default: 0, no limit)",
    )
    proxy.add_argument("--deaths", type=types.number(0, 100_000), default=0, help="kill this many programs")
    proxy.add_argument("--at-once", type=types.number(1, 32), default=deaths.AT_ONCE, help="deaths at a time")
    ends = "allocate all GPU memory, without and with the proxy"
    proxy.add_argument("--memory-end", action="store_true", help=ends)
    beside = "allocate all GPU memory beside programs with standby contexts, which release theirs"
    proxy.add_argument("--crowded", action="store_true", help=beside)
    proxy.add_argument("--numba", action="store_true", help="numba-cuda's own test suite, without and with")
    numba_suite.add_options(proxy, types)
    proxy.add_argument(
        "--deadline", type=types.seconds, default=120.0, help="seconds for each program (default: 120)"
    )
    proxy.add_argument("--libcuda", type=Path, metavar="DIR", help="the folder with the proxy's libcuda.so.1")
    proxy.add_argument("--driver", type=Path, metavar="DIR", help="the stand-in's, for the simulated GPU")
    add_reads(proxy)
    own = "in mode exact the threads of the program launch themselves, as with MPSD_DEBUG=relay=off"
    proxy.add_argument("--no-relay", dest="relays", action="store_false", help=own)
    proxy.add_argument("--out", type=Path, help="keep the logs of each part here")
    proxy.set_defaults(go=_run_command)


def _run_command(args: argparse.Namespace) -> int:
    for mode in args.modes:
        if mode not in pairs.MODES:
            raise UsageError(
                f"there is no mode {mode!r} of the proxy", remedy=f"of: {', '.join(pairs.MODES)}"
            )
    if judge.AUTO in args.modes and len(args.modes) > 1:
        raise UsageError("mode auto needs a daemon without settings", remedy="run mode auto by itself")
    if args.within and judge.VALIDATED in args.modes:
        raise UsageError(
            "--within times steps, and those of mode validate are not judged by time",
            remedy="run validate by itself",
        )
    plan = Plan(
        args.backend,
        select_programs(args.programs, args.backend),
        [mode for mode in pairs.MODES if mode in args.modes],
        pairs.Rounds(args.pairs, max(args.pairs, args.pairs_most), args.within),
        args.seed,
        args.deaths,
        args.at_once,
        numba_suite.options(args) if args.numba else None,
        args.deadline,
        args.libcuda,
        args.driver,
        args.memory_end,
        args.crowded,
        pairs.choose_cores(args.cores),
        args.reads,
        args.relays,
        args.out,
    )
    others = (plan.deaths, plan.memory_end, plan.crowded, plan.numba is not None)
    if plan.programs is None and not any(others):
        raise UsageError(
            "there is nothing to run", remedy="give --programs, --deaths, --memory-end, --crowded or --numba"
        )
    return execute(plan, args.json, args.markdown)
