"""The outcome of one fault: the programs beside it, its fail-over, and what mpsd recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class ProgramOutcome:
    """One program at one fault; times in ms, None where they were not reached.

    `stall`: the longest step that began at most 0.2 s before the fault. `after`: from the fault to the end of
    the first step that began after it. `told`: the error codes that the program got. `suspect`: whether mpsd
    suspected it. `usual`: its median step, where steps are not short. `moves`: how often mpsd told it to move
    because of the fault. `trial`: until its replay in a trial domain was over, from the fault and from the
    order to move there.
    """

    alive: bool
    wrong: int
    steps: int
    stall: float | None
    after: float | None
    told: list[int] = field(default_factory=list)
    suspect: bool | None = None
    usual: float | None = None
    moves: int | None = None
    trial: list[float] | None = None


@dataclass(slots=True)
class Fault:
    """One fault and its fail-over.

    problem: the event that did not come in time.
    bystander: the longest step [ms] of a program in another domain since the fault: the GPU stall.
    word: from the order to the offender until mpsd told the programs to move [ms].
    delay: the part of `word` that the offender's own work takes before the fault [ms].
    descriptors: open before the fault, of mpsd and of the program with most; kinds: their targets.
    threads: of the program with most.
    nothing: the offender's own wait succeeded and mpsd moved no program, as after some window faults.
    later: fail-overs after `record`, of an offender under the proxy that faulted again in its replay.
    named: whether mpsd named the offender under the proxy; `carried` is its pid.
    trial: as of a program, for the offender.
    unproxied: whether the client without the proxy was lost; None: there was none.
    """

    kind: str
    problem: str = ""
    offender_code: int | None = None
    programs: list[ProgramOutcome] = field(default_factory=list)
    record: Mapping[str, Any] | None = None
    faults: list[Mapping[str, Any]] = field(default_factory=list)
    bystander: float | None = None
    word: float | None = None
    delay: float = 0.0
    descriptors: list[int] | None = None
    threads: int | None = None
    kinds: Mapping[str, int] | None = None
    nothing: bool = False
    later: list[Mapping[str, Any]] = field(default_factory=list)
    named: bool | None = None
    carried: int | None = None
    trial: list[float] | None = None
    unproxied: bool | None = None


def program_outcome(report: Mapping[str, Any], at: float) -> ProgramOutcome:
    steps = [(start, end) for start, end in report["longest"] if end > at - 0.2]
    later = [end for start, end in steps if end > at]
    return ProgramOutcome(
        alive=True,
        wrong=report["wrong"],
        steps=report["steps"],
        stall=round(max((end - start for start, end in steps), default=0.0) * 1e3, 3),
        after=round((min(later) - at) * 1e3, 3) if later else None,
        told=[code for _, code in report["told"]],
    )


def data(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    return [asdict(fault) for fault in faults]
