"""The patch goes into a driver source as a whole or not at all, and is removed without a trace."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kmod import hooks
from kmod.build import Kernel, mends
from kmod.changes import HOOKS, INCLUDE, PCI_RESIZE, Change, changed, difference, have_spatch, read
from kmod.errors import ChangedSince, HookMismatch, KmodError, UnknownTree
from kmod.hooks import NOTES, Patch, State
from kmod.tree import BUILD_LIST, Tree, copy, find
from tests.kmod.smalltree import contents, make_tree

needs_spatch = pytest.mark.skipif(not have_spatch(), reason="spatch is missing: apt-get install coccinelle")
OWN = "mpsd-one.c"


def puts_in(semantic_patch: Path, source: Path) -> str:
    """Do what a fitting semantic patch does, without Coccinelle: each call once, at the file's end."""
    (change,) = [hook for hook in (*HOOKS, PCI_RESIZE) if hook.semantic_patch.endswith(semantic_patch.name)]
    if change is PCI_RESIZE:
        return read(source).replace("size_of(dev))", "size_of(dev), 0)")
    lines = [f"{call}x;" for call in change.calls]
    lines += ["y;"] * (change.inserted - len(lines))
    return read(source) + "\n".join(lines) + "\n"


def does_nothing(semantic_patch: Path, source: Path) -> str:
    return read(source)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return find(make_tree(tmp_path / "tree"))


@pytest.fixture
def patch(tmp_path: Path) -> Patch:
    own = tmp_path / "own"
    own.mkdir()
    (own / OWN).write_text("int one;\n")
    (own / "mpsd-one.h").write_text("extern int one;\n")
    return Patch(HOOKS, (own / OWN, own / "mpsd-one.h"))


def test_files_join_and_the_build_list_names_those_to_compile(tree: Tree, patch: Patch) -> None:
    assert hooks.apply(tree, patch, puts_in)
    assert (tree.root / "nvidia-uvm" / OWN).read_text() == "int one;\n"
    assert (tree.root / "nvidia-uvm/mpsd-one.h").is_file()
    listed = (tree.root / BUILD_LIST).read_text().splitlines()
    assert listed[-1] == f"NVIDIA_UVM_SOURCES += nvidia-uvm/{OWN}"
    assert all(INCLUDE in (tree.root / hook.file).read_text() for hook in HOOKS)
    assert hooks.state(tree, patch) is State.APPLIED


def test_twice_is_once(tree: Tree, patch: Patch) -> None:
    hooks.apply(tree, patch, puts_in)
    once = contents(tree.root)
    assert not hooks.apply(tree, patch, puts_in)
    assert contents(tree.root) == once


def test_it_comes_out_to_the_byte(tree: Tree, patch: Patch) -> None:
    odd = tree.root / "nvidia-uvm/uvm.c"
    odd.write_bytes(odd.read_bytes() + b"// caf\xe9\r\n")
    before = contents(tree.root)
    hooks.apply(tree, patch, puts_in)
    assert b"caf\xe9\r\n" in odd.read_bytes()
    assert hooks.reverse(tree)
    assert contents(tree.root) == before
    assert hooks.state(tree, patch) is State.CLEAN
    assert not hooks.reverse(tree)


def test_a_reverse_that_was_killed_while_it_threw_its_notes_away_is_none(
    tree: Tree, patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_folder: Path) -> None:
        raise KeyboardInterrupt

    hooks.apply(tree, patch, puts_in)
    with monkeypatch.context() as patched:
        patched.setattr(hooks.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            hooks.reverse(tree)
    shutil.rmtree(tree.root / "nvidia-uvm/.mpsd-kmod/originals")
    assert hooks.state(tree, patch) is State.CLEAN
    assert not hooks.reverse(tree)
    assert hooks.apply(tree, patch, puts_in)


def test_what_comes_out_is_newer_than_what_was_compiled(tree: Tree, patch: Patch) -> None:
    file = tree.root / "nvidia-uvm/uvm.c"
    hooks.apply(tree, patch, puts_in)
    applied_ns = file.stat().st_mtime_ns
    hooks.reverse(tree)
    assert file.stat().st_mtime_ns >= applied_ns


def test_a_hook_that_no_longer_matches_changes_nothing(tree: Tree, patch: Patch) -> None:
    before = contents(tree.root)
    with pytest.raises(HookMismatch, match=r"0 lines added .* instead of 4 .*nothing was changed"):
        hooks.apply(tree, patch, does_nothing)
    assert contents(tree.root) == before


def test_a_call_that_comes_twice_is_a_mismatch(tree: Tree) -> None:
    def twice(semantic_patch: Path, source: Path) -> str:
        return read(source) + f"{INCLUDE}\nmpsd_init();\nmpsd_init();\n"

    (change,) = [hook for hook in HOOKS if hook.file.endswith("/uvm.c")]
    with pytest.raises(HookMismatch, match=r"mpsd_init\(\) was added 2 times.*mpsd_exit\(\) was added 0"):
        changed(tree.root, change, twice)


def test_a_line_that_goes_is_a_mismatch(tree: Tree) -> None:
    change = Change("nvidia-uvm/uvm.c", "hooks/uvm.cocci", 1, ())
    with pytest.raises(HookMismatch, match="1 lines added and 1 removed"):
        changed(tree.root, change, lambda _, source: read(source).replace("return 0;", "return 1;"))


def test_a_newer_patch_takes_the_place_of_an_older_one(tree: Tree, patch: Patch) -> None:
    before = contents(tree.root)
    hooks.apply(tree, patch, puts_in)
    patch.files[0].write_text("int two;\n")
    newer = Patch(patch.changes, patch.files[:1])
    assert hooks.state(tree, newer) is State.OUTDATED
    assert hooks.apply(tree, newer, puts_in)
    assert (tree.root / "nvidia-uvm" / OWN).read_text() == "int two;\n"
    assert not (tree.root / "nvidia-uvm/mpsd-one.h").exists()
    hooks.reverse(tree)
    assert contents(tree.root) == before


@pytest.mark.parametrize("done", range(len(HOOKS) + 1))
def test_work_that_was_broken_off_is_put_back(tree: Tree, patch: Patch, done: int) -> None:
    before = contents(tree.root)
    hooks.apply(tree, patch, puts_in)
    for hook in HOOKS[done:]:
        (tree.root / hook.file).write_bytes(before[hook.file])
    (tree.root / BUILD_LIST).write_bytes(before[str(BUILD_LIST)])
    assert hooks.state(tree, patch) is State.BROKEN_OFF
    hooks.reverse(tree)
    assert contents(tree.root) == before


def test_a_file_that_somebody_changed_since_is_not_overwritten(tree: Tree, patch: Patch) -> None:
    hooks.apply(tree, patch, puts_in)
    file = tree.root / "nvidia-uvm/uvm_va_space.c"
    file.write_text("mine\n")
    assert hooks.state(tree, patch) is State.CHANGED
    with pytest.raises(ChangedSince, match=r"nvidia-uvm/uvm_va_space\.c"):
        hooks.reverse(tree)
    with pytest.raises(ChangedSince, match=r"nvidia-uvm/uvm_va_space\.c"):
        hooks.apply(tree, patch, puts_in)
    assert file.read_text() == "mine\n"


def test_hooks_of_somebody_elses_are_refused(tree: Tree, patch: Patch) -> None:
    hooks.apply(tree, patch, puts_in)
    shutil.rmtree((tree.root / NOTES).parent)
    assert hooks.state(tree, patch) is State.FOREIGN
    with pytest.raises(UnknownTree, match="fresh copy"):
        hooks.apply(tree, patch, puts_in)
    with pytest.raises(UnknownTree, match="no record of the original files"):
        hooks.reverse(tree)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 9}', '{"format": 1, "files": 3}'])
def test_notes_that_cannot_be_read_are_an_error_that_names_them(tree: Tree, patch: Patch, text: str) -> None:
    hooks.apply(tree, patch, puts_in)
    (tree.root / NOTES).write_text(text)
    with pytest.raises(KmodError, match=r"notes\.json"):
        hooks.state(tree, patch)


def test_notes_tell_both_states_of_every_file(tree: Tree, patch: Patch) -> None:
    hooks.apply(tree, patch, puts_in)
    notes = json.loads((tree.root / NOTES).read_text())
    assert set(notes["files"]) == {*(hook.file for hook in HOOKS), str(BUILD_LIST)}
    assert all(before != after for before, after in notes["files"].values())


def test_the_difference_is_of_lines() -> None:
    assert difference("a\nb\nb\nc\n", "a\nb\n  x\nb\nc\n") == (["x"], [])
    assert difference("a\nb\n", "a\nc\n") == (["c"], ["b"])


def declare(folder: Path, parameters: str) -> Kernel:
    header = folder / "include/linux/pci.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"int pci_resize_resource({parameters});\n")
    return Kernel("6.1", folder)


def test_the_build_is_mended_for_a_kernel_with_four_parameters_alone(tree: Tree, tmp_path: Path) -> None:
    assert mends(tree, declare(tmp_path / "three", "struct pci_dev *d, int i, int size")) == []
    four = declare(tmp_path / "four", "struct pci_dev *d, int i,\n\tint size, int exclude")
    assert mends(tree, four) == [PCI_RESIZE]
    source = tree.root / PCI_RESIZE.file
    source.write_text("#ifdef NV_PCI_RESIZE_RESOURCE_HAS_IT\n" + source.read_text())
    assert mends(tree, four) == []


def test_a_mended_tree_is_known_as_such(tree: Tree, patch: Patch, tmp_path: Path) -> None:
    four = declare(tmp_path / "four", "a, b, c, d")
    mended = Patch((*patch.changes, *mends(tree, four)), patch.files)
    before = contents(tree.root)
    hooks.apply(tree, mended, puts_in)
    assert "size_of(dev), 0)" in (tree.root / PCI_RESIZE.file).read_text()
    assert mends(tree, four) == [PCI_RESIZE]
    assert not hooks.apply(tree, mended, puts_in)
    hooks.reverse(tree)
    assert contents(tree.root) == before


@needs_spatch
@pytest.mark.parametrize("newer", [False, True])
def test_the_semantic_patches_fit_old_and_new_shapes(tmp_path: Path, patch: Patch, newer: bool) -> None:
    tree = find(make_tree(tmp_path / "shaped", newer=newer))
    before = contents(tree.root)
    hooks.apply(tree, Patch((*HOOKS, PCI_RESIZE), patch.files))
    space = (tree.root / "nvidia-uvm/uvm_va_space.c").read_text()
    assert space.index("mpsd_space_created(space);") > space.index("*made = NULL")
    faults = (tree.root / "nvidia-uvm/uvm_gpu_replayable_faults.c").read_text()
    assert (
        "(gpu, fault->va_space, fault, buffer->batch_service_context.batch_id))\n        return NV_OK"
        in faults
    )
    # The driver must not report an absorbed fault as fatal: trackers take a fatal fault for the loss of the
    # whole channel group.
    assert faults.index("mpsd_isolate_replayable(") < faults.index("uvm_tools_record_gpu_fatal_fault(")
    assert faults.index("mpsd_orphan(gpu, current);") < faults.index("push_cancel_on_gpu_targeted(")
    module = (tree.root / "nvidia-uvm/uvm.c").read_text()
    assert module.index("mpsd_exit();") > module.index("uvm_global_exit();")
    copies = (tree.root / "nvidia-uvm/uvm_gpu_non_replayable_faults.c").read_text()
    assert "(gpu, fault->va_space, fault))\n            fault->is_fatal = false;" in copies
    given_back = "mpsd_given_back(ended->gpu, fault->va_space, fault);"
    assert copies.index(given_back) < copies.index("if (ended->kill_channel.scheduled)")
    hooks.reverse(tree)
    assert contents(tree.root) == before


@needs_spatch
@pytest.mark.parametrize(
    ("name", "anchor"),
    [
        ("uvm_gpu_replayable_faults", "push_cancel_on_gpu_global"),
        ("uvm_gpu_non_replayable_faults", "clear_faulted_on_gpu"),
        ("uvm_gpu_non_replayable_faults", "kill_channel.scheduled)"),
        ("uvm_va_space", "uvm_deferred_free_object_list"),
        ("uvm", "uvm_global_exit"),
    ],
)
def test_a_semantic_patch_that_misses_its_anchor_is_noticed(
    tree: Tree, patch: Patch, name: str, anchor: str
) -> None:
    file = tree.root / f"nvidia-uvm/{name}.c"
    file.write_text(file.read_text().replace(anchor, "renamed" + ")" * anchor.count(")")))
    before = contents(tree.root)
    with pytest.raises(HookMismatch, match=file.name):
        hooks.apply(tree, patch)
    assert contents(tree.root) == before


def test_only_what_the_hooks_look_at_is_copied(tree: Tree, tmp_path: Path) -> None:
    (tree.root / "nvidia/big.o").write_text("big")
    small = copy(tree, tmp_path / "small", whole=False)
    assert not (small.root / "nvidia/big.o").exists()
    assert small.version == tree.version
    assert copy(tree, tmp_path / "whole", whole=True).root.joinpath("nvidia/big.o").is_file()
