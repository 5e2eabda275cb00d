"""Exchange of loaded modules: the patched ones for the stock ones, and back.

modprobe prefers ours. For the driver's own modules it gets a folder of links without ours. Modules are loaded
by their file's own names, regardless of the distribution's settings for `nvidia`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kmod.command import run
from kmod.dkms import Module
from kmod.errors import InUse, KmodError, program
from kmod.install import Manifest, Step, check, resolved
from kmod.machine import OURS, Machine
from kmod.modules import Use, another_build, is_ours, listed, load_order, unload_order
from kmod.source import require_fit

LOAD_DEADLINE_S = 120.0
DEPMOD_DEADLINE_S = 300.0
PATCHED, STOCK = "the patched modules", "the driver's own modules"


def plan_load(machine: Machine, used: Use, manifest: Manifest) -> list[Step]:
    """Return the steps to load ours; none if loaded. Raises InUse, or KmodError if ours are incomplete."""
    release = machine.running
    require_fit(machine, manifest.version, release)
    check(machine, release, manifest.modules)
    if used.ours and not _missing(machine, used) and not loaded_is_old(machine, manifest):
        return []
    return _exchange(machine, used, manifest, ours=True)


def plan_unload(machine: Machine, used: Use, manifest: Manifest) -> list[Step]:
    """Return the steps to unload ours; none if not loaded (unknown without nvidia_uvm). Raises InUse."""
    known = used.ours or not used.loaded or "nvidia_uvm" in {module.name for module in used.loaded}
    if known and not used.ours and not _missing(machine, used):
        return []
    return _exchange(machine, used, manifest, ours=False)


def loaded_is_old(machine: Machine, manifest: Manifest) -> bool:
    """Return whether the loaded patched nvidia_uvm differs from the installed one."""
    name = next(module.installed for module in manifest.modules if module.built == "nvidia-uvm")
    path = resolved(machine, machine.running, name)
    return path is not None and is_ours(machine) and another_build(machine, path)


def _exchange(machine: Machine, used: Use, manifest: Manifest, *, ours: bool) -> list[Step]:
    if used.busy:
        what = PATCHED if ours else STOCK
        raise InUse(f"the driver's modules are in use; to load {what}, end the programs that use them", used)
    modules = manifest.modules
    before = [*(module.name for module in used.loaded), *_missing(machine, used)]
    names = load_order(before, [module.kernel_name for module in modules])
    load = partial(_load, machine, modules, names)
    steps = []
    if before:
        steps.append(_look_for_stock(machine, _installed(modules, names)))
    steps += _unloading(machine, used, modules, names)
    origin = f"from {machine.ours(machine.running)}" if ours else "the driver's own"

    def act() -> None:
        try:
            load(ours=ours)
        except KmodError as error:
            _put_back(machine, load if before else None, error, ours=ours)
        _forget(machine)

    return [*steps, Step(f"modprobe {' '.join(names)}, {origin}", act)]


def _look_for_stock(machine: Machine, names: Sequence[str]) -> Step:
    return Step("check for the driver's own modules", lambda: require_stock(machine, names))


def require_stock(machine: Machine, names: Sequence[str]) -> None:
    """Raise KmodError if the stock modules are missing, before the loaded ones are removed."""
    view = stock_view(machine)
    for name in names:
        run(
            ["modprobe", "-d", view, "-i", "-S", machine.running, "--show-depends", name],
            deadline_s=LOAD_DEADLINE_S,
        )


def stock_view(machine: Machine) -> Path:
    """Return a new folder for modprobe -d with all modules of this kernel except ours."""
    release = machine.running
    view = machine.state / "stock"
    shutil.rmtree(view, ignore_errors=True)
    kernel, shown = machine.modules / release, view / "lib/modules" / release
    ours = kernel / OURS
    _links(kernel, shown, ours)
    # Some distributions' depmod and modprobe search usr/lib/modules below the folder.
    (view / "usr").symlink_to(".")
    run(["depmod", "-b", view, "-C", view / "none", release], deadline_s=DEPMOD_DEADLINE_S)
    return view


def _links(folder: Path, shown: Path, left_out: Path) -> None:
    """Link everything in `folder` except `left_out`, which may be deeper, and depmod's own tables."""
    shown.mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        if path == left_out or (path.name.startswith("modules.") and not _given(path.name)):
            continue
        if path in left_out.parents:
            _links(path, shown / path.name, left_out)
        else:
            (shown / path.name).symlink_to(path.resolve())


def _given(name: str) -> bool:
    """Return whether a table comes with the kernel; depmod writes the others."""
    return name in ("modules.order", "modules.builtin", "modules.builtin.modinfo")


def _unloading(machine: Machine, used: Use, modules: Sequence[Module], names: Sequence[str]) -> list[Step]:
    order = unload_order(used.loaded)
    if not order:
        return []

    def act() -> None:
        # A run that is killed from here on leaves modules unloaded: the next run loads them again.
        machine.state.mkdir(parents=True, exist_ok=True)
        machine.to_load.write_text("".join(f"{name}\n" for name in names), encoding="ascii")
        gone: list[str] = []
        try:
            for name in order:
                _rmmod(machine, name)
                gone.append(name)
        except KmodError as error:
            # A program began to use the driver after the check.
            known = [name for name in reversed(gone) if name in {module.kernel_name for module in modules}]
            _modprobe(machine, _installed(modules, known), None if used.ours else stock_view(machine))
            _forget(machine)
            raise KmodError(f"{error}\nThe previous modules are loaded again; repeat the command.") from error

    return [Step(f"rmmod {' '.join(order)}", act)]


def _missing(machine: Machine, used: Use) -> list[str]:
    """Return modules that were loaded before an exchange was interrupted in this boot, and are not now."""
    try:
        remembered = machine.to_load.read_text(encoding="ascii").split()
    except OSError:
        return []
    loaded = {module.name for module in used.loaded}
    return [name for name in remembered if name not in loaded]


def _forget(machine: Machine) -> None:
    machine.to_load.unlink(missing_ok=True)


def _installed(modules: Sequence[Module], names: Sequence[str]) -> list[str]:
    by_name = {module.kernel_name: module.installed for module in modules}
    return [by_name[name] for name in names]


def _modprobe(machine: Machine, names: Sequence[str], view: Path | None) -> None:
    where: list[str | Path] = ["-d", view] if view else []
    if not view and not machine.real:
        where = ["-d", machine.root]
    for name in names:
        run([machine.kernel_program("modprobe"), *where, "-i", name], deadline_s=LOAD_DEADLINE_S)


def _rmmod(machine: Machine, name: str) -> None:
    run([machine.kernel_program("rmmod"), name], deadline_s=LOAD_DEADLINE_S)


def _load(machine: Machine, modules: Sequence[Module], names: Sequence[str], *, ours: bool) -> None:
    """Load modules. Raises KmodError, also if another nvidia_uvm is loaded then."""
    installed = _installed(modules, names)
    _modprobe(machine, installed, None if ours else stock_view(machine))
    if not ours and is_ours(machine):
        # udev rules load nvidia_uvm as soon as a driver is loaded, and get the preferred one.
        _rmmod(machine, "nvidia_uvm")
        _modprobe(machine, installed, stock_view(machine))
    if is_ours(machine) != ours:
        raise KmodError(f"nvidia_uvm is loaded, but it is {'not ' if ours else ''}the patched one")


def _put_back(machine: Machine, load: Callable[..., None] | None, error: KmodError, *, ours: bool) -> None:
    """Load the previous modules again after a failure, if there were any. Always raises KmodError."""
    text = f"cannot load {PATCHED if ours else STOCK}: {error}"
    try:
        for name in unload_order(listed(machine)):
            _rmmod(machine, name)
        if load is not None:
            load(ours=not ours)
    except KmodError as second:
        raise KmodError(
            f"{text}\nThe previous modules cannot be loaded either: {second}\nSee {program()} status. "
            f"`{program()} unload` tries to load the driver's own modules again; a reboot loads "
            "the preferred modules"
        ) from error
    _forget(machine)
    if load is None:
        raise KmodError(f"{text}\nNo driver module is loaded, as before.") from error
    if not ours:
        raise KmodError(f"{text}\nThe patched modules are loaded again.") from error
    raise KmodError(
        f"{text}\nThe driver's own modules are loaded again. The next boot tries the patched modules "
        f"again, unless you uninstall them: {program()} uninstall --next-boot"
    ) from error
