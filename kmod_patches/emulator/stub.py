"""Build of the stub of nvidia.ko on which a built nvidia-uvm.ko can be loaded.

The module itself tells which functions it needs, so the stub follows the driver's version. Functions that
stub/*.c implement are compiled; every other function gets a refusal. Headers are those of the driver tree.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from emulator.kernel import Kernel
from kmod.command import run
from kmod.errors import KmodError

SOURCES = Path(__file__).with_name("stub")
ANSWERS = re.compile(r"^MPSD_STUB_ANSWERS\((\w+)\);$", re.MULTILINE)
FUNCTION = re.compile(r"nvUvmInterface\w+")
# Optional features of a driver's headers, each found by a word in the source, not by the version.
FEATURES = {
    "MPSD_RM_ATS": ("common/inc/nv_uvm_interface.h", "enableAts"),
    "MPSD_RM_VIDMEM_PAGES": ("common/inc/nv_uvm_types.h", "maxVidmemPageSize"),
}
BUILD_DEADLINE_S = 300.0
LOOK_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Stub:
    """A built stub. `imports`: functions that UVM needs; `answers`: functions that the stub implements."""

    module: Path
    imports: tuple[str, ...]
    answers: frozenset[str]


def build(uvm: Path, tree: Path, version: str, kernel: Kernel, folder: Path, *, gpu: bool) -> Stub:
    """Generate and compile the stub in `folder`, which must not exist.

    `uvm`: a built nvidia-uvm.ko; `tree`: the source in which it was built, for its conftest headers;
    `version`: the driver's, which UVM's users read; `gpu`: with the software GPU. Raises KmodError.
    """
    imports = imported(uvm, kernel.exports())
    shutil.copytree(SOURCES, folder, ignore=None if gpu else shutil.ignore_patterns("gpu"))
    answers = answered(path.read_text(encoding="utf-8") for path in folder.rglob("*.c"))
    (folder / "stub-calls.h").write_text(calls_header(imports, answers), encoding="utf-8")
    (folder / "refusals.c").write_text(refusals(imports, answers), encoding="utf-8")
    (folder / "Kbuild").write_text(kbuild(folder, tree, version), encoding="utf-8")
    run(["make", "-C", kernel.headers, f"M={folder}", "modules"], deadline_s=BUILD_DEADLINE_S)
    return Stub(folder / "nvidia.ko", imports, answers)


def imported(module: Path, exports: frozenset[str]) -> tuple[str, ...]:
    """Return the symbols that a module needs beyond the kernel. Raises KmodError for a non-RM function."""
    text = run(["nm", "--undefined-only", "--format=posix", module], deadline_s=LOOK_DEADLINE_S)
    names = sorted({line.split()[0] for line in text.splitlines() if line.strip()} - exports)
    strange = [name for name in names if not FUNCTION.fullmatch(name)]
    if strange or not names:
        raise KmodError(f"{module} imports unsupported symbols: {', '.join(strange) or 'nothing'}")
    return tuple(names)


def answered(sources: Iterable[str]) -> frozenset[str]:
    """Return the functions that C sources mark as implemented."""
    return frozenset(name for text in sources for name in ANSWERS.findall(text))


def calls_header(imports: Iterable[str], answers: Iterable[str]) -> str:
    """Return stub-calls.h: a number for each function, also for implemented ones that are not imported."""
    names = sorted({*imports, *answers})
    numbers = "".join(f"\tCALL_{name},\n" for name in names)
    every = " \\\n".join(f"\tCALL({name})" for name in names)
    return (
        f"enum mpsd_stub_call {{\n{numbers}\tMPSD_STUB_CALLS\n}};\n#define MPSD_STUB_EVERY_CALL \\\n{every}\n"
    )


def refusals(imports: Iterable[str], answers: frozenset[str]) -> str:
    """Return refusals.c: every import without an implementation."""
    lines = [f"MPSD_STUB_REFUSES({name});" for name in imports if name not in answers]
    return "\n".join(['#include "stub.h"', *lines, ""])


def features(tree: Path) -> list[str]:
    """Return the macros for the features of this driver's headers."""
    texts = {name: (tree / header).read_text(encoding="utf-8") for name, (header, _) in FEATURES.items()}
    return [name for name, (_, word) in FEATURES.items() if re.search(rf"\b{word}\b", texts[name])]


def kbuild(folder: Path, tree: Path, version: str) -> str:
    """Return the Kbuild file of the stub, with the driver's headers and the flags that they need."""
    objects = sorted(str(path.relative_to(folder).with_suffix(".o")) for path in folder.rglob("*.c"))
    flags = [f"-I{folder}", *(f"-I{tree / part}" for part in ("common/inc", "nvidia-uvm", ""))]
    flags += ["-DMPSD_STUB_GPU"] if (folder / "gpu").is_dir() else []
    flags += [
        "-DNVRM",
        "-DNV_UVM_ENABLE",
        "-DNV_KERNEL_INTERFACE_LAYER",
        "-Wno-cast-qual",
        "-Wno-unused-function",
        "-Werror",
    ]
    flags += [f"-D{name}" for name in features(tree)]
    flags += [rf"-DMPSD_STUB_VERSION=\"{version}\"", rf"-DNV_VERSION_STRING=\"{version}\""]
    return "\n".join(
        ["obj-m := nvidia.o", f"nvidia-y := {' '.join(objects)}", f"ccflags-y := {' '.join(flags)}", ""]
    )
