"""Steps that install the patched modules beside the driver's own, and that remove them.

The steps follow from the present state, not from records of earlier runs. The next run completes or reverts
an interrupted one. The driver's own files are never moved, changed or removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from kmod import bootguard, dkms, hooks, secureboot, symbols
from kmod.build import Kernel
from kmod.caching import write_whole
from kmod.changes import have_spatch
from kmod.command import PACKAGES, run
from kmod.dkms import FOLDER, Dkms, Module, module_set, write_configuration
from kmod.errors import InUse, KmodError, Unavailable
from kmod.machine import OURS, Machine
from kmod.modules import Use
from kmod.placed import files, kernels, put_aside, remove_files
from kmod.secureboot import Key
from kmod.source import PACKAGE
from kmod.tree import Tree, find

MANIFEST = Path(FOLDER) / "made-from.json"
FORMAT = 1
BUILDING = ("spatch", "make", "gcc")
INSTALLING = ("dkms", "depmod", "modprobe")

# The copy, dkms' copy, the compiled objects (with debug information), and the stripped modules.
SPACE_FACTOR = 5
SHOW_DEADLINE_S = 60.0
HEADER = "# Written by mpsd-kmod, which also removes it: prefer the patched modules to the stock modules.\n"
# Remains of a build belong to another kernel or another patch.
BUILT = shutil.ignore_patterns("*.ko", "*.o", "*.mod", "*.mod.c", ".*.cmd", "conftest", "Module.symvers")


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `text`: its description, in the imperative."""

    text: str
    act: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Inputs and outputs of a source folder of ours. A folder without it is incomplete."""

    version: str
    vendor: str
    digest: str
    modules: tuple[Module, ...]

    @staticmethod
    def read(folder: Path) -> Manifest | None:
        try:
            value = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if value["format"] != FORMAT:
                return None
            modules = tuple(
                Module(str(module["built"]), str(module["installed"])) for module in value["modules"]
            )
            return Manifest(str(value["version"]), str(value["vendor"]), str(value["digest"]), modules)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, folder: Path) -> None:
        value = {"format": FORMAT, **asdict(self)}
        (folder / MANIFEST).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class InstallRequest:
    """A requested installation."""

    tree: Tree
    kernel: Kernel
    key: Key | None = None


def perform(steps: Iterable[Step], say: Callable[[str], None]) -> None:
    for step in steps:
        say(step.text)
        step.act()


def require_programs(*more: str) -> None:
    """Raise Unavailable if a program for patching or building, or one of `more`, is missing."""
    missing = [PACKAGES.get(name, name) for name in (*BUILDING, *more) if not _have(name)]
    if missing:
        packages = " ".join(sorted(set(missing)))
        raise Unavailable(f"missing here: {packages}; apt-get install {packages} (or your distribution's)")


def require(machine: Machine, wish: InstallRequest) -> None:
    """Raise KmodError if something that the build needs is missing, before anything is done."""
    require_programs(*INSTALLING)
    secureboot.require(machine, wish.key)
    if wish.key:
        secureboot.require_tool(machine, wish.kernel.release)
    need = SPACE_FACTOR * sum(path.stat().st_size for path in wish.tree.root.rglob("*") if path.is_file())
    for folder in (machine.sources, machine.dkms_tree.parent, machine.modules):
        free = shutil.disk_usage(folder).free if folder.is_dir() else need
        if free < need:
            raise KmodError(f"{folder} has {free >> 20} MiB free, but the build needs about {need >> 20} MiB")


def _have(name: str) -> bool:
    return have_spatch() if name == "spatch" else shutil.which(name) is not None


def refuse_in_use(used: Use, what: str, remedy: str) -> None:
    """Raise InUse while a driver module is loaded: modules loaded later would be of the other build."""
    if used.loaded:
        raise InUse(f"the driver's modules are loaded, so {what}; {remedy}", used)


def folder_of(machine: Machine, version: str) -> Path:
    return machine.sources / f"{PACKAGE}-{version}"


def digest(wish: InstallRequest, machine: Machine) -> str:
    """Return a digest of everything that decides the build, except the kernel: source, patch, key."""
    total = hashlib.sha256(hooks.whole_patch().digest().encode())
    key = f"{wish.key.private} {wish.key.certificate}" if wish.key else ""
    total.update(f"{key}\0{machine.root}\0".encode())
    # Includes the scripts written here, because a newer mpsd-kmod may write others.
    for writer in (dkms, bootguard):
        total.update(Path(str(writer.__file__)).read_bytes())
    for path in sorted(wish.tree.root.rglob("*")):
        if path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(wish.tree.root)}\0{content}\0".encode())
    return total.hexdigest()


def _wanted(machine: Machine, wish: InstallRequest) -> Manifest:
    """Return the wanted manifest. Reads the driver's whole source."""
    tree = wish.tree
    return Manifest(tree.version, str(tree.root), digest(wish, machine), module_set(tree))


def _fresh(machine: Machine, wanted: Manifest) -> bool:
    found = Manifest.read(folder_of(machine, wanted.version))
    return found is not None and found.digest == wanted.digest


def replaces(machine: Machine, wish: InstallRequest) -> bool:
    """Return whether a build of another driver or patch must be removed first: a kernel would mix both."""
    return _replaced_by(machine, _wanted(machine, wish))


def _replaced_by(machine: Machine, wanted: Manifest) -> bool:
    return _others(machine, wanted.version) or (not _fresh(machine, wanted) and _remains(machine))


def plan_install(machine: Machine, wish: InstallRequest) -> list[Step]:
    """Return the remaining steps; none if everything is installed."""
    wanted = _wanted(machine, wish)
    version, folder = wanted.version, folder_of(machine, wanted.version)
    if _replaced_by(machine, wanted):
        return [
            *plan_uninstall(machine),
            _source_step(machine, wish, wanted),
            *_build_steps(machine, wish, wanted),
        ]
    if not _fresh(machine, wanted):
        return [_source_step(machine, wish, wanted), *_build_steps(machine, wish, wanted)]
    if _active(machine, version, wish.kernel.release, wanted.modules):
        return [] if bootguard.present(machine, folder) else _guard_steps(machine, version)
    return _build_steps(machine, wish, wanted)


def _source_step(machine: Machine, wish: InstallRequest, manifest: Manifest) -> Step:
    folder = folder_of(machine, manifest.version)
    text = f"copy {wish.tree.root} to {folder} and apply the patch"
    return Step(text, partial(_make_source, machine, wish, manifest))


def _build_steps(machine: Machine, wish: InstallRequest, manifest: Manifest) -> list[Step]:
    version, release, tool = manifest.version, wish.kernel.release, Dkms(machine)
    settings = machine.depmod_settings
    return [
        Step(f"write {settings}", partial(write_whole, settings, settings_text(manifest.modules))),
        *_guard_steps(machine, version),
        Step(f"dkms: register {PACKAGE}/{version}", partial(_register, tool, version)),
        Step(f"dkms: build for {release}", partial(_build, machine, version, release)),
        Step(
            f"dkms: install for {release}, in {machine.ours(release)}",
            partial(tool.install, version, release),
        ),
        Step(f"depmod {release}", partial(machine.depmod, release)),
        Step(
            "check that modprobe finds them and that their symbol versions agree",
            partial(check, machine, release, manifest.modules),
        ),
    ]


def _guard_steps(machine: Machine, version: str) -> list[Step]:
    put = partial(bootguard.put, machine, folder_of(machine, version))
    return [Step(f"write {bootguard.unit(machine)}", put)] if bootguard.wanted(machine) else []


def settings_text(modules: Sequence[Module]) -> str:
    return HEADER + "".join(f"override {module.installed} * {OURS}\n" for module in modules)


def plan_uninstall(machine: Machine) -> list[Step]:
    """Return the remaining steps of removal; none if nothing of ours is installed."""
    tool, settings, releases = Dkms(machine), machine.depmod_settings, kernels(machine)
    # First and at once: a reboot during removal must find the driver's own modules, not names without files.
    steps = [
        Step(f"disable {machine.ours(release)}; depmod {release}", partial(put_aside, machine, release))
        for release in releases
    ]
    steps += [
        Step(f"dkms: remove {PACKAGE}/{version}", partial(tool.forget, version))
        for version in tool.versions()
    ]
    if any(files(machine, release) for release in releases):
        places = ", ".join(str(machine.ours(release)) for release in releases)
        steps.append(Step(f"remove {places}", partial(remove_files, machine, releases)))
    if settings.exists():
        steps.append(Step(f"remove {settings}", settings.unlink))
    if bootguard.remains(machine):
        steps.append(Step(f"remove {bootguard.unit(machine)}", partial(bootguard.remove, machine)))
    # Repeat for kernels of an interrupted removal: modules.dep still names our modules then.
    steps += [Step(f"depmod {release}", partial(machine.depmod, release)) for release in releases]
    steps += [Step(f"remove {folder}", partial(shutil.rmtree, folder)) for folder in own_folders(machine)]
    return steps


def roll_back(machine: Machine, release: str, say: Callable[[str], None]) -> Path | None:
    """Revert a failed install, because DKMS would retry it with every new kernel.

    If other kernels have complete modules of ours, only this kernel's are removed. Returns the copy of the
    build's log.
    """
    tool, kept = Dkms(machine), None
    for log in machine.dkms_tree.glob(f"{PACKAGE}/*/build/make.log"):
        machine.state.mkdir(parents=True, exist_ok=True)
        kept = machine.state / "make.log"
        shutil.copyfile(log, kept)
    others = [
        (version, kernel)
        for version in tool.versions()
        for kernel in tool.kernels(version)
        if kernel != release
    ]
    if not others:
        perform(plan_uninstall(machine), say)
        return kept
    say(f"remove the build for {release}; {', '.join(kernel for _, kernel in others)} keep them")
    for version in {version for version, _ in others}:
        _drop(machine, version, release)
    machine.depmod(release)
    return kept


def _drop(machine: Machine, version: str, release: str) -> None:
    """Remove the modules of one kernel, complete or not. The caller runs depmod."""
    tool = Dkms(machine)
    remove_files(machine, [release])
    for link in tool.tree.glob(f"kernel-{release}-*"):
        link.unlink()
    tool.forget_build(version, release)


def check(machine: Machine, release: str, modules: Sequence[Module]) -> None:
    """Check that modprobe finds all our modules and that they fit together. Raises KmodError."""
    found = {module.built: resolved(machine, release, module.installed) for module in modules}
    astray = {
        built: path
        for built, path in found.items()
        if not lies_in_ours(machine, release, path) or not (path and path.is_file())
    }
    if astray:
        listed = ", ".join(f"{built} is {_where(path)}" for built, path in sorted(astray.items()))
        raise KmodError(f"modprobe does not find the patched modules in {machine.ours(release)}: {listed}")
    giver = found["nvidia"]
    for path in found.values():
        assert giver and path
        _, differing = symbols.disagreements(giver, path)
        if differing:
            raise KmodError(f"{path} was built against another nvidia.ko: {', '.join(differing[:5])} differ")


def lies_in_ours(machine: Machine, release: str, path: Path | None) -> bool:
    """Return whether modprobe's answer is in our folder; some distributions' says /usr/lib/modules."""
    return path is not None and path.parent.resolve() == machine.ours(release).resolve()


def _where(path: Path | None) -> str:
    if path is None:
        return "not found"
    return str(path) if path.is_file() else f"{path}, which does not exist"


def resolved(machine: Machine, release: str, name: str) -> Path | None:
    """Return the file that modprobe would load for a name, regardless of the machine's modprobe settings."""
    where = [] if machine.real else ["-d", str(machine.root)]
    try:
        said = run(
            ["modprobe", *where, "-i", "-S", release, "--show-depends", name], deadline_s=SHOW_DEADLINE_S
        )
    except KmodError:
        return None
    lines = [line.split() for line in said.splitlines() if line.startswith("insmod ")]
    return Path(lines[-1][1]) if lines else None


def _active(machine: Machine, version: str, release: str, modules: Sequence[Module]) -> bool:
    settings = machine.depmod_settings
    if release not in Dkms(machine).kernels(version) or not settings.is_file():
        return False
    if settings.read_text(encoding="utf-8") != settings_text(modules):
        return False
    try:
        check(machine, release, modules)
    except KmodError:
        return False
    return True


def _register(tool: Dkms, version: str) -> None:
    if not tool.added(version):
        tool.forget(version)
        tool.add(version)


def _build(machine: Machine, version: str, release: str) -> None:
    """Build from the beginning, because an earlier run may have left an incomplete build."""
    # The build takes minutes, in which modprobe must not find names without files.
    put_aside(machine, release)
    _drop(machine, version, release)
    Dkms(machine).build(version, release)


def _make_source(machine: Machine, wish: InstallRequest, manifest: Manifest) -> None:
    """Create the source folder under its name only when complete. Raises KmodError."""
    folder = folder_of(machine, manifest.version)
    beside = folder.with_name(f".{folder.name}.new")
    for old in (beside, folder):
        if old.exists():
            shutil.rmtree(old)
    try:
        machine.sources.mkdir(parents=True, exist_ok=True)
        # Links may lead out of the source.
        shutil.copytree(wish.tree.root, beside, symlinks=False, ignore=BUILT)
        tree = find(beside)
        hooks.apply(tree, hooks.whole_patch())
        write_configuration(tree, manifest.modules, Path(manifest.vendor), machine, wish.key)
        bootguard.write_script(machine, tree.root / FOLDER, manifest.modules)
        manifest.write(beside)
        os.rename(beside, folder)
    except (OSError, shutil.Error) as error:
        raise KmodError(f"cannot create {folder}: {error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _others(machine: Machine, version: str) -> bool:
    known = {folder.name for folder in own_folders(machine)} - {folder_of(machine, version).name}
    return bool(known) or bool(set(Dkms(machine).versions()) - {version})


def _remains(machine: Machine) -> bool:
    return bool(Dkms(machine).versions() or kernels(machine) or own_folders(machine))


def own_folders(machine: Machine) -> list[Path]:
    """Return our source folders, incomplete ones too."""
    found = [*machine.sources.glob(f"{PACKAGE}-*"), *machine.sources.glob(f".{PACKAGE}-*.new")]
    return sorted(path for path in found if path.is_dir() and not path.is_symlink())
