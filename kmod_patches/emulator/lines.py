"""What the guest says on its second serial port: one line for each thing, and nothing else on that port.

    mpsd-vm1 begin NAME
    mpsd-vm1 pass NAME "what was seen"
    mpsd-vm1 fail NAME "why"
    mpsd-vm1 done

NAME has no blanks; the text is a JSON string, so it stays on its line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

MARK = "mpsd-vm1"


class Word(Enum):
    BEGIN = "begin"
    PASS = "pass"
    FAIL = "fail"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Line:
    word: Word
    name: str = ""
    text: str = ""


def encode(line: Line) -> str:
    parts = [MARK, line.word.value]
    if line.word is not Word.DONE:
        parts.append(line.name)
    if line.word in (Word.PASS, Word.FAIL):
        parts.append(json.dumps(line.text))
    return " ".join(parts) + "\n"


def parse(text: str) -> Line | None:
    """A line as the port gives it, line end and all; None for anything that is not whole."""
    parts = text.strip().split(" ", 3)
    try:
        word = Word(parts[1])
        if parts[0] != MARK:
            return None
        if word is Word.DONE:
            return Line(word) if len(parts) == 2 else None
        if word is Word.BEGIN:
            return Line(word, parts[2]) if len(parts) == 3 else None
        said = json.loads(parts[3])
    except (IndexError, ValueError):
        return None
    return Line(word, parts[2], said) if isinstance(said, str) else None
