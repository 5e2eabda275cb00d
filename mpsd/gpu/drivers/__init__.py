"""Proven combinations of driver branch and GPU: one TOML file each, in this folder.

    title = "driver 580 on NVIDIA H200"     # for `mpsd-ctl doctor`
    backend = "nvidia"                      # or "simulated"
    driver = "580"                          # the branch: the first part of the driver's version; "": each
    gpus = ["NVIDIA H200"]                  # the family: names as NVML reports them, in full
    level = "failover"                      # the highest level that is proven
    auto = "guard"                          # what protect = "auto" takes; without this key, `level`
    [evidence]                              # a file of the repository = what it shows
    "faultinject/evidence/failover-sm.md" = "SM exceptions: no participant lost a result"

A combination without a file has no proven level. Tables of other tools may follow in a file; they are
ignored here.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from mpsd.base.protection import ProtectionLevel


@dataclass(frozen=True, slots=True)
class Combination:
    """A driver branch on a GPU family. `evidence`: files of the repository, each with its statement."""

    title: str
    backend: str
    driver: str
    gpus: tuple[str, ...]
    level: ProtectionLevel
    auto: ProtectionLevel
    evidence: tuple[tuple[str, str], ...]

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
    )


def proven(backend: str, driver: str, gpu: str) -> Combination | None:
    """Return the proven combination of this driver version and GPU name; None if there is none."""
    return next((each for each in combinations() if each.matches(backend, driver, gpu)), None)
