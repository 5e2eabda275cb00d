"""Puts the patched modules in the place of the loaded ones, and the driver's own back.

modprobe can be asked for ours, which come first; for the driver's own it gets a folder of links in which ours
are not. The files' own names are asked for, past what the distribution's settings say of `nvidia`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from kmod.command import run
from kmod.dkms import Module
from kmod.errors import InUse, KmodError
from kmod.install import Manifest, Step, check
from kmod.machine import OURS, Machine
from kmod.modules import Use, is_ours, load_order, unload_order

LOAD_DEADLINE_S = 120.0
DEPMOD_DEADLINE_S = 300.0


def plan_load(machine: Machine, used: Use, manifest: Manifest) -> list[Step]:
    """Raises InUse, KmodError where ours are not whole. Nothing to do where ours are loaded."""
    release = machine.running
    check(machine, release, manifest.modules)
    if used.ours:
        return []
    _refuse_busy(used, "load the patched modules")
    names = load_order(used.loaded, [module.kernel_name for module in manifest.modules])
    stock = _installed(manifest.modules, names)
    steps = [_look_for_stock(machine, stock)] if used.loaded else []
    steps += _unloading(machine, used, manifest.modules)
    text = f"modprobe {' '.join(names)}, from {machine.ours(release)}"

    def act() -> None:
        try:
            _modprobe(machine, _installed(manifest.modules, names), None)
            if not is_ours(machine):
                raise KmodError("nvidia_uvm is loaded, and it is not the patched one")
        except KmodError as error:
            _put_back(machine, manifest.modules, used, names, error)

    return [*steps, Step(text, act)]


def plan_unload(machine: Machine, used: Use, manifest: Manifest) -> list[Step]:
    """Raises InUse. Nothing to do where ours are not loaded."""
    if not used.ours:
        return []
    _refuse_busy(used, "load the driver's own modules")
    names = load_order(used.loaded, [module.kernel_name for module in manifest.modules])
    stock = _installed(manifest.modules, names)
    return [
        _look_for_stock(machine, stock),
        *_unloading(machine, used, manifest.modules),
        Step(
            f"modprobe {' '.join(names)}, the driver's own",
            lambda: _modprobe(machine, stock, stock_view(machine)),
        ),
    ]


def _look_for_stock(machine: Machine, names: Sequence[str]) -> Step:
    return Step("look for the driver's own modules", lambda: require_stock(machine, names))


def require_stock(machine: Machine, names: Sequence[str]) -> None:
    """Raises KmodError while there is something to lose: once what is loaded is gone it is too late."""
    view = stock_view(machine)
    for name in names:
        run(
            ["modprobe", "-d", view, "-i", "-S", machine.running, "--show-depends", name],
            deadline_s=LOAD_DEADLINE_S,
        )


def stock_view(machine: Machine) -> Path:
    """A folder for modprobe -d in which this kernel has all its modules but ours. Made anew."""
    release = machine.running
    view = machine.state / "stock"
    shutil.rmtree(view, ignore_errors=True)
    kernel, shown = machine.modules / release, view / "lib/modules" / release
    ours = kernel / OURS
    _links(kernel, shown, ours)
    # Some distributions' depmod and modprobe look in usr/lib/modules below the folder.
    (view / "usr").symlink_to(".")
    run(["depmod", "-b", view, "-C", view / "none", release], deadline_s=DEPMOD_DEADLINE_S)
    return view


def _links(folder: Path, shown: Path, left_out: Path) -> None:
    """Links to all in `folder` but `left_out`, which may lie deeper, and but depmod's own tables."""
    shown.mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        if path == left_out or (path.name.startswith("modules.") and not _given(path.name)):
            continue
        if path in left_out.parents:
            _links(path, shown / path.name, left_out)
        else:
            (shown / path.name).symlink_to(path.resolve())


def _given(name: str) -> bool:
    """Tables that come with the kernel; the others depmod writes."""
    return name in ("modules.order", "modules.builtin", "modules.builtin.modinfo")


def _refuse_busy(used: Use, what: str) -> None:
    if used.busy:
        raise InUse(f"the driver's modules are in use; to {what}, end what uses them", used)


def _unloading(machine: Machine, used: Use, modules: Sequence[Module]) -> list[Step]:
    order = unload_order(used.loaded)
    if not order:
        return []

    def act() -> None:
        gone: list[str] = []
        try:
            for name in order:
                run([machine.kernel_program("rmmod"), name], deadline_s=LOAD_DEADLINE_S)
                gone.append(name)
        except KmodError as error:
            # Something began to use the driver since we looked.
            known = [name for name in reversed(gone) if name in {module.kernel_name for module in modules}]
            _modprobe(machine, _installed(modules, known), None if used.ours else stock_view(machine))
            raise KmodError(f"{error}\nWhat was loaded is loaded again; run the same once more.") from error

    return [Step(f"rmmod {' '.join(order)}", act)]


def _installed(modules: Sequence[Module], names: Sequence[str]) -> list[str]:
    by_name = {module.kernel_name: module.installed for module in modules}
    return [by_name[name] for name in names]


def _modprobe(machine: Machine, names: Sequence[str], view: Path | None) -> None:
    where: list[str | Path] = ["-d", view] if view else []
    if not view and not machine.real:
        where = ["-d", machine.root]
    for name in names:
        run([machine.kernel_program("modprobe"), *where, "-i", name], deadline_s=LOAD_DEADLINE_S)


def _put_back(
    machine: Machine, modules: Sequence[Module], used: Use, names: Sequence[str], error: KmodError
) -> None:
    """Ours did not load: the driver's own once more, where it was loaded before. Raises KmodError always."""
    for name in reversed(names):
        if (machine.sys / "module" / name).is_dir():
            run([machine.kernel_program("rmmod"), name], deadline_s=LOAD_DEADLINE_S)
    if not used.loaded:
        raise KmodError(f"the patched modules do not load: {error}\nNothing is loaded, as before.") from error
    _modprobe(machine, _installed(modules, names), stock_view(machine))
    raise KmodError(
        f"the patched modules do not load: {error}\nThe driver's own are loaded again. The next boot tries "
        "the patched ones once more, unless you uninstall them: mpsd-kmod uninstall --next-boot"
    ) from error
