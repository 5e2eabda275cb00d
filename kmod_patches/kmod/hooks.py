"""Apply the patch to a driver source and reverse it, byte for byte.

The driver's original files are kept in the tree, with the digests of both states, before the first file is
written. So an interrupted run is recognised and can be reversed.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kmod.alone import alone
from kmod.changes import FOLDER, HOOKS, INCLUDE, Change, Patcher, own_files, patched, read, spatch, write
from kmod.errors import ChangedSince, KmodError, UnknownTree
from kmod.tree import KEPT, ORIGINALS, Tree

LOCK_DEADLINE_S = 600.0
NOTES = KEPT / "notes.json"
FORMAT = 1


class State(enum.Enum):
    CLEAN = "clean"
    APPLIED = "applied"
    OUTDATED = "applied from other sources of the patch than these"
    BROKEN_OFF = "half applied"
    CHANGED = "changed since it was applied"
    FOREIGN = "has hooks that another program applied"


@dataclass(frozen=True, slots=True)
class Patch:
    """The changes of driver files, and the files to add beside them."""

    changes: tuple[Change, ...]
    files: tuple[Path, ...]

    def digest(self) -> str:
        semantic = [FOLDER / change.semantic_patch for change in self.changes]
        return _digest(b"".join(path.read_bytes() for path in [*semantic, *self.files]))


@dataclass(frozen=True, slots=True)
class PatchRecord:
    """Record of a patched tree: {file: (digest before, digest after)}, and the names of added files."""

    patch: str
    files: Mapping[str, tuple[str, str]]
    joined: tuple[str, ...]


def whole_patch(mends: Iterable[Change] = ()) -> Patch:
    return Patch((*HOOKS, *mends), tuple(own_files()))


def state(tree: Tree, patch: Patch) -> State:
    """Return the patch's state in a tree. Raises KmodError if records or files cannot be read."""
    missing = [hook.file for hook in HOOKS if not (tree.root / hook.file).is_file()]
    if missing:
        raise UnknownTree(
            f"{tree.root} has no {', '.join(missing)}: take a fresh copy of the driver's source"
        )
    notes = _read_notes(tree)
    if notes is None:
        return State.FOREIGN if _hooked(tree) else State.CLEAN
    stands = {_stand(tree.root / name, digests) for name, digests in notes.files.items()}
    if "other" in stands:
        return State.CHANGED
    if "before" in stands or not all((tree.root / name).is_file() for name in notes.joined):
        return State.BROKEN_OFF
    return State.APPLIED if notes.patch == patch.digest() else State.OUTDATED


def apply(tree: Tree, patch: Patch, patcher: Patcher = spatch) -> bool:
    """Apply the patch. Return False if it is applied already. Raises KmodError, and then applies nothing.

    Remains of an earlier version of the patch or of an interrupted run are removed first. Waits for another
    run in the tree.
    """
    with alone(tree.root, LOCK_DEADLINE_S):
        return apply_alone(tree, patch, patcher)


def apply_alone(tree: Tree, patch: Patch, patcher: Patcher = spatch) -> bool:
    """Apply the patch, for a caller that holds the tree's lock."""
    stands = state(tree, patch)
    if stands is State.APPLIED:
        return False
    if stands is State.FOREIGN:
        raise UnknownTree(
            f"{tree.root} {stands.value}: without a record of the original files they cannot be restored. "
            "Take a fresh copy of the driver's source."
        )
    if stands is not State.CLEAN:
        _reverse(tree)
    texts = patched(tree.root, patch.changes, patch.files, patcher)
    _write(tree, patch, texts)
    return True


def try_patch(tree: Tree, patch: Patch, patcher: Patcher = spatch) -> None:
    """Raise KmodError if apply() would, without any change."""
    stands = state(tree, patch)
    if stands in (State.FOREIGN, State.CHANGED):
        raise UnknownTree(f"{tree.root} {stands.value}")
    if stands is State.CLEAN:
        patched(tree.root, patch.changes, patch.files, patcher)


def reverse(tree: Tree) -> bool:
    """Restore the driver's files. Return False if nothing is applied. Raises ChangedSince."""
    with alone(tree.root, LOCK_DEADLINE_S):
        return _reverse(tree)


def _reverse(tree: Tree) -> bool:
    notes = _read_notes(tree)
    if notes is None:
        if _hooked(tree):
            raise UnknownTree(f"{tree.root} {State.FOREIGN.value}; it has no record of the original files")
        return False
    other = [name for name, digests in notes.files.items() if _stand(tree.root / name, digests) == "other"]
    if other:
        raise ChangedSince(f"{', '.join(sorted(other))} in {tree.root}: {State.CHANGED.value}")
    for name in notes.files:
        # Not with its old time: make would keep an object compiled from the patched file.
        _replace(tree.root / name, read(tree.root / ORIGINALS / name))
    for name in notes.joined:
        (tree.root / name).unlink(missing_ok=True)
    # First the notes: without them the remains are unused files, and the tree is clean.
    (tree.root / NOTES).unlink()
    shutil.rmtree(tree.root / KEPT)
    return True


def _write(tree: Tree, patch: Patch, texts: Mapping[str, str]) -> None:
    shutil.rmtree(tree.root / KEPT, ignore_errors=True)
    digests = {}
    for name, text in texts.items():
        original = tree.root / ORIGINALS / name
        original.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree.root / name, original)
        digests[name] = (_digest(original.read_bytes()), _digest(text.encode("latin-1")))
    joined = {f"nvidia-uvm/{path.name}": path for path in patch.files}
    _write_notes(tree, PatchRecord(patch.digest(), digests, tuple(joined)))
    for name, path in joined.items():
        shutil.copyfile(path, tree.root / name)
    for name, text in texts.items():
        _replace(tree.root / name, text)


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".mpsd-new")
    write(beside, text)
    shutil.copymode(path, beside)
    os.replace(beside, path)


def _write_notes(tree: Tree, notes: PatchRecord) -> None:
    value = {"format": FORMAT, "patch": notes.patch, "files": dict(notes.files), "joined": list(notes.joined)}
    beside = tree.root / NOTES.with_suffix(".new")
    beside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, tree.root / NOTES)


def _read_notes(tree: Tree) -> PatchRecord | None:
    path = tree.root / NOTES
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["format"] != FORMAT:
            raise KmodError(f"{path} has format {value['format']}, which this program does not support")
        files = {str(name): (str(pair[0]), str(pair[1])) for name, pair in value["files"].items()}
        return PatchRecord(str(value["patch"]), files, tuple(map(str, value["joined"])))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OSError) as error:
        raise KmodError(
            f"cannot read {path} ({error}). Take a fresh copy of the driver's source; "
            f"the original files are in {tree.root / ORIGINALS}"
        ) from error


def _stand(path: Path, digests: Sequence[str]) -> str:
    try:
        digest = _digest(path.read_bytes())
    except OSError:
        return "other"
    return {digests[0]: "before", digests[1]: "after"}.get(digest, "other")


def _hooked(tree: Tree) -> bool:
    return any(
        INCLUDE in (tree.root / hook.file).read_text(encoding="utf-8", errors="replace")
        for hook in HOOKS
        if (tree.root / hook.file).is_file()
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
