"""A driver of names: every function that a driver of some CUDA version exports, by the caller's version.

Each function returns its own number. The versions come from cudaTypedefs.h, which names the CUDA version of
each prototype. The driver has own names, which no header declares, and names that share an address.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from libcuda_build.compile import FOLDER
from libcuda_build.header import find_include, read_functions
from libcuda_build.table import read_plan
from tests.support.libcudas import PROGRAMS, compile_library

FIRST = 10000
"""The number of the first function, beyond every CUresult."""

CHOSEN = 4712
"""The result of cuOwnChosen, an indirect function (STT_GNU_IFUNC)."""

ALIASES = {"cuProfilerStart": "cuProfilerStop", "cuMemAlloc_v2": "cuMemAllocShared"}
"""Names, and other names for the same function."""

_BUILT_IN = {"cuInit", "cuDriverGetVersion", "cuGetProcAddress", "cuGetProcAddress_v2"}
_TYPEDEF = re.compile(r"\*PFN_(cu\w+?)_v(\d{4,5})(_ptsz|_ptds)?\)")
_NAME = re.compile(r"(cu\w+?)(?:_v(\d))?(_ptsz|_ptds)?$")


@dataclass(frozen=True)
class NamesDriver:
    """`numbers`: the result of each function, by its name. `bases`: what cuGetProcAddress is asked for."""

    path: Path
    numbers: dict[str, int]
    bases: list[str]


def build(folder: Path, version: int, own_names: int) -> NamesDriver:
    """Build folder/libcuda.so.1, a driver of this CUDA version that exports `own_names` names of its own."""
    since = _versions()
    plan = read_plan(FOLDER, read_functions(find_include()))
    known = [name for name in plan.names if since.get(name, 0) <= version]
    names = sorted({*known, *(f"cuOwn{number:03d}" for number in range(own_names))} - _BUILT_IN)
    numbers = {name: FIRST + number for number, name in enumerate(names)}
    for name, other in ALIASES.items():
        numbers[other] = numbers[name]
    source = folder / "names.c"
    source.write_text("\n".join(_source(numbers, since)) + "\n")
    flags = (
        f"-DVERSION={version}",
        f"-DCHOSEN={CHOSEN}",
        f"-I{PROGRAMS}",
        "-Wl,-soname,libcuda.so.1,-Bsymbolic",
    )
    library = compile_library(folder / "libcuda.so.1", source, *flags)
    bases = sorted({_parts(name)[0] for name in {*numbers, *_BUILT_IN}})
    return NamesDriver(library, numbers, bases)


def _parts(name: str) -> tuple[str, int, bool]:
    """Return the plain name, the number of the version, and whether it is a per-thread function."""
    found = _NAME.match(name)
    assert found, name
    return found[1], int(found[2] or 1), found[3] is not None


def _versions() -> dict[str, int]:
    """Return the CUDA version of each exported name, as far as the typedefs name it."""
    typed: dict[tuple[str, bool], set[int]] = defaultdict(set)
    for header in find_include().glob("cuda*Typedefs.h"):
        for base, version, per_thread in _TYPEDEF.findall(header.read_text()):
            typed[base, bool(per_thread)].add(int(version))
    exported: dict[tuple[str, bool], list[tuple[int, str]]] = defaultdict(list)
    for name in read_functions(find_include()):
        base, number, per_thread = _parts(name)
        exported[base, per_thread].append((number, name))
    since = {}
    for key, names in exported.items():
        # The newest name has the newest prototype. Of a name with a suffix the oldest may have no prototype.
        pairs = zip(sorted(names, reverse=True), sorted(typed[key], reverse=True), strict=False)
        since.update({name: version for (_, name), version in pairs})
    return since


def _source(numbers: dict[str, int], since: dict[str, int]) -> Iterator[str]:
    yield '#include "names.h"'
    others = set(ALIASES.values())
    for name, number in numbers.items():
        if name not in others:
            yield f"OUT int {name}(void) {{ return {number}; }}"
    for name, other in ALIASES.items():
        yield f'OUT int {other}(void) __attribute__((alias("{name}")));'
    yield "static const struct entry entries[] = {"
    for name in [*numbers, *_BUILT_IN]:
        base, _, per_thread = _parts(name)
        yield f'{{ "{base}", {since.get(name, 0)}, {int(per_thread)}, (void *){name} }},'
    yield "{ NULL, 0, 0, NULL } };"
