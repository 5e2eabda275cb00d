"""`mpsd-faultinject numerics`: the thread percentages at which cuBLAS computes wrong results.

Each percentage is measured by an ordinary client of stock MPS with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, several
side by side. A wrong result is a finding, and the campaign is valid all the same. With --write-table it
becomes the `[numerics]` table of the driver's file (mpsd.gpu.numerics).

On the simulated GPU the programs make up wrong results at the percentages of its table. That tests this
campaign alone.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from faultinject.evidence import files, schema, tables
from faultinject.evidence.files import tell_stderr
from faultinject.programs.numerics.products import BOUND, CASES, PATHS, TYPES, Product
from faultinject.registry.history import History, clock
from faultinject.rig.node import Node, open_node
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.base.errors import UnsupportedError, UsageError
from mpsd.base.percentages import VARIABLE, WHOLE, Measured
from mpsd.gpu import numerics

KIND, SCHEMA_VERSION = "numerics", 1
RIGHT, WRONG, NOT_MEASURED = "right", "wrong", "not measured"
HEAD = ["percentages", "SMs", *(case.name for case in CASES), "verdict"]

SCHEMA: Mapping[str, tuple[type, ...]] = {
    **schema.ENVELOPE,
    "bound": (float,),  # the largest relative error of a right result
    "expected": (list, type(None)),  # simulated GPU: the wrong percentages of its table
    "rows": (list,),  # of Row, by percentage
}


@dataclass(slots=True)
class Row:
    """One percentage. `problem`: why it has not all results. `products`: see programs.numerics.products."""

    percentage: int
    sms: int | None = None
    cublas: str = ""
    problem: str = ""
    products: list[dict[str, Any]] = field(default_factory=list)


def percentages(text: str) -> list[int]:
    """Read whole percentages and ranges of them, separated by commas (for argparse)."""
    found: set[int] = set()
    for word in text.split(","):
        first, dash, last = word.partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal():
            raise argparse.ArgumentTypeError(f"{word!r} is no whole percentage and no range of them")
        found |= set(range(int(first), int(last) + 1))
    if not found or not found <= set(WHOLE):
        raise argparse.ArgumentTypeError(f"{text!r} is not within 1 to 100")
    return sorted(found)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each percentage. Raises MpsdError if the rig cannot be set up."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        node = open_node(args.backend, Path(base))
        try:
            options = _program_options(node, Path(base), args)
            expected = _expected(node, args.percentages)
            with History() as history, Rig(node, "stock", history, logs_to=args.out) as rig:
                rows = list(_measure(rig, options, args))
            leftovers = rig.leftovers
        finally:
            node.close()
    words = ["mpsd-faultinject", KIND, "--backend", args.backend, "--percentages", _ranges(args.percentages)]
    return {
        **schema.envelope(KIND, SCHEMA_VERSION, (node.device, node.driver), args.backend, date, words),
        "leftovers": leftovers,
        "bound": BOUND,
        "expected": expected,
        "rows": [asdict(row) for row in rows],
    }


def _program_options(node: Node, base: Path, args: argparse.Namespace) -> list[str]:
    """Return the options of each program; for a GPU, make the inputs first. Raises UnsupportedError."""
    if node.name == "simulated":
        return ["--wrong", ",".join(map(str, _expected(node, args.percentages) or ()))]
    try:
        from faultinject.programs.numerics import arrays
    except ImportError as error:
        raise UnsupportedError(
            f"the campaign needs numpy: {error}", remedy="install numpy, or use --backend simulated"
        ) from error
    folder = base / "inputs"
    folder.mkdir()
    arrays.prepare(folder, args.seed)
    return ["--inputs", str(folder), *(["--cublas", args.cublas] if args.cublas else [])]


def _expected(node: Node, asked: Sequence[int]) -> list[int] | None:
    """Return the wrong percentages of the simulated GPU's table; None for a real GPU."""
    if node.name != "simulated":
        return None
    table = numerics.table_of(node.name, node.driver, node.backend.devices.gpus()[0].name)
    return sorted(table.wrong & {*asked}) if table is not None else []


def _measure(rig: Rig, options: Sequence[str], args: argparse.Namespace) -> Iterator[Row]:
    """Yield each percentage, `jobs` of them side by side, until the time of the campaign is over."""
    end = clock() + args.seconds
    for at in range(0, len(args.percentages), args.jobs):
        now = args.percentages[at : at + args.jobs]
        if clock() > end:
            yield from (Row(each, problem=f"the {args.seconds:g} s of the campaign are over") for each in now)
            continue
        environment = rig.service.client_environment()
        workers = [
            rig.spawn(
                f"percent-{each}",
                "numerics.gemm",
                *options,
                environment={**environment, VARIABLE: str(each)},
            )
            for each in now
        ]
        for each, worker in zip(now, workers, strict=True):
            row = _result(rig, worker, each, args.deadline)
            tell_stderr(f"{each} %: {row.sms} SMs, {verdict_of(asdict(row))}")
            yield row


def _result(rig: Rig, worker: Worker, percentage: int, deadline_s: float) -> Row:
    """Wait for one program and end it."""
    ended = worker.wait("done", "failed", timeout=worker.spawned + deadline_s - clock())
    begun = worker.first_message("begun")
    row = Row(percentage)
    if begun is not None:
        row.sms, row.cublas = int(begun.data["sms"]), str(begun.data["cublas"])
    if ended is None:
        why = f"the program did not end within {deadline_s:g} s" if worker.running else "the program died"
        row.problem = f"{why}: {rig.error_text(worker) or 'no message'}"
    elif ended.what == "failed":
        row.problem = str(ended.data["text"])
    row.products = [
        asdict(Product(**{name: entry.data[name] for name in ("type", "case", "path", "error", "nan")}))
        for entry in worker.messages("product")
    ]
    worker.end()
    return row


# -- the report, judged from its own figures -------------------------------------------------------------


def verdict_of(row: Mapping[str, Any]) -> str:
    """Return the verdict on one percentage: right, wrong with the products, or not measured."""
    wrong = [product for product in map(_product, row["products"]) if product.is_wrong]
    if wrong:
        paths = dict.fromkeys(f"{product.type} {product.path}" for product in wrong)
        return f"{WRONG}: {', '.join(paths)}"
    if row["problem"] or len(row["products"]) < len(CASES) * len(TYPES) * len(PATHS):
        return f"{NOT_MEASURED}: {row['problem'] or 'results are missing'}"
    return RIGHT


def _product(data: Mapping[str, Any]) -> Product:
    return Product(data["type"], data["case"], data["path"], data["error"], data["nan"])


def _with_verdict(finished: Mapping[str, Any], verdict: str) -> list[int]:
    """Return the percentages with this verdict."""
    return [r["percentage"] for r in finished["rows"] if verdict_of(r).partition(":")[0] == verdict]


def measured(finished: Mapping[str, Any]) -> Measured:
    """Return the table of a report, for the driver's file.

    The SMs that a client sees decide, and one run can miss a wrong result: the percentages with the SMs of a
    wrong one are wrong, too.
    """
    wrong, right = (frozenset(_with_verdict(finished, verdict)) for verdict in (WRONG, RIGHT))
    sms = {row["percentage"]: row["sms"] for row in finished["rows"] if row["sms"] is not None}
    spoilt = {sms[each] for each in wrong if each in sms}
    wrong |= {each for each, seen in sms.items() if seen in spoilt}
    cublas = ", ".join(dict.fromkeys(row["cublas"] for row in finished["rows"] if row["cublas"]))
    return Measured(cublas, finished["bound"], wrong, frozenset(WHOLE) - wrong - right)


def verdicts(finished: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the verdicts on the measurement, from its figures. A wrong result is no defect of it."""
    return [(name, f"invalid: {why}" if why else "valid") for name, why in _defects(finished)]


def _defects(finished: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the parts of a measurement, each with its defect or an empty text."""
    rows = finished["rows"]
    missing = _with_verdict(finished, NOT_MEASURED)
    yield "percentages", f"not measured: {_ranges(missing)}" if missing or not rows else ""
    seen = [row["sms"] for row in rows if row["sms"] is not None]
    grows = seen == sorted(seen) and (len(seen) < 2 or seen[0] < seen[-1] or len(rows) < len(WHOLE))
    yield "SMs", "" if grows else "the SMs that a client sees do not follow its percentage"
    whole = [row for row in rows if row["percentage"] == WHOLE[-1]]
    spoilt = [row for row in whole if verdict_of(row).startswith(WRONG)]
    yield "at 100 %", "results are wrong without a limit too: not MPS spoils them" if spoilt else ""
    versions = {row["cublas"] for row in rows if row["cublas"]}
    yield "cuBLAS", f"several versions: {', '.join(sorted(versions))}" if len(versions) > 1 else ""
    if (expected := finished["expected"]) is not None:
        found = sorted(measured(finished).wrong)
        why = f"found {_ranges(found)}, the simulated table has {_ranges(expected)}"
        yield "simulated table", "" if found == expected else why


def passed(finished: Mapping[str, Any]) -> bool:
    return tables.passed(finished, [verdict for _, verdict in verdicts(finished)])


def toml(finished: Mapping[str, Any]) -> str:
    """Return the `[numerics]` table of the driver's file."""
    table = measured(finished)
    evidence = "simulated" if finished["backend"] == "simulated" else KIND
    lines = [
        "[numerics]",
        f'evidence = "{evidence}"',
        f'cublas = "{table.cublas}"',
        f"bound = {table.bound}",
        f"wrong = {sorted(table.wrong)}",
        f"missing = {sorted(table.missing)}",
    ]
    return "\n".join(lines) + "\n"


def load(data: Any, path: Path) -> dict[str, Any] | None:
    """Return the report that a file's JSON is; None for anything else. Raises UsageError."""
    return files.load_of_kind(data, KIND, path, _problems)


def _problems(data: Mapping[str, Any]) -> Iterator[str]:
    yield from schema.report_violations(SCHEMA, SCHEMA_VERSION, data)
    for number, row in enumerate(data["rows"]):
        yield from schema.missing_fields(row, Row, f"report.rows[{number}]")
        for product in row["products"]:
            yield from schema.missing_fields(product, Product, f"report.rows[{number}].products")


def _ranges(numbers: Sequence[int]) -> str:
    """Return whole numbers in order as ranges: 1-3, 7."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


def table(finished: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each percentage that is not right, and one for all that are."""
    rows = [HEAD]
    right = [row for row in finished["rows"] if verdict_of(row) == RIGHT]
    for row in finished["rows"]:
        if row not in right:
            sms = "-" if row["sms"] is None else str(row["sms"])
            rows.append([str(row["percentage"]), sms, *_worst([row]), verdict_of(row)[:200]])
    if right:
        rows.append([_ranges([row["percentage"] for row in right]), "", *_worst(right), RIGHT])
    return rows


def _worst(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield for each case the worst errors of its types, over both paths."""
    products = [_product(data) for row in rows for data in row["products"]]
    for case in CASES:
        of_case = [product for product in products if product.case == case.name]
        yield " / ".join(_error([p for p in of_case if p.type == kind]) for kind in TYPES)


def _error(products: Sequence[Product]) -> str:
    if not products:
        return "-"
    if any(product.nan for product in products):
        return "NaN"
    return f"{max(product.error or 0.0 for product in products):.4f}"


def _seen(finished: Mapping[str, Any]) -> str:
    """Return the number of SMs that a client sees, by percentage."""
    known = [(row["sms"], row["percentage"]) for row in finished["rows"] if row["sms"] is not None]
    groups = groupby(known, lambda pair: pair[0])
    return "; ".join(f"{_ranges([p for _, p in of])} %: {sms}" for sms, of in groups)


def markdown(finished: Mapping[str, Any]) -> str:
    found = measured(finished)
    lines = [
        f"# Thread percentages and cuBLAS: {finished['device']}, driver {finished['driver']}",
        "",
        tables.provenance(finished),
        "",
        "Each percentage is the CUDA_MPS_ACTIVE_THREAD_PERCENTAGE of one client of stock MPS, outside mpsd.",
        f"cuBLAS {found.cublas or 'unknown'}. Figures: worst error of an element, {' / '.join(TYPES)},",
        f"relative to the exact result plus its RMS. Above {finished['bound']} it is wrong.",
        "gemm: cublasGemmEx. lt: cublasLtMatmul.",
        "A percentage with the SMs of a wrong one counts as wrong in the driver's table.",
        "NaN: an element is not a number; results are filled with NaN before the product.",
        ""
        if finished["backend"] != "simulated"
        else "Simulated: the programs made the wrong results up. They test the campaign, and do not count.",
        "",
        tables.markdown_table(table(finished)),
        "",
        f"SMs that a client sees: {_seen(finished)}.",
        "",
        *(f"{name}: {verdict}." for name, verdict in verdicts(finished)),
        "",
        tables.left_behind(finished),
    ]
    return "\n".join(lines) + "\n"


def _run_command(args: argparse.Namespace) -> int:
    finished = run(args)
    print(tables.heading(finished))
    print(tables.aligned(table(finished)))
    for name, verdict in verdicts(finished):
        print(f"{name}: {verdict}")
    files.deliver(finished, KIND, args.json, args.markdown, markdown(finished), tell_stderr)
    if args.write_table is not None:
        if not passed(finished) and _with_verdict(finished, NOT_MEASURED) == []:
            raise UsageError("the measurement is not valid: no table is written", remedy="read its verdicts")
        files.write_text(args.write_table, toml(finished))
        tell_stderr(f"wrote {args.write_table}")
    return 0 if passed(finished) else 1


def add_parser(commands: Any, types: Any) -> None:
    """Add the options of the subcommand. `types`: the readers of names, numbers and seconds."""
    parser = commands.add_parser(KIND, help="thread percentages at which cuBLAS computes wrong results")
    which = "the GPU (default: simulated)"
    parser.add_argument("--backend", choices=types.backends, default="simulated", help=which)
    types.common(parser)
    every = list(WHOLE)
    parser.add_argument("--percentages", type=percentages, default=every, help="as 1-50,75 (default: 1-100)")
    parser.add_argument("--jobs", type=types.number(1, 40), default=8, help="clients at a time (default: 8)")
    parser.add_argument("--deadline", type=types.seconds, default=30.0, help="seconds for each percentage")
    parser.add_argument("--seconds", type=types.seconds, default=150.0, help="for all (default: 150)")
    parser.add_argument("--cublas", default="", metavar="FILE", help="the libcublas (default: PyTorch's)")
    parser.add_argument(
        "--write-table", type=Path, metavar="FILE", help="write the driver's [numerics] table"
    )
    parser.add_argument("--out", type=Path, help="keep the logs of the programs here")
    parser.set_defaults(go=_run_command)
