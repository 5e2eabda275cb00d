"""The guest's protocol on its second serial port: one line per message, and nothing else.

    mpsd-vm1 begin NAME
    mpsd-vm1 pass NAME "observation"
    mpsd-vm1 fail NAME "reason"
    mpsd-vm1 done

NAME has no blanks; the text is a JSON string, so it has no line breaks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

MARK = "mpsd-vm1"


class MessageKind(Enum):
    BEGIN = "begin"
    PASS = "pass"
    FAIL = "fail"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Line:
    word: MessageKind
    name: str = ""
    text: str = ""


def encode(line: Line) -> str:
    parts = [MARK, line.word.value]
    if line.word is not MessageKind.DONE:
        parts.append(line.name)
    if line.word in (MessageKind.PASS, MessageKind.FAIL):
        parts.append(json.dumps(line.text))
    return " ".join(parts) + "\n"


def parse(text: str) -> Line | None:
    """Parse a line of the port, with its line end; None for an incomplete or foreign line."""
    parts = text.strip().split(" ", 3)
    try:
        word = MessageKind(parts[1])
        if parts[0] != MARK:
            return None
        if word is MessageKind.DONE:
            return Line(word) if len(parts) == 2 else None
        if word is MessageKind.BEGIN:
            return Line(word, parts[2]) if len(parts) == 3 else None
        said = json.loads(parts[3])
    except (IndexError, ValueError):
        return None
    return Line(word, parts[2], said) if isinstance(said, str) else None
