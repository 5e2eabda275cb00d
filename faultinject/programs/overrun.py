"""Where a program strays that runs past what it has allocated, or goes on using what it has freed."""

from __future__ import annotations

from dataclasses import dataclass

from faultinject.programs.device import Access, Device

SIZE = 20 << 20
"""Of the allocation: a multiple of the granule in which memory is mapped, so that nothing lies behind it."""

FAR = 16 << 20
SPAN = 16 << 20
"""Bytes over which a full grid strays."""

FAR_SPAN = 1 << 20
"""The same that far away."""

DISTANT = 3 << 30
"""As an index does that does not fit into 32 bits."""

DISTANT_BEFORE = 2 << 30
DISTANT_SPAN = 256 << 20
"""A full grid's, several GiB away."""

WORD = 4
NULL_FIELD = 16
"""A field of a structure whose pointer is null."""

NULL_SPAN = 32 << 10


@dataclass(frozen=True, slots=True)
class Aim:
    """`span` bytes from `address` on, as they lie to the allocation (0: to none)."""

    access: Access
    address: int
    span: int
    allocation: int
    relation: str

    def told(self) -> dict[str, object]:
        """As a fault record tells of it."""
        address = hex(self.allocation) if self.allocation else ""
        return {"address": address, "bytes": SIZE, "relation": self.relation}


def take_aim(device: Device, kind: str, allocation: int, *, wild: bool) -> Aim:
    """What this kind touches; frees the allocation where the kind says so. Raises DeviceError."""
    end, span = allocation + SIZE, SPAN if wild else WORD
    match kind:
        case "zone_load":
            return Aim("load", end, span, allocation, "past")
        case "zone_atomic":
            return Aim("atomic", end, span, allocation, "past")
        case "zone_before_start":
            return Aim("store", allocation - span, span, allocation, "before")
        case "zone_use_after_free":
            device.free(allocation)
            return Aim("store", allocation, span, allocation, "inside")
        case "zone_far":
            return Aim("store", end + FAR, FAR_SPAN if wild else WORD, allocation, "past")
        case "zone_distant":
            return Aim("store", end + DISTANT, DISTANT_SPAN if wild else WORD, allocation, "past")
        case "zone_distant_before":
            # What lies nearest is the program's first allocation, whichever that is.
            return Aim("store", allocation - DISTANT_BEFORE, span, 0, "before")
        case "zone_null":
            return Aim("store", NULL_FIELD, NULL_SPAN if wild else WORD, 0, "")
        case _:
            return Aim("store", end, span, allocation, "past")
