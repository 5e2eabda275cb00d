"""Reports of fail-overs: their form, their verdicts, their tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import lt
from pathlib import Path
from statistics import median
from typing import Any

from faultinject import report
from faultinject.failover.outcomes import Fault, Moved
from faultinject.kinds import ENGINE, ENGINE_DELAY_MS
from mpsd.core.members import MISSING
from mpsd.core.whose import IN_ITS_CODE

KIND, SCHEMA_VERSION = "failover", 1

SCHEMA: Mapping[str, tuple[type, ...]] = {
    **report.ENVELOPE,
    "mode": (str,),
    "works": (list,),  # of names; none: three servers
    "offender": (str,),  # not in the first reports, nor this one
    "together": (bool,),
    "faults": (dict,),  # kind: list of Fault
}


_spread = partial(report.spread, places=2)

_LATER = (
    "bystander",
    "suspect",
    "word",
    "delay",
    "usual",
    "descriptors",
    "kinds",
    "nothing",
    "threads",
    "later",
    "named",
    "carried",
)
"""What the first reports do not have."""
BARS_MS: Mapping[bool, float] = {False: 5.0, True: 100.0}
"""By whether a program is a suspect: how much later than the GPU stood still it may resume."""
NOTHING_MOST = 0.25
"""The share of faults of which nothing may come, so that the others are of enough."""
CALM_AFTER, GROWTH = 3, 1.5
"""Before the last fault at most so many times as many are open as before that one; nor more each time."""


def load(path: Path) -> dict[str, Any] | None:
    """The report in this file; None if it is something else. Raises UsageError."""
    return report.load_sound(path, KIND, _problems)


def _problems(data: Mapping[str, Any]) -> Iterator[str]:
    yield from report.against_version(
        SCHEMA, SCHEMA_VERSION, {"offender": "plain", "together": False, **data}
    )
    for kind, faults in data["faults"].items():
        if not isinstance(faults, list):
            yield f"report.faults.{kind} is no list"
            continue
        for number, fault in enumerate(faults):
            where = f"report.faults.{kind}[{number}]"
            yield from report.missing_fields(fault, Fault, where, _LATER)
            for place, program in enumerate(fault["programs"]):
                yield from report.missing_fields(program, Moved, f"{where}.programs[{place}]", _LATER)


def judge(faults: Sequence[Mapping[str, Any]]) -> str:
    """valid, or what was seen that must not be."""
    if not faults:
        return "invalid: nothing was run"
    for fault in faults:
        if fault["problem"]:
            return f"invalid: {fault['problem'][:300]}"
        for program in fault["programs"]:
            if not program["alive"]:
                return "invalid: a program was lost"
            if program["wrong"]:
                return "invalid: a program saw a wrong result, or memory that had changed"
            if len(program["told"]) > 1:
                return f"invalid: a program met more than one error: {program['told']}"
        if sum(bool(p["told"]) for p in fault["programs"]) > _missing(fault):
            return "invalid: a program met an error where nothing of its was missing"
        if _named(fault) & _harmless_pids(fault):
            return "invalid: mpsd named a program that did nothing"
        # Whose wait has succeeded may have ended before anybody could know.
        if fault.get("named") is False and fault["offender_code"] != 0:
            return "invalid: an offender that was carried over was not named"
    if _nothing(faults) > NOTHING_MOST * len(faults):
        return f"invalid: nothing came of {_nothing(faults)} of {len(faults)} faults"
    for who, counts in opened(faults).items():
        if _grows(counts):
            return f"invalid: {who} opened more and more descriptors: {counts}"
    if _grows(threads(faults)):
        return f"invalid: a program has more and more threads: {threads(faults)}"
    return "valid"


def _grows(counts: Sequence[int]) -> bool:
    calm = counts[CALM_AFTER:]
    return len(calm) > CALM_AFTER and (calm[-1] > GROWTH * calm[0] or all(map(lt, calm, calm[1:])))


def threads(faults: Sequence[Mapping[str, Any]]) -> list[int]:
    """Of the program that has most, before each fault."""
    return [fault["threads"] for fault in faults if fault.get("threads") is not None]


def _nothing(faults: Sequence[Mapping[str, Any]]) -> int:
    return sum(bool(fault.get("nothing")) for fault in faults)


def opened(faults: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """By whom: how many descriptors were open before each fault."""
    known = [fault["descriptors"] for fault in faults if fault.get("descriptors")]
    return {who: [both[place] for both in known] for place, who in enumerate(("mpsd", "a program"))}


def grown(faults: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of what the program that has most opens more with each fault, when it has become calm: how many."""
    known = [fault["kinds"] for fault in faults if fault.get("kinds")][CALM_AFTER:]
    if len(known) < 2:
        return {}
    first, last = known[0], known[-1]
    more = {kind: (count - first.get(kind, 0)) / (len(known) - 1) for kind, count in last.items()}
    return {kind: round(each, 2) for kind, each in sorted(more.items()) if each >= 1}


def _growth(kinds: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    for kind, faults in kinds.items():
        each = ", ".join(f"{number:g} of {what}" for what, number in grown(faults).items())
        if each:
            yield from (
                f"{kind}: the program that has most descriptors opens more with each fault: {each}.",
                "",
            )


def _harmless(kinds: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    for kind, faults in kinds.items():
        if _nothing(faults):
            yield f"{kind}: nothing came of {_nothing(faults)} of them: the offender's own wait succeeded."
            yield ""


def _carried(finished: Mapping[str, Any]) -> Iterator[str]:
    """Of offenders that are under mpsd-run too."""
    if finished.get("offender", "plain") == "plain":
        return
    yield "The offenders are under mpsd-run too: where nobody knows whose fault it was, they are carried over"
    yield "as well. They are named when the exception turns out to have been in their own code, or when their"
    yield "own work has faulted once more, and then everybody else has moved once more."
    if finished.get("offender") == "known":
        yield "They were started before the programs, and what they launched was nothing new."
    for kind, faults in finished["faults"].items():
        named = sum(bool(fault.get("named")) for fault in faults)
        moves = sorted({1 + len(fault["later"]) for fault in faults if fault["record"]})
        each = f"{moves[0]} to {moves[-1]}" if moves else "no"
        by_code = sum(map(_is_named_by_code, faults))
        last = sum(_had_the_last_turn(fault) for fault in faults)
        yield (
            f"{kind}: named {named} of {len(faults)}, {by_code} of them by their code, "
            f"{last} when all others had had their turn; {each} moves of everybody else for each fault."
        )
    yield ""


def _fates(fault: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return fault["record"]["clients"] if fault["record"] else ()


def _named(fault: Mapping[str, Any]) -> set[int]:
    """The pids of offenders."""
    return {f["offender"]["pid"] for f in fault["faults"] if f["offender"]}


def _survivors(fault: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Fates of all but an offender that was carried over, whose own turn nobody waits for."""
    offenders = _named(fault) | {fault.get("carried")}
    return [fate for fate in _fates(fault) if fate["pid"] not in offenders]


def _harmless_pids(fault: Mapping[str, Any]) -> set[int]:
    """Of the programs that did nothing. The first reports with offenders that are carried over do not say
    which of the programs that is."""
    if fault.get("named") is not None and fault.get("carried") is None:
        return set()
    return {fate["pid"] for fate in _fates(fault)} - {fault.get("carried")}


def _is_named_by_code(fault: Mapping[str, Any]) -> bool:
    signs = (sign["text"] for known in fault["faults"] if known["offender"] for sign in known["evidence"])
    return any(text.startswith(IN_ITS_CODE) for text in signs)


def _had_the_last_turn(fault: Mapping[str, Any]) -> bool:
    """Whether others had a turn, and who was named the last one."""
    turns = {fate["pid"]: fate["turn_ms"] for fate in _fates(fault) if fate["turn_ms"]}
    return len(turns) > 1 and max(turns, key=turns.__getitem__) in _named(fault)


def _first_and_last(counts: Sequence[int]) -> str:
    return f"{counts[0]} / {counts[-1]}" if counts else "-"


def _missing(fault: Mapping[str, Any]) -> int:
    """Programs of which mpsd knows that what they had in flight may be missing."""
    return sum(fate["why"].startswith(MISSING) for fate in _survivors(fault))


def row(kind: str, faults: Sequence[Mapping[str, Any]]) -> list[str]:
    """kind, faults, lost, told, times in ms (median / worst), whether they are within the bars, how many are
    not, descriptors and threads (before the first fault / the last), verdict."""
    programs = [p for fault in faults for p in fault["programs"]]
    fates = [fate for fault in faults for fate in _survivors(fault)]
    return [
        kind,
        str(len(faults)),
        str(sum(not p["alive"] for p in programs)),
        str(sum(bool(p["told"]) for p in programs)),
        _spread([p["stall"] for p in programs]),
        _spread([fault.get("bystander") for fault in faults]),
        *(_spread(resumed(faults, suspect=suspect)) for suspect in (False, True)),
        *(_spread(beyond(faults, suspect=suspect)) for suspect in (False, True)),
        in_time(faults),
        *(late(faults, suspect=suspect) for suspect in (False, True)),
        _spread([fault.get("word") for fault in faults]),
        _spread([fault["record"]["decision_ms"] for fault in faults if fault["record"]]),
        *(_spread([fate.get(name) for fate in fates]) for name in STEPS),
        *map(_first_and_last, opened(faults).values()),
        _first_and_last(threads(faults)),
        judge(faults),
    ]


HEAD = ["kind", "faults", "lost", "told", "longest step", "GPU's", "resumed: cleared", "suspects"]
HEAD += ["beyond: cleared", "suspects", "in time", "late: cleared", "suspects"]
HEAD += ["word", "decided", "held", "fence", "goes on", "turn", "done", "open: mpsd", "a program"]
HEAD += ["threads", "verdict"]
MEANINGS = {
    "told": "how often a program met one error, which said that what it had in flight may be lost: in "
    "the mode keep always, and in the mode exact where it cannot be done again",
    "longest step": "of a program around the fault",
    "GPU's": "that of a bystander in another domain: how long the GPU itself stood still",
    "resumed": "from the fault until cleared programs and suspects went on in their fresh contexts, "
    "where work is done again with that",
    "beyond": "how much longer than the GPU's stall their longest steps were, beyond what a step of "
    "theirs takes (the median of those around; no servers': they are short), with what was done again",
    "in time": "whether they resumed, at the median, no later than 5 (cleared) and 100 ms (suspects) "
    "after the GPU",
    "late": "how many did not, of all",
    "word": "from the order to the offender until mpsd's word to move (a host-engine fault comes 50 "
    "ms after the order: its stream is kept busy)",
    "decided": "from mpsd's first sign to that decision",
    "held, fence, goes on": "from the word until a program's calls were held, its old context "
    "could write no more, and it went on",
    "turn, done": "where a suspect does its work again in its turn, until it was given that, and until what "
    "was done again had ended",
    "open, threads": "descriptors of mpsd, and of the program that had most, and threads likewise, before "
    "the first fault and before the last",
}
"""What columns hold whose name does not say it; times are in ms, median / worst."""
STEPS = ("held_ms", "fence_ms", "first_ms", "turn_ms", "done_ms")


def beyond(faults: Sequence[Mapping[str, Any]], *, suspect: bool) -> list[float]:
    """How much longer than usual the longest step of each such program was, less the bystander's, in ms."""
    return [
        program["stall"] - (program.get("usual") or 0.0) - fault["bystander"]
        for fault in faults
        for program in fault["programs"]
        if program.get("suspect") is suspect and None not in (program["stall"], fault.get("bystander"))
    ]


def _delay(fault: Mapping[str, Any]) -> float:
    """The first reports do not have it; they are from a GPU."""
    return float(fault.get("delay", ENGINE_DELAY_MS if fault["kind"] in ENGINE else 0.0))


def resumed(
    faults: Sequence[Mapping[str, Any]], *, suspect: bool, over_the_gpus: bool = False
) -> list[float]:
    """From the fault until each such program went on in its fresh context, or, a suspect with work to be done
    again, until its turn had come, in ms; `over_the_gpus`: less the bystander's stall. Not in planned moves:
    before these programs work on."""
    return [
        fault["word"] - _delay(fault) + went_on - (fault["bystander"] if over_the_gpus else 0.0)
        for fault in faults
        if None not in (fault.get("word"), fault.get("bystander"))
        and not (fault["record"] or {}).get("planned")
        for fate in _survivors(fault)
        if fate["outcome"] == "moved" and fate["suspect"] is suspect
        if (went_on := fate.get("turn_ms") or fate.get("first_ms")) is not None
    ]


def in_time(faults: Sequence[Mapping[str, Any]]) -> str:
    """Whether the medians are within the bars."""
    known = {suspect: resumed(faults, suspect=suspect, over_the_gpus=True) for suspect in BARS_MS}
    are_late = [median(found) > BARS_MS[suspect] for suspect, found in known.items() if found]
    return "-" if not are_late else "no" if any(are_late) else "yes"


def late(faults: Sequence[Mapping[str, Any]], *, suspect: bool) -> str:
    """How many resumed later than they may, of all."""
    found = resumed(faults, suspect=suspect, over_the_gpus=True)
    return f"{sum(ms > BARS_MS[suspect] for ms in found)} of {len(found)}" if found else "-"


def table(finished: Mapping[str, Any]) -> list[list[str]]:
    return [HEAD, *(row(kind, faults) for kind, faults in finished["faults"].items())]


def legend() -> str:
    """The columns, for a reader of a terminal."""
    lines = ["Times are in ms, median / worst."]
    for column, meaning in MEANINGS.items():
        lines += textwrap.wrap(f"{column}: {meaning}", 110, subsequent_indent="    ")
    return "\n".join(lines)


def _who(works: Sequence[str]) -> str:
    if not works:
        return "Three servers keep memory in the vault and check every result."
    return f"Programs ({', '.join(works)}), whose results are compared with those of a run without faults."


def _together(finished: Mapping[str, Any]) -> str:
    return ", the same programs through all kinds" if finished.get("together") else ""


def markdown(finished: Mapping[str, Any]) -> str:
    lines = [
        f"# Fail-over: {finished['device']}, driver {finished['driver']}",
        "",
        f"{finished['date']}; again: `{finished['command']}`",
        "",
        f"{_who(finished['works'])} A neighbour faults again and again, and they go on in a second",
        f"domain each time{_together(finished)}. Times are in ms, median / worst.",
        "",
        report.markdown_table(table(finished)),
        "",
        *(f"- `{column}`: {meaning}" for column, meaning in MEANINGS.items()),
        "",
        *_carried(finished),
        *_growth(finished["faults"]),
        *_harmless(finished["faults"]),
        report.left_behind(finished),
    ]
    return "\n".join(lines) + "\n"


def passed(finished: Mapping[str, Any]) -> bool:
    return report.passed(finished, [judge(faults) for faults in finished["faults"].values()])
