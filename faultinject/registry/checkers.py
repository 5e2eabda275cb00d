"""Laws over one run. Each is a small function of an observation; a law that throws says unknown.

A law returns None where it does not apply. Times have laws of their own, which are judged only where the
history says so (`bars` in its node entry): on the simulated GPU they are measured, not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from faultinject.registry import kinds
from faultinject.registry.defaults import under_default
from faultinject.registry.faults import (
    Fault,
    Hit,
    Naming,
    Recording,
    StallBar,
    Story,
    under_kernel_module,
)
from faultinject.registry.observation import REFUSED_IN_FAULT, Observation
from faultinject.registry.verdicts import (
    Finding,
    Verdict,
    invalid,
    merge,
    unknown,
    valid,
)

Judgement = tuple[Verdict, str] | None
Law = Callable[[Fault, Observation], Judgement]


@dataclass(frozen=True, slots=True)
class Bars:
    """Upper limits in milliseconds, as the project states them for real hardware."""

    record: float = 5.0
    evict: float = 20.0
    hit_evict: float = 15.0
    stall: float = 5.0
    fresh: float = 300.0
    memory: float = 100.0
    attach: float = 20.0


BARS = Bars()
FULL_BYTES = 4 << 20
"""With less than this free the GPU counts as full: the driver maps memory in units of 2 MiB."""


def effective(fault: Fault, seen: Observation) -> Fault:
    """Return the fault as the settings of this machine change it.

    A guard that is on absorbs it without a record; the patched kernel module absorbs it and records it.
    """
    if seen.mode == kinds.KMOD:
        return under_kernel_module(fault)
    if fault.kind.startswith("guard_") and seen.mode != "stock" and not fault.variant:
        if seen.guard_on:
            fault = replace(fault, survive={**fault.survive, "mpsd": True}, naming=Naming.NO_CLIENT)
        else:
            fault = replace(fault, survive={**fault.survive, "mpsd": False}, recording=Recording.REQUIRED)
    return under_default(fault, seen.notes.get("level")) if seen.mode == kinds.AUTO else fault


def rig_worked(fault: Fault, seen: Observation) -> Judgement:
    if seen.failure:
        return unknown(seen.failure)
    ready = sum(s.ready for s in seen.survivors)
    if ready < seen.ready_expected:
        return unknown(f"only {ready} of {seen.ready_expected} survivors came up")
    return valid()


def fault_happened(fault: Fault, seen: Observation) -> Judgement:
    if fault.story in (Story.CHURN, Story.PID_REUSE):
        return None
    return valid() if seen.fired_at is not None else unknown("the fault was never injected")


def survivors_accounted(fault: Fault, seen: Observation) -> Judgement:
    silent = [s.name for s in seen.survivors if s.ready and not s.done and s.error is None]
    return unknown(f"{', '.join(silent)} ended without saying why") if silent else valid()


def survivors_live(fault: Fault, seen: Observation) -> Judgement:
    must = fault.survive.get(seen.mode)
    if must:
        lost = [f"{s.name} (error {s.error})" for s in seen.survivors if s.lost]
        return invalid(f"lost {', '.join(lost)}") if lost else valid()
    if must is False and seen.mode == "stock" and not seen.lost:
        return unknown("stock MPS is known to lose clients to this fault, and lost none")
    return None


def results_right(fault: Fault, seen: Observation) -> Judgement:
    wrong = [s.name for s in seen.survivors if s.wrong]
    if wrong:
        return invalid(f"wrong results in {', '.join(wrong)}")
    return valid() if any(s.steps for s in seen.survivors) else unknown("no survivor reported its results")


def recorded(fault: Fault, seen: Observation) -> Judgement:
    if seen.mode == "stock" or fault.recording is Recording.OPTIONAL:
        return None
    if fault.recording is Recording.NONE:
        return invalid("a fault record without a fault") if seen.records else valid()
    return valid() if seen.records else invalid("there is no fault record")


def class_right(fault: Fault, seen: Observation) -> Judgement:
    if seen.mode == "stock" or not seen.records:
        return None
    wrong = [r.data["class"] for r in seen.records if r.data["class"] not in fault.classes]
    if wrong:
        expected = " or ".join(sorted(fault.classes)) or "no record"
        return invalid(f"classified as {', '.join(wrong)}, expected {expected}")
    return valid()


def no_innocent_named(fault: Fault, seen: Observation) -> Judgement:
    if seen.mode == "stock":
        return None
    if seen.named == "wrong":
        return invalid(f"named {seen.wrongly_named}, the offender was {list(seen.offenders)}")
    accused = [r.offender for r in seen.records if r.offender]
    if fault.naming is Naming.NO_CLIENT and accused and not fault.elsewhere:
        return invalid(f"named {accused} for a fault of no client")
    return valid()


def offender_named(fault: Fault, seen: Observation) -> Judgement:
    is_required = fault.naming in (Naming.CERTAIN, Naming.RIGHT) and fault.recording is Recording.REQUIRED
    if seen.mode == "stock" or not is_required:
        return None
    if seen.named != "right":
        return invalid(f"the offender is not named ({seen.named})")
    if fault.naming is Naming.CERTAIN and seen.confidence != "certain":
        return invalid(f"the offender is named {seen.confidence}, not certain")
    return valid()


def suspects_include_offender(fault: Fault, seen: Observation) -> Judgement:
    lists = [r.data.get("suspects") or () for r in seen.records if r.offender is None]
    if seen.mode == "stock" or fault.naming is not Naming.NOT_WRONG or not any(lists):
        return None
    suspects = {(s["pid"], s["start_ticks"]) for found in lists for s in found}
    return valid() if suspects & set(seen.offenders) else invalid("the offender is not among the suspects")


def newcomers_served(fault: Fault, seen: Observation) -> Judgement:
    """No client started after the record gets error 807; each runs under MPS."""
    if seen.mode == "stock" or not seen.newcomers:
        return None
    since = seen.record.seen if seen.record else float("-inf")
    for newcomer in (n for n in seen.newcomers if n.spawned >= since):
        if REFUSED_IN_FAULT in newcomer.refused:
            return invalid(f"{newcomer.name}, started after the record, was refused with 807")
        if newcomer.first_kernel is None:
            return invalid(f"{newcomer.name} never ran a kernel")
        if newcomer.on_mps is False:
            return invalid(f"{newcomer.name} ran outside MPS")
    return valid()


def fresh_server(fault: Fault, seen: Observation) -> Judgement:
    if seen.mode == "stock" or not fault.takes_domain:
        return None
    return invalid("no fresh server took over") if seen.fresh_ms is None else valid()


def domain_stays(fault: Fault, seen: Observation) -> Judgement:
    """No client moves for a fault in another domain, or for an absorbed one."""
    if seen.mode == "stock" or not (fault.elsewhere or fault.absorbed or fault.zoned):
        return None
    return invalid("clients were moved for a fault that harms none of them") if seen.moved else valid()


def memory_returned(fault: Fault, seen: Observation) -> Judgement:
    if seen.mode == "stock" or not fault.memory_back:
        return None
    return (
        invalid("memory of an exited client was never released") if seen.memory_back_ms is None else valid()
    )


def guard_laid(fault: Fault, seen: Observation) -> Judgement:
    if fault.kind not in kinds.GUARD or not fault.settings:
        return None
    return valid() if seen.guard_on else invalid("the requested guard was not laid")


def daemon_sound(fault: Fault, seen: Observation) -> Judgement:
    """mpsd found no contradiction in its own state, and performed every effect."""
    if seen.mode == "stock":
        return None
    if seen.counters is None:
        return unknown("mpsd did not report its counters")
    failed = {k: seen.counters[k] for k in ("internal_errors", "effects_failed") if seen.counters.get(k)}
    return invalid(f"mpsd itself failed: {failed}") if failed else valid()


def zones_laid(fault: Fault, seen: Observation) -> Judgement:
    if not fault.zoned:
        return None
    zones = seen.zones or {}
    if fault.kind == "zone_null" and not zones.get("null_page"):
        return invalid("the null page of the offender is not covered")
    if fault.kind in kinds.DISTANT and not zones.get("far_bytes"):
        return invalid("the offender had no far zones")
    if zones.get("sparse" if fault.hit is Hit.SILENT else "managed"):
        return valid()
    lacks = "that absorb without a report" if fault.hit is Hit.SILENT else "that report"
    return invalid(f"the offender had no guard zones {lacks}: {dict(zones) or 'none at all'}")


def allocation_right(fault: Fault, seen: Observation) -> Judgement:
    """The record of a hit names the allocation beside it, and on which side of it."""
    if not fault.zoned or fault.hit is Hit.SILENT:
        return None
    if seen.hit is None:
        return invalid("no record of a hit")
    if seen.aim is None:
        return unknown("the offender did not say what it aimed at")
    recorded_allocation = seen.hit.get("allocation") or {}
    known = ("address", "bytes", "relation") if seen.aim["address"] else ("relation",)
    wanted = {key: seen.aim[key] for key in known if seen.aim[key]}
    wrong = {
        key: recorded_allocation.get(key)
        for key, value in wanted.items()
        if recorded_allocation.get(key) != value
    }
    return (
        invalid(f"the hit is recorded at {recorded_allocation or 'nothing'}, it was at {wanted}")
        if wrong
        else valid()
    )


def hit_evicted(fault: Fault, seen: Observation) -> Judgement:
    if not fault.zoned or fault.hit not in (Hit.EVICTED, Hit.FROZEN) or seen.hit is None:
        return None
    if seen.hit.get("outcome") != "evicted":
        return invalid(f"after the hit the offender was {seen.hit.get('outcome')}, not evicted")
    return valid() if seen.evicted_at is not None else invalid("the offender was not ended")


def absorbed_by_kernel(fault: Fault, seen: Observation) -> Judgement:
    """Each offender has a record of the kernel module, and mpsd evicted it."""
    if not fault.absorbed:
        return None
    ended = [r.offender for r in seen.records if (r.data.get("hit") or {}).get("zone") == "sink"]
    without_record = [offender for offender in seen.offenders if offender not in ended]
    if without_record:
        return invalid(f"no record of the kernel module for {without_record}")
    other_outcomes = [str(hit.get("outcome")) for hit in seen.hits if hit.get("outcome") != "evicted"]
    if other_outcomes:
        return invalid(f"after its fault was absorbed an offender was {other_outcomes[0]}, not evicted")
    if len(seen.records) != len(seen.offenders):
        return invalid(f"{len(seen.records)} records of {len(seen.offenders)} offenders")
    if any(hit.get("alone") is not True for hit in seen.hits):
        return invalid("the domain of an absorbed fault has faulted as well")
    return valid() if seen.evicted_at is not None else invalid("the offender was not ended")


def hit_absorbed(fault: Fault, seen: Observation) -> Judgement:
    """The offender continues with right results; there is one record of it, or none (silent)."""
    if not fault.zoned or fault.hit not in (Hit.ABSORBED, Hit.SILENT):
        return None
    # A program that the rig has ended has "ended", by a later revision of its record.
    outcomes = [h.get("outcome") for h in seen.hits]
    if fault.hit is Hit.ABSORBED and outcomes not in (["absorbed"], ["ended"]):
        return invalid(f"expected a record of one absorbed hit, found: {outcomes}")
    if seen.continued is None or seen.evicted_at is not None:
        return invalid("the offender did not continue")
    return invalid("the offender's later results are wrong") if seen.continued["wrong"] else valid()


def frozen_then_killed(fault: Fault, seen: Observation) -> Judgement:
    """The offender was stopped, as mpsd and the kernel say, and terminate_client was not sent for it."""
    if fault.hit is not Hit.FROZEN:
        return None
    if seen.frozen is None or not (seen.frozen["told"] and seen.frozen["stopped"]):
        return invalid(f"the offender was not stopped: {dict(seen.frozen or {})}")
    steps = [s for a in seen.answers if a.get("ok") for s in a["result"].get("steps", ())]
    if not steps:
        return invalid("the answer to the requested eviction does not say its steps")
    asked = [s for s in steps if s.startswith("terminate_client")]
    return invalid(f"a stopped client was sent {asked[0]}") if asked else valid()


def gpu_was_full(fault: Fault, seen: Observation) -> Judgement:
    if fault.story is not Story.GPU_FULL:
        return None
    if seen.filler is None or "code" in seen.filler:
        return invalid(f"the client that held the memory was lost: {dict(seen.filler or {})}")
    if seen.filler["wrong"]:
        return invalid(f"{seen.filler['wrong']} allocations of the client that held the memory have changed")
    if seen.free_when_full is None or seen.free_when_full >= FULL_BYTES:
        return unknown(f"the GPU was not full: {seen.free_when_full} bytes were free")
    return valid()


def poison_told(fault: Fault, seen: Observation) -> Judgement:
    if seen.mode == "stock" or not fault.poisons:
        return None
    return valid() if seen.poisoned else invalid("mpsd did not report the domain as poisoned")


def readopted(fault: Fault, seen: Observation) -> Judgement:
    if fault.story not in (Story.DAEMON_DIES, Story.HIT_AFTER_RESTART) or seen.mode == "stock":
        return None
    return valid() if seen.readopted else invalid("the restarted daemon did not adopt the clients")


def eviction_done(fault: Fault, seen: Observation) -> Judgement:
    if seen.mode == "stock" or fault.story is not Story.EVICTION:
        return None
    if seen.evict_asked is None:
        return unknown("no eviction was requested")
    if seen.evicted_at is None:
        return invalid("the offender was not ended")
    return unknown("the offender had died before the request") if seen.gone_ms is None else valid()


def other_process_unharmed(fault: Fault, seen: Observation) -> Judgement:
    if fault.story is not Story.PID_REUSE:
        return None
    if seen.innocent_alive is None:
        return unknown("no process got the pid")
    if not seen.innocent_alive:
        return invalid("a process that was never a client was killed")
    refused = any(a["op"] == "kill" and not a["ok"] for a in seen.answers)
    return valid() if refused else invalid("the request to evict another process was not refused")


def crowd_right(fault: Fault, seen: Observation) -> Judgement:
    if fault.story is not Story.CHURN:
        return None
    if seen.crowd is None:
        return unknown("the crowd did not report")
    bad = {k: seen.crowd[k] for k in ("wrong", "failed") if seen.crowd[k]}
    return invalid(f"the crowd of clients: {bad}") if bad else valid()


def nothing_left(fault: Fault, seen: Observation) -> Judgement:
    if seen.leftovers is None:
        return unknown("the run has no end")
    return invalid("left behind: " + "; ".join(seen.leftovers)) if seen.leftovers else valid()


LAWS: tuple[Law, ...] = (
    rig_worked,
    fault_happened,
    survivors_accounted,
    survivors_live,
    results_right,
    recorded,
    class_right,
    no_innocent_named,
    offender_named,
    suspects_include_offender,
    newcomers_served,
    fresh_server,
    domain_stays,
    memory_returned,
    guard_laid,
    zones_laid,
    allocation_right,
    hit_evicted,
    absorbed_by_kernel,
    hit_absorbed,
    frozen_then_killed,
    gpu_was_full,
    daemon_sound,
    poison_told,
    readopted,
    eviction_done,
    other_process_unharmed,
    crowd_right,
    nothing_left,
)


EVIDENT: frozenset[Law] = frozenset(
    {rig_worked, survivors_live, results_right, no_innocent_named, nothing_left}
)
"""Laws that a run can break even where the rig failed. The others would need what did not happen."""


def _bar(name: str, value: float | None, limit: float) -> Judgement:
    if value is None:
        return None
    text = f"{name} took {value:.1f} ms, at most {limit:.1f} are allowed"
    return valid(text) if value <= limit else invalid(text)


def record_in_time(fault: Fault, seen: Observation) -> Judgement:
    if seen.record_ms is not None and seen.record_ms < 0:
        return invalid(f"a record {-seen.record_ms:.1f} ms before its event: the clocks do not agree")
    return None if seen.mode == "stock" else _bar("the record", seen.record_ms, BARS.record)


def evicted_in_time(fault: Fault, seen: Observation) -> Judgement:
    applies = seen.mode != "stock" and fault.stall_bar is not StallBar.NONE
    limit = BARS.hit_evict if fault.absorbed or fault.zoned else BARS.evict
    return _bar("the eviction", seen.evict_ms, fault.evict_bar_ms or limit) if applies else None


def stall_bounded(fault: Fault, seen: Observation) -> Judgement:
    if seen.mode == "stock" or fault.stall_bar is StallBar.NONE:
        return None
    if fault.stall_bar is StallBar.FREE:
        return _bar("the longest stall", seen.stall_ms, BARS.stall)
    if seen.evict_ms is None:
        return unknown("the eviction was not timed")
    return _bar("the longest stall", seen.stall_ms, seen.evict_ms + BARS.stall)


def fresh_in_time(fault: Fault, seen: Observation) -> Judgement:
    return None if seen.mode == "stock" else _bar("a fresh server", seen.fresh_ms, BARS.fresh)


def memory_in_time(fault: Fault, seen: Observation) -> Judgement:
    return _bar("releasing memory", seen.memory_back_ms, BARS.memory)


def attached_in_time(fault: Fault, seen: Observation) -> Judgement:
    return _bar("attaching", max(seen.attach_ms, default=None), BARS.attach)


BAR_LAWS: tuple[Law, ...] = (
    record_in_time,
    evicted_in_time,
    stall_bounded,
    fresh_in_time,
    memory_in_time,
    attached_in_time,
)


def check(
    fault: Fault, seen: Observation, *, bars: bool, laws: Sequence[Law] = LAWS + BAR_LAWS
) -> tuple[Finding, ...]:
    """Return what every applicable law says. Without `bars` the laws on times are not judged."""
    fault = effective(fault, seen)
    findings = []
    for law in laws:
        if seen.failure and law not in EVIDENT:
            continue
        name = law.__name__.replace("_", " ")
        try:
            judgement = law(fault, seen)
        except Exception as error:  # a broken law must never look like success
            judgement = unknown(f"the law itself failed: {error!r}")
        if judgement is None or (law in BAR_LAWS and not bars):
            continue
        findings.append(Finding(name, *judgement))
    return tuple(findings)


def verdict(findings: Sequence[Finding]) -> Verdict:
    """One verdict for a run: unknown beats valid, invalid beats unknown."""
    return merge(f.verdict for f in findings)
