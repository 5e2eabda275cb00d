"""What can go wrong, in words for the person who asked."""

from __future__ import annotations


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
