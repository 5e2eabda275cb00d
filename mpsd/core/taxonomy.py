"""Every class of fault: how it is recognised, how far it reaches, what isolates it, what to do.

One table, shown by `mpsd-ctl faults --explain CLASS`. What stands under `recognised` was measured on an
H200 with driver 580 (faultinject/reports) unless it says "not measured".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from types import MappingProxyType

from mpsd.errors import NotFoundError
from mpsd.model import LiesThere, UvmEvent, UvmFaultType, UvmReason


class Scope(StrEnum):
    """What a fault of this class takes with it when nothing isolates it."""

    NOBODY = "nobody"
    CLIENT = "the client alone"
    DOMAIN = "every client of the domain"
    GPU = "everything on the GPU"


@dataclass(frozen=True, slots=True)
class FaultClass:
    name: str
    title: str
    recognised: str
    scope: Scope
    isolated: str
    action: str
    xids: tuple[int, ...] = ()


_GUARD = "the outer guard where it lies over the address (silent: nobody is named); else not isolated"
_NONE = "not isolated: a spare takes new clients at once; victims go on by fail-over, or start again"
_AGAIN = "restart those that did not go on (mpsd-ctl failovers)"
_FIX = f"have the owner of the named client run it under compute-sanitizer; {_AGAIN}"
_DEVICE = "drain the GPU (mpsd-ctl drain), then follow the vendor's advice for this Xid"


DEATHS = frozenset({"server-death", "control-death"})
"""Of processes of MPS: nothing that a kernel did."""


def _row(
    name: str, title: str, recognised: str, scope: Scope, isolated: str, action: str, *xids: int
) -> FaultClass:
    return FaultClass(name, title, recognised, scope, isolated, action, xids)


_ROWS = (
    _row(
        "mmu-invalid-address",
        "access to an address that is not mapped",
        "UVM fatal event on the offender's own tracker (invalid PDE or PTE), before any client sees an error",
        Scope.DOMAIN,
        _GUARD,
        _FIX,
        31,
    ),
    _row(
        "guard-hit",
        "a stray access that a guard zone absorbed",
        "UVM GPU-fault event (serviced, no prefetch) on the client's own tracker, at an address in a guard "
        "zone that its ledger notes",
        Scope.CLIENT,
        "the guard zone that the libcuda proxy laid: nobody else notices",
        "have the owner of the named client run it under compute-sanitizer; what a policy evict, absorb or "
        "freeze does with it: mpsd-ctl policy",
    ),
    _row(
        "mmu-null",
        "access through a null pointer",
        "as mmu-invalid-address, with an address in the first 64 KiB",
        Scope.DOMAIN,
        "not isolated: UVM refuses a guard at address 0 from outside",
        _FIX,
        31,
    ),
    _row(
        "mmu-use-after-unmap",
        "access to freed or never mapped memory inside a reservation",
        "as mmu-invalid-address; the address lies in a reserved range of the offender with nothing mapped",
        Scope.DOMAIN,
        _NONE,
        _FIX,
        31,
    ),
    _row(
        "mmu-permission",
        "write to a read-only mapping, or an atomic that is not allowed",
        "UVM fatal event with fault type write or atomic, or reason permissions",
        Scope.DOMAIN,
        _NONE,
        _FIX,
        31,
    ),
    _row(
        "mmu-instruction-fetch",
        "a call or jump through a wild pointer",
        "UVM fatal event, and a kernel log line for the same address whose client is the instruction cache",
        Scope.DOMAIN,
        _GUARD,
        _FIX,
        31,
    ),
    _row(
        "pbdma-fault",
        "a stream memory operation on an address that is not mapped",
        "UVM fatal event, and an Xid 31 line that names a PBDMA engine",
        Scope.DOMAIN,
        _NONE,
        _FIX,
        31,
        32,
    ),
    _row(
        "sm-out-of-range",
        "access outside the shared, local or canonical address window",
        "Xid 13 with 'Out Of Range', then Xid 43 on the server; no UVM event, so nobody is named",
        Scope.DOMAIN,
        _NONE,
        "look at the suspects; the vendor's driver does not tell which client it was",
        13,
        43,
    ),
    _row(
        "sm-misaligned",
        "misaligned access",
        "Xid 13 with 'Misaligned Address', then Xid 43 on the server; nobody is named",
        Scope.DOMAIN,
        _NONE,
        "look at the suspects; the vendor's driver does not tell which client it was",
        13,
        43,
    ),
    _row(
        "sm-stack-overflow",
        "stack overflow in a kernel",
        "Xid 13 with a stack error, then Xid 43; driver 580 says 'Out Of Range Address', so: sm-out-of-range",
        Scope.DOMAIN,
        _NONE,
        "look at the suspects; a larger cudaLimitStackSize may help the owner",
        13,
        43,
    ),
    _row(
        "sm-trap",
        "trap or breakpoint instruction",
        "Xid 43 on the server with no Xid 13 before it; nobody is named",
        Scope.DOMAIN,
        _NONE,
        "look at the suspects; traps usually come from failed checks in the kernel's own code",
        43,
    ),
    _row(
        "sm-exception",
        "exception in a kernel, kind unknown",
        "the server reports a fatal GPU error, or leaves ACTIVE, and no Xid line says more",
        Scope.DOMAIN,
        _NONE,
        "look at the suspects and at the kernel log",
        13,
        43,
    ),
    _row(
        "device-assert",
        "assert() in a kernel",
        "only by the client itself (error 710): no Xid, no UVM event, the server stays ACTIVE",
        Scope.CLIENT,
        "by MPS itself: nobody else notices",
        "nothing to do; the client has its own message on its standard error",
    ),
    _row(
        "death-in-flight",
        "a client died while its kernel ran, without a lease",
        "Xid 31 for the domain right after the death of a client that was not leased",
        Scope.DOMAIN,
        "by the death lease, for every client that is attached",
        "see in mpsd-ctl status why that client had no lease",
        31,
    ),
    _row(
        "hang",
        "a dead client's kernel never ends",
        "the client's process has gone, its work has not ended within the linger limit; certain where it was "
        "alone in its domain, for others' kernels may make it wait",
        Scope.NOBODY,
        "by the death lease: its domain is marked poisoned, new clients go to a fresh one, and programs "
        "that are ready for a fail-over move there",
        "let the other clients of the poisoned domain finish; the kernel is ended when the last one has gone",
    ),
    _row(
        "server-death",
        "the MPS server died",
        "the server's pidfd became readable while its domain was in use",
        Scope.DOMAIN,
        _NONE,
        f"{_AGAIN}; find out who killed the server (kernel log, out-of-memory killer)",
    ),
    _row(
        "control-death",
        "the MPS control daemon died",
        "its pidfd became readable; its server goes with it, and the clients see error 806",
        Scope.DOMAIN,
        _NONE,
        f"{_AGAIN}; find out who killed the control daemon",
    ),
    _row(
        "device-ecc",
        "memory error of the GPU",
        "Xid 48, 63, 64, 92, 94, 95, 140, 171 or 172; the device's own (not measured)",
        Scope.GPU,
        "not by mpsd: contained errors (94) end one process, others the GPU's work",
        _DEVICE,
        48,
        63,
        64,
        92,
        94,
        95,
        140,
        171,
        172,
    ),
    _row(
        "device-bus",
        "the GPU or its link is gone",
        "Xid 74 (NVLink) or 79 (fallen off the bus) (not measured)",
        Scope.GPU,
        "nothing",
        _DEVICE,
        74,
        79,
    ),
    _row(
        "device-gsp",
        "the GPU's firmware does not answer",
        "Xid 62, 119 or 120 (not measured)",
        Scope.GPU,
        "nothing",
        _DEVICE,
        62,
        119,
        120,
    ),
    _row(
        "device-other",
        "another fault of the device",
        "a critical Xid that belongs to the device and to no other class (not measured)",
        Scope.GPU,
        "nothing",
        _DEVICE,
        38,
        46,
        54,
        56,
        57,
        58,
        61,
        68,
        78,
        110,
        121,
        123,
        136,
        137,
        142,
        143,
        144,
        145,
        146,
        147,
        148,
        149,
        150,
        151,
        154,
        155,
        156,
        158,
    ),
    _row(
        "unattributed-xid",
        "an Xid that belongs to no domain of mpsd",
        "no domain of that GPU gave any other sign within the evidence window",
        Scope.CLIENT,
        "not applicable: it was most likely a process outside MPS",
        "see the kernel log; mpsd-ctl status lists GPU processes that are not on MPS",
    ),
)

CLASSES: Mapping[str, FaultClass] = MappingProxyType({row.name: row for row in _ROWS})
_DEVICE_CLASSES = ("device-ecc", "device-bus", "device-gsp", "device-other")
_BY_DEVICE_XID = {x: n for n in _DEVICE_CLASSES for x in CLASSES[n].xids}

# Xids that work of a client can raise. Anything else on this list is no evidence against a domain:
# 45 says only that channels were removed because of something earlier.
CLIENT_XIDS = frozenset({13, 31, 32, 43, 69})
MMU_CLASSES = frozenset(n for n in CLASSES if n.startswith("mmu-")) | {"pbdma-fault"}
NULL_PAGE_BYTES = 64 << 10


FATAL_DEVICE_XIDS = frozenset({48, 62, 79, 94, 95, 119, 120, 140})
"""Those that take contexts and servers with them: what a server says right after is their echo."""


def device_class(xid: int) -> str | None:
    """The class of a device fault, or None if this Xid is not the device's own."""
    return _BY_DEVICE_XID.get(xid)


def classify_uvm(event: UvmEvent, lies_there: LiesThere | None = None) -> str:
    """The class of a fatal UVM event, better known once its address was looked up."""
    permission = event.fault_type in (UvmFaultType.WRITE, UvmFaultType.ATOMIC)
    if permission or event.reason is UvmReason.PERMISSIONS:
        return "mmu-permission"
    if event.address < NULL_PAGE_BYTES:
        return "mmu-null"
    if lies_there is LiesThere.FREED:
        return "mmu-use-after-unmap"
    return "mmu-invalid-address"


def refine_mmu(fault_class: str, text: str) -> str:
    """A better class for an MMU fault, once an Xid 31 line for the same fault was read."""
    upper = text.upper()
    if "PBDMA" in upper:
        return "pbdma-fault"
    if "GPCCLIENT_GCC" in upper and fault_class in ("mmu-invalid-address", "mmu-use-after-unmap"):
        return "mmu-instruction-fetch"
    return fault_class


def classify_sm(text: str) -> str | None:
    """The class that an Xid 13 line tells, None when it tells nothing new.

    The driver prints several lines a fault; the ESR register line names no kind.
    """
    lower = text.lower()
    if "misaligned" in lower:
        return "sm-misaligned"
    if "stack" in lower:
        return "sm-stack-overflow"
    if "out of range" in lower or "out-of-range" in lower:
        return "sm-out-of-range"
    return None


def explain(name: str) -> str:
    """Plain text about one class. Raises NotFoundError naming the nearest class."""
    row = CLASSES.get(name)
    if row is None:
        near = get_close_matches(name, CLASSES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(CLASSES)}"
        raise NotFoundError(f"there is no fault class {name!r}", remedy=hint)
    xids = ", ".join(map(str, row.xids)) or "none"
    return "\n".join(
        (
            f"{row.name}: {row.title}",
            f"  recognised  {row.recognised}",
            f"  reaches     {row.scope.value}",
            f"  isolated    {row.isolated}",
            f"  Xids        {xids}",
            f"  do          {row.action}",
        )
    )
