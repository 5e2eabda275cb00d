"""The verbs of mpsd-kmod that change a machine: install, uninstall, load, unload; and users, status."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from kmod import modules, secureboot, source
from kmod.build import kernel
from kmod.debian import alone
from kmod.dkms import Dkms, module_set
from kmod.errors import InUse, KmodError, Unavailable
from kmod.install import (
    Manifest,
    Step,
    Wish,
    folder_of,
    kernels,
    lies_in_ours,
    own_folders,
    perform,
    plan_install,
    plan_uninstall,
    refuse_in_use,
    require,
    resolved,
    roll_back,
)
from kmod.loading import plan_load, plan_unload
from kmod.machine import Machine, must_be_root

LOCK_DEADLINE_S = 60.0
NEXT_BOOT = "--next-boot does it all the same, for the next boot"
RAMDISK = (
    "If the initial ramdisk of {release} holds the driver's modules, make it anew: "
    "update-initramfs -u -k {release} (Debian, Ubuntu) or dracut -f --kver {release}"
)


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verb = _verb(
        verbs, "install", install, "build the patched driver with DKMS and put it before the stock one"
    )
    verb.add_argument(
        "--tree", type=Path, help="the driver's source (default: the loaded driver's, in /usr/src)"
    )
    verb.add_argument("--kernel", default="", help="release to build for (default: the running one)")
    verb.add_argument(
        "--sign", nargs=2, type=Path, metavar=("KEY", "CERT"), help="sign with these (default: dkms' own)"
    )
    _next_boot(verb)
    _next_boot(_verb(verbs, "uninstall", uninstall, "remove all that install made; the stock modules stay"))
    _verb(verbs, "load", load, "unload the stock modules and load the patched ones, now")
    _verb(verbs, "unload", unload, "unload the patched modules and load the stock ones, now")
    _verb(verbs, "users", users, "list the loaded modules and who uses them", changes=False)


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    function: Callable[[argparse.Namespace], int],
    text: str,
    *,
    changes: bool = True,
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text)
    add_common(verb)
    if changes:
        verb.add_argument("--dry-run", action="store_true", help="tell each step, do none")
    verb.set_defaults(verb=function)
    return verb


def add_common(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="one JSON object on standard output")
    verb.add_argument(
        "--root", type=lambda text: Path(text).resolve(), default=Path("/"), help=argparse.SUPPRESS
    )


def _next_boot(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--next-boot",
        action="store_true",
        help="also while the driver is loaded; it takes effect at the next boot",
    )


def install(given: argparse.Namespace) -> int:
    machine = Machine(given.root)
    if not given.dry_run:
        must_be_root(machine, "install")
    used = modules.use(machine)
    wish = _wish(machine, given)
    require(machine, wish)
    name = next(module.installed for module in module_set(wish.tree) if module.built == "nvidia")
    source.require_same_driver(machine, wish.tree, wish.kernel.release, {name, "nvidia"})
    here = wish.kernel.release == machine.running
    if here and not given.next_boot:
        refuse_in_use(used, "what is installed now would not fit them", "unload them, or " + NEXT_BOOT)
    says = []
    if not wish.tree.tested:
        says.append(f"driver {wish.tree.version} is not one that the patch was tested with")
    if here and used.loaded:
        says.append(_until_boot(used))
    return _alone(machine, given, lambda: _make(machine, given, wish, says))


def _wish(machine: Machine, given: argparse.Namespace) -> Wish:
    tree = source.choose(machine, given.tree)
    release = given.kernel or machine.running
    try:
        found = kernel(release, machine.modules)
    except Unavailable as error:
        raise Unavailable(
            f"{error}; apt-get install linux-headers-{release} (or kernel-devel-{release})"
        ) from error
    return Wish(tree, found, secureboot.given_key(*given.sign) if given.sign else None)


def _make(machine: Machine, given: argparse.Namespace, wish: Wish, says: Sequence[str]) -> int:
    release = wish.kernel.release
    steps = plan_install(machine, wish)
    try:
        _do(given, steps, "installed already", says)
    except (KmodError, OSError):
        if not given.dry_run:
            roll_back(machine, release, lambda text: _say(given, f"taking out again: {text}"))
        raise
    if steps and not given.dry_run:
        _say(given, RAMDISK.format(release=release))
    return 0


def _until_boot(used: modules.Use) -> str:
    """What holds from now on to the next boot: files and loaded modules are of two builds."""
    missing = [name for name in modules.ALWAYS if name not in {module.name for module in used.loaded}]
    late = f", and {' '.join(missing)} cannot be loaded until then" if missing else ""
    return f"takes effect at the next boot, or with mpsd-kmod load or unload; what is loaded stays{late}"


def uninstall(given: argparse.Namespace) -> int:
    machine = Machine(given.root)
    used = modules.use(machine)
    if not given.dry_run:
        must_be_root(machine, "uninstall")
    says = []
    if machine.running in kernels(machine) and used.loaded:
        if not given.next_boot:
            refuse_in_use(
                used, "the stock ones would not fit them", "mpsd-kmod unload first, or " + NEXT_BOOT
            )
        says.append(_until_boot(used))

    def undo() -> int:
        _do(given, plan_uninstall(machine), "nothing is installed", says)
        return 0

    return _alone(machine, given, undo)


def load(given: argparse.Namespace) -> int:
    machine = Machine(given.root)
    return _exchange(machine, given, plan_load, "the patched modules are loaded")


def unload(given: argparse.Namespace) -> int:
    machine = Machine(given.root)
    return _exchange(machine, given, plan_unload, "the patched modules are not loaded")


def _exchange(
    machine: Machine,
    given: argparse.Namespace,
    plan: Callable[[Machine, modules.Use, Manifest], list[Step]],
    nothing: str,
) -> int:
    if not given.dry_run:
        must_be_root(machine, given.verb.__name__.strip("_"))
    manifest = _installed_for(machine, machine.running)

    def act() -> int:
        _do(given, plan(machine, modules.use(machine), manifest), nothing, [])
        return 0

    return _alone(machine, given, act)


def _installed_for(machine: Machine, release: str) -> Manifest:
    for folder in own_folders(machine):
        manifest = Manifest.read(folder)
        if manifest and release in Dkms(machine).kernels(manifest.version):
            return manifest
    raise KmodError(
        f"the patched modules are not installed for the running kernel {release}: mpsd-kmod install"
    )


def users(given: argparse.Namespace) -> int:
    used = modules.use(Machine(given.root))
    if given.json:
        print(json.dumps(used.as_json()))
    else:
        print("\n".join(used.lines()) or "no module of the driver is loaded")
    return 0


def machine_status(given: argparse.Namespace) -> int:
    """What is installed, what is loaded, and what the next boot would load."""
    machine = Machine(given.root)
    value = status_json(machine)
    if given.json:
        print(json.dumps(value))
        return 0
    print("\n".join(status_lines(machine, value)))
    return 0


def status_json(machine: Machine) -> dict[str, object]:
    used = modules.use(machine)
    installed = []
    for folder in own_folders(machine):
        manifest = Manifest.read(folder)
        if manifest is None:
            installed.append({"folder": str(folder), "whole": False})
            continue
        names = {module.built: module.installed for module in manifest.modules}
        active = Dkms(machine).kernels(manifest.version)
        found = {release: resolved(machine, release, names["nvidia-uvm"]) for release in active}
        installed.append(
            {
                "folder": str(folder),
                "whole": folder == folder_of(machine, manifest.version),
                "version": manifest.version,
                "from": manifest.vendor,
                "kernels": {release: lies_in_ours(machine, release, path) for release, path in found.items()},
            }
        )
    return {
        "running": machine.running,
        "installed": installed,
        "sources": [
            {"folder": str(tree.root), "version": tree.version, "proprietary": source.proprietary(tree)}
            for tree in source.candidates(machine)
        ],
        "loaded_version": source.loaded_version(machine),
        "loaded": used.as_json(),
        **secureboot.as_json(machine),
    }


def status_lines(machine: Machine, value: dict[str, object]) -> list[str]:
    lines = []
    installed, sources = value["installed"], value["sources"]
    assert isinstance(installed, list) and isinstance(sources, list)
    for entry in installed:
        if not entry["whole"]:
            lines.append(f"{entry['folder']}: half of an install; run install or uninstall once more")
            continue
        lines.append(f"installed: driver {entry['version']}, patched, from {entry['from']}")
        lines += [
            f"  kernel {release}: {'the patched modules come first' if first else 'NOT what modprobe finds'}"
            for release, first in entry["kernels"].items()
        ]
        if sources and entry["version"] not in {tree["version"] for tree in sources}:
            lines.append("  that driver's own source is gone or another version: run install again")
    if not installed:
        lines.append("installed: nothing of ours")
    version = str(value["loaded_version"])
    own = "patched" if modules.is_ours(machine) else "stock"
    lines.append(f"loaded: {f'driver {version}, {own}' if version else 'no nvidia module'}")
    lines.append(f"Secure Boot: {secureboot.state(machine).text()}")
    return lines


def refusal_json(error: Exception) -> str:
    value: dict[str, object] = {
        "done": False,
        "error": error.text if isinstance(error, InUse) else str(error),
    }
    if isinstance(error, InUse):
        value["loaded"] = error.used.as_json()
    return json.dumps(value)


def _do(given: argparse.Namespace, steps: Sequence[Step], nothing: str, says: Sequence[str]) -> None:
    if not given.json:
        for text in says:
            print(text)
    if given.dry_run:
        _say(given, "\n".join(f"would {step.text}" for step in steps) or nothing)
    elif not steps:
        _say(given, nothing)
    else:
        perform(steps, lambda text: _say(given, text))
    if given.json:
        done = not given.dry_run
        print(json.dumps({"done": done, "steps": [step.text for step in steps], "notes": list(says)}))


def _say(given: argparse.Namespace, text: str) -> None:
    if not given.json:
        print(text, flush=True)


def _alone(machine: Machine, given: argparse.Namespace, act: Callable[[], int]) -> int:
    if given.dry_run:
        return act()
    with alone(machine.state, LOCK_DEADLINE_S):
        return act()
