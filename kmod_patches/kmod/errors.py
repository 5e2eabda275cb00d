"""What can go wrong, in words for the person who asked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmod.modules import Use


NAME = "mpsd-kmod"


def program() -> str:
    """As the user called it, for what he is told to do next."""
    called = sys.argv[0] if sys.argv else ""
    return called if Path(called).name == NAME else NAME


def text_of(error: Exception) -> str:
    """An OSError's as well: it names the file, or that it was none."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return f"{error.filename or 'standard output'}: {error.strerror}"


class KmodError(Exception):
    """It cannot be done; the text says why and what was left as it was."""


class UnknownTree(KmodError):
    """The folder is no driver source that the patch knows how to read. Nothing was changed."""


class HookMismatch(KmodError):
    """The semantic patch did not do in this source what it must. Nothing was changed."""


class ChangedSince(KmodError):
    """A file is neither as the driver had it nor as the patch left it. Nothing was changed."""


class Unavailable(KmodError):
    """A suite or a tool is not to be had here."""


class InUse(KmodError):
    """The driver's modules are loaded, and what was asked for would change them. Nothing was changed."""

    def __init__(self, text: str, used: Use) -> None:
        self.text, self.used = text, used
        super().__init__("\n  ".join([text, *used.lines()]))
