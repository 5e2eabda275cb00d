"""The checks, in their order: each leaves the machine in the state that the next needs."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from emulator.guest import system, tracking, uvm
from emulator.guest.check import Check, CheckError, expect

MODULES = Path("/modules")
STUB = "nvidia"
UNLOAD_S = 60.0
UNLOAD_POLL_S = 0.1
UVM = "nvidia-uvm"
# Calls of UVM to the resource manager without a GPU, when loading and unloading.
COMING = {"nvUvmInterfaceRegisterUvmCallbacks": (1, 0), "nvUvmInterfaceSessionCreate": (1, 0)}
GOING = {"nvUvmInterfaceDeRegisterUvmOps": (1, 0), "nvUvmInterfaceSessionDestroy": (1, 0)}
# UVM's test of semaphores (206) makes one jump on purpose, which a release build reports.
EXPECTED = "UVM_GPU_SEMAPHORE_MAX_JUMP"
TROUBLE = re.compile(
    r"BUG:|WARNING:|Oops|general protection|UBSAN|Call Trace|Assert failed|refcount_t:|[Mm]emory leak"
)


def load_stub() -> str:
    system.load(f"{MODULES}/{STUB}.ko")
    return f"driver {Path('/sys/module/nvidia/version').read_text().strip()}"


def load_uvm() -> str:
    system.load(f"{MODULES}/{UVM}.ko", "uvm_enable_builtin_tests=1")
    expect("calls of the stub", calls(), COMING)
    return f"{len(COMING)} calls answered"


def make_nodes() -> str:
    """Create the device nodes like nvidia-modprobe: UVM registers only numbers."""
    major = system.character_major(UVM)
    for minor, name in enumerate(("nvidia-uvm", "nvidia-uvm-tools")):
        os.mknod(f"/dev/{name}", 0o20666, os.makedev(major, minor))
    return f"major {major}"


def address_space() -> str:
    """Open an address space, pin its memory, and close both in either order."""
    for first in (0, 1):
        space = uvm.open_space()
        held = [space, uvm.pin_memory(space)]
        os.close(held[first])
        os.close(held[1 - first])
    expect("calls of the stub", calls(), COMING)
    return "twice"


def unload_uvm() -> str:
    system.unload("nvidia_uvm")
    expect("calls of the stub", calls(), COMING | GOING)
    system.unload("nvidia")
    return "nothing remained"


def unload() -> str:
    """Unload both modules. A killed client's files may close late; the stub logs leftovers."""
    deadline = time.monotonic() + UNLOAD_S
    while True:
        try:
            system.unload("nvidia_uvm")
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(UNLOAD_POLL_S)
    system.unload("nvidia")
    return "unloaded"


def processes() -> set[int]:
    """Return the living processes, without zombies."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state = path.read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.add(int(path.parent.name))
    return found


def kernel_log() -> str:
    """Check that neither the kernel nor UVM has logged a complaint since the start of the machine."""
    lines = read_log()
    bad = [line for line in lines if TROUBLE.search(line) and EXPECTED not in line]
    if bad:
        raise CheckError("; ".join(bad[:5]))
    return f"{len(lines)} lines"


def calls() -> dict[str, tuple[int, int]]:
    """Return the called functions of the stub, with the number of answers and refusals."""
    words = (line.split() for line in Path("/proc/mpsd-stub").read_text().splitlines())
    return {name: (int(answered), int(refused)) for name, answered, refused in words}


def read_log() -> list[str]:
    """Return the kernel's log so far, without time stamps."""
    fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    lines: list[str] = []
    try:
        while True:
            try:
                record = os.read(fd, 8192).decode(errors="replace")
            except BlockingIOError:
                return lines
            lines.append(record.partition(";")[2].split("\n")[0])
    finally:
        os.close(fd)


def builtin(test: uvm.Builtin) -> Check:
    return Check(f"builtin-{test.name}", lambda: uvm.run_builtin(test), 300.0)


ENDS = (Check("unload-uvm", unload_uvm), Check("kernel-log", kernel_log))

STOCK = (
    Check("load-stub", load_stub),
    Check("load-uvm", load_uvm),
    Check("make-nodes", make_nodes),
    Check("address-space", address_space),
    *(builtin(test) for test in uvm.BUILTINS),
    Check("tracker-by-pidfd", tracking.by_pidfd),
    Check("lease", tracking.lease),
    *ENDS,
)
"""Checks for any nvidia-uvm, with or without the patch."""
