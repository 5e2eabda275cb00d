"""The `[numerics]` tables of the drivers' files: percentages at which cuBLAS computes wrong results.

    [numerics]              # written by `mpsd-faultinject numerics --write-table FILE`
    evidence = "numerics"   # the table under faultinject/evidence; "simulated": no GPU's
    cublas = "13.0.2"       # the measured version
    bound = 0.02            # the largest relative error of a right result
    wrong = [40, 43]        # whole percentages with a wrong result
    missing = []            # whole percentages without a result

A combination of driver branch and GPU without this table is not measured.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mpsd.base.model import Gpu
from mpsd.base.percentages import Measured, from_view

FOLDER = Path(__file__).parent / "drivers"


@dataclass(frozen=True, slots=True)
class Numerics:
    """The table of a driver branch ("": each) on GPUs of these names. `title`: both in words."""

    title: str
    backend: str
    driver: str
    gpus: tuple[str, ...]
    evidence: str
    measured: Measured

    def matches(self, backend: str, driver: str, gpu: str) -> bool:
        branch = driver.partition(".")[0]
        return backend == self.backend and self.driver in ("", branch) and gpu in self.gpus


def read(text: str) -> Numerics | None:
    """Return the table of one file; None if it has none. Raise ValueError, KeyError or TypeError."""
    file: Mapping[str, Any] = tomllib.loads(text)
    if "numerics" not in file:
        return None
    table = file["numerics"]
    return Numerics(
        title=str(file["title"]),
        backend=str(file["backend"]),
        driver=str(file["driver"]),
        gpus=tuple(map(str, file["gpus"])),
        evidence=str(table["evidence"]),
        measured=from_view(table),
    )


@cache
def tables() -> tuple[Numerics, ...]:
    """Return the tables of all files. Raise ValueError, KeyError or TypeError for a malformed file."""
    found = (read(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.toml")))
    return tuple(each for each in found if each is not None)


def table_of(backend: str, driver: str, gpu: str) -> Measured | None:
    """Return the table of this driver version and GPU name; None if they are not measured."""
    return next((each.measured for each in tables() if each.matches(backend, driver, gpu)), None)


def by_gpu(backend: str, driver: str, gpus: Iterable[Gpu]) -> dict[str, Measured | None]:
    """Return the table of each GPU, by UUID."""
    return {gpu.uuid: table_of(backend, driver, gpu.name) for gpu in gpus}
