"""Limits and their values, as operators write them and as the control daemon answers them.

A value is a plain text: "50" or "33.3" (percent), "0" or "1" (priority), "2048M" (device memory of each
client, MiB). An answer is the text of the control daemon without its surroundings, "" if it has no value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from mpsd.base.quantities import mebibytes
from mpsd.base.text import complains


class Kind(StrEnum):
    """The limits, by the names in the commands of the control daemon."""

    PERCENTAGE = "active_thread_percentage"
    PRIORITY = "client_priority"
    MEMORY = "device_pinned_mem_limit"


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One limit of a domain. `gpu`: the UUID, of a memory limit alone."""

    kind: Kind
    gpu: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.gpu}".rstrip()


STOCK: Mapping[Key, str] = MappingProxyType({Key(Kind.PERCENTAGE): "100", Key(Kind.PRIORITY): "0"})
"""The values of a new control daemon. It has no memory limit."""
REMEDY: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.PERCENTAGE: "write a number above 0 up to 100 without a percent sign, for example 50",
        Kind.PRIORITY: "write 0 (normal) or 1 (below normal)",
        Kind.MEMORY: "write a whole number and M or G, for example 1536M",
    }
)
"""How a value must be written, for errors and logs."""
_ROUNDED = 0.06  # The control daemon answers with one decimal.
_LONGEST_ANSWER = 200
_SAID = {
    Kind.PERCENTAGE: re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,6})?", re.ASCII),
    Kind.PRIORITY: re.compile(r"[01]"),
    Kind.MEMORY: re.compile(r"[1-9][0-9]{0,7}[MG]", re.ASCII),
}
_ANSWERED = {
    # Driver releases differ in the text before the value.
    Kind.PERCENTAGE: re.compile(r"(?:.*\s)?([0-9]{1,3}(?:\.[0-9]{1,6})?)%?", re.ASCII | re.DOTALL),
    Kind.PRIORITY: re.compile(r"(?:.*\s)?([01])", re.ASCII | re.DOTALL),
    Kind.MEMORY: re.compile(r"(?:.*\s)?([0-9]{1,9}[MG])", re.ASCII | re.DOTALL),
}


def said(kind: Kind, text: str) -> str | None:
    """Return the value that a command's last word means. None: only the control daemon can tell."""
    text = text.upper()
    if not _SAID[kind].fullmatch(text):
        return None
    if kind is Kind.MEMORY:
        return f"{mebibytes(text)}M"
    value = f"{float(text):g}"
    # A value with an exponent is no command, and could not be restored.
    return value if kind is not Kind.PERCENTAGE or (0 < float(text) <= 100 and "e" not in value) else None


def answer(kind: Kind, reply: str) -> str:
    """Return the value in a reply of the control daemon, "" if the reply has none or is a complaint."""
    if complains(reply):
        # Its last word can be a number: "Invalid server PID 85".
        return ""
    found = _ANSWERED[kind].fullmatch(reply[-_LONGEST_ANSWER:].strip())
    if found is None or (kind is Kind.MEMORY and mebibytes(found[1]) == 0):
        return ""
    # A small percentage is rounded to 0.0.
    return found[1] if kind is not Kind.PERCENTAGE or float(found[1]) <= 100 else ""


def value_of(kind: Kind, answered: str) -> str:
    """Return the value that an answer stands for."""
    return f"{mebibytes(answered)}M" if kind is Kind.MEMORY else f"{float(answered):g}"


def agrees(kind: Kind, value: str, answered: str) -> bool:
    """Return whether a control daemon with this value gives this answer."""
    if not answered:
        return False
    if kind is not Kind.MEMORY:
        return abs(float(answered) - float(value)) < _ROUNDED
    theirs, ours = mebibytes(answered), mebibytes(value)
    # Driver 595 answers with whole GiB from one GiB on.
    return theirs == ours or (answered[-1] == "G" and theirs == ours - ours % 1024)
