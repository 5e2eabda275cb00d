"""Checks of nvidia-uvm, stock or patched, that need a GPU, run on the software GPU."""

from __future__ import annotations

import os

from emulator.guest import checks, gpu, system, uvm
from emulator.guest.check import Check, expect
from emulator.guest.gpuclient import client

# UVM's own tests of its channels, semaphores, memory and copies. 213 and 216 may skip a time check.
BUILTINS = (
    uvm.Builtin("rm-mem", 205),
    uvm.Builtin("gpu-semaphore", 206),
    uvm.Builtin("tracker", 212),
    uvm.Builtin("push", 213, b"\0", 4),
    uvm.Builtin("ce", 216, b"\1", 4),
    uvm.Builtin("mem", 230),
    uvm.Builtin("host", 288),
)
STRAY = 0x7F00_1234_5000


def load_gpu() -> str:
    """Load without HMM, which would need video memory as kernel pages; UVM counts its allocations."""
    system.load(f"{checks.MODULES}/{checks.STUB}.ko")
    system.load(
        f"{checks.MODULES}/{checks.UVM}.ko", "uvm_enable_builtin_tests=1 uvm_disable_hmm=1 uvm_leak_checker=1"
    )
    return "loaded"


def register() -> str:
    """Register and unregister twice: nothing of the first registration remains."""
    for _ in range(2):
        space = uvm.open_space()
        gpu.register(space)
        os.close(space)
    no_trouble()
    return "twice"


def no_trouble() -> None:
    """Check that the emulation knew every request of UVM."""
    expect("unknown to the GPU", [deed for deed in gpu.deeds() if deed.name == "trouble"], [])
    expect("refused", {name: count for name, count in checks.calls().items() if count[1]}, {})


def run_builtin(test: uvm.Builtin) -> str:
    """Run one of UVM's own tests, with the GPU registered."""
    gpu.command("forget")
    space = uvm.open_space()
    try:
        gpu.register(space)
        status = uvm.call(space, test.request, test.given, test.status_at)
    finally:
        os.close(space)
    expect(f"UVM test {test.request}", status, 0)
    no_trouble()
    return f"ioctl {test.request}"


def builtin(test: uvm.Builtin) -> Check:
    return Check(f"gpu-{test.name}", lambda: run_builtin(test), 600.0)


def cancelled() -> str:
    """A client's store to an unmapped address: cancelled, at that address of its own space."""
    with client(0xC1, 1, veid=3):
        gpu.command("forget")
        gpu.command(gpu.Fault(STRAY, 1, veid=3).line())
        found = gpu.wait_for("cancel-va")
        directory = gpu.directories()[0xC1]
    cancels = [deed for deed in found if deed.name == "cancel-va"]
    seen = [(deed.address, deed.directory, deed.first) for deed in cancels]
    expect("cancels", seen, [(STRAY, directory, gpu.ENGINE_GRAPHICS + 3)])
    expect("went on", [deed for deed in found if deed.name == "went-on"], [])
    no_trouble()
    return f"directory {directory:#x}"


def reported() -> str:
    """A copy engine's fault: returned to the resource manager, which ends the channel."""
    with client(0xC1, 1, copies=True):
        gpu.command("forget")
        fault = gpu.Fault(STRAY, 1, engine=gpu.ENGINE_COPY, access=gpu.READ, replayable=False)
        gpu.command(fault.line())
        found = gpu.wait_for("reported")
    expect("reported", [deed.address for deed in found if deed.name == "reported"], [STRAY])
    expect("cleared", [deed for deed in found if deed.name == "clear-faulted"], [])
    no_trouble()
    return "not cleared"


def orphan() -> str:
    """Work of a VEID without an address space: the whole channel group is cancelled."""
    with client(0xC1, 1, veid=3):
        gpu.command("forget")
        gpu.command(gpu.Fault(STRAY, 1, veid=4).line())
        found = gpu.wait_for("cancel-instance")
    expect("cancels", len([deed for deed in found if deed.name == "cancel-instance"]), 1)
    return "the group"


START = (
    Check("load-gpu", load_gpu),
    Check("make-nodes", checks.make_nodes),
    Check("register-gpu", register),
)
GPU_STOCK = (
    *START,
    *(builtin(test) for test in BUILTINS),
    Check("stray-store-cancelled", cancelled),
    Check("stray-copy-reported", reported),
    Check("orphan-cancels-group", orphan),
    Check("unload-gpu", checks.unload),
    Check("kernel-log", checks.kernel_log),
)
