"""Proven combinations of driver branch and GPU: one TOML file each, in this folder.

    title = "driver 580 on NVIDIA H200"     # for `mpsd-ctl doctor`
    backend = "nvidia"                      # or "simulated"
    driver = "580"                          # the branch: the first part of the driver's version; "": each
    gpus = ["NVIDIA H200"]                  # the family: names as NVML reports them, in full
    level = "failover"                      # the highest level that is proven
    auto = "guard"                          # what protect = "auto" takes; without this key, `level`
    [stall]                                 # how long the GPU stands still at an SM exception; optional
    base_ms = 10                            # without other contexts
    context_ms = 8                          # for each context of a client
    standby_ms = 3.7                        # for each standby context
    evidence = "faultinject/evidence/..."   # the table with the measurement
    [evidence]                              # a file of the repository = what it shows
    "faultinject/evidence/failover-sm.md" = "SM exceptions: no participant lost a result"

A combination without a file has no proven level. Tables of other tools may follow in a file; they are
ignored here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from mpsd.base.protection import ProtectionLevel


@dataclass(frozen=True, slots=True)
class Stall:
    """How long a GPU stands still at an SM exception, by the contexts on it. `evidence`: the table."""

    base_ms: float
    context_ms: float
    standby_ms: float
    evidence: str

    def of(self, contexts: int, standbys: int) -> float:
        """Return the estimate [ms] with so many contexts of clients, and so many standby contexts."""
        return round(self.base_ms + contexts * self.context_ms + standbys * self.standby_ms, 1)


@dataclass(frozen=True, slots=True)
class Combination:
    """A driver branch on a GPU family. `evidence`: files of the repository, each with its statement.

    `stall`: None if it is not measured.
    """

    title: str
    backend: str
    driver: str
    gpus: tuple[str, ...]
    level: ProtectionLevel
    auto: ProtectionLevel
    evidence: tuple[tuple[str, str], ...]
    stall: Stall | None = None

    def matches(self, backend: str, driver: str, gpu: str) -> bool:
        """Return whether this is the combination of a driver version and the name of a GPU."""
        branch = driver.partition(".")[0]
        return backend == self.backend and self.driver in ("", branch) and gpu in self.gpus


@cache
def combinations() -> tuple[Combination, ...]:
    """Return all proven combinations. Raise ValueError, KeyError or TypeError for a malformed file."""
    files = sorted((f for f in resources.files(__name__).iterdir() if f.name.endswith(".toml")), key=str)
    return tuple(read(file.read_text(encoding="utf-8")) for file in files)


def read(text: str) -> Combination:
    """Return the combination of one file. Raise ValueError, KeyError or TypeError."""
    table = tomllib.loads(text)
    return Combination(
        title=str(table["title"]),
        backend=str(table["backend"]),
        driver=str(table["driver"]),
        gpus=tuple(map(str, table["gpus"])),
        level=ProtectionLevel(table["level"]),
        auto=ProtectionLevel(table.get("auto", table["level"])),
        evidence=tuple((str(file), str(statement)) for file, statement in table["evidence"].items()),
        stall=_stall(table["stall"]) if "stall" in table else None,
    )


def _stall(table: Mapping[str, Any]) -> Stall:
    base, context, standby = (float(table[key]) for key in ("base_ms", "context_ms", "standby_ms"))
    return Stall(base, context, standby, str(table["evidence"]))


def proven(backend: str, driver: str, gpu: str) -> Combination | None:
    """Return the proven combination of this driver version and GPU name; None if there is none."""
    return next((each for each in combinations() if each.matches(backend, driver, gpu)), None)
