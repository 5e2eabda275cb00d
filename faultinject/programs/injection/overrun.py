"""The target of an access past an allocation, or after its free."""

from __future__ import annotations

from dataclasses import dataclass

from faultinject.programs.devices.base import Access, Device

SIZE = 20 << 20
"""Size of the allocation: a multiple of the mapping granule, so that nothing is mapped behind it."""

FAR = 16 << 20
SPAN = 16 << 20
"""Bytes that a full grid accesses."""

FAR_SPAN = 1 << 20
"""The same far away."""

DISTANT = 3 << 30
"""As an index that does not fit into 32 bits."""

DISTANT_BEFORE = 2 << 30
DISTANT_SPAN = 256 << 20
"""The distance of a full grid, several GiB."""

WORD = 4
NULL_FIELD = 16
"""A field of a structure with a null pointer."""

NULL_SPAN = 32 << 10


@dataclass(frozen=True, slots=True)
class Aim:
    """`span` bytes from `address` on, relative to the allocation (0: to none)."""

    access: Access
    address: int
    span: int
    allocation: int
    relation: str

    def record_fields(self) -> dict[str, object]:
        """Return the target in the words of a fault record."""
        address = hex(self.allocation) if self.allocation else ""
        return {"address": address, "bytes": SIZE, "relation": self.relation}


def take_aim(device: Device, kind: str, allocation: int, *, full_grid: bool) -> Aim:
    """Return what this kind accesses; free the allocation where the kind says so. Raises DeviceError."""
    end, span = allocation + SIZE, SPAN if full_grid else WORD
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
            return Aim("store", end + FAR, FAR_SPAN if full_grid else WORD, allocation, "past")
        case "zone_distant":
            return Aim("store", end + DISTANT, DISTANT_SPAN if full_grid else WORD, allocation, "past")
        case "zone_distant_before":
            # The nearest memory is the program's first allocation.
            return Aim("store", allocation - DISTANT_BEFORE, span, 0, "before")
        case "zone_null":
            return Aim("store", NULL_FIELD, NULL_SPAN if full_grid else WORD, 0, "")
        case _:
            return Aim("store", end, span, allocation, "past")
