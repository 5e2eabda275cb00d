"""Trial of the patch on the sources of Debian's suites, with a table of the results.

Always: apply the hooks and count them, apply them again, and reverse them byte for byte. On request: build
the modules, with times and sizes; check the patch's own files with sparse and stricter compiler warnings;
install the build through DKMS below a folder, and remove it.
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
    """Results of one suite; an empty cell was not tried."""

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
    """The scope: the kernel (None: no builds), the cache, and the number of cores."""

    kernel: Kernel | None
    cache: Path
    jobs: int
    build: Collection[str] = ()
    """Suites of which both modules are built."""
    install: Collection[str] = ()
    """Suites of which the modules are installed, too."""
    uvm: Collection[str] = ()
    """Suites of which only nvidia-uvm is built."""

    def suite(self, suite: debian.Suite) -> Row:
        """Try everything of one suite; its row reports failures."""
        row = Row(suite.name)
        try:
            row.fetched = debian.fetch(suite.name, self.cache)
        except Unavailable as error:
            row.said.append(f"{'MISSING' if suite.required else 'skipped'}: {error}")
            row.failed = suite.required
            return row
        except (KmodError, OSError) as error:
            row.said.append(f"its source is unavailable in {self.cache} (--cache): {text_of(error)}")
            row.failed = True
            return row
        row.cells["version"] = row.fetched.version
        if not find(row.fetched.tree).tested:
            row.said.append("version missing in kmod.tree.TESTED and in the patches' headers")
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
    """Yield the table's lines, and the notes on each suite below it."""
    rows = list(rows)
    yield _place(found)
    yield " ".join(name.ljust(width) for name, width in zip(COLUMNS, WIDTHS, strict=True)).rstrip()
    for row in rows:
        yield row.line()
    for row in rows:
        for text in row.said:
            yield f"{row.suite}: {text}"


def _place(found: Kernel | None) -> str:
    """Return the first line of the table: date and tools."""
    today = datetime.now(UTC).date().isoformat()
    if found is None:
        return f"{today}; no kernel headers, so there are no mends and no builds"
    try:
        compiler = run(["gcc", "--version"], deadline_s=10.0).splitlines()[0]
    except Unavailable:
        compiler = "no gcc"
    return f"{today}; Linux {found.release}; {compiler}"


def _try_hooks(row: Row, source: Tree, found: Kernel | None) -> None:
    if hooks.state(source, hooks.whole_patch()) is not hooks.State.CLEAN:
        raise KmodError(f"{source.root} in the cache was changed; remove it to fetch it again")
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
    """Return the files that the patch may touch, by their path below `root`."""
    found: dict[str, bytes] = {}
    for name in SMALL:
        path = root / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                found[str(file.relative_to(root))] = file.read_bytes()
    return found


def _try_build(row: Row, bench: Bench, found: Kernel, *, both: bool) -> tuple[Path, ...]:
    """Build in a folder that is kept: unchanged files are not compiled again."""
    row.cells["built"] = "FAILED"
    built = bench.both() if both else bench.one()
    if not both:
        row.said.append("skipped: the build of nvidia.ko")
    row.cells["built"] = f"{built.seconds:.0f} s{' *' if built.kept else ''}"
    if built.kept:
        row.said.append("* compiled only the files changed since the last time")
    complaints = lint.warnings(bench.tree, found, LIB_MODULES)
    row.cells["warnings"] = str(len(complaints))
    row.said += complaints
    row.failed = row.failed or bool(complaints)
    sites = hooksites.compare(bench.tree, found, LIB_MODULES)
    changed = ", ".join(f"{name} ({before} -> {after})" for name, before, after in sites.changed)
    row.said.append(
        f"{len(sites.changed)} of {sites.functions} functions in the hooked files changed: {changed}"
    )
    # Bench.one() has made this file already: do not run make for it again.
    patched = bench.uvm(patched=True) if both else built.modules[0]
    stock = bench.uvm(patched=False)
    sizes = [path.stat().st_size >> 10 for path in (stock, patched)]
    row.cells["nvidia-uvm.ko"] = f"{sizes[0]} -> {sizes[1]} KiB"
    return built.modules


def _try_install(row: Row, bench: Bench, modules: tuple[Path, ...], folder: Path) -> None:
    shop = bench.shop
    try:
        row.said.append(installtrial.try_install(find(shop.fetched.tree), shop.kernel, modules, folder))
    except Unavailable as error:
        row.said.append(f"skipped: the install: {error}")
