"""The laws of a program without and with the proxy. All are judged from the report's own numbers.

`blocks` are medians of step times in seconds, one for each round (with beats, see pace()). The programs of a
group alternate, so the blocks of one round are neighbours in time. `memory` is what the whole GPU gained
while the program started and worked, in bytes, by NVML.

Where blocks past the proxy and through it were timed within one process (Within), they judge the step time.
The median of their ratios may be off by twice its standard error, or by the difference of two blocks past the
proxy, whichever is more. A limit closer than that leaves the verdict unknown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faultinject.programs.pairing.rounds import BLOCKS, MIN_BEATS
from faultinject.registry.verdicts import (
    Finding,
    Verdict,
    invalid,
    merge,
    unknown,
    valid,
)

STEP_BAR, TRAINING_BAR, MEMORY_BAR = 0.01, 0.05, 0.02
FAILOVER_MODES = ("keep", "exact")
GUARDED = "guard"
AUTO = "auto"
DEFAULT_BAR = 0.03
"""The limit on the step time in mode auto: what saving may add by default."""
VALIDATED = "validate"
STANDBY_MODES = (*FAILOVER_MODES, VALIDATED)
"""The modes in which programs have a standby context."""
ROUNDS_LEAST = 3
# Share of the limit on step times: the median must be known better than this.
ERROR_SHARE = 1 / 4
# For rounds within a process: fewer say too little about the spread of the ratios.
WITHIN_LEAST = 9
# Share of the limit on step times: how far two blocks past the proxy may differ.
NOISE_SHARE = 1 / 2
ERRORS = 2

Judgement = tuple[Verdict, str] | None


@dataclass(frozen=True, slots=True)
class Side:
    """One process of a pair.

    `failure`: why it did not finish. `failover`: how it could fail over at its end, as mpsd saw it; older
    reports have none.
    """

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
    """Blocks of one process in seconds, one of each for a round: past the proxy, through it, past it again.

    functions: how many of the functions that went past are the proxy's own. cannot: why none can go past.
    cpu: processor seconds of a step of each block, of all threads; older reports have none.
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
        """Return the ratio of the block through the proxy to the mean of the two past it."""
        return through_to_past(self.past, self.through, self.again)

    def cpu_ratio(self) -> Ratio | None:
        """Return the same of processor time, which has no limit."""
        if self.cpu is None:
            return None
        return through_to_past(*(self.cpu[name] for name in BLOCKS))

    def error(self) -> float | None:
        """Return how far off the median of ratio() may be: twice its standard error."""
        found = self.ratio()
        return None if found is None else ERRORS * standard_error(found, len(self.through))

    def noise(self) -> Ratio | None:
        """Return the ratio of the two blocks past the proxy."""
        return balanced_ratio(self.again, self.past)

    def is_settled(self) -> bool:
        """Return whether more rounds would hardly change either: the error is an eighth of the limit."""
        rounds = len(self.through)
        found = [one for one in (self.ratio(), self.noise()) if one is not None]
        errors = [ERRORS * standard_error(one, rounds) for one in found]
        return rounds >= WITHIN_LEAST and len(errors) == 2 and max(errors) <= STEP_BAR * ERROR_SHARE


@dataclass(frozen=True, slots=True)
class Pair:
    """`plain` and `again` are the same program without the proxy: their difference is noise.

    timed: False for a program with steps that depend on other processes (`untimed` says why). mapped: it maps
    all its memory itself, so the vault may hold nothing of it. hidden: it writes outside its parameters, in
    memory and in a module variable.
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
    """Median of the rounds' ratios and their quartiles: `low` to `high` holds half of the rounds."""

    median: float
    low: float
    high: float


def block_time(times: Sequence[float], beats: Sequence[float]) -> float:
    """Return the seconds that a block counts with.

    That is its median step, or the fastest tenth of its beats where it has many (programs/workloads): other
    load on the machine only makes beats longer.
    """
    if len(beats) < MIN_BEATS:
        return statistics.median(times)
    return sorted(beats)[len(beats) // 10]


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio | None:
    """Return the ratio of blocks of the same rounds; None for too few."""
    return spread(a / b for a, b in zip(numerator, denominator, strict=False) if b > 0)


def spread(ratios: Iterable[float]) -> Ratio | None:
    """Return median and quartiles; None for too few."""
    found = sorted(ratios)
    if len(found) < ROUNDS_LEAST:
        return None
    low, _, high = statistics.quantiles(found, n=4, method="inclusive")
    return Ratio(statistics.median(found), low, high)


def balanced_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio | None:
    """Return the same of rounds with blocks in a different order, one of len(BLOCKS) in turn.

    The first block of a round may be slower than the others. With one order in three that would shift the
    median of all ratios, so the median of each order is shifted to that of all.
    """
    if min(len(numerator), len(denominator)) < WITHIN_LEAST or min(denominator) <= 0:
        return ratio(numerator, denominator)
    ratios = [a / b for a, b in zip(numerator, denominator, strict=False)]
    turns = len(BLOCKS)
    medians = [statistics.median(ratios[turn::turns]) for turn in range(turns)]
    middle = statistics.fmean(medians)
    return spread(one * middle / medians[number % turns] for number, one in enumerate(ratios))


def through_to_past(past: Sequence[float], through: Sequence[float], again: Sequence[float]) -> Ratio | None:
    """Return the ratios of the blocks through the proxy to the mean of the two past it, by round."""
    return balanced_ratio(through, [(a + b) / 2 for a, b in zip(past, again, strict=False)])


def standard_error(found: Ratio, rounds: int) -> float:
    """Return the standard error of the median of that many ratios, from their quartiles."""
    return 1.2533 * (found.high - found.low) / 1.349 / math.sqrt(rounds)


def are_settled(plain: Sequence[float], others: Sequence[Sequence[float]]) -> bool:
    """Return whether more rounds would hardly change any ratio to `plain`."""
    for blocks in others:
        found = ratio(blocks, plain)
        if found is None or standard_error(found, len(plain)) > STEP_BAR * ERROR_SHARE:
            return False
    return True


def memory_ratio(numerator: Side, denominator: Side) -> float | None:
    """Return the memory ratio; None where the GPU does not tell (simulated)."""
    if numerator.memory is None or denominator.memory is None or denominator.memory <= 0:
        return None
    return numerator.memory / denominator.memory


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
        return invalid(f"the proxy passes calls through ({stats['state']}): {stats['reason']}")
    return valid()


def memory_was_vaulted(pair: Pair) -> Judgement:
    stats = pair.proxied.stats
    if pair.mode == "forward" or stats is None or stats["state"] != "active":
        return None
    if not stats["vault_taken"]:
        return None if pair.mapped else invalid("no segment is in the vault")
    left_out = {name: stats[f"vault_{name}"] for name in ("refused", "lost") if stats[f"vault_{name}"]}
    return invalid(f"segments that the vault does not hold: {left_out}") if left_out else valid()


def host_memory_was_guarded(pair: Pair) -> Judgement:
    stats = pair.proxied.stats
    if pair.mode != GUARDED or stats is None or stats["state"] != "active":
        return None
    return valid() if stats["host_guard"] else invalid("no host memory of the program was under a guard")


def could_fail_over(pair: Pair) -> Judgement:
    if pair.mode not in FAILOVER_MODES or pair.proxied.failure:
        return None
    found = pair.proxied.failover
    if found is None:
        return invalid("mpsd knew of no fail-over participant")
    if found["standing"] != "ready" or found["mode"] != pair.mode:
        why = found["reason"] or ", ".join(found["opaque"])
        return invalid(f"it could not fail over: {found['standing']} in mode {found['mode']}: {why}")
    return valid()


def writes_are_covered(pair: Pair) -> Judgement:
    """Judge whether operations write only what mode exact saves before them."""
    stats = pair.proxied.stats
    if pair.mode != VALIDATED or stats is None or stats["state"] != "active":
        return None
    found = pair.proxied.failover
    if found and found["opaque"]:
        return invalid(f"it could not fail over any more: {', '.join(found['opaque'])}")
    seen = stats["validation"]
    if not seen["operations"]:
        return invalid("no operation was checked")
    if pair.hidden:
        unvalidated = not seen["strays"] or not seen["variables"]
        return invalid("its writes outside the parameters were not found") if unvalidated else valid()
    if seen["strays"] or seen["variables"]:
        return invalid(
            f"{seen['strays']} pages were written outside the parameters, and module variables "
            f"{seen['variables']} times; the first of them by {seen['first']}"
        )
    if seen["unread"]:
        return unknown(f"{seen['unread']} code images could not be checked, or use the device heap")
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
        return unknown("no function that went past the proxy is the proxy's own")
    off = abs(noise.median - 1)
    if off > NOISE_SHARE * (DEFAULT_BAR if pair.mode == AUTO else STEP_BAR):
        return unknown(f"past the proxy one block took {noise.median:.4f} of another's time")
    doubt = max(ERRORS * standard_error(found, rounds), off)
    text = f"through the proxy a step took {found.median:.4f} of the time past it, known to {doubt:.4f}"
    if abs(found.median - (1 + pair.step_bar)) <= doubt:
        return unknown(f"{text}: too close to {1 + pair.step_bar:.2f}")
    return invalid(text) if found.median > 1 + pair.step_bar else valid(text)


def memory_same(pair: Pair) -> Judgement:
    """The memory of a standby context has no limit: it is reported."""
    if pair.mode in (*STANDBY_MODES, AUTO) or pair.plain.failure or pair.proxied.failure:
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
    """Return what every applicable law says; without `bars` none about time and memory."""
    findings = []
    for law in LAWS + (BAR_LAWS if bars else ()):
        judgement = law(pair)
        if judgement is not None:
            findings.append(Finding(law.__name__.replace("_", " "), *judgement))
    return tuple(findings)


def verdict(findings: Sequence[Finding]) -> Verdict:
    return merge(f.verdict for f in findings)
