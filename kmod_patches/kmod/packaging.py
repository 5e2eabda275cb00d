"""Verbs of mpsd-kmod on the machine: install, uninstall, load, unload, users and status."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kmod import hooks, modules, secureboot, source
from kmod.alone import alone
from kmod.build import kernel
from kmod.command import undisturbed
from kmod.dkms import Dkms
from kmod.errors import InUse, KmodError, Unavailable, program, text_of
from kmod.install import (
    InstallRequest,
    Manifest,
    Step,
    folder_of,
    lies_in_ours,
    own_folders,
    perform,
    plan_install,
    plan_uninstall,
    refuse_in_use,
    replaces,
    require,
    resolved,
    roll_back,
)
from kmod.loading import loaded_is_old, plan_load, plan_unload
from kmod.machine import Machine, must_be_root
from kmod.placed import kernels

LOCK_DEADLINE_S = 60.0
NEXT_BOOT = "--next-boot proceeds anyway, for the next boot"
RAMDISK = (
    "If the initial ramdisk of {release} contains the driver's modules, rebuild it: "
    "update-initramfs -u -k {release} (Debian, Ubuntu) or dracut -f --kver {release}"
)


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verb = _verb(
        verbs, "install", install, "build the patched driver with DKMS and prefer it to the stock modules"
    )
    verb.add_argument(
        "--tree", type=Path, help="the driver's source (default: the loaded driver's, in /usr/src)"
    )
    verb.add_argument("--kernel", default="", help="release to build for (default: the running kernel)")
    verb.add_argument(
        "--sign", nargs=2, type=Path, metavar=("KEY", "CERT"), help="key and certificate (default: dkms' own)"
    )
    _next_boot(verb)
    _next_boot(
        _verb(verbs, "uninstall", uninstall, "remove all that install created; the stock modules stay")
    )
    _verb(verbs, "load", load, "unload the stock modules and load the patched modules, now")
    _verb(verbs, "unload", unload, "unload the patched modules and load the stock modules, now")
    _verb(verbs, "users", users, "list the loaded modules and the processes that use them", changes=False)


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
        verb.add_argument("--dry-run", action="store_true", help="print each step without doing it")
    verb.set_defaults(verb=function)
    return verb


def add_common(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    verb.add_argument(
        "--root", type=lambda text: Path(text).resolve(), default=Path("/"), help=argparse.SUPPRESS
    )


def _next_boot(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--next-boot",
        action="store_true",
        help="proceed while the driver is loaded; it takes effect at the next boot",
    )


def install(given: argparse.Namespace) -> int:
    machine = Machine(given.root)
    if not given.dry_run:
        must_be_root(machine, "install")
    wish = _wish(machine, given)
    require(machine, wish)
    source.require_same_driver(machine, wish.tree, wish.kernel.release)
    if given.dry_run:
        hooks.try_patch(wish.tree, hooks.whole_patch())
    return _alone(machine, given, lambda: _make(machine, given, wish))


def _wish(machine: Machine, given: argparse.Namespace) -> InstallRequest:
    release = given.kernel or machine.running
    tree = source.choose(machine, release, given.tree)
    try:
        found = kernel(release, machine.modules)
    except Unavailable as error:
        raise Unavailable(
            f"{error}; apt-get install linux-headers-{release} (or kernel-devel-{release})"
        ) from error
    return InstallRequest(tree, found, secureboot.given_key(*given.sign) if given.sign else None)


def _make(machine: Machine, given: argparse.Namespace, wish: InstallRequest) -> int:
    release, used = wish.kernel.release, modules.use(machine)
    # Another build removes the present build of every kernel first.
    here = release == machine.running or (replaces(machine, wish) and machine.running in kernels(machine))
    if here and not given.next_boot:
        order = " ".join(modules.unload_order(used.loaded))
        remedy = f"{NEXT_BOOT}; or end the programs that use them and unload them: rmmod {order}"
        refuse_in_use(used, "the installed modules would not fit them", remedy)
    says = []
    if not wish.tree.tested:
        says.append(f"driver {wish.tree.version} is not tested with this patch")
    if here and used.loaded:
        says.append(_until_boot(used, f", or with {program()} load"))
    steps = plan_install(machine, wish)
    try:
        _do(given, steps, "already installed", says, [RAMDISK.format(release=release)])
    except (KmodError, OSError) as error:
        if given.dry_run:
            raise
        raise _taken_out(machine, given, release, error) from error
    return 0


def _taken_out(machine: Machine, given: argparse.Namespace, release: str, error: Exception) -> KmodError:
    """Revert a failed install and return the error to report."""
    text = str(error)
    try:
        kept = roll_back(machine, release, lambda said: _say(given, f"reverting: {said}"))
    except (KmodError, OSError) as second:
        return KmodError(f"{text}\nReverting failed as well: {second}; run {program()} uninstall")
    return KmodError(f"{text}\nComplete log of the build: {kept}" if kept else text)


def _until_boot(used: modules.Use, sooner: str) -> str:
    """Return the state until the next boot: files and loaded modules are of two builds."""
    missing = [name for name in modules.ALWAYS if name not in {module.name for module in used.loaded}]
    late = f", and {' '.join(missing)} cannot be loaded until then" if missing else ""
    return f"takes effect at the next boot{sooner}; loaded modules stay{late}"


def uninstall(given: argparse.Namespace) -> int:
    machine = Machine(given.root)
    if not given.dry_run:
        must_be_root(machine, "uninstall")

    def undo() -> int:
        used, releases, says = modules.use(machine), kernels(machine), []
        # Modules of the driver that are loaded later fit the loaded ones, if those are the driver's own.
        stock = not used.ours and any(module.name == "nvidia_uvm" for module in used.loaded)
        if machine.running in releases and used.loaded and not stock:
            if not given.next_boot:
                remedy = f"{program()} unload first, or {NEXT_BOOT}"
                refuse_in_use(used, "the stock modules would not fit them", remedy)
            says.append(_until_boot(used, ""))
        after = [RAMDISK.format(release=release) for release in releases]
        _do(given, plan_uninstall(machine), "nothing is installed", says, after)
        if not given.dry_run:
            machine.to_load.unlink(missing_ok=True)
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

    def act() -> int:
        manifest = _installed_for(machine, machine.running, wanted=plan is plan_load)
        with undisturbed():
            _do(given, plan(machine, modules.use(machine), manifest), nothing, [])
        return 0

    return _alone(machine, given, act)


def _installed_for(machine: Machine, release: str, *, wanted: bool) -> Manifest:
    for folder in own_folders(machine):
        manifest = Manifest.read(folder)
        if manifest and release in Dkms(machine).kernels(manifest.version):
            return manifest
    none = f"the patched modules are not installed for the running kernel {release}"
    raise KmodError(f"{none}: {program()} install" if wanted else f"{none}, so there is nothing to unload")


def users(given: argparse.Namespace) -> int:
    used = modules.use(Machine(given.root))
    if given.json:
        print(json.dumps(used.as_json()))
    else:
        print("\n".join(used.lines()) or "no driver module is loaded")
    return 0


def machine_status(given: argparse.Namespace) -> int:
    """Print the installed modules, the loaded modules, and the modules of the next boot."""
    machine = Machine(given.root)
    value = status_json(machine)
    if given.json:
        print(json.dumps(value))
        return 0
    print("\n".join(status_lines(machine, value)))
    return 0


def status_json(machine: Machine) -> dict[str, object]:
    used, old = modules.use(machine), False
    installed = []
    for folder in own_folders(machine):
        manifest = Manifest.read(folder)
        if manifest is None:
            installed.append({"folder": str(folder), "whole": False})
            continue
        old = old or loaded_is_old(machine, manifest)
        names = {module.built: module.installed for module in manifest.modules}
        active = Dkms(machine).kernels(manifest.version)
        stock = {release: sorted(source.stock_versions(machine, release)) for release in active}
        found = {release: resolved(machine, release, names["nvidia-uvm"]) for release in active}
        installed.append(
            {
                "folder": str(folder),
                # Without a kernel that it was built for, the install was interrupted.
                "whole": bool(active) and folder == folder_of(machine, manifest.version),
                "version": manifest.version,
                "from": manifest.vendor,
                "kernels": {release: lies_in_ours(machine, release, path) for release, path in found.items()},
                "drivers": stock,
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
        "loaded_is_old": old,
        **secureboot.as_json(machine),
    }


def status_lines(machine: Machine, value: dict[str, object]) -> list[str]:
    lines = []
    installed, sources = value["installed"], value["sources"]
    assert isinstance(installed, list) and isinstance(sources, list)
    for entry in installed:
        if not entry["whole"]:
            lines.append(f"{entry['folder']}: incomplete install; run install or uninstall again")
            continue
        lines.append(f"installed: driver {entry['version']}, patched, from {entry['from']}")
        lines += [
            f"  kernel {release}: {'the patched modules come first' if first else 'NOT what modprobe finds'}"
            for release, first in entry["kernels"].items()
        ]
        lines += [
            f"  kernel {release} now has driver {', '.join(others)}, whose libraries refuse these modules: "
            "run install again"
            for release, others in entry["drivers"].items()
            if others and entry["version"] not in others
        ]
        if sources and entry["version"] not in {tree["version"] for tree in sources}:
            lines.append("  that driver's own source is missing or has another version: run install again")
    if not installed:
        lines.append("installed: no patched modules")
    version = str(value["loaded_version"])
    own = "patched" if modules.is_ours(machine) else "stock"
    if value["loaded_is_old"]:
        own += f", a build other than the installed one: {program()} load"
    lines.append(f"loaded: {f'driver {version}, {own}' if version else 'no nvidia module'}")
    lines.append(f"Secure Boot: {secureboot.state(machine).text()}")
    return lines


def refusal_json(error: Exception) -> str:
    value: dict[str, object] = {
        "done": False,
        "error": error.text if isinstance(error, InUse) else text_of(error),
    }
    if isinstance(error, InUse):
        value["loaded"] = error.used.as_json()
    return json.dumps(value)


def _do(
    given: argparse.Namespace,
    steps: Sequence[Step],
    nothing: str,
    says: Sequence[str],
    after: Sequence[str] = (),
) -> None:
    """Run the steps. `says` is printed before them, `after` when they are done."""
    if not given.json:
        for text in says:
            _say(given, text)
    if given.dry_run:
        _say(given, "\n".join(f"would {step.text}" for step in steps) or nothing)
    elif not steps:
        _say(given, nothing)
    else:
        perform(steps, lambda text: _say(given, text))
        for text in after:
            _say(given, text)
    if given.json:
        done = not given.dry_run
        notes = [*says, *(after if steps else ())]
        tell(json.dumps({"done": done, "steps": [step.text for step in steps], "notes": notes}))


def _say(given: argparse.Namespace, text: str) -> None:
    if not given.json:
        tell(text)


def tell(text: str) -> None:
    """Print on standard output. A lost connection must not stop the steps half-way."""
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _alone(machine: Machine, given: argparse.Namespace, act: Callable[[], int]) -> int:
    if given.dry_run:
        return act()
    with alone(machine.state, LOCK_DEADLINE_S):
        return act()
