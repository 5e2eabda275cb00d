"""Files that the patch changes, the size of each change, and the tools that apply it.

A semantic-patch rule that no longer matches is silent. So each file states how many lines are added and
removed, and which calls are added. Any difference is an error before a file is written.
"""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kmod.command import run
from kmod.errors import HookMismatch, KmodError
from kmod.tree import BUILD_LIST

FOLDER = Path(__file__).resolve().parent.parent
SOURCES = FOLDER / "src"
INCLUDE = '#include "mpsd-uvm.h"'
SPATCH_DEADLINE_S = 120.0
NOTHING_MATCHED = "there are no modified files"

Patcher = Callable[[Path, Path], str]
"""Apply (semantic patch, source file) and return the text, unchanged if nothing matched."""


@dataclass(frozen=True, slots=True)
class Change:
    """A driver file, its semantic patch, and the required result: lines added and removed, calls."""

    file: str
    semantic_patch: str
    inserted: int
    calls: tuple[str, ...]
    removed: int = 0


HOOKS = (
    Change(
        "nvidia-uvm/uvm_gpu_replayable_faults.c",
        "hooks/uvm_gpu_replayable_faults.cocci",
        4,
        (INCLUDE, "mpsd_isolate_replayable(", "mpsd_orphan("),
    ),
    Change(
        "nvidia-uvm/uvm_gpu_non_replayable_faults.c",
        "hooks/uvm_gpu_non_replayable_faults.cocci",
        4,
        (INCLUDE, "mpsd_isolate_non_replayable(", "mpsd_given_back("),
    ),
    Change(
        "nvidia-uvm/uvm_va_space.c",
        "hooks/uvm_va_space.cocci",
        5,
        (
            INCLUDE,
            "mpsd_space_created(",
            "mpsd_space_stopped(",
            "mpsd_space_destroyed(",
            "mpsd_gpu_space_ends(",
        ),
    ),
    Change("nvidia-uvm/uvm.c", "hooks/uvm.cocci", 3, (INCLUDE, "mpsd_init()", "mpsd_exit()")),
)

PCI_RESIZE = Change(
    "nvidia/nv-pci.c", "mends/pci_resize_resource.cocci", 1, ("pci_resize_resource(",), removed=1
)


def read(path: Path) -> str:
    """Read a file as text that `write` reproduces byte for byte, whatever its encoding and line ends."""
    return path.read_bytes().decode("latin-1")


def write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("latin-1"))


def spatch(semantic_patch: Path, source: Path) -> str:
    """Run Coccinelle. It reads no headers: every name that a rule needs is in the file itself."""
    with tempfile.TemporaryDirectory(prefix="mpsd-kmod-") as made:
        result = Path(made) / source.name
        command = ["spatch", "--very-quiet", "--no-includes", "--no-show-diff", "--max-width", "200"]
        try:
            run([*command, "--sp-file", semantic_patch, source, "-o", result], deadline_s=SPATCH_DEADLINE_S)
        except KmodError as error:
            # A file without any match; its lines are counted next.
            if NOTHING_MATCHED not in str(error):
                raise
        return read(result if result.is_file() else source)


def changed(root: Path, change: Change, patcher: Patcher) -> str:
    """Return the file's text with the change. Raises HookMismatch if it differs from the stated change."""
    source = root / change.file
    try:
        before = read(source)
    except OSError as error:
        raise KmodError(f"cannot read {source}: {error.strerror}") from error
    after = patcher(FOLDER / change.semantic_patch, source)
    _check(change, before, after)
    return after


def difference(before: str, after: str) -> tuple[list[str], list[str]]:
    """Return (lines added, lines removed), without surrounding white space."""
    old, new = before.splitlines(), after.splitlines()
    come: list[str] = []
    go: list[str] = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, old_from, old_to, new_from, new_to in matcher.get_opcodes():
        if tag != "equal":
            go += [line.strip() for line in old[old_from:old_to]]
            come += [line.strip() for line in new[new_from:new_to]]
    return come, go


def _check(change: Change, before: str, after: str) -> None:
    come, go = difference(before, after)
    wrong = []
    if (len(come), len(go)) != (change.inserted, change.removed):
        wrong.append(
            f"{len(come)} lines added and {len(go)} removed instead of {change.inserted} and {change.removed}"
        )
    for call in change.calls:
        count = sum(call in line for line in come)
        if count != 1:
            wrong.append(f"{call.rstrip('(')} was added {count} times instead of once")
    if wrong:
        raise HookMismatch(
            f"{change.file}: {'; '.join(wrong)}. {change.semantic_patch} does not fit this driver version; "
            "nothing was changed."
        )


def own_files(folder: Path = SOURCES) -> list[Path]:
    """Return the files to put beside the driver's files."""
    return sorted([*folder.glob("*.c"), *folder.glob("*.h")])


def build_list(text: str, files: Iterable[Path]) -> str:
    """Return the module's list of sources with one more line at its end for our files."""
    names = " ".join(f"nvidia-uvm/{path.name}" for path in files if path.suffix == ".c")
    return text + ("" if text.endswith("\n") else "\n") + f"NVIDIA_UVM_SOURCES += {names}\n"


def patched(
    root: Path, changes: Sequence[Change], files: Sequence[Path], patcher: Patcher = spatch
) -> dict[str, str]:
    """Return every changed driver file, by its path below `root`, with its new text."""
    texts = {change.file: changed(root, change, patcher) for change in changes}
    texts[str(BUILD_LIST)] = build_list(read(root / BUILD_LIST), files)
    return texts


def have_spatch() -> bool:
    return shutil.which("spatch") is not None
