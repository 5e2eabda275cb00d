"""All checks, by the set that a machine is booted for."""

from __future__ import annotations

from emulator.guest import checks, device, misbehaving
from emulator.guest.check import Check
from emulator.guest.gpuchecks import GPU_STOCK
from emulator.guest.isolation import GPU_PATCHED, ISOLATED

DEVICE = (
    Check("device-answers", device.answers),
    Check("device-modes", device.modes),
    Check("device-nothing-to-tell", device.nothing_to_tell),
)
SETS = {
    "stock": checks.STOCK,
    "patched": (*checks.STOCK[: -len(checks.ENDS)], *DEVICE, *checks.ENDS),
    "gpu-stock": GPU_STOCK,
    "gpu-patched": GPU_PATCHED,
    "isolated": ISOLATED,
    "rig": misbehaving.RIG,
}
