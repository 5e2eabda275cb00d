"""Benchmark: time that the proxy adds to a call, on the stand-in driver or on the machine's own.

Two processes run side by side, one without the proxy and one with it, and measure in turn. The process with
the proxy also calls the driver's own functions in the same context. That difference is free of noise between
processes, and the verdict uses it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent
LIMIT_NS = 50.0
MODES = {
    "passed on": {"MPSD_DEBUG": "vault=0"},
    "memory in a window": {"MPSD_DEBUG": f"vault=1,zone_budget={1 << 30}"},
    "ready for a fail-over, keep": {
        "MPSD_DEBUG": "vault=1",
        "MPSD_FAILOVER": "keep",
        "MPSD_FAILOVER_SOCKET": "/nonexistent/failover.sock",
    },
    "ready for a fail-over, exact": {
        "MPSD_DEBUG": "vault=1",
        "MPSD_FAILOVER": "exact",
        "MPSD_FAILOVER_SOCKET": "/nonexistent/failover.sock",
    },
}
"""Memory modes of the proxy. The mode decides which functions have wrappers."""

TOKEN = "token"
"""The row that is not a call: a step of a language model, 160 kernels and an awaited copy. No limit."""

STANDIN_IMAGE = b"standin module\nkernel nothing nothing 0\nkernel eight eight 0\n"
SOURCE = """
extern "C" __global__ void nothing() {}
extern "C" __global__ void eight(void *, void *, void *, void *, void *, void *, void *, void *) {}
"""
_EIGHT = ", ".join(f".param .u64 p{i}" for i in range(8))
PTX = (
    ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry nothing()\n{\n  ret;\n}\n"
    f".visible .entry eight({_EIGHT})\n{{\n  ret;\n}}\n\0"
).encode()
"""The same kernels as PTX, for a driver that compiles it if there is no nvcc."""

DEADLINE_S = 60.0
SYSTEM_INCLUDE = Path("/usr/local/cuda/include")
FIND_DRIVER = """
import ctypes
ctypes.CDLL("libcuda.so.1")
print(next(line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line))
"""

Figures = Mapping[str, tuple[float, float]]
"""For each function: nanoseconds through the proxy, and of the driver's own function."""


class BenchError(Exception):
    """The benchmark cannot run here."""


@dataclass(frozen=True, slots=True)
class Setting:
    """`plain`: folder of a driver without the proxy (None: the loader's choice); `real`: its file."""

    program: Path
    image: Path
    proxy: Path
    plain: Path | None
    real: Path
    calls: int
    refused: bool


def main() -> int:
    given = _parser().parse_args()
    try:
        _check(given)
        with tempfile.TemporaryDirectory(prefix="mpsd-libcuda-bench-") as made:
            report = _measure(given, Path(made))
    except (BenchError, OSError, subprocess.SubprocessError) as error:
        print(f"bench-libcuda: {error}", file=sys.stderr)
        return 2
    text = table(report)
    print(text)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if given.markdown:
        given.markdown.write_text(markdown(report, text), encoding="utf-8")
    return 0 if report["verdict"] == "valid" or not report["bars"] else 1


def _check(given: argparse.Namespace) -> None:
    """Check the arguments before any measurement. Raises BenchError."""
    for path in (given.json, given.markdown):
        if path is not None and not os.access(path.parent, os.W_OK):
            raise BenchError(f"{path} cannot be written: name a file in a writable folder")
    if given.libcuda is not None and not (given.libcuda / "libcuda.so.1").exists():
        raise BenchError(f"--libcuda {given.libcuda} has no libcuda.so.1: python -m libcuda_build --out DIR")


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
        return int(text)

    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench-libcuda", description=__doc__)
    parser.add_argument("--backend", choices=("standin", "nvidia"), default="standin", help="the driver")
    parser.add_argument("--pairs", type=_at_least(1), default=4, help="pairs of processes (default: 4)")
    parser.add_argument("--rounds", type=_at_least(1), default=10, help="rounds of each pair (default: 10)")
    parser.add_argument(
        "--calls", type=_at_least(50), default=200_000, help="calls per round; launches: a fiftieth"
    )
    parser.add_argument("--libcuda", type=Path, metavar="DIR", help="folder of a proxy built before")
    parser.add_argument("--include", type=Path, metavar="DIR", help="folder of cuda.h")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    return parser


def _measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all measurements and return the report. Raises BenchError."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    setting = _set_up(given, folder)
    rows, device, driver = [], "", ""
    for mode, variables in MODES.items():
        rounds: list[tuple[Figures, Figures]] = []
        for _ in range(given.pairs):
            with _running(setting, None) as plain, _running(setting, variables) as proxied:
                driver, device = plain.driver, plain.device
                rounds += [(plain.round(), proxied.round()) for _ in range(given.rounds)]
        rows += [_row(mode, name, rounds) for name in rounds[0][0]]
    verdicts = {row["verdict"] for row in rows}
    return {
        "schema": 1,
        "kind": "bench-libcuda",
        "device": device if given.backend == "nvidia" else "STAND-IN",
        "driver": driver,
        "backend": given.backend,
        "date": date,
        "command": shlex.join(_command(given)),
        "limit_ns": LIMIT_NS,
        "bars": int(given.backend == "nvidia"),
        "pairs": given.pairs,
        "rounds": given.rounds,
        "rows": rows,
        "verdict": next(v for v in ("invalid", "unknown", "valid") if v in verdicts),
    }


def _command(given: argparse.Namespace) -> list[str]:
    """Return the command that repeats the measurement, without folders of this machine."""
    words = ["scripts/bench-libcuda", "--backend", given.backend, "--pairs", str(given.pairs)]
    return [*words, "--rounds", str(given.rounds), "--calls", str(given.calls)]


# -- setup -------------------------------------------------------------------------------------------------


def _set_up(given: argparse.Namespace, folder: Path) -> Setting:
    include = given.include or _find_include()
    _compile(folder / "launch", include)
    proxy = given.libcuda or _build("build_proxy", folder / "proxy", include)
    plain, image = None, folder / "image"
    if given.backend == "standin":
        plain = _build("build_standin", folder / "standin", include)
        image.write_bytes(STANDIN_IMAGE)
        real = plain / "libcuda.so.1"
    else:
        real = _find_driver()
        _compile_kernel(folder, image)
    return Setting(folder / "launch", image, proxy.resolve(), plain, real, given.calls, plain is not None)


def _find_include() -> Path:
    """Return the folder of cuda.h: the PyPI package's, or the toolkit's. Raises BenchError."""
    try:
        from libcuda_build.header import HeaderError, find_include
    except ImportError:
        pass
    else:
        try:
            return find_include()
        except HeaderError:
            pass
    if (SYSTEM_INCLUDE / "cuda.h").is_file():
        return SYSTEM_INCLUDE
    raise BenchError("no cuda.h: pip install nvidia-cuda-runtime, or name its folder with --include")


def _build(what: str, target: Path, include: Path) -> Path:
    """Build the proxy or the stand-in driver. Raises BenchError."""
    try:
        from libcuda_build import compile as builder
    except ImportError as error:
        raise BenchError(f"the library cannot be built here ({error}): name one with --libcuda") from error
    try:
        getattr(builder, what)(target, include=include)
    except builder.BuildError as error:
        raise BenchError(str(error)) from error
    return target


def _find_driver() -> Path:
    """Return the file of the machine's own libcuda. Raises BenchError."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MPSD_")}
    done = subprocess.run(
        [sys.executable, "-c", FIND_DRIVER],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        raise BenchError("no CUDA driver here: use --backend standin, which needs none")
    return Path(done.stdout.strip())


def _compile(target: Path, include: Path) -> None:
    source = str(FOLDER / "bench" / "launch.c")
    command = ["gcc", "-O2", "-std=gnu11", "-isystem", str(include), "-o", str(target), source, "-ldl"]
    subprocess.run(command, check=True, timeout=DEADLINE_S)


def _compile_kernel(folder: Path, image: Path) -> None:
    """Compile the kernels for this GPU with nvcc, or as text for the driver to compile."""
    (folder / "nothing.cu").write_text(SOURCE, encoding="utf-8")
    if shutil.which("nvcc"):
        command = ["nvcc", "-arch=native", "-cubin", "-o", str(image), str(folder / "nothing.cu")]
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False)
        if done.returncode == 0 and image.is_file():
            return
    image.write_bytes(PTX)


class MeasuringProcess:
    """One measuring process, which runs a round on request."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        words = self._line().split(maxsplit=2)
        if words[:1] != ["ready"]:
            raise BenchError("a measuring process ended before it was ready")
        self.driver, self.device = words[1], words[2] if len(words) > 2 else ""

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def round(self) -> Figures:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        found = {}
        while line := self._line():
            name, through, direct = line.split()
            found[name] = (float(through), float(direct))
        if not found:
            raise BenchError("a measuring process has ended")
        return found


@contextmanager
def _running(setting: Setting, proxied: Mapping[str, str] | None) -> Iterator[MeasuringProcess]:
    """Start a process. `proxied`: variables of a process with the proxy; None: one without."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MPSD_")}
    folder = setting.plain if proxied is None else setting.proxy
    if folder is not None:
        before = environment.get("LD_LIBRARY_PATH", "")
        environment["LD_LIBRARY_PATH"] = f"{folder}:{before}" if before else str(folder)
    environment |= {"MPSD_REAL_LIBCUDA": str(setting.real), **(proxied or {})}
    command = [str(setting.program), str(setting.calls), str(setting.image), str(int(setting.refused))]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield MeasuringProcess(process)
        finally:
            process.kill()


# -- results -----------------------------------------------------------------------------------------------


def _row(mode: str, name: str, rounds: Sequence[tuple[Figures, Figures]]) -> dict[str, Any]:
    """Return one row. `added`: between two processes; `inside`: within one. Nanoseconds: median,
    quartiles."""
    added = [with_it[name][0] - without[name][0] for without, with_it in rounds]
    inside = [with_it[name][0] - with_it[name][1] for _, with_it in rounds]
    row: dict[str, Any] = {
        "mode": mode,
        "call": name,
        "without_ns": round(statistics.median(without[name][0] for without, _ in rounds), 1),
        "with_ns": round(statistics.median(with_it[name][0] for _, with_it in rounds), 1),
        "added_ns": _spread(added),
        "inside_ns": _spread(inside),
    }
    return {**row, "verdict": verdict(row["inside_ns"]) if name != TOKEN else "-"}


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": round(middle, 1), "low": round(low, 1), "high": round(high, 1)}


def verdict(inside: Mapping[str, float]) -> str:
    """Return whether the addition is below the limit; unknown if the quartiles lie on both sides of it."""
    if inside["high"] < LIMIT_NS:
        return "valid"
    return "invalid" if inside["low"] >= LIMIT_NS else "unknown"


def table(report: Mapping[str, Any]) -> str:
    head = (
        f"{report['device']}, driver {report['driver']}; nanoseconds per call, median (and quartiles) of "
        f"{report['pairs']} x {report['rounds']} rounds"
    )
    lines = [head]
    for mode in MODES:
        rows = [row for row in report["rows"] if row["mode"] == mode]
        if not rows:
            continue
        columns = f"{'without':>10}{'with':>10}   {'two processes':<26}{'one process':<26}"
        lines.append(f"{mode + ':':<26}{columns}")
        for row in rows:
            figures = f"{row['without_ns']:>10.1f}{row['with_ns']:>10.1f}"
            spreads = f"{_format_spread(row['added_ns']):<26}{_format_spread(row['inside_ns']):<26}"
            lines.append(f"{row['call']:<26}{figures}   {spreads}{row['verdict']}")
    most = max(row["inside_ns"]["median"] for row in report["rows"] if row["call"] != TOKEN)
    lines.append(f"most added: {most:.1f} ns; the aim is under {LIMIT_NS:.0f} ns: {report['verdict']}")
    return "\n".join(lines)


def _format_spread(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:+.1f} ({spread['low']:+.1f} to {spread['high']:+.1f})"


def markdown(report: Mapping[str, Any], text: str) -> str:
    """Return the report as Markdown."""
    title = f"# {report['device']}, driver {report['driver']}: time that the proxy adds to a call"
    block = "\n".join(f"    {line}" for line in text.splitlines())
    return f"{title}\n\n{report['date']}:\n\n    {report['command']}\n\n{block}\n"


if __name__ == "__main__":
    sys.exit(main())
