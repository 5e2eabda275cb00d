"""Checks of the patch's own C files with sparse and stricter compiler warnings.

Each file is compiled with the command that the build recorded.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from kmod.build import Kernel
from kmod.changes import own_files
from kmod.command import run_any
from kmod.errors import KmodError
from kmod.tree import Tree

# The warnings of the kernel's W=1 and -Wextra, without unused parameters, which callbacks often have.
WARNINGS = (
    "-Wextra",
    "-Wunused",
    "-Wno-unused-parameter",
    "-Wmissing-declarations",
    "-Wmissing-format-attribute",
    "-Wmissing-prototypes",
    "-Wold-style-definition",
    "-Wmissing-include-dirs",
    "-Wunused-but-set-variable",
    "-Wunused-const-variable",
    "-Wshadow",
)
OURS = re.compile(r"(?:^|/)(mpsd-[a-z]+\.[ch]):\d+:\d+: (?:warning|error)")
DEADLINE_S = 120.0


def warnings(tree: Tree, for_kernel: Kernel, modules: Path) -> list[str]:
    """Return every warning about a file of ours in a built tree. Raises Unavailable without sparse."""
    found: list[str] = []
    for source in [path.name for path in own_files() if path.suffix == ".c"]:
        arguments = compiled_with(tree, source)
        folder = modules / for_kernel.release / "build"
        for checker in (["sparse", "-D__CHECK_ENDIAN__"], ["gcc", "-fsyntax-only", *WARNINGS]):
            said = run_any([*checker[:1], *arguments, *checker[1:]], deadline_s=DEADLINE_S, cwd=folder)
            found += [f"{checker[0]}: {line}" for line in said.splitlines() if OURS.search(line)]
    return sorted(set(found))


def compiled_with(tree: Tree, source: str) -> list[str]:
    """Return the arguments with which the build compiled a file of nvidia-uvm; the last is the file
    itself."""
    command_file = tree.root / "nvidia-uvm" / f".{source.removesuffix('.c')}.o.cmd"
    try:
        first = command_file.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError) as error:
        raise KmodError(f"{command_file} has no compiler command: build first") from error
    match = re.match(r"(?:saved)?cmd_\S+ := *(.*)", first)
    if match is None:
        raise KmodError(f"{command_file} has no compiler command")
    words = shlex.split(match[1].split(" ;")[0])
    return [word for word in words[1:] if not word.startswith("-Wp,-M")]
