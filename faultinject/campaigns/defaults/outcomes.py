"""The outcome of one fault for each program: the protection that status showed, and the program's fate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Fate(StrEnum):
    """The fate of a program at one fault."""

    KEPT = "kept"
    MOVED = "moved"
    LOST = "lost"
    WRONG = "wrong results"
    NOT_RUNNING = "not running"


@dataclass(slots=True)
class ProgramFate:
    """One program at one fault.

    called: the level in status right before the fault ("" where status did not list the program), with `why`
    it is not higher. pause: its longest step less a usual one [ms]. idle: it had no work when the fault came.
    error: the last words of a program that was lost. held, limit: bytes of its snapshot buffers, and their
    limit; cost: what saving adds, as a share of the time without it. All None where status does not say so.
    """

    program: str
    called: str = ""
    why: str = ""
    fate: Fate = Fate.NOT_RUNNING
    pause: float | None = None
    idle: bool = False
    error: str = ""
    held: int | None = None
    limit: int | None = None
    cost: float | None = None


@dataclass(slots=True)
class DefaultFault:
    """One fault.

    problem: the event that did not come in time. offender_code: the CUDA error of the offender; None if it
    did not say one. gpu_stall: the longest step [ms] of a program in another domain. moves: fail-overs that
    mpsd recorded. classes: of the fault records. innocent: programs that a record names as the offender.
    """

    kind: str
    problem: str = ""
    offender_code: int | None = None
    programs: list[ProgramFate] = field(default_factory=list)
    gpu_stall: float | None = None
    moves: int = 0
    classes: list[str] = field(default_factory=list)
    innocent: list[str] = field(default_factory=list)


def has_no_effect(fault: Mapping[str, Any]) -> bool:
    """Return whether the offender's own wait succeeded and mpsd recorded nothing."""
    return fault["offender_code"] == 0 and not fault["moves"] and not fault["classes"]


def pause_ms(times: Sequence[float], usual_s: float) -> float:
    """Return how much longer than a usual step the longest step took."""
    return round(max(0.0, max(times) - usual_s) * 1e3, 3)
