"""What can go wrong, in words for the person who asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmod.modules import Use


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
