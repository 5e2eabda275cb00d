"""mpsd-faultinject: inject faults into GPU sharing and judge what became of everybody.

Exit status: 0 every verdict is valid; 1 one is invalid or unknown; 2 usage; as mpsd.errors otherwise.
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

from faultinject import report, takeover
from faultinject.checkers import check, verdict
from faultinject.failover import command as failover
from faultinject.failover import reports as failover_reports
from faultinject.faults import REGISTRY, by_name, select, under_kernel_part
from faultinject.history import load
from faultinject.kinds import EVERY_MODE, KMOD, MODES
from faultinject.matrix import Matrix, Plan, passed, tell_stderr
from faultinject.node import BACKENDS
from faultinject.observation import observe
from faultinject.proxy import command as proxy
from faultinject.proxy import reports as proxy_reports
from faultinject.proxy.library import check_folders
from faultinject.serving import command as serving
from faultinject.serving import reports as serving_reports
from faultinject.stage import Options
from faultinject.verdict import Verdict
from mpsd.errors import MpsdError, UsageError
from mpsd.output import mute

MOST_SURVIVORS = 16
MOST_JOBS = 256


def names(text: str) -> list[str]:
    """For argparse: words by commas, at least one."""
    if not (found := [word for word in text.split(",") if word]):
        raise argparse.ArgumentTypeError("nothing is named")
    return found


def counts(text: str) -> list[int]:
    """For argparse: numbers of clients, by commas."""
    return [number(0, 1000)(word) for word in names(text)]


def number(least: int, most: int) -> Callable[[str], int]:
    """For argparse: a whole number in this range."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} to {most}")
        return int(text)

    return read


def seconds(text: str) -> float:
    """For argparse: a time that is not nothing."""
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


def _add_backend(parser: argparse.ArgumentParser) -> None:
    """For commands that show or measure: the simulated GPU unless told otherwise, and they say so."""
    which = "the GPU (default: simulated)"
    parser.add_argument("--backend", choices=BACKENDS, default="simulated", help=which)


def _add_fault_runs(
    parser: argparse.ArgumentParser, of: str, libcuda: str = "the folder with the proxy's libcuda.so.1"
) -> None:
    """For commands that let faults come again and again beside programs. `of`: what has logs of its own."""
    _add_backend(parser)
    _add_common(parser)
    parser.add_argument("--faults", type=number(1, 1000), default=3, help="of each kind (default: 3)")
    parser.add_argument("--deadline", type=seconds, default=120.0, help="seconds for each kind")
    parser.add_argument("--libcuda", type=Path, metavar="DIR", help=libcuda)
    parser.add_argument("--driver", type=Path, metavar="DIR", help="the stand-in's, for the simulated GPU")
    parser.add_argument("--out", type=Path, help=f"keep the logs of each {of} here")


_TYPES = SimpleNamespace(
    backends=BACKENDS,
    common=_add_common,
    fault_runs=_add_fault_runs,
    names=names,
    number=number,
    seconds=seconds,
)
"""What the options of a subcommand in another module are read by."""


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
    # Without a survivor there is nobody whose fate could be judged.
    run.add_argument(
        "--survivors", type=number(1, MOST_SURVIVORS), default=3, help=f"1 to {MOST_SURVIVORS} (default: 3)"
    )
    run.add_argument("--deadline", type=seconds, default=120.0, help="seconds that one run may take")
    run.add_argument("--jobs", type=number(1, MOST_JOBS), default=1, help="runs at a time (simulated only)")
    run.add_argument("--out", type=Path, help="keep histories, and the logs of what was not valid")
    run.add_argument("--libcuda", type=Path, metavar="DIR", help="the proxy's folder, for the zone kinds")
    run.add_argument("--driver", type=Path, metavar="DIR", help="the stand-in driver's, on the simulated GPU")
    run.set_defaults(go=_run)
    lists = commands.add_parser("list", help="show the kinds of fault")
    lists.set_defaults(go=_list)
    demo = commands.add_parser("demo", help="one fault of each class, stock MPS beside mpsd")
    _add_backend(demo)
    jobs = "runs at a time (simulated only; 0: by the CPUs)"
    demo.add_argument("--jobs", type=number(0, MOST_JOBS), default=0, help=jobs)
    demo.add_argument("--yes", action="store_true", help="use the real GPU, whoever is on it, without asking")
    demo.set_defaults(go=_demo)
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
    sweep.add_argument("--sample", type=effect, default=0, help="so many N drawn by the seed; 0: every N")
    sweep.add_argument("--from", dest="first", type=effect, default=1)
    sweep.add_argument("--to", dest="last", type=effect, default=0, help="0: until no effect is left")
    sweep.add_argument("--jobs", type=number(1, MOST_JOBS), default=1, help="runs at a time (simulated only)")
    sweep.add_argument("--out", type=Path, help="keep histories and logs")
    sweep.set_defaults(go=_sweep)
    proxy.add_parser(commands, _TYPES)
    failover.add_parser(commands, _TYPES)
    takeover.add_parser(commands, _TYPES)
    serving.add_parser(commands, _TYPES)
    render = commands.add_parser("render", help="render a report as Markdown")
    render.add_argument("report", type=Path)
    render.set_defaults(go=_render)
    again = commands.add_parser(
        "check", help="judge a stored history, or a report of proxy, failover, takeover or serving"
    )
    again.add_argument("history", type=Path)
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
    print(f"again: {finished['command']}")
    print(report.aligned(report.table(finished["runs"])))
    return 0 if passed(finished) else 1


def write(finished: dict[str, Any], json_path: Path | None, markdown_path: Path | None) -> None:
    """The report as JSON and Markdown, where paths are given."""
    report.deliver(finished, "matrix", json_path, markdown_path, report.markdown(finished), tell_stderr)


def _list(args: argparse.Namespace) -> int:
    rows = [["kind", "title", "class", f"survivors under {' / '.join(EVERY_MODE)}"]]
    words = {True: "live", False: "lost", None: "open"}
    for fault in REGISTRY:
        survive = under_kernel_part(fault).survive
        expected = {**fault.survive, KMOD: survive[KMOD]}
        fates = " / ".join(words[expected[m]] if fault.runs_in(m) else "-" for m in EVERY_MODE)
        rows.append([fault.name, fault.title, " ".join(sorted(fault.classes)) or "-", fates])
    print(report.aligned(rows))
    return 0


def _demo(args: argparse.Namespace) -> int:
    from faultinject.demo import demo

    return demo(args.backend, jobs=args.jobs, yes=args.yes)


def _bench(args: argparse.Namespace) -> int:
    from faultinject.bench import bench
    from faultinject.stream import Plan as Rates

    rates = Rates(hold_s=args.hold_s)
    return bench(args.backend, args.clients, args.idle_s, args.seed, args.json, args.markdown, rates)


def _sweep(args: argparse.Namespace) -> int:
    from faultinject.sweep import SweepPlan, sweep

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
    )
    return sweep(plan, args.json, args.markdown)


def _render(args: argparse.Namespace) -> int:
    of_proxy = proxy_reports.load(args.report)
    of_failover = None if of_proxy else failover_reports.load(args.report)
    if of_proxy:
        text = proxy_reports.markdown(of_proxy)
    elif of_failover:
        text = failover_reports.markdown(of_failover)
    elif of_takeover := takeover.load(args.report):
        text = takeover.markdown(of_takeover)
    elif of_serving := serving_reports.load(args.report):
        text = serving_reports.markdown(of_serving)
    else:
        text = report.markdown(report.load(args.report))
    print(text, end="")
    return 0


def _check(args: argparse.Namespace) -> int:
    of_proxy = proxy_reports.load(args.history)
    if of_proxy is not None:
        again = proxy_reports.judged(of_proxy)
        proxy.show(again)
        return 0 if proxy_reports.passed(again) else 1
    of_failover = failover_reports.load(args.history)
    if of_failover is not None:
        print(report.aligned(failover_reports.table(of_failover)))
        return 0 if failover_reports.passed(of_failover) else 1
    of_takeover = takeover.load(args.history)
    if of_takeover is not None:
        print(report.aligned(takeover.table(of_takeover)))
        return 0 if takeover.passed(of_takeover) else 1
    of_serving = serving_reports.load(args.history)
    if of_serving is not None:
        serving.show(of_serving)
        return 0 if serving_reports.passed(of_serving) else 1
    history = load(args.history)
    begin, node = history.first("begin"), history.first("node")
    if begin is None:
        raise UsageError(f"{args.history} is no history of a run", remedy="give a history.jsonl of --out")
    name = begin.data["kind"] + (f"@{begin.data['variant']}" if begin.data["variant"] else "")
    findings = check(by_name(name), observe(history), bars=bool(node and node.data["bars"]))
    for finding in findings:
        print(f"{finding.verdict:8} {finding.law}" + (f": {finding.text}" if finding.text else ""))
    return 0 if verdict(findings) is Verdict.VALID else 1


def make_out(path: Path | None) -> None:
    """The directory for histories and logs. Raises UsageError."""
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--out {path}: cannot be made: {error.strerror}", remedy="choose another place"
        ) from error


def _told_to_stop(number: int, frame: object) -> None:
    """SIGTERM, or the end of its terminal, ends a run as Ctrl-C does: all that it started ends with it."""
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    go: Callable[[argparse.Namespace], int] = args.go
    try:
        for name in ("json", "markdown"):
            report.check_target(getattr(args, name, None), f"--{name}")
        make_out(getattr(args, "out", None))
    except MpsdError as error:
        print(f"mpsd-faultinject: {error}", file=sys.stderr)
        return error.exit_code
    # Under nohup(1) the end of a terminal is none.
    ends = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _told_to_stop) for number in ends}
    try:
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
        # Whoever read has gone, as `| head` does: that is no error.
        mute(sys.stdout)
        return 0
    except OSError as error:
        if error.filename is None:
            mute(sys.stdout)
        what = "cannot write" if error.filename is None else f"cannot use {error.filename}"
        print(f"mpsd-faultinject: {what}: {error.strerror or error}", file=sys.stderr)
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
