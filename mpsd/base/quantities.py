"""Quantities with a unit, as operators write them."""

from __future__ import annotations

import re
from decimal import Decimal

_MEMORY = re.compile(r"([0-9]{1,8}(?:\.[0-9]{1,6})?)([MG])", re.ASCII | re.IGNORECASE)
_MIB = {"M": 1, "G": 1024}


def mebibytes(text: str) -> int:
    """Return `512M`, `2G` or `1.5G` in MiB. Raises ValueError unless it is a whole number."""
    match = _MEMORY.fullmatch(text)
    mib = Decimal(match[1]) * _MIB[match[2].upper()] if match else Decimal("NaN")
    if match is None or mib != int(mib):
        raise ValueError(f"{text!r} is not a whole number of MiB")
    return int(mib)
