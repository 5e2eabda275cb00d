"""Tries the patch on the sources that Debian's suites have, and makes a table of what became of each.

Always: the hooks are put in and counted, put in once more, and taken out to the byte. On request the modules
are built, with times and sizes, and the patch's own files looked at by sparse and the compiler's stricter
warnings; and what was built is installed through DKMS below a folder, and taken out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from kmod import debian, hooks, hooksites, installtrial, lint
from kmod.build import LIB_MODULES, Kernel, mends
from kmod.changes import PCI_RESIZE
from kmod.command import run
from kmod.errors import HookMismatch, KmodError, Unavailable, text_of
from kmod.tree import SMALL, Tree, copy, find
from kmod.workshop import Bench, Workshop

COLUMNS = ("suite", "version", "hooks", "twice", "reversed", "mended", "built", "nvidia-uvm.ko", "warnings")
WIDTHS = (12, 16, 10, 8, 8, 7, 8, 21, 8)


@dataclass(slots=True)
class Row:
    """What became of one suite; an empty cell was not tried."""

    suite: str
    fetched: debian.Fetched | None = None
    cells: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    failed: bool = False

    def line(self) -> str:
        cells = {"suite": self.suite, **self.cells}
        return " ".join(
            cells.get(name, "-").ljust(width) for name, width in zip(COLUMNS, WIDTHS, strict=True)
        ).rstrip()


@dataclass(frozen=True, slots=True)
class Trial:
    """What to try: for which kernel (None: nothing is built), in which cache, on how many cores."""

    kernel: Kernel | None
    cache: Path
    jobs: int
    build: Collection[str] = ()
    """The suites whose modules are built."""
    install: Collection[str] = ()
    """Those of them that are installed, too."""
    uvm: Collection[str] = ()
    """Of which nvidia-uvm alone is built."""

    def suite(self, suite: debian.Suite) -> Row:
        """Everything of one suite; whatever fails is told in its row."""
        row = Row(suite.name)
        try:
            row.fetched = debian.fetch(suite.name, self.cache)
        except Unavailable as error:
            row.said.append(f"{'MISSING' if suite.required else 'skipped'}: {error}")
            row.failed = suite.required
            return row
        except (KmodError, OSError) as error:
            row.said.append(f"its source is not to be had in {self.cache} (--cache): {text_of(error)}")
            row.failed = True
            return row
        row.cells["version"] = row.fetched.version
        if not find(row.fetched.tree).tested:
            row.said.append("a version that is neither in kmod.tree.TESTED nor in the patches' headers yet")
        try:
            _try_hooks(row, find(row.fetched.tree), self.kernel)
            if self.kernel and suite.name in {*self.build, *self.uvm}:
                with Workshop(row.fetched, self.kernel, self.cache, self.jobs).bench() as bench:
                    modules = _try_build(row, bench, self.kernel, both=suite.name in self.build)
                    if suite.name in self.install:
                        _try_install(row, bench, modules, self.cache / "install")
            else:
                row.said.append("skipped: the build of both modules")
        except (KmodError, OSError) as error:
            mismatch = isinstance(error, HookMismatch)
            row.cells["hooks"] = "MISMATCH" if mismatch else row.cells.get("hooks", "FAILED")
            row.said.append(text_of(error))
            row.failed = True
        return row


def table(rows: Iterable[Row], found: Kernel | None) -> Iterator[str]:
    """Its lines, and what is to be said of each suite below."""
    rows = list(rows)
    yield _place(found)
    yield " ".join(name.ljust(width) for name, width in zip(COLUMNS, WIDTHS, strict=True)).rstrip()
    for row in rows:
        yield row.line()
    for row in rows:
        for text in row.said:
            yield f"{row.suite}: {text}"


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


def _try_hooks(row: Row, source: Tree, found: Kernel | None) -> None:
    if hooks.state(source, hooks.whole_patch()) is not hooks.State.CLEAN:
        raise KmodError(f"{source.root}, in the cache, was changed; remove it, and it is fetched anew")
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


def _try_build(row: Row, bench: Bench, found: Kernel, *, both: bool) -> tuple[Path, ...]:
    """In a folder that is kept: what did not change is not compiled again."""
    row.cells["built"] = "FAILED"
    built = bench.both() if both else bench.one()
    if not both:
        row.said.append("skipped: the build of nvidia.ko")
    row.cells["built"] = f"{built.seconds:.0f} s{' *' if built.kept else ''}"
    if built.kept:
        row.said.append("* compiled what had changed since the last time")
    complaints = lint.warnings(bench.tree, found, LIB_MODULES)
    row.cells["warnings"] = str(len(complaints))
    row.said += complaints
    row.failed = row.failed or bool(complaints)
    sites = hooksites.compare(bench.tree, found, LIB_MODULES)
    changed = ", ".join(f"{name} ({before} -> {after})" for name, before, after in sites.changed)
    row.said.append(
        f"{len(sites.changed)} of {sites.functions} functions in the hooked files changed: {changed}"
    )
    patched, stock = (bench.uvm(patched=kind).stat().st_size >> 10 for kind in (True, False))
    row.cells["nvidia-uvm.ko"] = f"{stock} -> {patched} KiB"
    return built.modules


def _try_install(row: Row, bench: Bench, modules: tuple[Path, ...], folder: Path) -> None:
    shop = bench.shop
    try:
        row.said.append(installtrial.try_install(find(shop.fetched.tree), shop.kernel, modules, folder))
    except Unavailable as error:
        row.said.append(f"skipped: the install: {error}")
