"""Tries the patch on the sources that Debian's suites have, and prints a table of what became of each.

Always: the hooks are put in and counted, put in once more, and taken out to the byte. On request the modules
are built and the patch's own files looked at by sparse and the compiler's stricter warnings; and those of one
suite are installed through DKMS below a folder, and taken out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from kmod import debian, hooks, hooksites, installtrial, lint
from kmod.build import LIB_MODULES, Kernel, build, kernel, mends
from kmod.changes import PCI_RESIZE
from kmod.command import run
from kmod.errors import HookMismatch, KmodError, Unavailable
from kmod.tree import SMALL, Tree, copy, find

BUILD_DEADLINE_S = 3000.0
INSTALLED = "trixie"
COLUMNS = ("suite", "version", "hooks", "twice", "reversed", "mended", "built", "nvidia-uvm.ko", "warnings")
WIDTHS = (12, 16, 10, 8, 8, 7, 8, 13, 8)


@dataclass(slots=True)
class Row:
    """What became of one suite; an empty cell was not tried."""

    suite: str
    cells: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    failed: bool = False

    def line(self) -> str:
        cells = {"suite": self.suite, **self.cells}
        return " ".join(
            cells.get(name, "-").ljust(width) for name, width in zip(COLUMNS, WIDTHS, strict=True)
        )


def main() -> int:
    given = _parser().parse_args()
    try:
        found = kernel(given.kernel)
    except Unavailable as error:
        if given.full or given.build or given.install:
            print(f"test-kmod: {error}; apt-get install linux-headers-amd64", file=sys.stderr)
            return 2
        found = None
    rows = [_try(suite, found, given) for suite in debian.SUITES]
    print(f"\n{_place(found)}")
    print(" ".join(name.ljust(width) for name, width in zip(COLUMNS, WIDTHS, strict=True)))
    for row in rows:
        print(row.line())
    for row in rows:
        for text in row.said:
            print(f"{row.suite}: {text}")
    failed = [row.suite for row in rows if row.failed]
    print(f"test-kmod: {'FAILED: ' + ', '.join(failed) if failed else 'all ok'}")
    return 1 if failed else 0


def _place(found: Kernel | None) -> str:
    """When and with what: the first line of the table."""
    today = datetime.now(UTC).date().isoformat()
    if found is None:
        return f"{today}; no kernel headers, so nothing was mended or built"
    try:
        compiler = run(["gcc", "--version"], deadline_s=10.0).splitlines()[0]
    except Unavailable:
        compiler = "no gcc"
    return f"{today}; Linux {found.release}; {compiler}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/test-kmod", description=__doc__)
    parser.add_argument("--full", action="store_true", help="build the modules of every suite")
    parser.add_argument(
        "--build", action="append", default=[], metavar="SUITE", help="build those of this one"
    )
    parser.add_argument(
        "--install",
        action="append",
        default=[],
        metavar="SUITE",
        help=f"build those of this one, install them below a folder, and take them out; --full: {INSTALLED}",
    )
    parser.add_argument("--kernel", default="", help="release to build for (default: the running one)")
    parser.add_argument(
        "--cache", type=Path, default=debian.cache_folder(), help="sources and builds are kept here"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser


def _try(suite: debian.Suite, found: Kernel | None, given: argparse.Namespace) -> Row:
    row = Row(suite.name)
    print(f"== {suite.name}", flush=True)
    try:
        fetched = debian.fetch(suite.name, given.cache)
    except Unavailable as error:
        row.said.append(f"{'MISSING' if suite.required else 'skipped'}: {error}")
        row.failed = suite.required
        return row
    row.cells["version"] = fetched.version
    if not find(fetched.tree).tested:
        row.said.append(
            "a version that is neither in kmod.tree.TESTED nor in the semantic patches' headers yet"
        )
    try:
        _try_hooks(row, find(fetched.tree), found)
        installs = suite.name in given.install or (given.full and suite.name == INSTALLED)
        if found and (given.full or installs or suite.name in given.build):
            with debian.alone(given.cache / "build", debian.LOCK_DEADLINE_S):
                modules = _try_build(row, fetched, found, given)
                if installs:
                    _try_install(row, fetched, found, modules, given.cache / "install")
        else:
            row.said.append("skipped: the build (--full builds all)")
    except KmodError as error:
        row.cells["hooks"] = (
            "MISMATCH" if isinstance(error, HookMismatch) else row.cells.get("hooks", "FAILED")
        )
        row.said.append(str(error))
        row.failed = True
    return row


def _try_hooks(row: Row, source: Tree, found: Kernel | None) -> None:
    with tempfile.TemporaryDirectory(prefix="mpsd-kmod-") as made:
        tree = copy(source, Path(made) / "tree", whole=False)
        patch = hooks.whole_patch(mends(tree, found) if found else ())
        hooks.apply(tree, patch)
        lines = sum(change.inserted for change in patch.changes if change is not PCI_RESIZE)
        row.cells["hooks"] = f"{lines} lines"
        row.cells["mended"] = "yes" if PCI_RESIZE in patch.changes else "no"
        row.cells["twice"] = "FAILED" if hooks.apply(tree, patch) else "ok"
        hooks.reverse(tree)
        same = _contents(tree.root) == _contents(source.root)
        row.cells["reversed"] = "ok" if same else "FAILED"
        row.failed = "FAILED" in row.cells.values()


def _contents(root: Path) -> dict[str, bytes]:
    """The files that the patch may touch, by their path below `root`."""
    found: dict[str, bytes] = {}
    for name in SMALL:
        path = root / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                found[str(file.relative_to(root))] = file.read_bytes()
    return found


def _try_build(row: Row, fetched: debian.Fetched, found: Kernel, given: argparse.Namespace) -> list[Path]:
    """The modules, built in a folder that is kept: what did not change is not compiled again."""
    folder = given.cache / "build" / f"{fetched.version}-{found.release}"
    log = folder.with_name(folder.name + ".log")
    kept = folder.is_dir()
    tree = find(folder) if kept else _copy_whole(find(fetched.tree), folder)
    began = time.monotonic()
    hooks.apply(tree, hooks.whole_patch(mends(tree, found)))
    row.cells["built"] = "FAILED"
    modules = build(tree, found, log, jobs=given.jobs, deadline_s=BUILD_DEADLINE_S)
    row.cells["built"] = f"{time.monotonic() - began:.0f} s{' *' if kept else ''}"
    if kept:
        row.said.append("* compiled what had changed since the last time")
    row.cells["nvidia-uvm.ko"] = f"{_stripped_bytes(modules[-1]) >> 10} KiB"
    complaints = lint.warnings(tree, found, LIB_MODULES)
    row.cells["warnings"] = str(len(complaints))
    row.said += complaints
    row.failed = row.failed or bool(complaints)
    sites = hooksites.compare(tree, found, LIB_MODULES)
    changed = ", ".join(f"{name} ({before} -> {after})" for name, before, after in sites.changed)
    row.said.append(
        f"{len(sites.changed)} of {sites.functions} functions in the hooked files changed: {changed}"
    )
    return modules


def _try_install(row: Row, fetched: debian.Fetched, found: Kernel, modules: list[Path], folder: Path) -> None:
    try:
        row.said.append(installtrial.try_install(find(fetched.tree), found, modules, folder))
    except Unavailable as error:
        row.said.append(f"skipped: the install: {error}")


def _copy_whole(source: Tree, folder: Path) -> Tree:
    beside = folder.with_name(folder.name + ".new")
    run(["rm", "-rf", beside], deadline_s=60.0)
    copy(source, beside, whole=True)
    os.rename(beside, folder)
    return find(folder)


def _stripped_bytes(module: Path) -> int:
    with tempfile.TemporaryDirectory(prefix="mpsd-kmod-") as made:
        small = Path(made) / module.name
        run(["strip", "--strip-debug", "-o", small, module], deadline_s=60.0)
        return small.stat().st_size


if __name__ == "__main__":
    sys.exit(main())
