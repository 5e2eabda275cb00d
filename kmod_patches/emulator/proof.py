"""All tests of the patch that need no GPU, in one run: the work of scripts/test-kmod.

It tries the driver sources of Debian's suites (kmod.trial) and boots virtual machines (emulator.boots). It
prints each result and names what was skipped.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from emulator import kernel, vm
from emulator.__main__ import report
from emulator.boots import BOOTS, RIG, Boot, BootBench, Shown, lines
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
    """Suites to build both modules of, and suites to boot nvidia-uvm of.

    `skipped`: sets of checks that are not run. `install`: built suites that are also installed. `uvm`:
    suites of which only nvidia-uvm is built.
    """

    build: tuple[str, ...]
    boot: tuple[str, ...]
    skipped: frozenset[str] = frozenset()
    install: tuple[str, ...] = ()
    uvm: tuple[str, ...] = ()


LABEL = (
    "Output of the guests. QEMU emulates each instruction, and the GPU is software: no time here is a real\n"
    "GPU's, and no patched module has run on a real GPU."
)
BUILD, BOOT = "build", "boot"
"""The parts of --ci. A build has no deadline of a few seconds, so it may share the cores with other tests."""
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
        print("test-kmod: interrupted; finished builds are kept", file=sys.stderr)
        return 130
    except SystemExit as end:
        print("test-kmod: ended by a signal; finished builds are kept", file=sys.stderr)
        return end.code if isinstance(end.code, int) else 1
    except (KmodError, OSError) as error:
        print(f"test-kmod: {text_of(error)}", file=sys.stderr)
        return 2


def _try_to_write(given: argparse.Namespace) -> None:
    """Test the output file before the long run. Raises KmodError, OSError."""
    if not (given.ci or given.full or given.boot):
        raise KmodError("--write needs output of guests: add --boot, --ci or --full")
    with given.write.open("a"):
        pass


def _prove(given: argparse.Namespace) -> int:
    scope = _scope(given)
    began = time.monotonic()
    try:
        found = build.kernel(given.kernel or (kernel.newest() if scope.boot else ""))
    except Unavailable as error:
        if scope.build or scope.uvm or scope.boot or given.kernel:
            print(f"test-kmod: {error}; apt-get install linux-headers-amd64", file=sys.stderr)
            return 2
        found = None
    trial = Trial(found, given.cache, given.jobs, scope.build, scope.install, scope.uvm)
    rows = tried(trial) if given.part != BOOT else []
    fetched = {row.suite: row.fetched for row in rows if row.fetched}
    booted: list[str] = []
    if given.part != BUILD and scope.boot and found:
        fetched |= {suite: debian.fetch(suite, given.cache) for suite in scope.boot if given.part == BOOT}
        booted = boot_all(scope, fetched, found, given)
    print()
    for line in [*(table(rows, found) if rows else ()), *booted]:
        print(line)
    failed = [row.suite for row in rows if row.failed] + [line for line in booted if "FAILED" in line]
    took = f"after {time.monotonic() - began:.0f} s, with {sum(os.times()[:4]):.0f} s of one core"
    print(f"test-kmod: {f'FAILED {took}: ' + ', '.join(failed) if failed else f'all ok {took}'}")
    return 1 if failed else 0


def _scope(given: argparse.Namespace) -> Scope:
    """Return what the options ask for. Raises KmodError for a part of something else than --ci."""
    if given.part and not given.ci:
        raise KmodError("--part is for --ci alone")
    chosen = Scope((*given.build, *given.install), tuple(given.boot), install=tuple(given.install))
    return CI if given.ci else FULL if given.full else chosen


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="scripts/test-kmod", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    scope = made.add_mutually_exclusive_group()
    scope.add_argument(
        "--ci",
        action="store_true",
        help=f"like scripts/test: build nvidia-uvm of {', '.join(CI.uvm)}, boot {', '.join(CI.boot)}",
    )
    scope.add_argument("--full", action="store_true", help=f"build all, boot {', '.join(FULL.boot)}")
    made.add_argument(
        "--part",
        choices=(BUILD, BOOT),
        help=f"of --ci only this: {BUILD} tries the hooks and builds, {BOOT} boots what is built",
    )
    for name, text in (
        ("build", "build both modules of this suite"),
        ("boot", "boot this suite's nvidia-uvm"),
        ("install", "build this suite, install it through DKMS below a folder, and remove it"),
    ):
        made.add_argument(
            f"--{name}", action="append", default=[], choices=SUITES, metavar="SUITE", help=text
        )
    made.add_argument(
        "--kernel", default="", help="release to build for (default: the running one, or newest)"
    )
    made.add_argument(
        "--cache", type=Path, help="folder of sources and builds (default: $XDG_CACHE_HOME/mpsd-kmod)"
    )
    made.add_argument("--write", type=Path, help="file for the output of the guests")
    made.add_argument("--jobs", type=at_least_one, default=len(os.sched_getaffinity(0)))
    return made


def tried(trial: Trial) -> list[Row]:
    """Return a row for each suite, and report progress."""
    rows = []
    for suite in debian.SUITES:
        built = {**dict.fromkeys(trial.uvm, "nvidia-uvm"), **dict.fromkeys(trial.build, "both modules")}
        more = f" and {built[suite.name]}" if suite.name in built else ""
        print(f"== {suite.name}: hooks{more}", flush=True)
        rows.append(trial.suite(suite))
    return rows


def boot_all(
    scope: Scope, fetched: Mapping[str, debian.Fetched], found: build.Kernel, given: argparse.Namespace
) -> list[str]:
    """Boot each machine and return its line. Write the guests' output to the file of --write.

    `fetched`: the driver's source of each suite that has one.
    """
    wanted: list[tuple[str, Boot]] = [("", RIG), *((suite, boot) for suite in scope.boot for boot in BOOTS)]
    with tempfile.TemporaryDirectory(prefix="mpsd-emulator-") as folder:
        try:
            bay = BootBench(kernel.find(given.cache, found.release), given.cache, Path(folder))
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
        # An emulated machine gains little from a second core. Two at most, because checks have deadlines.
        for ended in at_once(boot_one, wanted, min(2, given.jobs)):
            if ended.shown:
                report(ended.shown)
                texts += ["", ended.shown.title, *lines(ended.shown.found)]
            said.append(f"{ended.title}: {ended.text}")
        if given.write:
            given.write.write_text("\n".join([*texts, ""]), encoding="utf-8")
    return said


def at_once(run: Callable[[_Asked], _Told], wanted: Sequence[_Asked], most: int) -> Iterator[_Told]:
    """Yield the results in order. An interrupt ends the running machines."""
    with ThreadPoolExecutor(max(1, most)) as pool:
        try:
            yield from pool.map(run, wanted)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            vm.end_all()
            raise


@dataclass(frozen=True, slots=True)
class Booted:
    """The end of a machine's boot in words, and its results, if any."""

    title: str
    text: str
    shown: Shown | None = None


def booted(title: str, bay: BootBench, boot: Boot, fetched: debian.Fetched | None) -> Booted:
    """Boot and return the result with the time taken, including builds."""
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
