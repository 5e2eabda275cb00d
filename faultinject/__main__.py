"""mpsd-faultinject: inject faults into GPU sharing and judge what happens to every client.

Exit status: 0 every verdict is valid; 1 one is invalid or unknown; 2 usage; as mpsd.base.errors otherwise.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from faultinject.campaigns import check, matrixreport, numerics, sources, takeover, tryout
from faultinject.campaigns.attacks import command as attacks
from faultinject.campaigns.crowd import command as crowd
from faultinject.campaigns.defaults import command as defaults
from faultinject.campaigns.ends import command as ends
from faultinject.campaigns.failover import command as failover
from faultinject.campaigns.matrix import (
    Matrix,
    Plan,
    passed,
)
from faultinject.campaigns.outages import command as outages
from faultinject.campaigns.proxy import command as proxy
from faultinject.campaigns.serving import command as serving
from faultinject.evidence import files, revision, tables
from faultinject.evidence.files import tell_stderr
from faultinject.registry.defaults import under_default
from faultinject.registry.faults import (
    REGISTRY,
    select,
    under_kernel_module,
)
from faultinject.registry.kinds import EVERY_MODE, KMOD, MODES
from faultinject.rig.libraries import check_folders
from faultinject.rig.node import BACKENDS
from faultinject.rig.stage import Options
from mpsd.base.errors import MpsdError, UsageError
from mpsd.base.output import discard_buffer
from mpsd.base.protection import ProtectionLevel

MOST_SURVIVORS = 16
MOST_JOBS = 256


def names(text: str) -> list[str]:
    """Read at least one word, separated by commas (for argparse)."""
    if not (found := [word for word in text.split(",") if word]):
        raise argparse.ArgumentTypeError("expected at least one name")
    return found


def counts(text: str) -> list[int]:
    """Read numbers of clients, separated by commas (for argparse)."""
    return [number(0, 1000)(word) for word in names(text)]


def sizes(text: str) -> list[int]:
    """Read sizes of programs [MiB], separated by commas (for argparse)."""
    return [number(1, 1 << 20)(word) for word in names(text)]


def number(least: int, most: int) -> Callable[[str], int]:
    """Return a reader of whole numbers in this range (for argparse)."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} to {most}")
        return int(text)

    return read


def seconds(text: str) -> float:
    """Read a positive time (for argparse)."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--json", type=Path, help="write the report here (a directory: under its standard name)"
    )
    parser.add_argument("--markdown", type=Path, help="write the rendered table here (likewise)")
    parser.add_argument(
        "--revision", help="revision of the code, for the report (default: MPSD_REVISION, or git's)"
    )


def _add_backend(parser: argparse.ArgumentParser) -> None:
    """Add --backend for commands that show or measure; the default is the simulated GPU."""
    which = "the GPU (default: simulated)"
    parser.add_argument("--backend", choices=BACKENDS, default="simulated", help=which)


def _add_fault_runs(
    parser: argparse.ArgumentParser,
    repeated_what: str,
    libcuda: str = "the folder with the proxy's libcuda.so.1",
) -> None:
    """Add the options of commands that repeat faults beside programs."""
    parser.add_argument("--faults", type=number(1, 1000), default=3, help="of each kind (default: 3)")
    _add_proxied_runs(parser, repeated_what, libcuda)


def _add_proxied_runs(
    parser: argparse.ArgumentParser,
    logged_part: str,
    libcuda: str = "the folder with the proxy's libcuda.so.1",
    *,
    deadline: float = 120.0,
    limited: str = "each kind",
) -> None:
    """Add the options of commands with programs under the proxy.

    `logged_part`: it has logs of its own. `deadline` [s]: the default for what is `limited`.
    """
    _add_backend(parser)
    _add_common(parser)
    text = f"seconds for {limited} (default: {deadline:.0f})"
    parser.add_argument("--deadline", type=seconds, default=deadline, help=text)
    parser.add_argument("--libcuda", type=Path, metavar="DIR", help=libcuda)
    parser.add_argument("--driver", type=Path, metavar="DIR", help="the stand-in's, for the simulated GPU")
    parser.add_argument("--out", type=Path, help=f"keep the logs of each {logged_part} here")


_TYPES = SimpleNamespace(
    backends=BACKENDS,
    common=_add_common,
    counts=counts,
    sizes=sizes,
    fault_runs=_add_fault_runs,
    proxied_runs=_add_proxied_runs,
    names=names,
    number=number,
    seconds=seconds,
)
"""The readers of options, for subcommands in other modules."""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="mpsd-faultinject", description=__doc__.splitlines()[0])
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="inject faults and judge")
    run.add_argument("--backend", choices=BACKENDS, required=True, help="the GPU")
    _add_common(run)
    run.add_argument("--kinds", type=names, default=["all"], help="all, or kinds (see list), by commas")
    run.add_argument(
        "--modes", type=names, default=list(MODES), help=f"of: {', '.join(EVERY_MODE)} (default: stock,mpsd)"
    )
    # Without a survivor there is nothing to judge.
    run.add_argument(
        "--survivors", type=number(1, MOST_SURVIVORS), default=3, help=f"1 to {MOST_SURVIVORS} (default: 3)"
    )
    run.add_argument("--deadline", type=seconds, default=120.0, help="seconds that one run may take")
    run.add_argument("--jobs", type=number(1, MOST_JOBS), default=1, help="runs at a time (simulated only)")
    run.add_argument("--out", type=Path, help="keep histories, and the logs of runs that are not valid")
    run.add_argument("--libcuda", type=Path, metavar="DIR", help="the proxy's folder, for the zone kinds")
    run.add_argument("--driver", type=Path, metavar="DIR", help="the stand-in driver's, on the simulated GPU")
    run.set_defaults(go=_run)
    lists = commands.add_parser("list", help="show the kinds of fault")
    lists.set_defaults(go=_list)
    demo = commands.add_parser(
        "demo", help="one fault of each class: stock MPS, mpsd at observe, mpsd by default"
    )
    _add_backend(demo)
    jobs = "runs at a time (simulated only; 0: by the CPUs)"
    demo.add_argument("--jobs", type=number(0, MOST_JOBS), default=0, help=jobs)
    demo.add_argument(
        "--yes", action="store_true", help="use the real GPU without asking, even if it is in use"
    )
    demo.set_defaults(go=_demo)
    tryout.add_parser(commands)
    bench = commands.add_parser("bench", help="measure attaching, recording, evicting, and the daemon")
    bench.add_argument(
        "--backend", choices=BACKENDS, default="simulated", help="the GPU (default: simulated)"
    )
    _add_common(bench)
    bench.add_argument("--idle-s", type=seconds, default=5.0, help="seconds over which idle CPU is measured")
    bench.add_argument(
        "--hold-s", type=seconds, default=2.0, help="seconds for which a rate of events is held"
    )
    bench.add_argument("--clients", type=counts, default=[0, 10, 60], help="by commas (default: 0,10,60)")
    bench.set_defaults(go=_bench)
    sweep = commands.add_parser("sweep", help="mpsd dies before effect N, for every N")
    sweep.add_argument(
        "--backend", choices=BACKENDS, default="simulated", help="the GPU (default: simulated)"
    )
    _add_common(sweep)
    effect = number(0, 1_000_000)
    sweep.add_argument(
        "--sample", type=effect, default=0, help="try this many N, drawn by the seed; 0: every N"
    )
    sweep.add_argument("--from", dest="first", type=effect, default=1)
    sweep.add_argument("--to", dest="last", type=effect, default=0, help="0: until no effect is left")
    sweep.add_argument("--jobs", type=number(1, MOST_JOBS), default=1, help="runs at a time (simulated only)")
    sweep.add_argument("--out", type=Path, help="keep histories and logs")
    sweep.add_argument(
        "--failover", action="store_true", help="at a fault beside programs that fail over; N counts from it"
    )
    sweep.add_argument("--libcuda", type=Path, metavar="DIR", help="the proxy's folder, for --failover")
    sweep.add_argument("--driver", type=Path, metavar="DIR", help="the stand-in driver's, likewise")
    sweep.set_defaults(go=_sweep)
    proxy.add_parser(commands, _TYPES)
    failover.add_parser(commands, _TYPES)
    takeover.add_parser(commands, _TYPES)
    sources.add_parser(commands, _TYPES)
    numerics.add_parser(commands, _TYPES)
    serving.add_parser(commands, _TYPES)
    attacks.add_parser(commands, _TYPES)
    defaults.add_parser(commands, _TYPES)
    crowd.add_parser(commands, _TYPES)
    ends.add_parser(commands, _TYPES)
    outages.add_parser(commands, _TYPES)
    render = commands.add_parser("render", help="render a report as Markdown")
    render.add_argument("report", type=Path)
    render.set_defaults(go=_render)
    again = commands.add_parser("check", help="judge reports or histories again, from their own figures")
    again.add_argument("files", type=Path, nargs="+", metavar="FILE")
    again.set_defaults(go=_check)
    return top


def _run(args: argparse.Namespace) -> int:
    for mode in args.modes:
        if mode not in EVERY_MODE:
            raise UsageError(f"there is no mode {mode!r}", remedy=f"use {' or '.join(EVERY_MODE)}")
    check_folders(args.libcuda, args.driver)
    plan = Plan(
        args.backend,
        tuple(select(args.kinds)),
        args.modes,
        Options(survivors=args.survivors, seed=args.seed),
        deadline_s=args.deadline,
        jobs=args.jobs,
        out=args.out,
        libcuda=args.libcuda,
        driver=args.driver,
    )
    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        finished = Matrix(plan).run(Path(base))
    write(finished, args.json, args.markdown)
    print(tables.heading(finished))
    print(tables.aligned(matrixreport.table(finished["runs"])))
    return 0 if passed(finished) else 1


def write(finished: dict[str, Any], json_path: Path | None, markdown_path: Path | None) -> None:
    """The report as JSON and Markdown, where paths are given."""
    files.deliver(finished, "matrix", json_path, markdown_path, matrixreport.markdown(finished), tell_stderr)


def _list(args: argparse.Namespace) -> int:
    rows = [["kind", "title", "class", f"survivors under {' / '.join(EVERY_MODE)}"]]
    words = {True: "live", False: "lost", None: "open"}
    for fault in REGISTRY:
        by_default = under_default(fault, ProtectionLevel.FAILOVER).survive
        expected = {**by_default, KMOD: under_kernel_module(fault).survive[KMOD]}
        outcomes = " / ".join(words[expected[m]] if fault.runs_in(m) else "-" for m in EVERY_MODE)
        rows.append([fault.name, fault.title, " ".join(sorted(fault.classes)) or "-", outcomes])
    print(tables.aligned(rows))
    return 0


def _demo(args: argparse.Namespace) -> int:
    from faultinject.campaigns.demo import demo

    return demo(args.backend, jobs=args.jobs, yes=args.yes)


def _bench(args: argparse.Namespace) -> int:
    from faultinject.campaigns.bench import bench
    from faultinject.campaigns.eventrates import Plan as Rates

    rates = Rates(hold_s=args.hold_s)
    return bench(args.backend, args.clients, args.idle_s, args.seed, args.json, args.markdown, rates)


def _sweep(args: argparse.Namespace) -> int:
    from faultinject.campaigns.sweep import SweepPlan, sweep

    if args.last and args.last < args.first:
        raise UsageError(f"--to {args.last} is before --from {args.first}", remedy="0: until none is left")
    plan = SweepPlan(
        args.backend,
        args.seed,
        first=args.first,
        last=args.last,
        sample=args.sample,
        jobs=args.jobs,
        out=args.out,
        failover=args.failover,
        libcuda=args.libcuda,
        driver=args.driver,
    )
    return sweep(plan, args.json, args.markdown)


def _render(args: argparse.Namespace) -> int:
    print(check.render(args.report), end="")
    return 0


def _check(args: argparse.Namespace) -> int:
    """Judge files again: 0 all valid, 1 something is not, 2 a file is no report."""
    status = 0
    for path in args.files:
        try:
            lines, are_valid = check.verdict_lines(path)
        except UsageError as error:
            print(f"mpsd-faultinject: {error}", file=sys.stderr)
            status = error.exit_code
            continue
        for line in lines:
            print(f"{path}: {line}" if len(args.files) > 1 else line)
        status = status or int(not are_valid)
    return status


def make_output_folder(path: Path | None) -> None:
    """The directory for histories and logs. Raises UsageError."""
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out {path}: cannot be made: {error.strerror}", remedy="choose another place"
        ) from error


def _stop_on_signal(number: int, frame: object) -> None:
    """End a run at SIGTERM or SIGHUP as Ctrl-C does, with every process that it started."""
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    go: Callable[[argparse.Namespace], int] = args.go
    try:
        for name in ("json", "markdown"):
            files.check_target(getattr(args, name, None), f"--{name}")
        make_output_folder(getattr(args, "out", None))
    except MpsdError as error:
        print(f"mpsd-faultinject: {error}", file=sys.stderr)
        return error.exit_code
    # nohup(1) ignores SIGHUP; so does this run then.
    ends = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _stop_on_signal) for number in ends}
    try:
        with revision.override(getattr(args, "revision", None)):
            status = go(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except MpsdError as error:
        print(f"mpsd-faultinject: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has closed its end, as `| head` does: no error.
        discard_buffer(sys.stdout)
        return 0
    except OSError as error:
        if error.filename is None:
            discard_buffer(sys.stdout)
        what = "cannot write" if error.filename is None else f"cannot use {error.filename}"
        print(f"mpsd-faultinject: {what}: {error.strerror or error}", file=sys.stderr)
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
