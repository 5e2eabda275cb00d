"""Taxonomy of faults: for every class its signs, its reach, what isolates it, and the operator's action.

`mpsd-ctl faults --explain CLASS` shows a row of this table. The `recognised` column was measured on an H200
with driver 580 (faultinject/evidence/mechanisms-faults.md) unless it says "not measured".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from types import MappingProxyType

from mpsd.base.errors import NotFoundError
from mpsd.base.model import AddressKind, UvmEvent, UvmFaultType, UvmReason
from mpsd.base.protection import ProtectionLevel
from mpsd.core.faults import sources

SOURCES = "sources"


class Scope(StrEnum):
    """Reach of a fault of this class if nothing isolates it."""

    NOBODY = "no other client"
    CLIENT = "the client alone"
    DOMAIN = "every client of the domain"
    GPU = "everything on the GPU"


@dataclass(frozen=True, slots=True)
class FaultClass:
    """A row of the table.

    `level`: the lowest protection level at which such a fault costs no other client its GPU work. At guard
    that takes the offender's own guard zones; at failover, clients that fail over. None: every level, or no
    level.
    """

    name: str
    title: str
    recognised: str
    scope: Scope
    isolated: str
    action: str
    xids: tuple[int, ...] = ()
    level: ProtectionLevel | None = None


_NONE = "not isolated: the standby domain takes new clients at once; protected clients fail over"
_GUARD = f"absorbed if the outer guard covers the address (no client is named then); otherwise {_NONE}"
_AGAIN = "restart clients that did not fail over (mpsd-ctl failovers)"
_FIX = "ask the owner of the offender to run it under compute-sanitizer"
_INSPECT = "inspect the suspects"
_SUSPECTS = f"{_INSPECT}: the driver does not say which client it was"
_DEVICE = "drain the GPU (mpsd-ctl drain), then follow NVIDIA's advice for this Xid"


DEATHS = frozenset({"server-death", "control-death"})
"""Classes of deaths of MPS processes, which no kernel causes."""


HARMLESS = frozenset({"hang"})
"""Classes that cost no client its work, although mpsd empties the domain."""


def _row(
    name: str,
    title: str,
    recognised: str,
    scope: Scope,
    isolated: str,
    action: str,
    *xids: int,
    level: ProtectionLevel | None = None,
) -> FaultClass:
    # Clients can fail over after each fault that ends a domain.
    level = ProtectionLevel.FAILOVER if level is None and scope is Scope.DOMAIN else level
    return FaultClass(name, title, recognised, scope, isolated, action, xids, level)


_ROWS = (
    _row(
        "mmu-invalid-address",
        "access to an address that is not mapped",
        "fatal UVM event (invalid PDE or PTE) on the offender's own tracker, before any client sees an error",
        Scope.DOMAIN,
        _GUARD,
        _FIX,
        31,
    ),
    _row(
        "guard-hit",
        "stray access absorbed by a guard zone",
        "serviced UVM fault event (no prefetch) on the client's own tracker, at an address in a guard zone "
        "of its ledger",
        Scope.CLIENT,
        "absorbed by a guard zone of the libcuda proxy: other clients are unharmed",
        "ask the owner of the offender to run it under compute-sanitizer; mpsd-ctl policy sets whether mpsd "
        "evicts, absorbs or freezes",
    ),
    _row(
        "mmu-null",
        "access through a null pointer",
        "as mmu-invalid-address, with an address in the first 64 KiB",
        Scope.DOMAIN,
        "absorbed for clients with guard zones; the outer guard cannot cover address 0; otherwise " + _NONE,
        _FIX,
        31,
        level=ProtectionLevel.GUARD,
    ),
    _row(
        "mmu-use-after-unmap",
        "access to freed or never mapped memory inside a reservation",
        "as mmu-invalid-address, with an address in an unmapped part of a reservation of the offender",
        Scope.DOMAIN,
        _NONE,
        _FIX,
        31,
    ),
    _row(
        "mmu-permission",
        "write to a read-only mapping, or a forbidden atomic access",
        "fatal UVM event with fault type write or atomic, or reason permissions",
        Scope.DOMAIN,
        _NONE,
        _FIX,
        31,
    ),
    _row(
        "mmu-instruction-fetch",
        "call or jump through an invalid function pointer",
        "fatal UVM event, and an Xid 31 line for the same address that names the instruction cache (GCC)",
        Scope.DOMAIN,
        _GUARD,
        _FIX,
        31,
    ),
    _row(
        "pbdma-fault",
        "stream memory operation on an address that is not mapped",
        "fatal UVM event, and an Xid 31 line that names a PBDMA engine",
        Scope.DOMAIN,
        _NONE,
        _FIX,
        31,
        32,
    ),
    _row(
        "sm-out-of-range",
        "access outside the shared, local or canonical address window",
        "Xid 13 with 'Out Of Range', then Xid 43 on the server; without a UVM event no client is named",
        Scope.DOMAIN,
        _NONE,
        _SUSPECTS,
        13,
        43,
    ),
    _row(
        "sm-misaligned",
        "misaligned access",
        "Xid 13 with 'Misaligned Address', then Xid 43 on the server; no client is named",
        Scope.DOMAIN,
        _NONE,
        _SUSPECTS,
        13,
        43,
    ),
    _row(
        "sm-stack-overflow",
        "stack overflow in a kernel",
        "Xid 13 with a stack error, then Xid 43; driver 580 prints 'Out Of Range Address' instead, which "
        "gives class sm-out-of-range",
        Scope.DOMAIN,
        _NONE,
        f"{_INSPECT}; raise cudaLimitStackSize in the offender",
        13,
        43,
    ),
    _row(
        "sm-trap",
        "trap or breakpoint instruction",
        "Xid 43 on the server without an Xid 13 before it; no client is named",
        Scope.DOMAIN,
        _NONE,
        f"{_INSPECT}; a trap is usually a failed check in the kernel's own code",
        43,
    ),
    _row(
        "sm-exception",
        "SM exception of unknown kind",
        "the server reports a fatal GPU error or leaves ACTIVE, and no Xid line says more",
        Scope.DOMAIN,
        _NONE,
        f"{_INSPECT} and the kernel log",
        13,
        43,
    ),
    _row(
        "device-assert",
        "assert() in a kernel",
        "by the client alone (error 710): no Xid, no UVM event, and the server stays ACTIVE",
        Scope.CLIENT,
        "by MPS itself: other clients are unharmed",
        "no action: the client prints the failed assertion on its standard error",
    ),
    _row(
        "death-in-flight",
        "a client without a lease died while its kernel ran",
        "Xid 31 for the domain right after the death of a client without a lease",
        Scope.DOMAIN,
        "by the lease, for every client that is attached",
        "find out why that client had no lease (event client-unprotected in mpsd-ctl events)",
        31,
    ),
    _row(
        "hang",
        "kernel of an exited client that never ends",
        "the client has exited, but its work has not ended within the linger limit; certain if the client "
        "was alone in its domain, because kernels of other clients may delay the work",
        Scope.NOBODY,
        "by the lease: mpsd marks the domain as poisoned and sends new clients to a fresh domain, and "
        "protected clients fail over to it",
        "let the other clients of the poisoned domain finish: mpsd ends the kernel after the last of them",
    ),
    _row(
        "server-death",
        "the MPS server died",
        "the server's pidfd became readable while its domain was in use",
        Scope.DOMAIN,
        _NONE,
        "find out what killed the server (kernel log, out-of-memory killer)",
    ),
    _row(
        "control-death",
        "the MPS control daemon died",
        "the control daemon's pidfd became readable; its server exits too, and the clients see error 806",
        Scope.DOMAIN,
        _NONE,
        "find out what killed the control daemon (kernel log, out-of-memory killer)",
    ),
    _row(
        "device-ecc",
        "memory error of the GPU",
        "Xid 48, 63, 64, 92, 94, 95, 140, 171 or 172 (not measured)",
        Scope.GPU,
        "not by mpsd: a contained error (Xid 94) ends one process, the other errors end all work on the GPU",
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
        "the GPU or its link failed",
        "Xid 74 (NVLink) or 79 (the GPU has fallen off the bus) (not measured)",
        Scope.GPU,
        "not isolated",
        _DEVICE,
        74,
        79,
    ),
    _row(
        "device-gsp",
        "the GPU's firmware does not respond",
        "Xid 62, 119 or 120 (not measured)",
        Scope.GPU,
        "not isolated",
        _DEVICE,
        62,
        119,
        120,
    ),
    _row(
        "device-other",
        "other fault of the GPU itself",
        "a critical Xid of the GPU itself that belongs to no other class (not measured)",
        Scope.GPU,
        "not isolated",
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
        "Xid that belongs to no domain of mpsd",
        "no domain of that GPU gave another sign within the evidence window",
        Scope.CLIENT,
        "not applicable: most likely a process outside MPS caused it",
        "read the kernel log; mpsd-ctl status lists GPU processes outside MPS",
    ),
)

CLASSES: Mapping[str, FaultClass] = MappingProxyType({row.name: row for row in _ROWS})
DEVICE_CLASSES = ("device-ecc", "device-bus", "device-gsp", "device-other")
_BY_DEVICE_XID = {x: n for n in DEVICE_CLASSES for x in CLASSES[n].xids}

# Xids that work of a client can raise. Other Xids are no evidence against a domain: for example, Xid 45
# says only that channels were removed because of an earlier error.
CLIENT_XIDS = frozenset({13, 31, 32, 43, 69})
MMU_CLASSES = frozenset(n for n in CLASSES if n.startswith("mmu-")) | {"pbdma-fault"}
NULL_PAGE_BYTES = 64 << 10


FATAL_DEVICE_XIDS = frozenset({48, 62, 79, 94, 95, 119, 120, 140})
"""Device Xids that end contexts and servers. A server's report right after such an Xid is its consequence."""

LOST_XIDS = frozenset({79, 95, 140})
"""Device Xids after which the GPU runs no work until it is reset. Xid 94, a contained error, ends one process
alone, and Xid 48 comes with it or with 95. The causes of Xids 62, 119 and 120 can pass."""


def device_class(xid: int) -> str | None:
    """Return the class of a device fault, or None if this Xid is not one of the device."""
    return _BY_DEVICE_XID.get(xid)


def advice(name: str, *, lost: bool = True, named: bool = False) -> str:
    """Return what the operator does about a fault of this class.

    `lost`: clients lost their GPU work. `named`: the record names the offender, so it has no suspects."""
    row = CLASSES[name]
    action = row.action
    if named:
        action = action.replace(_SUSPECTS, _INSPECT).replace(_INSPECT, "inspect the offender")
    return f"{action}; {_AGAIN}" if lost and row.scope is Scope.DOMAIN else action


def classify_uvm(event: UvmEvent, lies_there: AddressKind | None = None) -> str:
    """Return the class of a fatal UVM event. `lies_there`: the mapping at its address, if looked up."""
    permission = event.fault_type in (UvmFaultType.WRITE, UvmFaultType.ATOMIC)
    if permission or event.reason is UvmReason.PERMISSIONS:
        return "mmu-permission"
    if event.address < NULL_PAGE_BYTES:
        return "mmu-null"
    if lies_there is AddressKind.FREED:
        return "mmu-use-after-unmap"
    return "mmu-invalid-address"


def refine_mmu(fault_class: str, text: str) -> str:
    """Return a better class for an MMU fault, from the Xid 31 line of the same fault."""
    upper = text.upper()
    if "PBDMA" in upper:
        return "pbdma-fault"
    if "GPCCLIENT_GCC" in upper and fault_class in ("mmu-invalid-address", "mmu-use-after-unmap"):
        return "mmu-instruction-fetch"
    return fault_class


def classify_sm(text: str) -> str | None:
    """Return the class that an Xid 13 line tells, or None if it tells nothing new.

    The driver prints several lines per fault; the ESR register line names no kind.
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
    """Return plain text about one class, or about the sources of decisions (`sources`).

    Raises NotFoundError naming the nearest class.
    """
    if name == SOURCES:
        return sources.explain()
    row = CLASSES.get(name)
    if row is None:
        near = get_close_matches(name, CLASSES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(sorted(CLASSES))}; or {SOURCES}"
        raise NotFoundError(f"there is no fault class {name!r}", remedy=hint)
    xids = ", ".join(map(str, row.xids)) or "none"
    return "\n".join(
        (
            f"{row.name}: {row.title}",
            f"  recognised  {row.recognised}",
            f"  reaches     {row.scope.value}",
            f"  isolated    {row.isolated}",
            f"  Xids        {xids}",
            f"  saved by    {_saved_by(row)}",
            f"  do          {advice(name)}",
        )
    )


def _saved_by(row: FaultClass) -> str:
    if row.level is None:
        return "no level" if row.scope is Scope.GPU else "every level"
    program = "the offender" if row.level is ProtectionLevel.GUARD else "the other clients"
    return f'protect = "{row.level}", with {program} under mpsd-run'
