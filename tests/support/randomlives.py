"""What random lives of a daemon choose from, and the true state of their world."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import strategies as st

from mpsd.base.model import ClientId, Confidence, KernelAction, ProcessInstance
from mpsd.core import events as ev
from mpsd.core.faults.records import FaultRecord
from mpsd.core.lists import QUIET_LOG, UNSURE
from mpsd.core.slots import IDLE
from tests.support.core import MISALIGNED, OUT_OF_RANGE, REGISTER, World, mmu_text, process

GPUS = ("GPU-0", "GPU-1")
SLOTS = (("a", "GPU-0", 1000), ("b", "GPU-0", 2000), ("c", "GPU-1", None))
ADDRESSES = (0, 0x7F0000001000, 0x7F0000002000)
WORDS = ("", OUT_OF_RANGE, MISALIGNED, REGISTER, "@ 0x_", mmu_text(ADDRESSES[1], "GPCCLIENT_GCC"))
XIDS = (13, 31, 32, 43, 45, 69, 48, 79, 9999)
OF_SERVERS = ("ask", "laggards", "kill-victims", "suspected", "unlisted", "successor")
OF_DOMAINS = ("ensure", IDLE, *OF_SERVERS, QUIET_LOG, UNSURE)
OF_CLIENTS = ("linger", "kill-wait", "strays", "hits", "thaw", "fault-revision")
TIMERS = (*OF_DOMAINS, *OF_CLIENTS, "no-such")
ROUNDS = 10

pids = st.integers(10, 17)
starts = st.sampled_from((1, 1, 1, 2))
picks = st.integers(0, 11)
processes = st.builds(process, pids, starts)


@dataclass
class Truth:
    """The true state of the world, which core does not know."""

    came_up: set[str] = field(default_factory=set)
    faulted: set[ProcessInstance] = field(default_factory=set)
    ended: set[ClientId] = field(default_factory=set)
    vouched: set[tuple[str, ProcessInstance]] = field(default_factory=set)
    stopped: set[ProcessInstance] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    answered: Counter[str] = field(default_factory=Counter)
    revisions: dict[int, int] = field(default_factory=dict)
    timers: list[tuple[str, str]] = field(default_factory=list)
    private: bool = True
    hung: set[int] = field(default_factory=set)


def is_absorbed(event: ev.Event) -> bool:
    """Return whether the kernel module has absorbed this fault."""
    return isinstance(event, ev.KernelFaultSeen) and event.fault.action is KernelAction.SUNK


def check_record(world: World, truth: Truth, record: FaultRecord) -> None:
    """Check a revision of a record against the truth."""
    seen = truth.revisions
    if record.logged is not None and record.revision == 1:
        clients = [c for c in world.state.clients.values() if c.living]
        here = [c for c in clients if set(world.state.domains[c.id.domain].gpus) & set(record.gpus)]
        assert record.logged.pid not in {c.id.process.pid for c in here if not c.absent}
        assert record.domain is None and record.confidence is Confidence.LIKELY
    domain = world.state.domains.get(record.domain or "")
    if record.id not in seen and domain is not None and domain.may_lack_clients:
        assert record.confidence is not Confidence.LIKELY or record.fault_class == "hang"
    if record.id not in seen:
        assert record.id > max(seen, default=0) and record.revision >= 1
    else:
        assert record.revision > seen[record.id]
    seen[record.id] = record.revision
    if record.confidence is Confidence.CERTAIN:
        assert record.offender is not None
        who = record.offender.id.process
        if record.fault_class == "hang" and record.offender.id not in truth.ended:
            truth.hung.add(record.id)
        # A revision may come after that work has ended.
        assert record.id in truth.hung or who in truth.faulted, f"{who} is named for certain"
    named = record.offender is not None or record.logged is not None
    assert named == (record.confidence is not Confidence.UNKNOWN)
    assert record.offender is None or not record.suspects
