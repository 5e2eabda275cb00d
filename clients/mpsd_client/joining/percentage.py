"""The thread percentage that a program is to run at: a warning where cuBLAS would compute wrong results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpsd_client._protocol import percentages


def percentage_warnings(environ: Mapping[str, str], offer: Mapping[str, Any] | None) -> list[str]:
    """Return a warning for a program with this environment; none if its percentage is right or not measured.

    `offer`: Client.percentages, the domain's limit and the table of its GPUs."""
    if offer is None:
        return []
    own = percentages.read(environ.get(percentages.VARIABLE, ""))
    percentage = percentages.effective(own, offer["limit"])
    if percentage is None:
        return []
    found = percentages.verdict(percentage, percentages.from_view(offer["table"]))
    if found.finding is not percentages.Finding.WRONG:
        return []
    origin = percentages.VARIABLE if percentage == own else "the domain's limit"
    return [f"cuBLAS computes wrong results without an error: {origin}, {found.text}"]
