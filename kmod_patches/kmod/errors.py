"""Errors, worded for the user of the command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmod.modules import Use


NAME = "mpsd-kmod"


def program() -> str:
    """Return the program's name as the user called it, for advice."""
    called = sys.argv[0] if sys.argv else ""
    return called if Path(called).name == NAME else NAME


def text_of(error: Exception) -> str:
    """Return the text of an error. For an OSError it names the file, or standard output."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return f"{error.filename or 'standard output'}: {error.strerror}"


class KmodError(Exception):
    """The request cannot be carried out; the text states the reason and what was left unchanged."""


class UnknownTree(KmodError):
    """The folder is no driver source that the patch supports. Nothing was changed."""


class HookMismatch(KmodError):
    """The semantic patch did not make the required changes in this source. Nothing was changed."""


class ChangedSince(KmodError):
    """A file is neither in the driver's state nor in the patched state. Nothing was changed."""


class Unavailable(KmodError):
    """A suite or a tool is unavailable here."""


class InUse(KmodError):
    """The driver's modules are loaded, and the request would change them. Nothing was changed."""

    def __init__(self, text: str, used: Use) -> None:
        self.text, self.used = text, used
        super().__init__("\n  ".join([text, *used.lines()]))
