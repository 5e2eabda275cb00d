"""Machines below a folder: sources, kernels, /proc and /sys, and stand-ins for the real programs.

The stand-ins of dkms and Coccinelle do at once what the tests need of theirs; test_dkms.py runs the real
ones.
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kmod.build import Kernel
from kmod.changes import HOOKS
from kmod.dkms import Module
from kmod.install import InstallRequest
from kmod.machine import Machine
from kmod.tree import Tree, find
from tests.kmod.smalltree import make_tree

RELEASE = "6.1.0-1-test"
VERSION = "550.163.01"
NAMES = (Module("nvidia", "nvidia-current-open"), Module("nvidia-uvm", "nvidia-current-open-uvm"))
needs_kmod = pytest.mark.skipif(
    shutil.which("depmod") is None, reason="depmod is missing: apt-get install kmod"
)

DKMS_CONF = """\
PACKAGE_NAME="nvidia-current-open"
PACKAGE_VERSION="{version}"
AUTOINSTALL=yes
MAKE[0]="make modules KERNEL_UNAME=${{kernelver}}"
CLEAN="true"
BUILT_MODULE_NAME[0]="nvidia"
DEST_MODULE_NAME[0]="$PACKAGE_NAME"
DEST_MODULE_LOCATION[0]="/updates/dkms"
BUILT_MODULE_NAME[1]="nvidia-uvm"
DEST_MODULE_NAME[1]="$PACKAGE_NAME-uvm"
DEST_MODULE_LOCATION[1]="/updates/dkms"
"""

# The parts of dkms that the tests need: where it puts files, under which names, and when it runs our scripts.
# KILL names the verb during which it kills the process that started it.
DKMS = """\
#!/bin/bash
set -e
[ "$1" != "--dkmstree" ] || { tree=$2; sources=$4; modules=$6; shift 6; }
verb=$1; name=$3; version=$5; kernelver=${7:-}; kernel_source_dir=/none
folder=$tree/$name/$version
killed() { if [ "${KILL:-}" = "$verb" ]; then kill -9 $PPID; exit 9; fi; }
each() { . "$folder/source/dkms.conf"; for i in "${!BUILT_MODULE_NAME[@]}"; do "$@"; done; }
built() { cp "$PARTS/${BUILT_MODULE_NAME[$i]}.ko" "$folder/$kernelver/x/module/${DEST_MODULE_NAME[$i]}.ko"; }
placed() {
    cp "$folder/$kernelver/x/module/${DEST_MODULE_NAME[$i]}.ko" "$modules/$kernelver/updates/dkms/"
    [ "$i" -gt 0 ] || killed
}
removed() { rm -f "$modules/$kernelver/updates/dkms/${DEST_MODULE_NAME[$i]}.ko"; killed; }
case $verb in
add)
    [ ! -e "$folder" ] || { echo "already added"; exit 3; }
    mkdir -p "$folder/build"; killed; ln -s "$sources/$name-$version" "$folder/source" ;;
build)
    [ ! -e "$folder/$kernelver/x" ] || { echo "already built"; exit 3; }
    mkdir -p "$folder/build" "$folder/$kernelver/x/module"
    echo "the compiler says no" >"$folder/build/make.log"; killed
    [ -z "${FAIL:-}" ] || exit 10
    each built; rm -r "$folder/build" ;;
install)
    [ ! -e "$tree/$name/kernel-$kernelver-x" ] || { echo "already installed"; exit 5; }
    mkdir -p "$modules/$kernelver/updates/dkms"; each placed
    ln -s "$version/$kernelver/x" "$tree/$name/kernel-$kernelver-x"
    cd "$folder/source"; . ./dkms.conf; $POST_INSTALL ;;
uninstall)
    each removed; rm -f "$tree/$name/kernel-$kernelver-x"
    cd "$folder/source"; . ./dkms.conf; $POST_REMOVE ;;
esac
"""

# A file beside the modules has what a fitting semantic patch inserts; the fix changes a line.
SPATCH = """\
#!/bin/sh
for word; do before=$semantic; semantic=$source; source=$option; option=$result; result=$word; done
added=$PARTS/${semantic##*/}
if [ -f "$added" ]; then
    cat "$source" "$added" >"$result"
else
    sed 's/size_of(dev))/size_of(dev), 0)/' "$source" >"$result"
fi
"""


def elf(
    gives: Mapping[str, int],
    wants: Mapping[str, int],
    *,
    absolute: bool = False,
    version: str = "",
    source: str = "",
) -> bytes:
    """Return a module file as far as its symbols' versions go.

    `absolute`: as kernels before 5.19 store them. `source`: srcversion in modinfo.
    """
    told = {"version": version, "srcversion": source}
    crcs = b"".join(struct.pack("<I", crc) for crc in gives.values())
    strings, symbols = b"\0", b"\0" * 24
    for index, (name, crc) in enumerate(gives.items()):
        section, value = (0xFFF1, crc) if absolute else (1, 4 * index)
        symbols += struct.pack("<IBBHQQ", len(strings), 0, 0, section, value, 0)
        strings += f"__crc_{name}".encode() + b"\0"
    versions = b"".join(struct.pack("<Q56s", crc, name.encode()) for name, crc in wants.items())
    parts = [
        ("", 0, b"", 0),
        ("__kcrctab", 1, crcs, 0),
        (".symtab", 2, symbols, 3),
        (".strtab", 3, strings, 0),
        ("__versions", 1, versions, 0),
        (".shstrtab", 3, b"", 0),
        (".modinfo", 1, "".join(f"{name}={text}\0" for name, text in told.items() if text).encode(), 0),
    ]
    names = b"".join(name.encode() + b"\0" for name, _, _, _ in parts)
    body, table, at = b"", b"", 64
    for name, kind, data, link in parts:
        content = names if name == ".shstrtab" else data
        place = names.index(name.encode() + b"\0") if name else 0
        entry = 24 if kind == 2 else 0
        table += struct.pack(
            "<IIQQQQIIQQ", place, kind, 0, 0, at + len(body), len(content), link, 0, 1, entry
        )
        body += content
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, at + len(body), 0, 64, 0, 0, 64, len(parts), 5)
    return head + body + table


def add_source(machine: Machine, version: str = VERSION, *, name: str = "nvidia-current-open") -> Path:
    """Write the driver's own source, laid out as in Debian's package."""
    root = make_tree(machine.sources / f"{name}-{version}", version)
    (root / "nvidia/nv.c").write_text('MODULE_LICENSE("Dual MIT/GPL");\n')
    (root / "nvidia/nv-kernel.o_binary").write_text("compiled by the vendor\n")
    (root / "dkms.conf").write_text(DKMS_CONF.format(version=version))
    return root


def make_machine(root: Path) -> Machine:
    """Make one kernel with headers and the driver's own two modules. No module is loaded, no process runs."""
    machine = Machine(root)
    kernel = machine.modules / RELEASE
    stock = kernel / "updates/dkms"
    headers = kernel / "build/include/linux"
    for folder in (
        stock,
        headers,
        machine.sys,
        machine.proc / "sys/kernel",
        machine.dkms_tree,
        root / "sbin",
    ):
        folder.mkdir(parents=True)
    (headers / "pci.h").write_text("int pci_resize_resource(dev_t *dev, int i, int size, int exclude);\n")
    (machine.proc / "sys/kernel/osrelease").write_text(RELEASE + "\n")
    (machine.proc / "modules").write_text("")
    (stock / "nvidia-current-open.ko").write_bytes(elf({"answer": 1}, {}))
    (stock / "nvidia-current-open-uvm.ko").write_bytes(elf({}, {"answer": 1}))
    add_source(machine)
    if shutil.which("depmod"):
        machine.depmod(RELEASE)
    return machine


def add_programs(folder: Path) -> dict[str, str]:
    """Stand-ins of dkms and Coccinelle. Returns the environment in which they are found first."""
    programs, parts = folder / "programs", folder / "parts"
    for made in (programs, parts):
        made.mkdir(parents=True)
    for name, text in (("dkms", DKMS), ("spatch", SPATCH)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for hook in HOOKS:
        lines = [f"{call}x;" for call in hook.calls]
        lines += ["y;"] * (hook.inserted - len(lines))
        (parts / Path(hook.semantic_patch).name).write_text("".join(f"{line}\n" for line in lines))
    (parts / "nvidia.ko").write_bytes(elf({"answer": 2}, {}))
    (parts / "nvidia-uvm.ko").write_bytes(elf({}, {"answer": 2}))
    return {"PATH": f"{programs}:{os.environ['PATH']}", "PARTS": str(parts)}


# The stand-in reads the loaded modules from the machine's /proc and /sys, and asks the real modprobe which
# file a name stands for. REFUSE: part of the path of files that do not load. BUSY: a module that does not
# unload. UDEV: a rule requests nvidia_uvm once nvidia is loaded, and modprobe without a view finds ours.
MODPROBE = """\
#!{python}
import os, subprocess, sys
from pathlib import Path
root, words = Path(__file__).parents[1], sys.argv[1:]
shown = [*words[:-1], "-S", {release!r}, "--show-depends", words[-1]]
said = subprocess.run(["modprobe", *shown], capture_output=True, text=True, check=True).stdout
listed = root / "proc/modules"
refused = os.environ.get("REFUSE", "none")
for path in [Path(line.split()[1]).resolve() for line in said.splitlines()]:
    name = path.name.removesuffix(".ko").replace("nvidia-current-open", "nvidia").replace("-", "_")
    lines = [line.split() for line in listed.read_text().splitlines()]
    if name in [line[0] for line in lines]:
        continue
    if refused in str(path):
        sys.exit("modprobe: ERROR: could not insert: Key was rejected by service")
    for line in lines if name != "nvidia" else []:
        if line[0] == "nvidia":
            line[2:4] = [str(int(line[2]) + 1), line[3].strip("-") + name + ","]
    lines.append([name, "1", "0", "-", "Live", "0x0"])
    listed.write_text("".join(" ".join(line) + "\\n" for line in lines))
    (root / "sys/module" / name).mkdir(parents=True)
    if "updates/mpsd" in str(path) and name == "nvidia_uvm":
        (root / "sys/module/nvidia_uvm/parameters").mkdir()
        (root / "sys/module/nvidia_uvm/parameters/uvm_mpsd_mode").write_text("1")
    with (root / "log").open("a") as log:
        print("load", path.relative_to(root / "lib/modules" / {release!r}), file=log)
    if name == "nvidia" and os.environ.get("UDEV"):
        first = dict(os.environ)
        del first["UDEV"]
        subprocess.run([__file__, "-d", str(root), "-i", "nvidia-current-open-uvm"], check=True, env=first)
"""

RMMOD = """\
#!{python}
import os, shutil, sys
from pathlib import Path
root, name = Path(__file__).parents[1], sys.argv[1]
listed = root / "proc/modules"
lines = [line.split() for line in listed.read_text().splitlines()]
(mine,) = [line for line in lines if line[0] == name]
if mine[3] != "-" or os.environ.get("BUSY") == name:
    sys.exit(f"rmmod: ERROR: Module {{name}} is in use")
lines.remove(mine)
for line in lines:
    holders = [holder for holder in line[3].strip("-").split(",") if holder not in ("", name)]
    line[2:4] = [str(len(holders)), ",".join(holders) + "," if holders else "-"]
listed.write_text("".join(" ".join(line) + "\\n" for line in lines))
shutil.rmtree(root / "sys/module" / name)
with (root / "log").open("a") as log:
    print("unload", name, file=log)
"""


def add_kernel_programs(machine: Machine) -> None:
    """Stand-ins of modprobe and rmmod, for the machine's own /proc and /sys. They log to its file `log`."""
    for name, text in (("modprobe", MODPROBE), ("rmmod", RMMOD)):
        path = machine.root / "sbin" / name
        path.write_text(text.format(python=sys.executable, release=RELEASE))
        path.chmod(0o755)


def quiet(text: str) -> None:
    """Discard a progress message."""


def wish(machine: Machine, tree: Tree | None = None) -> InstallRequest:
    given = tree or find(machine.sources / f"nvidia-current-open-{VERSION}")
    return InstallRequest(given, Kernel(RELEASE, machine.modules / RELEASE / "build"))


def load(machine: Machine, lines: Sequence[str], *, version: str = VERSION, ours: bool = False) -> None:
    """Mark modules as loaded: `lines` as in /proc/modules."""
    (machine.proc / "modules").write_text("".join(f"{line} Live 0x0000000000000000\n" for line in lines))
    for line in lines:
        (machine.sys / "module" / line.split()[0]).mkdir(parents=True, exist_ok=True)
    (machine.sys / "module/nvidia/version").write_text(version + "\n")
    if ours:
        (machine.sys / "module/nvidia_uvm/parameters").mkdir(parents=True, exist_ok=True)
        (machine.sys / "module/nvidia_uvm/parameters/uvm_mpsd_mode").write_text("1\n")


def add_process(
    machine: Machine, pid: int, command: str, opened: Sequence[str], mapped: Sequence[str] = ()
) -> None:
    """Add a process with descriptors to `opened` and mappings of `mapped`."""
    folder = machine.proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
    (folder / "comm").write_text(command.split()[0] + "\n")
    for number, name in enumerate(opened):
        (folder / "fd" / str(number)).symlink_to(name)
    lines = [f"7f0000000000-7f0000001000 rw-s 00000000 00:06 1 {name}" for name in mapped]
    (folder / "maps").write_text("".join(line + "\n" for line in lines))
