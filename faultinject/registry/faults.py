"""The registry: every fault that the harness can inject, and what must hold afterwards.

A fault is a value. It says what the fault is, what it needs of the machine, which class mpsd must give it,
which clients must survive it in each mode, how certain the attribution must be, and how the machine heals.
The expectations for stock MPS were measured (evidence/matrix.md): False means that clients are known to be
lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import StrEnum

from faultinject.registry import kinds
from mpsd.base.errors import UsageError


class Recording(StrEnum):
    """Whether mpsd must write a fault record."""

    REQUIRED = "required"
    OPTIONAL = "optional"
    NONE = "none"


class Naming(StrEnum):
    """The record's statement about the offender. No record may name an innocent client."""

    CERTAIN = "certain"
    RIGHT = "right"
    NOT_WRONG = "not wrong"
    NO_CLIENT = "no client"


class Heal(StrEnum):
    """The repair of the machine after the fault, however the scenario ended."""

    NOTHING = "nothing: it heals by itself once its clients have ended"
    KILL_OFFENDER = "kill the offender"
    RESTART_DAEMON = "start mpsd again"
    FREE_DISK = "free the log disk"


class Need(StrEnum):
    """Features of the machine. A fault that lacks one is not run; the report says why."""

    LOG_DISK = "a log disk that can be filled"
    CHOOSE_PID = "the right to choose the next pid"
    PROXY = "mpsd's libcuda"
    NULL_PAGE = "the right to map address 0"


class Hit(StrEnum):
    """The outcome of an access to a guard zone (zone kinds alone)."""

    EVICTED = "the offender is evicted"
    ABSORBED = "it is recorded, and the offender continues"
    FROZEN = "the offender is stopped, and evicted on request"
    SILENT = "nothing: it is absorbed and not recorded"


class StallBar(StrEnum):
    """The bound of a survivor's longest stall, where the project states one."""

    NONE = "none"
    FREE = "a few milliseconds: the offender leaves SMs free"
    EVICTION = "the eviction time and a few milliseconds: the offender fills the GPU"


class Story(StrEnum):
    """How the scenario goes (faultinject.rig.scenarios has one function for each)."""

    INJECT = "the offender commits the fault"
    EVICTION = "the offender hangs and is evicted"
    PART_DIES = "a part of the service is killed"
    DAEMON_DIES = "mpsd dies while the kernel of an exited client runs"
    DISK_FULL = "the log disk is full when the fault happens"
    PID_REUSE = "another process gets the pid of an exited client"
    CHURN = "many clients come and go"
    GPU_FULL = "the offender commits the fault while another client holds all remaining GPU memory"
    FROZEN = "the offender commits the fault, mpsd stops it, and then evicts it"
    HIT_AFTER_RESTART = "mpsd is killed and restarted, then the offender commits the fault"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `survive`: by mode, whether survivors must live (True), are lost (False), or either (None).

    `settings` go into mpsd's configuration (section.key to TOML). `host_guard_bytes`: of a proxied program.
    `evict_bar_ms`: a limit of its own for the eviction after a hit. `bare`: a zone kind without the proxy.
    """

    kind: str
    title: str
    survive: Mapping[str, bool | None]
    classes: frozenset[str] = frozenset()
    recording: Recording = Recording.REQUIRED
    naming: Naming = Naming.CERTAIN
    story: Story = Story.INJECT
    variant: str = ""
    heal: Heal = Heal.NOTHING
    needs: frozenset[Need] = frozenset()
    modes: tuple[str, ...] = kinds.MODES
    offenders: int = 1
    elsewhere: bool = False
    fills_gpu: bool = False
    stall_bar: StallBar = StallBar.NONE
    memory_back: bool = False
    poisons: bool = False
    hit: Hit = Hit.EVICTED
    proxied_survivors: bool = False
    absorbed: bool = False
    evict_bar_ms: float | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    host_guard_bytes: int = 0
    bare: bool = False

    @property
    def zoned(self) -> bool:
        return self.kind in kinds.ZONE and not self.bare

    @property
    def name(self) -> str:
        return f"{self.kind}@{self.variant}" if self.variant else self.kind

    def runs_in(self, mode: str) -> bool:
        """Return whether the fault runs in this mode.

        Mode kmod leaves out guard zones and guards, which do the same by other means, and wild calls, which
        have an unknown end there.
        """
        if mode != kinds.KMOD:
            return ("mpsd" if mode == kinds.AUTO else mode) in self.modes
        other = self.kind in kinds.ZONE + kinds.CALL or (self.kind in kinds.GUARD and self.variant != "")
        return "mpsd" in self.modes and not other

    @property
    def takes_domain(self) -> bool:
        """Return whether the domain faults under mpsd too: mpsd promises no isolation from this kind."""
        return self.survive.get("mpsd") is False


def _survive(stock: bool | None, mpsd: bool | None) -> Mapping[str, bool | None]:
    return {"stock": stock, "mpsd": mpsd}


_LOST = _survive(False, False)
_SAVED = _survive(False, True)
_UNHARMED = _survive(True, True)


def _domain_fault(kind: str, title: str, fault_class: str, naming: Naming = Naming.CERTAIN) -> Fault:
    return Fault(kind, title, _LOST, frozenset({fault_class}), naming=naming)


def _sm(kind: str, title: str, fault_class: str) -> Fault:
    return _domain_fault(kind, title, fault_class, Naming.NOT_WRONG)


def _death(kind: str, title: str, variant: str = "", *, fills_gpu: bool = False) -> Fault:
    return Fault(
        kind,
        title,
        _SAVED,
        frozenset({"death-in-flight"}),
        recording=Recording.OPTIONAL,
        naming=Naming.NOT_WRONG,
        variant=variant,
        fills_gpu=fills_gpu,
        stall_bar=StallBar.NONE if fills_gpu else StallBar.FREE,
    )


def _guard(kind: str, where: str) -> tuple[Fault, Fault]:
    """Return the fault with the guards that mpsd chooses, and with the guard of this class turned on."""
    # Where the guard is off, the store is fatal and attributed; the laws ask `status` whether it is on.
    auto = Fault(
        kind,
        f"out-of-bounds store into {where}",
        _survive(False, None),
        frozenset({"mmu-invalid-address"}),
        recording=Recording.OPTIONAL,
    )
    asked = replace(
        auto,
        title=f"{auto.title}, guard on",
        survive=_survive(None, True),
        naming=Naming.NO_CLIENT,
        variant="on",
        modes=("mpsd",),
        settings={f"guard.{kind.removeprefix('guard_')}": "true"},
    )
    return auto, asked


def _zone(kind: str, what: str, *needs: Need) -> tuple[Fault, Fault, Fault]:
    """Return the fault by one thread with a kernel that ends or continues, and by a full grid.

    The zone absorbs and reports it, and mpsd evicts the offender before another client is delayed.
    """
    one = Fault(
        kind,
        f"{what}, one thread",
        _survive(None, True),
        # A client that is evicted with its kernel running may have a record of that too.
        frozenset({"guard-hit", "death-in-flight"}),
        variant="one",
        needs=frozenset({Need.PROXY, *needs}),
        modes=("mpsd",),
        stall_bar=StallBar.FREE,
        settings={"protect": '"guard"'},
    )
    grid = replace(
        one,
        title=f"{what}, a full grid",
        variant="grid",
        fills_gpu=True,
        stall_bar=StallBar.EVICTION,
    )
    long = replace(one, title=f"{what}, one thread whose kernel continues", variant="long")
    return one, long, grid


def _with_full_gpu(one: Fault, *, fills_gpu: bool = False) -> Fault:
    """Return the same fault while no GPU memory is free."""
    how = "a full grid" if fills_gpu else "one thread"
    return replace(
        one,
        title=f"{one.title.removesuffix(', one thread')}, {how}, no GPU memory left",
        variant="fullgrid" if fills_gpu else "full",
        story=Story.GPU_FULL,
        fills_gpu=fills_gpu,
        stall_bar=StallBar.EVICTION if fills_gpu else StallBar.FREE,
    )


def _far_zone_faults() -> tuple[Fault, ...]:
    """Return faults in the far zones.

    The GPU serves a grid's faults one after another, and the grid cannot end before: its eviction has a limit
    of its own.
    """
    # The default limits are too small for the far zones of a program: this grants it 16 GiB.
    caps = {"guard.zones_bytes_per_gpu": str(384 << 30)}

    def kinds_of(kind: str, what: str) -> tuple[Fault, ...]:
        return tuple(replace(each, settings={**each.settings, **caps}) for each in _zone(kind, what))

    past, _, grid = kinds_of("zone_distant", "store 3 GiB past the end of an allocation")
    wild = "a full grid over 256 MiB, to be evicted within 1000 ms"
    title = f"store 3 GiB past the end of an allocation, {wild}"
    before = kinds_of("zone_distant_before", "store 2 GiB before the start of an allocation")[0]
    return past, replace(grid, title=title, evict_bar_ms=1000.0), before


def _policy_faults(one: Fault) -> tuple[Fault, ...]:
    """Return the faults after which mpsd does not evict the offender at once."""
    absorb = replace(
        one,
        kind="zone_absorb",
        title="store past the end, policy absorb, one thread",
        hit=Hit.ABSORBED,
        settings={**one.settings, "guard.zone_policy": '"absorb"'},
    )
    freeze = replace(
        one,
        kind="zone_freeze",
        title="store past the end, policy freeze, one thread",
        story=Story.FROZEN,
        heal=Heal.KILL_OFFENDER,
        hit=Hit.FROZEN,
        settings={**one.settings, "guard.zone_policy": '"freeze"'},
    )
    restart = replace(
        one,
        kind="zone_restart",
        title="kill -9 of mpsd, then a store past the end under the restarted mpsd",
        story=Story.HIT_AFTER_RESTART,
        heal=Heal.RESTART_DAEMON,
        proxied_survivors=True,
    )
    sparse = replace(
        one,
        kind="zone_sparse",
        title="store past the end without a budget for managed zones, one thread",
        classes=frozenset(),
        recording=Recording.NONE,
        naming=Naming.NO_CLIENT,
        hit=Hit.SILENT,
        # Too small for a grant: the zones absorb and do not report.
        settings={**one.settings, "guard.zones_bytes_per_gpu": str(32 << 20)},
    )

    host = replace(
        sparse,
        kind="zone_host",
        title="store through a pointer to the program's own host memory, under a guard, one thread",
        settings=one.settings,
        host_guard_bytes=16 << 30,
    )

    def wild(fault: Fault) -> Fault:
        title = fault.title.replace("one thread", "a full grid")
        return replace(fault, title=title, variant="grid", fills_gpu=True, stall_bar=StallBar.NONE)

    return (
        absorb,
        wild(absorb),
        freeze,
        replace(freeze, title="store past the end, policy freeze, its kernel continues", variant="long"),
        restart,
        sparse,
        wild(sparse),
        host,
    )


def _eviction(kind: str, title: str, variant: str = "", *, fills_gpu: bool = False) -> Fault:
    return Fault(
        kind,
        title,
        _SAVED,
        frozenset({"hang", "death-in-flight"}),
        recording=Recording.OPTIONAL,
        naming=Naming.NOT_WRONG,
        story=Story.EVICTION,
        variant=variant,
        heal=Heal.KILL_OFFENDER,
        fills_gpu=fills_gpu,
        stall_bar=StallBar.EVICTION if fills_gpu else StallBar.FREE,
    )


def _without_offender(
    kind: str,
    title: str,
    *,
    classes: frozenset[str] = frozenset(),
    story: Story = Story.INJECT,
    needs: frozenset[Need] = frozenset(),
    modes: tuple[str, ...] = kinds.MODES,
    elsewhere: bool = False,
    memory_back: bool = False,
) -> Fault:
    """Return an event that harms no client of the domain and must be attributed to none."""
    return Fault(
        kind,
        title,
        _UNHARMED,
        classes,
        recording=Recording.OPTIONAL,
        naming=Naming.NO_CLIENT,
        story=story,
        needs=needs,
        modes=modes,
        elsewhere=elsewhere,
        memory_back=memory_back,
    )


_GPU_FAULTS = (
    _domain_fault("store", "store to an address that is not mapped", "mmu-invalid-address"),
    _domain_fault("load", "load from an address that is not mapped", "mmu-invalid-address"),
    _domain_fault("atomic", "atomic on an address that is not mapped", "mmu-invalid-address"),
    _domain_fault("null", "store through a null pointer", "mmu-null"),
    _domain_fault("use_after_unmap", "store to memory that was unmapped", "mmu-use-after-unmap"),
    _domain_fault("read_only", "store to a read-only mapping", "mmu-permission"),
    _sm("noncanonical", "store to a non-canonical address", "sm-out-of-range"),
    _sm("misaligned", "misaligned store", "sm-misaligned"),
    _sm("shared_window", "shared memory window out of range", "sm-out-of-range"),
    _sm("local_window", "local memory window out of range", "sm-out-of-range"),
    _sm("trap", "trap instruction", "sm-trap"),
    _sm("breakpoint", "breakpoint instruction", "sm-trap"),
    # The driver reports out of range too; only the registers of the exception differ.
    replace(
        _sm("stack_overflow", "stack overflow in a kernel", "sm-stack-overflow"),
        classes=frozenset({"sm-stack-overflow", "sm-out-of-range"}),
    ),
    _domain_fault("wild_call", "call through a wild pointer", "mmu-instruction-fetch"),
    Fault(
        "wild_call_low",
        "call through 0x10: the kernel hangs, then its client is evicted",
        _survive(None, None),
        frozenset({"hang", "death-in-flight", "mmu-instruction-fetch", "mmu-null"}),
        recording=Recording.OPTIONAL,
        naming=Naming.NOT_WRONG,
        story=Story.EVICTION,
        heal=Heal.KILL_OFFENDER,
    ),
    _domain_fault("pbdma", "stream memory operation on an unmapped address", "pbdma-fault"),
    Fault(
        "assert",
        "assert() in a kernel",
        _UNHARMED,
        frozenset({"device-assert"}),
        recording=Recording.OPTIONAL,
        naming=Naming.NOT_WRONG,
    ),
    *_guard("guard_low", "the low addresses"),
    *_guard("guard_file", "a file mapping"),
    *_guard("guard_heap", "the heap"),
    *_guard("guard_stack", "the stack"),
)

_FULL = (("past_end", "store"), ("load", "load"), ("atomic", "atomic"))

_ZONE_FAULTS = (
    *_zone("zone_past_end", "store past the end of an allocation"),
    *_zone("zone_load", "load past the end of an allocation"),
    *_zone("zone_before_start", "store before the start of an allocation"),
    *_zone("zone_use_after_free", "store to an allocation that was freed"),
    *_zone("zone_far", "store 16 MiB past the end of an allocation"),
    *_far_zone_faults(),
    *_zone("zone_atomic", "atomic past the end of an allocation"),
    *_zone("zone_null", "store through a null pointer", Need.NULL_PAGE),
    *(
        _with_full_gpu(_zone(f"zone_{kind}", f"{what} past the end of an allocation")[0])
        for kind, what in _FULL
    ),
    _with_full_gpu(_zone("zone_past_end", "store past the end of an allocation")[0], fills_gpu=True),
    *_policy_faults(_zone("zone_past_end", "")[0]),
)

_PROCESS_FAULTS = (
    _death("sigkill_running", "SIGKILL while its kernel runs"),
    _death("sigkill_running", "SIGKILL while its kernel fills the GPU", "fill", fills_gpu=True),
    Fault(
        "sigkill_running",
        "SIGKILL while a kernel runs that does not end",
        _SAVED,
        frozenset({"hang"}),
        naming=Naming.RIGHT,
        variant="endless",
        poisons=True,
    ),
    _death("exit_running", "exit without cleaning up while its kernel runs"),
    _death("segfault_running", "segmentation fault on the host while its kernel runs"),
    _without_offender("sigkill_idle", "SIGKILL of an idle client", memory_back=True),
    _without_offender("clean_exit", "an orderly exit", memory_back=True),
    _eviction("endless", "a kernel that does not end, evicted, SMs left free", "free"),
    _eviction("endless", "a kernel that does not end, evicted, the GPU full", "fill", fills_gpu=True),
    Fault(
        "sigstop",
        "a client is stopped while its kernel runs, then evicted (stock: continued)",
        _UNHARMED,
        frozenset({"death-in-flight"}),
        recording=Recording.OPTIONAL,
        naming=Naming.NOT_WRONG,
        story=Story.EVICTION,
        heal=Heal.KILL_OFFENDER,
    ),
    _without_offender("fork_using", "fork while its kernel runs"),
    Fault(
        "exec_using",
        "exec while its kernel runs",
        _survive(None, True),
        frozenset({"death-in-flight"}),
        recording=Recording.OPTIONAL,
        naming=Naming.NOT_WRONG,
    ),
)

_SERVICE_FAULTS = (
    Fault(
        "server_death",
        "SIGKILL of the MPS server",
        _LOST,
        frozenset({"server-death"}),
        naming=Naming.NO_CLIENT,
        story=Story.PART_DIES,
    ),
    Fault(
        "control_death",
        "SIGKILL of the control daemon",
        _survive(None, None),
        frozenset({"control-death"}),
        naming=Naming.NO_CLIENT,
        story=Story.PART_DIES,
    ),
    Fault(
        "mpsd_death",
        "kill -9 of mpsd while the kernel of an exited client runs",
        _survive(None, True),
        frozenset({"death-in-flight"}),
        recording=Recording.OPTIONAL,
        naming=Naming.NOT_WRONG,
        story=Story.DAEMON_DIES,
        heal=Heal.RESTART_DAEMON,
        modes=("mpsd",),
    ),
    Fault(
        "full_log_disk",
        "the log disk is full, then a client is killed while its kernel runs",
        _SAVED,
        frozenset({"death-in-flight"}),
        recording=Recording.OPTIONAL,
        naming=Naming.NOT_WRONG,
        story=Story.DISK_FULL,
        heal=Heal.FREE_DISK,
        needs=frozenset({Need.LOG_DISK}),
    ),
    Fault(
        "two_offenders",
        "two clients store to unmapped addresses at once",
        _LOST,
        frozenset({"mmu-invalid-address"}),
        offenders=2,
    ),
    Fault(
        "dies_while_evicted",
        "a client with an endless kernel is killed while it is being evicted",
        _survive(None, True),
        frozenset({"hang", "death-in-flight"}),
        recording=Recording.OPTIONAL,
        naming=Naming.NOT_WRONG,
        story=Story.EVICTION,
        heal=Heal.KILL_OFFENDER,
        modes=("mpsd",),
    ),
    _without_offender(
        "other_domain",
        "a client of another control daemon on the same GPU stores to an unmapped address",
        classes=frozenset({"unattributed-xid"}),
        elsewhere=True,
    ),
    _without_offender(
        "outside_mps",
        "a process outside MPS stores to an unmapped address",
        classes=frozenset({"unattributed-xid"}),
        elsewhere=True,
    ),
    _without_offender(
        "pid_reuse",
        "an innocent process has the pid of an exited client, whose eviction is requested",
        story=Story.PID_REUSE,
        needs=frozenset({Need.CHOOSE_PID}),
        modes=("mpsd",),
    ),
    # Other kinds test hangs; here only the daemon's own limit counts, however slow the machine is.
    replace(
        _without_offender(
            "churn", "the maximum number of clients, which start and end all the time", story=Story.CHURN
        ),
        settings={"lease.linger_limit_s": "30.0"},
    ),
)

REGISTRY: tuple[Fault, ...] = _GPU_FAULTS + _ZONE_FAULTS + _PROCESS_FAULTS + _SERVICE_FAULTS


_ABSORBED = frozenset(kinds.MMU + kinds.ENGINE + kinds.GUARD + ("two_offenders",)) - {"read_only"}


def under_kernel_module(fault: Fault) -> Fault:
    """Return what must hold in mode kmod: an absorbed fault ends its own client and harms no other."""
    if fault.kind not in _ABSORBED:
        return replace(fault, survive={**fault.survive, kinds.KMOD: fault.survive["mpsd"]})
    # mpsd cannot look up the allocation at the address: the client has ended by then.
    classes = {"mmu-invalid-address" if c == "mmu-use-after-unmap" else c for c in fault.classes}
    return replace(
        fault,
        survive={**fault.survive, "mpsd": True, kinds.KMOD: True},
        classes=frozenset(classes),
        recording=Recording.REQUIRED,
        naming=Naming.CERTAIN,
        stall_bar=StallBar.FREE,
        absorbed=True,
    )


def by_name(name: str) -> Fault:
    """Return the fault of exactly this name (kind, or kind@variant). Raises UsageError."""
    for fault in REGISTRY:
        if fault.name == name:
            return fault
    raise _unknown(name)


def select(names: Iterable[str]) -> Iterator[Fault]:
    """Yield faults by `all`, kind (all its variants) or kind@variant, in registry order, none twice.

    Raises UsageError for a name that is neither.
    """
    wanted = set(names)
    known = {"all"} | set(kinds.ALL) | {f.name for f in REGISTRY}
    for name in sorted(wanted - known):
        raise _unknown(name)
    for fault in REGISTRY:
        if wanted & {"all", fault.kind, fault.name}:
            yield fault


def _unknown(name: str) -> UsageError:
    names = [*kinds.ALL, *(f.name for f in REGISTRY), "all"]
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`mpsd-faultinject list` shows the kinds"
    return UsageError(f"there is no fault kind {name!r}", remedy=hint)
