"""What one fault brought: the programs beside it, its fail-over, and what mpsd recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Moved:
    """What one program lived through at one fault; times in ms, None where it was never reached.

    `stall` is the longest step that began after 0.2 s before the fault; `after` how long after the fault the
    first step ended that began after it; `told` the codes that it met; `suspect` whether mpsd took it for
    one who may have done it; `usual` the median of its steps then, where they are not short.
    """

    alive: bool
    wrong: int
    steps: int
    stall: float | None
    after: float | None
    told: list[int] = field(default_factory=list)
    suspect: bool | None = None
    usual: float | None = None


@dataclass(slots=True)
class Fault:
    """One fault and its fail-over. `problem`: what did not come in time. `bystander`: the longest step of a
    program in another domain since the fault, in ms: what the GPU itself stood still. `word`: ms from the
    order to the offender until mpsd told the programs to move (by the system's clock); `delay`: so much of it
    the offender's own work takes on the GPU before the fault. `descriptors`: how
    many mpsd had open before it, with everybody ready, and the program with most; `kinds`: its. `threads`: of
    the program with most, then. `nothing`: the offender's own wait succeeded and mpsd moved nobody, as after
    some window faults. `later`: the fail-overs that came of it after `record`: an
    offender that is carried over faults once more, by its own work. `named`: where the offender is under
    mpsd-run too, whether mpsd recorded that it was this one, whose pid is `carried`."""

    kind: str
    problem: str = ""
    offender_code: int | None = None
    programs: list[Moved] = field(default_factory=list)
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


def moved(said: Mapping[str, Any], at: float) -> Moved:
    steps = [(start, end) for start, end in said["longest"] if end > at - 0.2]
    later = [end for start, end in steps if end > at]
    return Moved(
        alive=True,
        wrong=said["wrong"],
        steps=said["steps"],
        stall=round(max((end - start for start, end in steps), default=0.0) * 1e3, 3),
        after=round((min(later) - at) * 1e3, 3) if later else None,
        told=[code for _, code in said["told"]],
    )


def data(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    return [asdict(fault) for fault in faults]
