"""Time from a fault's packet to the replay that ends the access, on the software GPU: emulated time.

It compares one path with the other on the same emulated machine, and says nothing about a real GPU.
"""

from __future__ import annotations

from statistics import median

from emulator.guest import device, gpu
from emulator.guest.beside import innocent
from emulator.guest.check import Check, CheckError, expect
from emulator.guest.gpuchecks import STRAY, no_trouble
from emulator.guest.gpuclient import client
from emulator.guest.isolation import GUILTY, mode
from mpsd.gpu.nvidia.kernel_abi import Mode

SAMPLES = 40
NS_PER_US = 1000


def sample() -> tuple[str, float]:
    """Return the end of a new client's first access, and the time [us] from its packet to the replay."""
    with client(GUILTY, 1, veid=3):
        gpu.command("forget")
        gpu.command(gpu.Fault(STRAY, 1, veid=3).line())
        gpu.wait_for_any(("cancel-va", "went-on"))
        found = replayed()
    end = next(at for at, deed in enumerate(found) if deed.name in ("cancel-va", "went-on"))
    # A replay makes an access continue; after a cancel the replay is yet to come.
    replays = found[end:] if found[end].name == "cancel-va" else found[end::-1]
    replay = next(deed for deed in replays if deed.name == "replay")
    begun = next(deed for deed in found if deed.name == "faulted")
    return found[end].name, (replay.ns - begun.ns) / NS_PER_US


def replayed() -> list[gpu.GpuAction]:
    """Return all actions once a replay has come after the end of the access."""
    for _ in range(SAMPLES):
        found = gpu.deeds()
        ends = [at for at, deed in enumerate(found) if deed.name in ("cancel-va", "went-on")]
        if found[ends[0]].name == "went-on" or any(deed.name == "replay" for deed in found[ends[0] :]):
            return found
        gpu.wait_for("replay", sum(deed.name == "replay" for deed in found) + 1)
    raise CheckError("no replay after the cancel")


def told(wanted: str) -> str:
    """Return median, 90th percentile and maximum of the samples."""
    with innocent():
        ends, times = zip(*(sample() for _ in range(SAMPLES)), strict=True)
    expect("ends", set(ends), {wanted})
    ranked = sorted(times)
    numbers = (median(ranked), ranked[int(0.9 * len(ranked))], ranked[-1])
    no_trouble()
    said = "median {:.0f}, p90 {:.0f}, max {:.0f}".format(*numbers)
    return f"emulated us from packet to replay, {len(ranked)} samples: {said}"


def stock() -> str:
    """The cancel, also of a patched module in mode off."""
    if device.present():
        mode(Mode.OFF)
    return told("cancel-va")


def sink() -> str:
    """The first sparse mapping of a client, its page tables included."""
    mode(Mode.ISOLATE)
    return told("went-on")


STOCK = Check("time-cancel", stock, 300.0)
CHECKS = (STOCK, Check("time-sink", sink, 300.0))
