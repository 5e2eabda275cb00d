"""What can be shown of the patch without a GPU, in one go: the work of scripts/test-kmod.

The driver sources of Debian's suites are tried (kmod.trial) and virtual machines are booted (emulator.boots).
What became of each is printed, and what was skipped is named.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from emulator import kernel, vm
from emulator.__main__ import report
from emulator.boots import BOOTS, RIG, Bay, Boot, Shown, lines
from emulator.guest import catalogue
from kmod import build, debian
from kmod.command import at_least_one, end_when_told, finished, parsed
from kmod.errors import KmodError, Unavailable, text_of
from kmod.trial import Row, Trial, table

SUITES = tuple(suite.name for suite in debian.SUITES)
BOOTED = tuple(suite.name for suite in debian.SUITES if suite.required)


_Asked = TypeVar("_Asked")
_Told = TypeVar("_Told")


@dataclass(frozen=True, slots=True)
class Scope:
    """The suites whose modules are both built, and those whose nvidia-uvm is booted.

    `skipped`: sets of checks that are not run. `install`: of those that are built, installed too. `uvm`:
    those of which nvidia-uvm alone is built.
    """

    build: tuple[str, ...]
    boot: tuple[str, ...]
    skipped: frozenset[str] = frozenset()
    install: tuple[str, ...] = ()
    uvm: tuple[str, ...] = ()


LABEL = (
    "What the guests said. QEMU emulates each instruction, and the GPU is software: no time here is a real\n"
    "GPU's, and no patched module has run on one."
)
CI = Scope((), ("trixie",), catalogue.LONG, uvm=("trixie",))
FULL = Scope(SUITES, BOOTED, install=("trixie",))


def main(arguments: Sequence[str] | None = None) -> int:
    end_when_told()
    given = parsed(parser(), arguments)
    if isinstance(given, int):
        return given
    try:
        if given.cache is None:
            given.cache = debian.cache_folder()
        if given.write:
            _try_to_write(given)
        return finished(_prove(given))
    except KeyboardInterrupt:
        print("test-kmod: broken off; what was built is kept", file=sys.stderr)
        return 130
    except SystemExit as end:
        print("test-kmod: ended by a signal; what was built is kept", file=sys.stderr)
        return end.code if isinstance(end.code, int) else 1
    except (KmodError, OSError) as error:
        print(f"test-kmod: {text_of(error)}", file=sys.stderr)
        return 2


def _try_to_write(given: argparse.Namespace) -> None:
    """Before the quarter of an hour whose result it is to hold. Raises KmodError, OSError."""
    if not (given.ci or given.full or given.boot):
        raise KmodError("--write is for what guests say: it needs --boot, --ci or --full")
    with given.write.open("a"):
        pass


def _prove(given: argparse.Namespace) -> int:
    chosen = Scope((*given.build, *given.install), tuple(given.boot), install=tuple(given.install))
    scope = CI if given.ci else FULL if given.full else chosen
    began = time.monotonic()
    try:
        found = build.kernel(given.kernel or (kernel.newest() if scope.boot else ""))
    except Unavailable as error:
        if scope.build or scope.uvm or scope.boot or given.kernel:
            print(f"test-kmod: {error}; apt-get install linux-headers-amd64", file=sys.stderr)
            return 2
        found = None
    rows = tried(Trial(found, given.cache, given.jobs, scope.build, scope.install, scope.uvm))
    booted = boot_all(scope, rows, found, given) if scope.boot and found else []
    print()
    for line in [*table(rows, found), *booted]:
        print(line)
    failed = [row.suite for row in rows if row.failed] + [line for line in booted if "FAILED" in line]
    took = f"after {time.monotonic() - began:.0f} s, with {sum(os.times()[:4]):.0f} s of one core"
    print(f"test-kmod: {f'FAILED {took}: ' + ', '.join(failed) if failed else f'all ok {took}'}")
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="scripts/test-kmod", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    scope = made.add_mutually_exclusive_group()
    scope.add_argument(
        "--ci",
        action="store_true",
        help=f"as scripts/test does: build nvidia-uvm of {', '.join(CI.uvm)}, boot {', '.join(CI.boot)}",
    )
    scope.add_argument("--full", action="store_true", help=f"build all, boot {', '.join(FULL.boot)}")
    for name, text in (
        ("build", "build both modules of this one"),
        ("boot", "boot this one's nvidia-uvm"),
        ("install", "build it, install it through DKMS below a folder, and take it out"),
    ):
        made.add_argument(
            f"--{name}", action="append", default=[], choices=SUITES, metavar="SUITE", help=text
        )
    made.add_argument(
        "--kernel", default="", help="release to build for (default: the running one, or newest)"
    )
    made.add_argument(
        "--cache", type=Path, help="where sources and builds are kept (default: $XDG_CACHE_HOME/mpsd-kmod)"
    )
    made.add_argument("--write", type=Path, help="what each guest said goes to this file, too")
    made.add_argument("--jobs", type=at_least_one, default=len(os.sched_getaffinity(0)))
    return made


def tried(trial: Trial) -> list[Row]:
    """A row for each suite, told when its turn comes."""
    rows = []
    for suite in debian.SUITES:
        built = {**dict.fromkeys(trial.uvm, "nvidia-uvm"), **dict.fromkeys(trial.build, "both modules")}
        more = f" and {built[suite.name]}" if suite.name in built else ""
        print(f"== {suite.name}: hooks{more}", flush=True)
        rows.append(trial.suite(suite))
    return rows


def boot_all(scope: Scope, rows: Sequence[Row], found: build.Kernel, given: argparse.Namespace) -> list[str]:
    """A line for each machine; what the guests said goes to the file that is given for it."""
    fetched = {row.suite: row.fetched for row in rows if row.fetched}
    wanted: list[tuple[str, Boot]] = [("", RIG), *((suite, boot) for suite in scope.boot for boot in BOOTS)]
    with tempfile.TemporaryDirectory(prefix="mpsd-emulator-") as folder:
        try:
            bay = Bay(kernel.find(given.cache, found.release), given.cache, Path(folder))
        except KmodError as error:
            return [f"virtual machines: FAILED: {error}"]

        def boot_one(each: tuple[str, Boot]) -> Booted:
            suite, boot = each
            title = f"{suite}: {boot.title}" if suite else boot.checks
            if boot.checks in scope.skipped:
                return Booted(title, "skipped (--full)")
            if suite and suite not in fetched:
                return Booted(title, "FAILED: no source")
            return booted(title, bay, boot, fetched.get(suite))

        said, texts = [], [LABEL]
        # An emulated machine does little with a second core; not more than two, for checks have deadlines.
        for ended in at_once(boot_one, wanted, min(2, given.jobs)):
            if ended.shown:
                report(ended.shown)
                texts += ["", ended.shown.title, *lines(ended.shown.found)]
            said.append(f"{ended.title}: {ended.text}")
        if given.write:
            given.write.write_text("\n".join([*texts, ""]), encoding="utf-8")
    return said


def at_once(run: Callable[[_Asked], _Told], wanted: Sequence[_Asked], most: int) -> Iterator[_Told]:
    """What each comes to, in their order. Whoever is interrupted ends the machines that run."""
    with ThreadPoolExecutor(max(1, most)) as pool:
        try:
            yield from pool.map(run, wanted)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            vm.end_all()
            raise


@dataclass(frozen=True, slots=True)
class Booted:
    """How a machine's boot ended, in words; what it has shown, where it was one."""

    title: str
    text: str
    shown: Shown | None = None


def booted(title: str, bay: Bay, boot: Boot, fetched: debian.Fetched | None) -> Booted:
    """With the time that it took, building what was missing too."""
    began = time.monotonic()
    try:
        shown = bay.run(boot, fetched)
    except KmodError as error:
        return Booted(title, f"FAILED: {str(error).splitlines()[0]}")
    fails = f", {len(boot.fails)} checks fail as they must" if boot.fails else ""
    ended = f"ok{fails}" if shown.right else "FAILED"
    return Booted(title, f"{ended}, {time.monotonic() - began:.0f} s", shown)


if __name__ == "__main__":
    sys.exit(main())
