"""Functions of the driver that compile to other instructions with the hooks than without.

Both texts are compiled with the build's command, without line numbers, and their disassembly is compared. All
other functions, among them the path of every serviceable fault, are the stock ones.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kmod.build import Kernel
from kmod.changes import HOOKS
from kmod.command import run
from kmod.lint import compiled_with
from kmod.tree import Tree

DEADLINE_S = 120.0
NO_LINES = ("-g0", "-Wno-builtin-macro-redefined", "-D__LINE__=0", '-D__FILE__="x"', "-w")
FUNCTION = re.compile(r"<([^>]+)>:")
# The offset of a string or table in its section is irrelevant for the function that uses it.
PLACE = re.compile(r"(R_X86_64_\w+\s+\.[\w.]+)[+-]0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Sites:
    """Number of functions in the hooked files, and those that differ: (name, instructions before, after)."""

    functions: int
    changed: tuple[tuple[str, int, int], ...]


def compare(tree: Tree, for_kernel: Kernel, modules: Path) -> Sites:
    """Compare a tree that was built with the patch. Raises KmodError."""
    folder = modules / for_kernel.release / "build"
    functions, changed = 0, []
    for hook in HOOKS:
        source = tree.root / hook.file
        arguments = compiled_with(tree, source.name)
        before = _disassembly(arguments, tree.original(hook.file), source, folder)
        after = _disassembly(arguments, source, source, folder)
        functions += len(before)
        changed += [
            (name, len(before.get(name, ())), len(after.get(name, ())))
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name)
        ]
    return Sites(functions, tuple(changed))


def _disassembly(arguments: list[str], text: Path, place: Path, folder: Path) -> dict[str, list[str]]:
    """Return the disassembly of `text`, compiled as if it were at `place`: function name to instructions."""
    with tempfile.TemporaryDirectory(prefix="mpsd-kmod-") as made:
        made_object = Path(made) / "x.o"
        kept = arguments[: arguments.index("-c")]
        command: list[str | Path] = [
            "gcc",
            *kept,
            *NO_LINES,
            f"-I{place.parent}",
            "-c",
            "-o",
            made_object,
            text,
        ]
        run(command, deadline_s=DEADLINE_S, cwd=folder)
        options = ["-dr", "--no-show-raw-insn", "--no-addresses"]
        return functions_of(run(["objdump", *options, made_object], deadline_s=DEADLINE_S))


def functions_of(listing: str) -> dict[str, list[str]]:
    """Split objdump's output by function."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in map(str.strip, listing.splitlines()):
        match = FUNCTION.fullmatch(line)
        if match:
            lines = found.setdefault(match[1], [])
        elif line:
            lines.append(PLACE.sub(r"\1", re.sub(r"^[0-9a-f]+: (?=R_)", "", line)))
    return found
