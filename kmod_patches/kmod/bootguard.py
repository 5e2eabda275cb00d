"""Boot guard: before udev loads a driver, disable patched modules of another version than the driver's.

modprobe prefers the patched modules, also after an upgrade of the driver. The driver's libraries refuse
modules of another version, so no CUDA program would start until `mpsd-kmod install` runs again. A systemd
unit compares versions at each boot. When in doubt it changes nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from kmod.caching import write_whole
from kmod.dkms import FOLDER, Module, write_program
from kmod.machine import OURS, Machine
from kmod.placed import ASIDE

NAME = "mpsd-kmod-versions.service"
SCRIPT = "versions"

# %v is the kernel's release. The unit waits for no mount, because a mount may need udev, which waits for this
# unit. If the script is unreachable or slow, the boot continues.
UNIT = """\
# Written by mpsd-kmod, which also removes it.
[Unit]
Description=Disable patched NVIDIA modules of another version than the installed driver
DefaultDependencies=no
After=systemd-remount-fs.service
Before=systemd-udev-trigger.service systemd-modules-load.service sysinit.target
ConditionPathExists={modules}/%v/{location}

[Service]
Type=oneshot
TimeoutStartSec=90
ExecStart=-/bin/sh {script} %v
"""

TEXT = """\
#!/bin/sh
# The unit runs this before a driver is loaded: it disables our modules if the driver was upgraded.
set -eu
[ -n "$1" ]
kernel={modules}/$1
target=$kernel/{location}
ours=
for file in "$target/{core}.ko"*; do
    case $file in
    *.ko | *.ko.?z | *.ko.zst) ours=$(modinfo -F version "$file") ;;
    esac
done
if [ -z "$ours" ]; then
    # An earlier run ended before its depmod.
    ! grep -qs "^{location}/" "$kernel/modules.dep" || {depmod} "$1"
    exit 0
fi
stock=
for file in $(find "$kernel" \\( {names} \\) ! -path "$target/*"); do
    version=$(modinfo -F version "$file" 2>/dev/null) || continue
    [ "$version" != "$ours" ] || exit 0
    stock=${{version:-$stock}}
done
[ -n "$stock" ] || exit 0
echo "mpsd-kmod: driver $stock is installed, the patched modules are $ours: not loaded; run mpsd-kmod install"
for file in "$target"/*.ko "$target"/*.ko.?z "$target"/*.ko.zst; do
    [ ! -e "$file" ] || mv "$file" "$file{aside}"
done
{depmod} "$1"
"""


def unit(machine: Machine) -> Path:
    return machine.root / "etc/systemd/system" / NAME


def wanted(machine: Machine) -> bool:
    """Return whether systemd runs this machine, as far as its folders show."""
    return unit(machine).parent.is_dir()


def present(machine: Machine, source: Path) -> bool:
    """Return whether the unit and script are in place; `source`: the folder with our scripts."""
    if not wanted(machine):
        return True
    try:
        text = unit(machine).read_text(encoding="utf-8")
    except OSError:
        return False
    return text == unit_text(machine, source) and _link(machine).is_symlink()


def unit_text(machine: Machine, source: Path) -> str:
    script = "/" / (source / FOLDER / SCRIPT).relative_to(machine.root)
    return UNIT.format(script=script, modules="/lib/modules", location=OURS)


def put(machine: Machine, source: Path) -> None:
    """Enable the unit as `systemctl enable` would, which needs a running systemd."""
    link = _link(machine)
    write_whole(unit(machine), unit_text(machine, source))
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(f"../{NAME}")


def remains(machine: Machine) -> bool:
    return unit(machine).exists() or _link(machine).is_symlink()


def remove(machine: Machine) -> None:
    for path in (_link(machine), unit(machine)):
        path.unlink(missing_ok=True)


def _link(machine: Machine) -> Path:
    return unit(machine).parent / "sysinit.target.wants" / NAME


def write_script(machine: Machine, folder: Path, modules: Sequence[Module]) -> None:
    """Write the script into the folder of our scripts."""
    core = next(module.installed for module in modules if module.built == "nvidia")
    names = " -o ".join(f"-name {shlex.quote(f'{name}.ko*')}" for name in sorted({core, "nvidia"}))
    text = TEXT.format(
        modules=shlex.quote(str(machine.modules)),
        location=OURS,
        core=core,
        names=names,
        aside=ASIDE,
        depmod=shlex.join(machine.depmod_command),
    )
    write_program(folder / SCRIPT, text)
