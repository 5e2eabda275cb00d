"""All checks, by the set for which a machine is booted."""

from __future__ import annotations

from emulator.guest import (
    adapter,
    checks,
    company,
    device,
    engines,
    failing,
    isolation,
    misbehaving,
    races,
    rows,
    steps,
    storms,
    timing,
    windows,
)
from emulator.guest.check import Check
from emulator.guest.gpuchecks import GPU_STOCK, START

DEVICE = (
    Check("device-answers", device.answers),
    Check("device-modes", device.modes),
    Check("device-nothing-to-tell", device.nothing_to_tell),
)
LAST = (Check("unload-gpu", checks.unload), Check("kernel-log", checks.kernel_log))


def on_the_gpu(*parts: tuple[Check, ...]) -> tuple[Check, ...]:
    """Return a boot with the GPU: load it first, unload it and read the kernel's log last."""
    return (*START, *(check for part in parts for check in part), *LAST)


SETS = {
    "stock": checks.STOCK,
    "patched": (*checks.STOCK[: -len(checks.ENDS)], *DEVICE, *checks.ENDS),
    "gpu-stock": (*GPU_STOCK[: -len(LAST)], timing.STOCK, *LAST),
    "gpu-patched": on_the_gpu(isolation.TOLD, adapter.CHECKS, company.CHECKS, steps.CHECKS, timing.CHECKS),
    "gpu-rows": on_the_gpu(rows.CHECKS, engines.CHECKS, windows.CHECKS),
    "gpu-storms": on_the_gpu(storms.CHECKS),
    "gpu-races": on_the_gpu(races.CHECKS),
    "gpu-failing": on_the_gpu(failing.CHECKS),
    "isolated": isolation.ISOLATED,
    "rig": misbehaving.RIG,
}
LONG = frozenset({"stock", "gpu-stock", "gpu-storms", "gpu-races", "gpu-failing"})
"""Sets for which CI has no time."""
