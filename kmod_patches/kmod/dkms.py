"""Instructions for DKMS: build the driver's whole set of modules, and install them in a folder of ours.

DKMS alone chooses its install folder: updates/dkms on Debian and Ubuntu, extra on Red Hat, whatever the
configuration says. The driver's own modules are there under the same names and would be overwritten. So DKMS
installs ours under other names. A script that DKMS runs before its depmod moves them to a folder of ours,
under the names that the distribution's settings use.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kmod.build import possible_mends
from kmod.changes import changed, read, spatch, write
from kmod.command import run
from kmod.errors import KmodError
from kmod.machine import OURS, Machine
from kmod.secureboot import Key
from kmod.source import PACKAGE
from kmod.tree import Tree

FOLDER = "mpsd"
"""Folder below the source folder, for our scripts and the driver's own dkms.conf."""

KNOWN = ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm", "nvidia-peermem")
NEEDED = frozenset({"nvidia", "nvidia-uvm"})
PREFIX = "mpsd-"
"""Prefix of the names under which DKMS installs."""

CONFIGURATION_DEADLINE_S = 30.0
BUILD_DEADLINE_S = 3600.0
DEADLINE_S = 300.0

OWN_CONFIGURATION = """\
MAKE[0]="'make' -j${{parallel_jobs:-1}} KERNEL_UNAME=${{kernelver}} NV_KERNEL_MODULES='{modules}' modules"
CLEAN="true"
{names}"""

CONFIGURATION = """\
# Written by mpsd-kmod; mpsd-kmod uninstall removes it and everything built with it.
{base}
PACKAGE_NAME="{package}"
PACKAGE_VERSION="{version}"
AUTOINSTALL="yes"
NO_WEAK_MODULES="yes"
# Not for a new kernel after the driver itself was removed or replaced.
[ -e {vendor} ] || AUTOINSTALL=
for index in "${{!BUILT_MODULE_NAME[@]}}"; do
    DEST_MODULE_NAME[$index]="{prefix}${{DEST_MODULE_NAME[$index]:-${{BUILT_MODULE_NAME[$index]}}}}"
    DEST_MODULE_LOCATION[$index]="/{location}"
done
PRE_BUILD="{folder}/before-build $kernel_source_dir $PRE_BUILD"
POST_INSTALL="{folder}/place $kernelver"
POST_REMOVE="{folder}/take-out $kernelver"
"""

BEFORE_BUILD = """\
#!/bin/sh
# dkms runs this in its copy of the source. The headers of this kernel decide whether the driver needs changes
# to build.
set -eu
headers=$1
shift
for header in "$headers/include/linux/pci.h" "${headers%/build}/source/include/linux/pci.h"; do
    [ -f "$header" ] || continue
    commas=$(tr '\\n' ' ' <"$header" | grep -o 'pci_resize_resource *([^)]*)' | head -n 1 | tr -cd , | wc -c)
    break
done
here=mpsd/mends
source=nvidia/nv-pci.c
if [ "${commas:-0}" -eq 3 ] && [ -f $here/nv-pci.c.after ] && cmp -s $here/nv-pci.c.before $source; then
    cp $here/nv-pci.c.after $source
fi
[ $# -eq 0 ] || exec "$@"
"""

PLACE = """\
#!/bin/sh
# dkms runs this after installing, before depmod. Copy first and rename, so that names have complete files.
set -eu
[ -n "$1" ]
kernel={modules}/$1
target=$kernel/{location}
# dkms ignores this exit status and indexes what it installed: mixed with the driver's own modules.
gone() {{
    status=$?
    [ $status -ne 0 ] || return 0
    rm -f "$target"/*.new "$target"/*.plain
    for name in {names}; do
        find "$kernel" -name "{prefix}$name.ko*" ! -path "$target/*" -delete
    done
    echo "mpsd-kmod: the patched modules are not in place for $1: it keeps the driver's own" >&2
}}
trap 'gone "$1"' EXIT
mkdir -p "$target"
rm -f "$target"/*.new "$target"/*.plain "$target"/*.off
for name in {names}; do
    found=$(find "$kernel" -name "{prefix}$name.ko*" ! -path "$target/*" | head -n 1)
    [ -n "$found" ] || {{ echo "mpsd-kmod: dkms installed no {prefix}$name.ko" >&2; exit 1; }}
    made=$target/$name.ko${{found##*.ko}}
    cp "$found" "$made.new"
{sign}done
rm -f "$target"/*.ko "$target"/*.ko.?z "$target"/*.ko.zst
for made in "$target"/*.new; do
    mv "$made" "${{made%.new}}"
done
for name in {names}; do
    find "$kernel" -name "{prefix}$name.ko*" ! -path "$target/*" -delete
done
"""

# A compressed file cannot be signed, and the kernel loads uncompressed files as well.
SIGN = """\
    case $made in
    *.xz) xz -dc "$made.new" >"$target/$name.ko.plain" ;;
    *.gz) gzip -dc "$made.new" >"$target/$name.ko.plain" ;;
    *.zst) zstd -dcq "$made.new" >"$target/$name.ko.plain" ;;
    *) cp "$made.new" "$target/$name.ko.plain" ;;
    esac
    rm "$made.new"
    for tool in "$kernel/build/scripts/sign-file" "/usr/lib/linux-kbuild-${{1%.*}}/scripts/sign-file" \\
        "$(command -v kmodsign || true)"; do
        [ ! -x "$tool" ] || break
    done
    hash=$(sed -n 's/^CONFIG_MODULE_SIG_HASH="\\(.*\\)"/\\1/p' "$kernel/build/.config" 2>/dev/null || true)
    "$tool" "${{hash:-sha512}}" {private} {certificate} "$target/$name.ko.plain"
    mv "$target/$name.ko.plain" "$target/$name.ko.new"
"""

TAKE_OUT = """\
#!/bin/sh
# dkms runs this after it has removed what it installed, before depmod.
set -eu
[ -n "$1" ]
kernel={modules}/$1
rm -rf "$kernel/{location}"
for name in {names}; do
    find "$kernel" -name "{prefix}$name.ko*" -delete 2>/dev/null || true
done
"""


@dataclass(frozen=True, slots=True)
class Module:
    """A module: its name in the build, and the name of its installed file, both without .ko."""

    built: str
    installed: str

    @property
    def kernel_name(self) -> str:
        """Name in /proc/modules."""
        return self.built.replace("-", "_")


def module_set(tree: Tree) -> tuple[Module, ...]:
    """Return the modules in the driver's own dkms.conf, or in its folders if that is a template or
    missing."""
    found = _configured(tree) or tuple(Module(name, name) for name in KNOWN if (tree.root / name).is_dir())
    missing = NEEDED - {module.built for module in found}
    if missing:
        raise KmodError(f"{tree.root}/dkms.conf does not build {' and '.join(sorted(missing))}")
    return found


def _configured(tree: Tree) -> tuple[Module, ...]:
    """Evaluate dkms.conf, a shell script that dkms runs as root, and so does this when it is to be built."""
    path = tree.root / "dkms.conf"
    if not path.is_file() or "__DKMS_MODULES" in read(path):
        return ()
    script = (
        '. "$1" >/dev/null 2>&1; for i in "${!BUILT_MODULE_NAME[@]}"; do '
        'echo "module ${BUILT_MODULE_NAME[$i]} ${DEST_MODULE_NAME[$i]:-${BUILT_MODULE_NAME[$i]}}"; done'
    )
    said = run(["bash", "--norc", "-c", script, "bash", path], deadline_s=CONFIGURATION_DEADLINE_S)
    lines = [line.split() for line in said.splitlines()]
    return tuple(Module(words[1], words[2]) for words in lines if len(words) == 3 and words[0] == "module")


def configuration(tree: Tree, modules: Sequence[Module], vendor: Path) -> str:
    """Return dkms.conf. `vendor`: the driver's own source folder; without it no new kernel gets our
    modules."""
    if _configured(tree):
        # The distribution's flags, which may be needed on this machine.
        base = f'. "${{BASH_SOURCE[0]%/*}}/{FOLDER}/driver-dkms.conf"'
    else:
        names = "".join(f'BUILT_MODULE_NAME[{i}]="{module.built}"\n' for i, module in enumerate(modules))
        base = OWN_CONFIGURATION.format(modules=" ".join(module.built for module in modules), names=names)
    return CONFIGURATION.format(
        base=base.rstrip("\n"),
        package=PACKAGE,
        version=tree.version,
        prefix=PREFIX,
        folder=FOLDER,
        location=OURS,
        vendor=shlex.quote(str(vendor)),
    )


def write_configuration(
    tree: Tree, modules: Sequence[Module], vendor: Path, machine: Machine, key: Key | None
) -> None:
    """Write dkms.conf and our scripts into a source folder, `tree`. Raises KmodError."""
    folder = tree.root / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    text = configuration(tree, modules, vendor)
    if _configured(tree):
        shutil.copyfile(tree.root / "dkms.conf", folder / "driver-dkms.conf")
    values = {
        "modules": shlex.quote(str(machine.modules)),
        "location": OURS,
        "prefix": PREFIX,
        "names": " ".join(shlex.quote(module.installed) for module in modules),
        "sign": "",
    }
    if key:
        values["sign"] = SIGN.format(
            private=shlex.quote(str(key.private)), certificate=shlex.quote(str(key.certificate))
        )
    write_program(folder / "before-build", BEFORE_BUILD)
    write_program(folder / "place", PLACE.format_map(values))
    write_program(folder / "take-out", TAKE_OUT.format_map(values))
    for mend in possible_mends(tree):
        (folder / "mends").mkdir(exist_ok=True)
        name = Path(mend.file).name
        write(folder / "mends" / f"{name}.before", read(tree.root / mend.file))
        write(folder / "mends" / f"{name}.after", changed(tree.root, mend, spatch))
    (tree.root / "dkms.conf").unlink(missing_ok=True)
    (tree.root / "dkms.conf").write_text(text, encoding="utf-8")


def write_program(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@dataclass(frozen=True, slots=True)
class Dkms:
    """The dkms command, and the state of our package in its tree."""

    machine: Machine

    @property
    def tree(self) -> Path:
        return self.machine.dkms_tree / PACKAGE

    def versions(self) -> list[str]:
        """Return all registered versions, incomplete ones too."""
        if not self.tree.is_dir():
            return []
        return sorted(path.name for path in self.tree.iterdir() if path.is_dir() and not path.is_symlink())

    def added(self, version: str) -> bool:
        return (self.tree / version / "source").exists()

    def kernels(self, version: str) -> list[str]:
        """Return the kernels for which it is active."""
        links = self.tree.glob("kernel-*") if self.tree.is_dir() else ()
        found = [Path(link.readlink()).parts for link in links if link.is_symlink()]
        return sorted(parts[1] for parts in found if len(parts) >= 3 and parts[0] == version)

    def add(self, version: str) -> None:
        self._run("add", version)

    def build(self, version: str, release: str) -> None:
        """Build for a kernel. Raises KmodError with the end of the log."""
        try:
            self._run("build", version, "-k", release, *self._headers(release), deadline_s=BUILD_DEADLINE_S)
        except KmodError as error:
            raise KmodError(f"{error}{self._log(version)}") from None

    def install(self, version: str, release: str) -> None:
        self._run("install", version, "-k", release, "--no-depmod", *self._headers(release))

    def forget(self, version: str) -> None:
        """Remove a version for all kernels, with remains of interrupted runs. The caller runs depmod."""
        for release in self.kernels(version):
            try:
                self._run("uninstall", version, "-k", release, "--no-depmod")
            except KmodError:
                pass  # An incomplete version: removed below, and the caller does `take-out`'s work.
        for link in self.tree.glob("kernel-*") if self.tree.is_dir() else ():
            if link.is_symlink() and link.readlink().parts[:1] == (version,):
                link.unlink()
        shutil.rmtree(self.tree / version, ignore_errors=True)
        if self.tree.is_dir() and not any(self.tree.iterdir()):
            self.tree.rmdir()

    def forget_build(self, version: str, release: str) -> None:
        """Remove an inactive build for one kernel, complete or not."""
        shutil.rmtree(self.tree / version / release, ignore_errors=True)
        shutil.rmtree(self.tree / version / "build", ignore_errors=True)

    def _headers(self, release: str) -> list[str]:
        if self.machine.real:
            return []
        return ["--kernelsourcedir", str(self.machine.modules / release / "build")]

    def _log(self, version: str) -> str:
        log = self.tree / version / "build/make.log"
        try:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "\nThe end of its make.log:\n" + "\n".join(lines[-12:])

    def _run(self, verb: str, version: str, *words: str, deadline_s: float = DEADLINE_S) -> None:
        where: list[str] = []
        if not self.machine.real:
            where += ["--dkmstree", str(self.machine.dkms_tree), "--sourcetree", str(self.machine.sources)]
            where += ["--installtree", str(self.machine.modules)]
            # dkms would create a key of its own in the machine's /var/lib/dkms.
            where = ["env", "sign_file=/nonexistent", "dkms", *where]
        else:
            where = ["dkms"]
        run([*where, verb, "-m", PACKAGE, "-v", version, *words], deadline_s=deadline_s)
