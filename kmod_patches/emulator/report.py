"""Boots every set of checks, for each suite that must be there, and prints a table of what the guests said.

python -m emulator.report --write kmod_patches/reports/emulator.txt

Two checks must fail on the stock module: without that the patched one's passing them says nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from emulator import vm
from emulator.__main__ import prepare
from emulator.guest import catalogue
from kmod import debian
from kmod.errors import KmodError

MUST_FAIL = frozenset({"stray-store-goes-on", "stray-copy-goes-on"})
LABEL = (
    "What the guests said. QEMU emulates each instruction, and the GPU is software: no time here is a real\n"
    "GPU's, and no patched module has run on one."
)


@dataclass(frozen=True, slots=True)
class Boot:
    """One machine: which module, on what, and which set of checks."""

    patched: bool
    gpu: bool
    name: str

    @property
    def title(self) -> str:
        where = "GPU in software" if self.gpu else "stub"
        return f"{'patched' if self.patched else 'stock'} module, {where}, set {self.name}"


BOOTS = (
    Boot(False, False, "stock"),
    Boot(True, False, "patched"),
    Boot(False, True, "gpu-stock"),
    Boot(False, True, "isolated"),
    *(Boot(True, True, name) for name in catalogue.GPU_PATCHED),
)
Results = Mapping[tuple[Boot, str], list[vm.Result]]


def right(boot: Boot, result: vm.Result) -> bool:
    """Whether a check ended as it has to with that module."""
    wrong_side = not boot.patched and result.name in MUST_FAIL
    return result.ended and result.passed != wrong_side


def render(results: Results, suites: Iterable[str], place: str) -> list[str]:
    """The table: for each boot a line for each check and suite, in the guests' own words."""
    lines = [place, LABEL]
    for boot in BOOTS:
        lines += ["", boot.title]
        for suite in suites:
            lines += [line(boot, suite, result) for result in results.get((boot, suite), [])]
    wrong = [
        f"{suite}: {boot.name}: {result.name}"
        for (boot, suite), seen in results.items()
        for result in seen
        if not right(boot, result)
    ]
    return [*lines, "", f"emulator: {'FAILED: ' + '; '.join(wrong) if wrong else 'all as it has to be'}"]


def line(boot: Boot, suite: str, result: vm.Result) -> str:
    """A check that must fail and does is no failure, and is called by what it is."""
    words = {(True, True): "ok", (True, False): "fails, as it must"}
    word = words.get((right(boot, result), result.passed), "WRONG")
    said = " ".join(result.text.split())[:400]
    return f"  {suite:9} {result.name:24} {word:8} {result.seconds:6.1f} s  {said}"


def run(suite: str, cache: Path) -> dict[tuple[Boot, str], list[vm.Result]]:
    """All boots of a suite; machines that differ in the set only share what is built. Raises KmodError."""
    found: dict[tuple[Boot, str], list[vm.Result]] = {}
    for kind in dict.fromkeys((boot.patched, boot.gpu) for boot in BOOTS):
        with tempfile.TemporaryDirectory(prefix="mpsd-emulator-") as made:
            machine = prepare(Path(made), cache, suite, patched=kind[0], gpu=kind[1])
            for boot in BOOTS:
                if (boot.patched, boot.gpu) == kind:
                    checks = catalogue.SETS[boot.name]
                    found[boot, suite] = vm.run(machine, [boot.name], checks, Path(made) / "console")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="emulator.report", description=__doc__)
    required = [suite.name for suite in debian.SUITES if suite.required]
    parser.add_argument("--suite", action="append", help=f"(default: {', '.join(required)})")
    parser.add_argument("--cache", type=Path, default=debian.cache_folder())
    parser.add_argument("--write", type=Path, help="the table goes there, too")
    given = parser.parse_args()
    suites = given.suite or required
    results: dict[tuple[Boot, str], list[vm.Result]] = {}
    try:
        with ThreadPoolExecutor(len(suites)) as pool:
            for found in pool.map(lambda suite: run(suite, given.cache), suites):
                results |= found
    except KmodError as error:
        print(f"emulator: {error}", file=sys.stderr)
        return 1
    lines = render(results, suites, datetime.now(UTC).date().isoformat())
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if given.write:
        given.write.write_text(text, encoding="utf-8")
    return 0 if all(right(boot, result) for (boot, _), seen in results.items() for result in seen) else 1


if __name__ == "__main__":
    sys.exit(main())
