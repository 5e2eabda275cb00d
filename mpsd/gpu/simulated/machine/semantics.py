"""Data on faults: affected contexts, times and log lines, measured on one H200 (driver 580).

Times are milliseconds after the launch of the faulting kernel. A pair is the observed range, from which the
simulated GPU draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpsd.base.model import UvmFaultType, UvmReason

Range = tuple[float, float]

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY = 0, 1, 2
NO_SUCH_KERNEL, ECC_UNCORRECTABLE = 98, 214
ILLEGAL_ADDRESS, ASSERT, MISALIGNED, LAUNCH_FAILED = 700, 710, 716, 719
CONNECTION_FAILED, RPC_FAILURE, SERVER_NOT_READY, MAX_CLIENTS, CLIENT_TERMINATED = 805, 806, 807, 808, 810
DEVICES_UNAVAILABLE, NOT_PERMITTED, NOT_SUPPORTED, UNKNOWN_ERROR = 46, 800, 801, 999

# Raw NV_STATUS values of UVM calls.
NV_OK, NV_ILLEGAL_ACTION, NV_INVALID_ADDRESS, NV_ADDRESS_IN_USE = 0x0, 0x16, 0x1E, 0x68
ACCESS_NUMBERS = {"read": 1, "write": 2, "atomic": 3, "prefetch": 4}


@dataclass(frozen=True, slots=True)
class XidLine:
    """One Xid in the kernel log, and NVML's event for it (nvml_ms None: NVML does not report it).

    `names`: owner of the pid in the line (`innocent`, `offender`, `server` or `nobody`). `resets`: the driver
    says that it has reset the channels, so the fault domain writes nothing any more.
    """

    number: int
    ms: Range
    names: str
    text: str
    nvml_ms: Range | None = None
    resets: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Effect of one kind of fault.

    own: error in the offender's context; others: in every other context of its fault domain (0: not
    propagated). server_ms: when its server goes to FAULT. stall_ms: how long nothing runs on the GPU.
    completes: the bad kernel counts as done, so the offender's sync returns success. event_ms: when the
    UVM tracker of the offender's space sees it (None: never). blames: the server's log names a client.
    """

    title: str
    own: int
    own_ms: Range
    others: int
    others_ms: Range
    server_ms: Range
    stall_ms: Range
    xids: tuple[XidLine, ...]
    event_ms: Range | None = None
    completes: bool = False
    blames: bool = False

    @property
    def spreads(self) -> bool:
        return self.others != SUCCESS


_MMU_TEXT = (
    "channel 0x{channel:08x}, intr 00000000. MMU Fault: ENGINE {engine} faulted @ "
    "0x{high:x}_{low:08x}. Fault is of type {fault} ACCESS_TYPE_VIRT_{access}"
)
_DATA, _CODE, _HOST = (
    "GRAPHICS GPC1 GPCCLIENT_T1_8",
    "GRAPHICS GPC1 GPCCLIENT_GCC",
    "GR0_PBDMA0 HUBCLIENT_ESC",
)
_RESET_TEXT = "channel 0x{channel:08x}"
_WARP_TEXT = "Graphics SM Warp Exception on (GPC 1, TPC 4, SM 0): "
_ESR_TEXT = "Graphics Exception: ESR 0x519730={esr} 0x519734={detail} 0x519728=0x1f81fb60 0x51972c=0x1174"


def _mmu(title: str, engine: str, start: float, *, landing: Range) -> Outcome:
    """Return a fault that UVM sees. `start`: when the driver begins to print."""
    line = XidLine(
        31,
        (start, start + 6),
        "innocent",
        _MMU_TEXT.replace("{engine}", engine),
        (landing[0] - 2, landing[0]),
    )
    return Outcome(
        title,
        own=ILLEGAL_ADDRESS,
        own_ms=landing,
        others=ILLEGAL_ADDRESS,
        others_ms=landing,
        server_ms=(start + 1, start + 7),
        stall_ms=(landing[0] - 2, landing[0] - 1),
        xids=(line,),
        event_ms=(0.5, 1.1),
        blames=True,
    )


def _sm(
    title: str,
    code: int,
    others_ms: Range,
    *,
    own_ms: Range | None = None,
    warp: str = "",
    esr: str = "",
    detail: str = "0x0",
) -> Outcome:
    """Return an SM exception. Without `own_ms` the offender's sync returns success."""
    texts = (_WARP_TEXT + warp, _ESR_TEXT.replace("{esr}", esr).replace("{detail}", detail)) if warp else ()
    lines = [XidLine(13, (5 + n, 6 + n), "nobody", text) for n, text in enumerate(texts)]
    return Outcome(
        title,
        own=code,
        own_ms=own_ms or others_ms,
        others=code,
        others_ms=others_ms,
        server_ms=(7, 11),
        stall_ms=(13, 39),
        xids=(*lines, XidLine(43, (10, 14), "server", _RESET_TEXT, (10, 16), resets=True)),
        completes=own_ms is None,
    )


STRAY = _mmu("access to an unmapped address", _DATA, 127, landing=(145, 152))
WILD_CALL = _mmu("call through a wild pointer", _CODE, 91, landing=(110, 146))
DEATH = replace(
    _mmu("the client died with work in flight", _CODE, 163, landing=(180, 187)),
    event_ms=None,
    stall_ms=(140, 144),
)

OUTCOMES: dict[str, Outcome] = {
    "stray": STRAY,
    "wild_call": WILD_CALL,
    "noncanonical": _sm(
        "address out of range", ILLEGAL_ADDRESS, (40, 290), warp="Out Of Range Address", esr="0x100000e"
    ),
    "misaligned": _sm(
        "misaligned address", MISALIGNED, (41, 129), warp="Misaligned Address", esr="0x500000f"
    ),
    "shared_window": _sm(
        "shared memory window", ILLEGAL_ADDRESS, (40, 68), warp="Out Of Range Address", esr="0xc00000e"
    ),
    "local_window": _sm(
        "local memory window", ILLEGAL_ADDRESS, (40, 42), warp="Out Of Range Address", esr="0x301000e"
    ),
    "trap": _sm("trap", LAUNCH_FAILED, (93, 360), own_ms=(9, 20)),
    "breakpoint": _sm("breakpoint", LAUNCH_FAILED, (94, 360), own_ms=(10, 20)),
    # The driver calls it out of range as well; only the exception's registers differ.
    "stack_overflow": _sm(
        "stack overflow",
        ILLEGAL_ADDRESS,
        (67, 69),
        own_ms=(40, 66),
        warp="Out Of Range Address",
        esr="0x300000e",
        detail="0x20",
    ),
    "pbdma": Outcome(
        "host engine access to an unmapped address",
        own=LAUNCH_FAILED,
        own_ms=(0, 1),
        others=LAUNCH_FAILED,
        others_ms=(1, 3),
        server_ms=(0, 1),
        stall_ms=(0, 0),
        xids=(XidLine(31, (0, 0), "offender", _MMU_TEXT.replace("{engine}", _HOST), (0, 1)),),
        event_ms=(0, 0),
        blames=True,
    ),
    "assert": Outcome(
        "device assert",
        own=ASSERT,
        own_ms=(10, 14),
        others=SUCCESS,
        others_ms=(0, 0),
        server_ms=(0, 0),
        stall_ms=(10, 13),
        xids=(),
    ),
    "death": DEATH,
}

# Kernels that access one address, with their type of access.
ACCESSES = {
    "store": "write",
    "load": "read",
    "atomic": "atomic",
    "null": "write",
    "use_after_unmap": "write",
    "read_only": "write",
    "wild_call": "read",
    "pbdma": "write",
    "guard_low": "write",
    "guard_file": "write",
    "guard_heap": "write",
    "guard_stack": "write",
    "prefetch": "prefetch",
}
# Delay from an access to its serviced fault on the trackers.
SERVICED_MS: Range = (0.4, 0.9)
# Delay from a fatal fault to the kernel module's record (an assumption: the time of UVM's own event).
RECORD_MS: Range = (0.3, 0.9)
# Kernels without an end of their own. wild_call_low: a call through 0x10.
ENDLESS = frozenset({"forever", "endless", "wild_call_low"})
GOOD = frozenset({"increment", "fill", "spin", "forever"})
KERNELS = GOOD | ENDLESS | ACCESSES.keys() | (OUTCOMES.keys() - {"stray", "death"})

FAULT_NAMES = {
    UvmFaultType.INVALID_PDE: "FAULT_PDE",
    UvmFaultType.WRITE: "FAULT_RO_VIOLATION",
}
REASONS = {
    UvmFaultType.INVALID_PDE: UvmReason.INVALID_ADDRESS,
    UvmFaultType.WRITE: UvmReason.INVALID_ADDRESS,
}


@dataclass(frozen=True, slots=True)
class DeviceXid:
    """A scripted fault of the device itself. `error` reaches every context of the GPU (0: none)."""

    text: str
    error: int


DEVICE_XIDS: dict[int, DeviceXid] = {
    48: DeviceXid(
        "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer",
        ECC_UNCORRECTABLE,
    ),
    62: DeviceXid("Internal micro-controller halt", UNKNOWN_ERROR),
    63: DeviceXid("Row remapper: new row marked for remapping, reset the GPU to activate", 0),
    64: DeviceXid("Row remapper: remapping failed", 0),
    74: DeviceXid("NVLink: fatal error detected on link 0", 0),
    79: DeviceXid("GPU has fallen off the bus.", UNKNOWN_ERROR),
    92: DeviceXid("High single-bit ECC error rate", 0),
    94: DeviceXid("Contained: SM. RST: No, D-RST: No", ECC_UNCORRECTABLE),
    95: DeviceXid("Uncontained: LTC TAG. RST: Yes, D-RST: No", ECC_UNCORRECTABLE),
    119: DeviceXid("Timeout waiting for RPC from GSP0! Expected function 76", UNKNOWN_ERROR),
    120: DeviceXid("GSP task exception", UNKNOWN_ERROR),
    140: DeviceXid("Unrecovered ECC error", ECC_UNCORRECTABLE),
}
