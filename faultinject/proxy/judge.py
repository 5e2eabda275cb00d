"""What must hold of a program without and with the proxy. Everything is judged from the report's own numbers.

`blocks` are medians of step times in seconds, one for each round (of a program with beats, see pace()); the
programs of a group take their turns round by round, so the blocks of one round are neighbours in time.
`memory` is what NVML saw the whole GPU gain while the program came up and worked, in bytes.

Where blocks past the proxy and through it were timed within the proxied process (Within), the step time is
judged by these. The median of their ratios may be off by twice its standard error, or by as much as two
blocks past the proxy differ, whichever is more: where the bar is no farther away than that, the verdict would
be chance, and is unknown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faultinject.verdict import Finding, Verdict, invalid, merge, unknown, valid

STEP_BAR, TRAINING_BAR, MEMORY_BAR = 0.01, 0.05, 0.02
FAILOVER_MODES = ("keep", "exact")
GUARDED = "guard"
VALIDATED = "validate"
STANDBY_MODES = (*FAILOVER_MODES, VALIDATED)
"""In which programs have a standby."""
ROUNDS_LEAST = 3
BEATS_LEAST = 20
# Of the bar on step times: where the median of the rounds may be off by more, the verdict would be chance.
ERROR_SHARE = 1 / 4
BLOCKS = ("past", "through", "again")
"""Of a round within a process. There are as many orders of them (within.py), which come one after another."""
# For rounds within a process: by fewer the quartiles say too little of how the ratios are spread.
WITHIN_LEAST = 9
# Of the bar on step times: what two blocks past the proxy may differ by.
NOISE_SHARE = 1 / 2
ERRORS = 2

Judgement = tuple[Verdict, str] | None


@dataclass(frozen=True, slots=True)
class Side:
    """One process of a pair. `failure`: why it did not come to its end. `failover`: how it could fail over at
    its end, as mpsd saw it; reports of before that have none."""

    digest: str = ""
    memory: int | None = None
    blocks: tuple[float, ...] = ()
    stats: Mapping[str, Any] | None = None
    failure: str = ""
    failover: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Side:
        blocks, more = tuple(data["blocks"]), data.get("failover")
        return cls(data["digest"], data["memory"], blocks, data["stats"], data["failure"], more)


@dataclass(frozen=True, slots=True)
class Within:
    """Blocks of one process, in seconds, one of each for a round: past the proxy, through it, past it again.

    `functions`: how many of those that went past are the proxy's own otherwise. `cannot`: why none can go.
    `cpu`: seconds of processors that a step of each block took, of all threads; older reports have none.
    """

    past: tuple[float, ...]
    through: tuple[float, ...]
    again: tuple[float, ...]
    functions: int
    cannot: str = ""
    cpu: Mapping[str, Sequence[float]] | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Within:
        past, through, again = (tuple(data[name]) for name in BLOCKS)
        return cls(past, through, again, data["functions"], data["cannot"], data.get("cpu"))

    def ratio(self) -> Ratio | None:
        """Of the block through the proxy to the mean of the two past it."""
        return through_to_past(self.past, self.through, self.again)

    def cpu_ratio(self) -> Ratio | None:
        """As ratio(), of what processors worked for it. It is told, and has no bar."""
        if self.cpu is None:
            return None
        return through_to_past(*(self.cpu[name] for name in BLOCKS))

    def noise(self) -> Ratio | None:
        """Of the two past it."""
        return levelled(self.again, self.past)

    def is_settled(self) -> bool:
        """Whether more rounds would hardly change either: twice its error is a quarter of the bar at most."""
        rounds = len(self.through)
        found = [one for one in (self.ratio(), self.noise()) if one is not None]
        errors = [ERRORS * standard_error(one, rounds) for one in found]
        return rounds >= WITHIN_LEAST and len(errors) == 2 and max(errors) <= STEP_BAR * ERROR_SHARE


@dataclass(frozen=True, slots=True)
class Pair:
    """`plain` and `again` are the same program without the proxy: how far they differ is noise.

    `timed` is False for a program whose steps are not its own to time (the reason is in `untimed`).
    `mapped`: it maps all its memory itself, so that the vault may have nothing of it.
    `hidden`: it writes where no parameter leads, in memory and in a variable of a module.
    """

    mode: str
    plain: Side
    again: Side
    proxied: Side
    untimed: str = ""
    step_bar: float = STEP_BAR
    mapped: bool = False
    hidden: bool = False
    within: Within | None = None


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the rounds' ratios, and their quartiles: `low` to `high` holds half of the rounds."""

    median: float
    low: float
    high: float


def pace(times: Sequence[float], beats: Sequence[float]) -> float:
    """What a block counts with, in seconds: the median of its steps, or what a tenth of its beats are faster
    than (faultinject/proxy/work), where it has many: what else is on the machine only makes them longer.
    """
    if len(beats) < BEATS_LEAST:
        return statistics.median(times)
    return sorted(beats)[len(beats) // 10]


def ratio(of: Sequence[float], to: Sequence[float]) -> Ratio | None:
    """Of blocks of the same rounds; None where there are too few."""
    return spread(a / b for a, b in zip(of, to, strict=False) if b > 0)


def spread(ratios: Iterable[float]) -> Ratio | None:
    """None where there are too few."""
    found = sorted(ratios)
    if len(found) < ROUNDS_LEAST:
        return None
    low, _, high = statistics.quantiles(found, n=4, method="inclusive")
    return Ratio(statistics.median(found), low, high)


def levelled(of: Sequence[float], to: Sequence[float]) -> Ratio | None:
    """The same of rounds whose blocks come in another order each, one of as many as BLOCKS by turns.

    The first block of a round may be slower than the others, whichever it is: with one order in three that
    would move the median of all ratios. So each order's own median is made that of all.
    """
    if min(len(of), len(to)) < WITHIN_LEAST or min(to) <= 0:
        return ratio(of, to)
    ratios = [a / b for a, b in zip(of, to, strict=False)]
    turns = len(BLOCKS)
    medians = [statistics.median(ratios[turn::turns]) for turn in range(turns)]
    middle = statistics.fmean(medians)
    return spread(one * middle / medians[number % turns] for number, one in enumerate(ratios))


def through_to_past(past: Sequence[float], through: Sequence[float], again: Sequence[float]) -> Ratio | None:
    """Of the blocks through the proxy to the mean of the two past it of each round."""
    return levelled(through, [(a + b) / 2 for a, b in zip(past, again, strict=False)])


def standard_error(found: Ratio, rounds: int) -> float:
    """Of the median of that many ratios, by their quartiles as if they were spread normally."""
    return 1.2533 * (found.high - found.low) / 1.349 / math.sqrt(rounds)


def are_settled(plain: Sequence[float], others: Sequence[Sequence[float]]) -> bool:
    """Whether more rounds would hardly change what is said of any of the others beside `plain`."""
    for blocks in others:
        found = ratio(blocks, plain)
        if found is None or standard_error(found, len(plain)) > STEP_BAR * ERROR_SHARE:
            return False
    return True


def memory_ratio(of: Side, to: Side) -> float | None:
    """None where the GPU's memory does not show what a program takes (the simulated one)."""
    if of.memory is None or to.memory is None or to.memory <= 0:
        return None
    return of.memory / to.memory


def came_to_an_end(pair: Pair) -> Judgement:
    for name, side in (("without the proxy", pair.plain), ("without the proxy, again", pair.again)):
        if side.failure:
            return unknown(f"{name}: {side.failure}")
    if pair.proxied.failure:
        return invalid(f"with the proxy: {pair.proxied.failure}")
    return valid()


def was_proxied(pair: Pair) -> Judgement:
    if pair.proxied.failure:
        return None
    stats = pair.proxied.stats
    if stats is None:
        return invalid("there was no proxy in the process")
    if stats["state"] != "active":
        return invalid(f"the proxy stepped aside ({stats['state']}): {stats['reason']}")
    return valid()


def memory_was_vaulted(pair: Pair) -> Judgement:
    stats = pair.proxied.stats
    if pair.mode == "forward" or stats is None or stats["state"] != "active":
        return None
    if not stats["vault_taken"]:
        return None if pair.mapped else invalid("nothing was brought to the vault")
    left_out = {name: stats[f"vault_{name}"] for name in ("refused", "lost") if stats[f"vault_{name}"]}
    return invalid(f"pieces that the vault does not hold: {left_out}") if left_out else valid()


def host_memory_was_guarded(pair: Pair) -> Judgement:
    stats = pair.proxied.stats
    if pair.mode != GUARDED or stats is None or stats["state"] != "active":
        return None
    return valid() if stats["host_guard"] else invalid("nothing of the program's host memory was under guard")


def could_fail_over(pair: Pair) -> Judgement:
    if pair.mode not in FAILOVER_MODES or pair.proxied.failure:
        return None
    found = pair.proxied.failover
    if found is None:
        return invalid("mpsd did not know of a program that could be moved")
    if found["standing"] != "ready" or found["mode"] != pair.mode:
        why = found["reason"] or ", ".join(found["opaque"])
        return invalid(f"it could not be moved: {found['standing']} in mode {found['mode']}: {why}")
    return valid()


def writes_are_covered(pair: Pair) -> Judgement:
    """Whether what its operations write is what mode `exact` saves before them."""
    stats = pair.proxied.stats
    if pair.mode != VALIDATED or stats is None or stats["state"] != "active":
        return None
    found = pair.proxied.failover
    if found and found["opaque"]:
        return invalid(f"it was looked at until it could not be moved: {', '.join(found['opaque'])}")
    seen = stats["validation"]
    if not seen["operations"]:
        return invalid("no operation was looked at")
    if pair.hidden:
        blind = not seen["strays"] or not seen["variables"]
        return invalid("what it writes where no parameter leads was not found") if blind else valid()
    if seen["strays"] or seen["variables"]:
        return invalid(
            f"{seen['strays']} pages were written where no parameter leads, and variables of modules "
            f"{seen['variables']} times; the first of them by {seen['first']}"
        )
    if seen["unread"]:
        return unknown(f"{seen['unread']} images of code could not be looked at, or use the device's heap")
    return valid()


def results_same(pair: Pair) -> Judgement:
    if pair.plain.failure or pair.again.failure or pair.proxied.failure:
        return None
    if pair.plain.digest != pair.again.digest:
        return unknown("without the proxy the results differ from one run to the next")
    if pair.proxied.digest != pair.plain.digest:
        return invalid("the results differ from those without the proxy")
    return valid()


def step_time_same(pair: Pair) -> Judgement:
    if pair.untimed or pair.mode == VALIDATED or pair.plain.failure or pair.proxied.failure:
        return None
    if pair.within is not None:
        return _same_within(pair.within, pair)
    proxied = ratio(pair.proxied.blocks, pair.plain.blocks)
    noise = ratio(pair.again.blocks, pair.plain.blocks)
    if proxied is None or noise is None:
        return unknown(f"fewer than {ROUNDS_LEAST} rounds were timed")
    if abs(noise.median - 1) > STEP_BAR:
        return unknown(f"without the proxy one process took {noise.median:.4f} of another's time")
    text = f"a step took {proxied.median:.4f} of the time without the proxy"
    return invalid(text) if proxied.median > 1 + pair.step_bar else valid(text)


def _same_within(within: Within, pair: Pair) -> Judgement:
    found, noise, rounds = within.ratio(), within.noise(), len(within.through)
    if within.cannot:
        return unknown(within.cannot)
    if found is None or noise is None or rounds < WITHIN_LEAST:
        return unknown(f"fewer than {WITHIN_LEAST} rounds were timed within the process")
    if not within.functions and pair.mode != "forward":
        return unknown("none of the functions that went past is the proxy's own")
    off = abs(noise.median - 1)
    if off > STEP_BAR * NOISE_SHARE:
        return unknown(f"past the proxy one block took {noise.median:.4f} of another's time")
    doubt = max(ERRORS * standard_error(found, rounds), off)
    text = f"through the proxy a step took {found.median:.4f} of the time past it, known to {doubt:.4f}"
    if abs(found.median - (1 + pair.step_bar)) <= doubt:
        return unknown(f"{text}: too near to {1 + pair.step_bar:.2f}")
    return invalid(text) if found.median > 1 + pair.step_bar else valid(text)


def memory_same(pair: Pair) -> Judgement:
    """A standby's context has no bound: what it takes is told."""
    if pair.mode in STANDBY_MODES or pair.plain.failure or pair.proxied.failure:
        return None
    found, noise = memory_ratio(pair.proxied, pair.plain), memory_ratio(pair.again, pair.plain)
    if found is None or noise is None:
        return None
    if abs(noise - 1) > MEMORY_BAR:
        return unknown(f"without the proxy one process took {noise:.4f} of another's memory")
    text = f"it took {found:.4f} of the memory without the proxy"
    return invalid(text) if found > 1 + MEMORY_BAR else valid(text)


Law = Callable[[Pair], Judgement]
LAWS: tuple[Law, ...] = (
    came_to_an_end,
    was_proxied,
    memory_was_vaulted,
    host_memory_was_guarded,
    could_fail_over,
    writes_are_covered,
    results_same,
)
BAR_LAWS: tuple[Law, ...] = (step_time_same, memory_same)


def check(pair: Pair, *, bars: bool) -> tuple[Finding, ...]:
    """What every law says that applies; without `bars` those about time and memory are not asked."""
    findings = []
    for law in LAWS + (BAR_LAWS if bars else ()):
        judgement = law(pair)
        if judgement is not None:
            findings.append(Finding(law.__name__.replace("_", " "), *judgement))
    return tuple(findings)


def verdict(findings: Sequence[Finding]) -> Verdict:
    return merge(f.verdict for f in findings)
