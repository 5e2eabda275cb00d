"""Faults as they end without a configured protection level (mode auto), and zone kinds without the proxy."""

from __future__ import annotations

from dataclasses import replace

from faultinject.registry import kinds
from faultinject.registry.faults import Fault, Need, StallBar
from mpsd.base.protection import ProtectionLevel

NO_PROMISE = ("control_death", "wild_call_low")


def under_default(fault: Fault, level: str | None) -> Fault:
    """Return what must hold in mode auto on a node of this protection level (None: it is not known).

    At level failover clients leave a domain with an endless kernel, which then ends.
    """
    carried = level == ProtectionLevel.FAILOVER and fault.kind not in NO_PROMISE
    guarded = level == ProtectionLevel.GUARD and fault.zoned
    must = True if carried or guarded else fault.survive["mpsd"]
    return replace(fault, survive={**fault.survive, kinds.AUTO: must}, poisons=fault.poisons and not carried)


def without_proxy(fault: Fault) -> Fault:
    """Return a zone kind with an ordinary offender, in modes stock and mpsd: its access is an MMU fault."""
    return replace(
        fault,
        title=f"{fault.title}, without guard zones",
        bare=True,
        survive={"stock": False, "mpsd": False},
        classes=frozenset({"mmu-invalid-address", "mmu-use-after-unmap"}),
        needs=fault.needs | {Need.PROXY},
        modes=kinds.MODES,
        stall_bar=StallBar.NONE,
        settings={},
    )
