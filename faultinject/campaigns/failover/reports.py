"""The report of the fail-over campaign: form, verdicts, tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import lt
from pathlib import Path
from statistics import median
from typing import Any

from faultinject.campaigns.failover import pauses
from faultinject.campaigns.failover.outcomes import Fault, ProgramOutcome
from faultinject.evidence import files, schema, tables
from faultinject.registry.kinds import ENGINE, ENGINE_DELAY_MS
from mpsd.core.failover.handlers import MISSING
from mpsd.core.failover.programcounter import IN_ITS_CODE

KIND, SCHEMA_VERSION = "failover", 1

SCHEMA: Mapping[str, tuple[type, ...]] = {
    **schema.ENVELOPE,
    "mode": (str,),
    "works": (list,),  # of names; none: three servers
    "offender": (str,),  # not in the first reports, nor this one
    "together": (bool,),
    "unproxied": (bool,),  # whether a client without the proxy was in the domain, too
    "faults": (dict,),  # kind: list of Fault
}


_spread = partial(tables.spread, places=2)

_OPTIONAL_FIELDS = (
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
    "moves",
    "trial",
    "unproxied",
)
"""Fields that older reports lack."""
BARS_MS: Mapping[bool, float] = {False: 5.0, True: 100.0}
"""How long after the end of the GPU stall a program may resume, by whether it is a suspect."""
MAX_WITHOUT_EFFECT = 0.25
"""The largest share of faults without effect: enough others must remain."""
SETTLED_AFTER, GROWTH = 3, 1.5
"""Open descriptors before the last fault: at most this many times those before fault 3, and not rising."""


def load(data: Any, path: Path) -> dict[str, Any] | None:
    """Return the report that a file's JSON is; None for anything else. Raises UsageError."""
    return files.load_of_kind(data, KIND, path, _problems)


def _problems(data: Mapping[str, Any]) -> Iterator[str]:
    earlier = {"offender": "plain", "together": False, "unproxied": False}
    yield from schema.report_violations(SCHEMA, SCHEMA_VERSION, {**earlier, **data})
    for kind, faults in data["faults"].items():
        if not isinstance(faults, list):
            yield f"report.faults.{kind} is no list"
            continue
        for number, fault in enumerate(faults):
            where = f"report.faults.{kind}[{number}]"
            yield from schema.missing_fields(fault, Fault, where, _OPTIONAL_FIELDS)
            for place, program in enumerate(fault["programs"]):
                yield from schema.missing_fields(
                    program, ProgramOutcome, f"{where}.programs[{place}]", _OPTIONAL_FIELDS
                )


def judge(faults: Sequence[Mapping[str, Any]]) -> str:
    """Return valid, or invalid with the first reason."""
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
                return f"invalid: a program got more than one error: {program['told']}"
        if sum(bool(p["told"]) for p in fault["programs"]) > _count_missing_work(fault):
            return "invalid: a program got an error although none of its work was missing"
        if _named_pids(fault) & _innocent_pids(fault):
            return "invalid: mpsd named an innocent program"
        # An offender with a successful wait may have exited before the fault was known.
        if fault.get("named") is False and fault["offender_code"] != 0:
            return "invalid: an offender under the proxy was not named"
        if problem := pauses.problem(fault):
            return problem
    if _count_without_effect(faults) > MAX_WITHOUT_EFFECT * len(faults):
        return f"invalid: {_count_without_effect(faults)} of {len(faults)} faults had no effect"
    for process, counts in open_descriptors(faults).items():
        if keeps_growing(counts):
            return f"invalid: {process} opened more descriptors with each fault: {counts}"
    if keeps_growing(threads(faults)):
        return f"invalid: a program has more threads with each fault: {threads(faults)}"
    return "valid"


def keeps_growing(counts: Sequence[int]) -> bool:
    """Return whether the counts before each fault have no bound."""
    settled = counts[SETTLED_AFTER:]
    return len(settled) > SETTLED_AFTER and (
        settled[-1] > GROWTH * settled[0] or all(map(lt, settled, settled[1:]))
    )


def threads(faults: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the threads of the program with most, before each fault."""
    return [fault["threads"] for fault in faults if fault.get("threads") is not None]


def _count_without_effect(faults: Sequence[Mapping[str, Any]]) -> int:
    return sum(bool(fault.get("nothing")) for fault in faults)


def open_descriptors(faults: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the open descriptors before each fault: of mpsd, and of the program with most."""
    known = [fault["descriptors"] for fault in faults if fault.get("descriptors")]
    return {name: [both[place] for both in known] for place, name in enumerate(("mpsd", "a program"))}


def descriptor_growth(faults: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Count by target the descriptors that the program with most gains per fault, once it is steady."""
    known = [fault["kinds"] for fault in faults if fault.get("kinds")][SETTLED_AFTER:]
    if len(known) < 2:
        return {}
    first, last = known[0], known[-1]
    more = {kind: (count - first.get(kind, 0)) / (len(known) - 1) for kind, count in last.items()}
    return {kind: round(each, 2) for kind, each in sorted(more.items()) if each >= 1}


def _growth_lines(kinds: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    for kind, faults in kinds.items():
        each = ", ".join(f"{number:g} of {what}" for what, number in descriptor_growth(faults).items())
        if each:
            yield from (
                f"{kind}: the program with most descriptors opens more with each fault: {each}.",
                "",
            )


def _without_effect_lines(kinds: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    for kind, faults in kinds.items():
        if _count_without_effect(faults):
            yield (
                f"{kind}: {_count_without_effect(faults)} faults had no effect: "
                "the offender's own wait succeeded."
            )
            yield ""


def _proxied_offender_lines(finished: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about offenders under mpsd-run."""
    if finished.get("offender", "plain") == "plain":
        return
    yield "The offenders run under mpsd-run too. While mpsd cannot attribute the fault, they fail over as"
    yield "well. mpsd names an offender when the exception was in its code, or when its replay has faulted"
    yield "again."
    if finished.get("offender") == "known":
        yield "They start before the programs, and their kernels are known by then."
    for kind, faults in finished["faults"].items():
        named = sum(bool(fault.get("named")) for fault in faults)
        moves = sorted(set(pauses.moves_of_innocents(faults)))
        each = f"{moves[0]} to {moves[-1]}" if moves else "no"
        by_code = sum(map(_is_named_by_code, faults))
        last = sum(_had_the_last_turn(fault) for fault in faults)
        yield (
            f"{kind}: named {named} of {len(faults)}, {by_code} of them by their code, "
            f"{last} in the last turn; {each} moves of every other program for each fault."
        )
    yield ""


def _unproxied_lines(finished: Mapping[str, Any]) -> Iterator[str]:
    if finished.get("unproxied"):
        yield "At each fault one more client of the domain runs without the proxy. It takes no part in the"
        yield "fail-over, is lost, and is started again."
        yield ""


def _client_outcomes(fault: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return fault["record"]["clients"] if fault["record"] else ()


def _named_pids(fault: Mapping[str, Any]) -> set[int]:
    """The pids of offenders."""
    return {f["offender"]["pid"] for f in fault["faults"] if f["offender"]}


def _survivor_outcomes(fault: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the fates of all clients but the offender, as the offender's own turn does not count."""
    offenders = _named_pids(fault) | {fault.get("carried")}
    return [outcome for outcome in _client_outcomes(fault) if outcome["pid"] not in offenders]


def _innocent_pids(fault: Mapping[str, Any]) -> set[int]:
    """Return the pids of innocent programs; none for older reports, which do not tell them apart."""
    if fault.get("named") is not None and fault.get("carried") is None:
        return set()
    return {outcome["pid"] for outcome in _client_outcomes(fault)} - {fault.get("carried")}


def _is_named_by_code(fault: Mapping[str, Any]) -> bool:
    signs = (sign["text"] for known in fault["faults"] if known["offender"] for sign in known["evidence"])
    return any(text.startswith(IN_ITS_CODE) for text in signs)


def _had_the_last_turn(fault: Mapping[str, Any]) -> bool:
    """Return whether several clients had a turn, and the last of them was named."""
    turns = {outcome["pid"]: outcome["turn_ms"] for outcome in _client_outcomes(fault) if outcome["turn_ms"]}
    return len(turns) > 1 and max(turns, key=turns.__getitem__) in _named_pids(fault)


def _first_and_last(counts: Sequence[int]) -> str:
    return f"{counts[0]} / {counts[-1]}" if counts else "-"


def _count_missing_work(fault: Mapping[str, Any]) -> int:
    """Return how many programs mpsd told that work in flight may be missing."""
    return sum(outcome["why"].startswith(MISSING) for outcome in _survivor_outcomes(fault))


def row(kind: str, faults: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the row of HEAD for the faults of one kind."""
    programs = [p for fault in faults for p in fault["programs"]]
    outcomes = [outcome for fault in faults for outcome in _survivor_outcomes(fault)]
    return [
        kind,
        str(len(faults)),
        str(sum(not p["alive"] for p in programs)),
        str(sum(bool(p["told"]) for p in programs)),
        _spread([p["stall"] for p in programs]),
        _spread([fault.get("bystander") for fault in faults]),
        *(_spread(resumed(faults, suspect=suspect)) for suspect in (False, True)),
        *(_spread(excess_over_stall(faults, suspect=suspect)) for suspect in (False, True)),
        in_time(faults),
        *(late(faults, suspect=suspect) for suspect in (False, True)),
        _spread([fault.get("word") for fault in faults]),
        _spread([fault["record"]["decision_ms"] for fault in faults if fault["record"]]),
        *(_spread([outcome.get(name) for outcome in outcomes]) for name in STEPS),
        *map(_first_and_last, open_descriptors(faults).values()),
        _first_and_last(threads(faults)),
        judge(faults),
    ]


HEAD = ["kind", "faults", "lost", "errors", "longest step", "GPU stall", "resumed: cleared", "suspects"]
HEAD += ["beyond: cleared", "suspects", "in time", "late: cleared", "suspects"]
HEAD += ["order", "decided", "held", "fence", "switched", "turn", "replayed", "open: mpsd", "a program"]
HEAD += ["threads", "verdict"]
MEANINGS = {
    "errors": "programs that got an error, which said that work in flight may be lost: always in mode keep, "
    "and in mode exact where the work cannot be replayed",
    "longest step": "of a program around the fault",
    "GPU stall": "the longest step of a bystander in another domain: how long the GPU itself stood still",
    "resumed": "from the fault until cleared programs and suspects ran in their new contexts, or until the "
    "turn of a suspect that replays",
    "beyond": "their longest steps, beyond the GPU stall and the time of a usual step (the median of those "
    "around; zero for servers, whose steps are short), replay included",
    "in time": "whether they resumed, at the median, within 5 (cleared) and 100 ms (suspects) of the stall",
    "late": "how many did not, of all",
    "order": "from the order to the offender until mpsd told the programs to move (a host-engine fault "
    "comes 50 ms after the order: its stream is kept busy)",
    "decided": "from mpsd's first sign to its decision",
    "held, fence, switched": "from there until a program's calls were held, its old context could not "
    "write, and it ran in the new one",
    "turn, replayed": "until a suspect's turn for its replay came, and until the replay had ended",
    "open, threads": "descriptors of mpsd and of the program with most, and threads likewise, before the "
    "first fault and before the last",
}
"""The meaning of columns that their names do not tell; times are in ms, median / worst."""
STEPS = ("held_ms", "fence_ms", "first_ms", "turn_ms", "done_ms")


def excess_over_stall(faults: Sequence[Mapping[str, Any]], *, suspect: bool) -> list[float]:
    """Return how far the longest step of each such program exceeded a usual step and the stall [ms]."""
    return [
        beyond
        for fault in faults
        for program in fault["programs"]
        if program.get("suspect") is suspect and (beyond := pauses.excess(fault, program)) is not None
    ]


def _delay(fault: Mapping[str, Any]) -> float:
    """Return the delay of the fault on the GPU [ms], which older reports do not record."""
    return float(fault.get("delay", ENGINE_DELAY_MS if fault["kind"] in ENGINE else 0.0))


def resumed(
    faults: Sequence[Mapping[str, Any]], *, suspect: bool, over_the_gpus: bool = False
) -> list[float]:
    """Return the times [ms] from the fault until each such program ran in its new context.

    For a suspect with work to replay: until its turn. `over_the_gpus`: less the GPU stall. Planned moves are
    left out: programs work until they begin.
    """
    return [
        fault["word"] - _delay(fault) + resumed_ms - (fault["bystander"] if over_the_gpus else 0.0)
        for fault in faults
        if None not in (fault.get("word"), fault.get("bystander"))
        and not (fault["record"] or {}).get("planned")
        for outcome in _survivor_outcomes(fault)
        if outcome["outcome"] == "moved" and outcome["suspect"] is suspect
        if (resumed_ms := outcome.get("turn_ms") or outcome.get("first_ms")) is not None
    ]


def in_time(faults: Sequence[Mapping[str, Any]]) -> str:
    """Return whether the medians are within the bars."""
    known = {suspect: resumed(faults, suspect=suspect, over_the_gpus=True) for suspect in BARS_MS}
    are_late = [median(found) > BARS_MS[suspect] for suspect, found in known.items() if found]
    return "-" if not are_late else "no" if any(are_late) else "yes"


def late(faults: Sequence[Mapping[str, Any]], *, suspect: bool) -> str:
    """Return how many resumed too late, of all."""
    found = resumed(faults, suspect=suspect, over_the_gpus=True)
    return f"{sum(ms > BARS_MS[suspect] for ms in found)} of {len(found)}" if found else "-"


def table(finished: Mapping[str, Any]) -> list[list[str]]:
    return [HEAD, *(row(kind, faults) for kind, faults in finished["faults"].items())]


def legend() -> str:
    """Return the meaning of the columns, for a terminal."""
    lines = ["Times are in ms, median / worst."]
    for column, meaning in MEANINGS.items():
        lines += textwrap.wrap(f"{column}: {meaning}", 110, subsequent_indent="    ")
    return "\n".join(lines)


def _programs_sentence(works: Sequence[str]) -> str:
    if not works:
        return "Three servers keep memory in the vault and check every result."
    return f"Programs ({', '.join(works)}), whose results are compared with those of a run without faults."


def _together_clause(finished: Mapping[str, Any]) -> str:
    return ", the same programs through all kinds" if finished.get("together") else ""


def markdown(finished: Mapping[str, Any]) -> str:
    lines = [
        f"# Fail-over: {finished['device']}, driver {finished['driver']}",
        "",
        tables.provenance(finished),
        "",
        f"{_programs_sentence(finished['works'])} A neighbour faults repeatedly, "
        "and they fail over to a standby",
        f"context each time{_together_clause(finished)}. Times are in ms, median / worst.",
        "",
        tables.markdown_table(table(finished)),
        "",
        *(f"- `{column}`: {meaning}" for column, meaning in MEANINGS.items()),
        "",
        *_proxied_offender_lines(finished),
        *_unproxied_lines(finished),
        *pauses.lines(finished),
        *_growth_lines(finished["faults"]),
        *_without_effect_lines(finished["faults"]),
        tables.left_behind(finished),
    ]
    return "\n".join(lines) + "\n"


def verdicts(finished: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the verdict on the faults of each kind, computed from their figures."""
    return [(kind, judge(faults)) for kind, faults in finished["faults"].items()]


def passed(finished: Mapping[str, Any]) -> bool:
    return tables.passed(finished, [verdict for _, verdict in verdicts(finished)])
