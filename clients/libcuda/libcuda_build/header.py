"""The functions that cuda.h declares, in all versions, as pycparser reads them after `gcc -E`."""

from __future__ import annotations

import importlib.util
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pycparser import c_ast, c_generator, c_parser

# With this macro cuda.h declares every version of a function (cuMemAlloc beside cuMemAlloc_v2, and the _ptds
# and _ptsz ones), and not only the newest under the plain name.
_ALL_VERSIONS = "__CUDA_API_VERSION_INTERNAL"

# Names in system headers that pycparser does not know.
_PLAIN_C = (
    "-D__attribute__(x)=",
    "-D__asm__(x)=",
    "-D__extension__=",
    "-D__inline=inline",
    "-D__restrict=",
    "-D_Alignas(x)=",
    "-D__builtin_va_list=int",
)


class HeaderError(Exception):
    """cuda.h is missing or cannot be read."""


@dataclass(frozen=True)
class Function:
    """A declaration: its name, and each parameter as "type name" in C."""

    name: str
    parameters: tuple[str, ...]


def find_include() -> Path:
    """Return the folder of the newest cuda.h in installed PyPI packages. Raises HeaderError."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(path) for path in (spec.submodule_search_locations or [])] if spec else []
    found = [header for root in roots for header in sorted(root.glob("*/include/cuda.h"))]
    if not found:
        raise HeaderError("no cuda.h: pip install nvidia-cuda-runtime, or name its folder with --include")
    return max(found, key=version_of).parent


def version_of(header: Path) -> int:
    """Return CUDA_VERSION of a cuda.h: 13050 for 13.5."""
    with header.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            words = line.split()
            if words[:2] == ["#define", "CUDA_VERSION"]:
                return int(words[2])
    raise HeaderError(f"{header} has no CUDA_VERSION")


def read_functions(include: Path, compiler: str = "gcc") -> dict[str, Function]:
    """Return every function that include/cuda.h declares, by name. Raises HeaderError."""
    header = include / "cuda.h"
    command = [compiler, "-E", "-P", "-std=c11", f"-D{_ALL_VERSIONS}", *_PLAIN_C, f"-I{include}", str(header)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HeaderError(f"{compiler} cannot read {header}: {done.stderr.strip()}")
    return _functions(done.stdout)


def _functions(source: str) -> dict[str, Function]:
    write = c_generator.CGenerator()
    found = {}
    for node in c_parser.CParser().parse(source).ext:
        if not isinstance(node, c_ast.Decl) or not isinstance(node.type, c_ast.FuncDecl):
            continue
        if not node.name.startswith("cu"):
            continue
        # The stub of a missing function returns a CUresult, so every function must return one.
        if getattr(node.type.type.type, "names", None) != ["CUresult"]:
            raise HeaderError(f"{node.name} does not return a CUresult")
        given = node.type.args.params if node.type.args else []
        # `(void)` is a Typename, not a Decl.
        found[node.name] = Function(
            node.name, tuple(write.visit(one) for one in given if isinstance(one, c_ast.Decl))
        )
    return found
