"""The table of proven combinations: every entry is whole, and its evidence exists and fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpsd.base.protection import ProtectionLevel
from mpsd.gpu import drivers
from mpsd.gpu.drivers import Combination, combinations, proven
from mpsd.gpu.simulated.node import DRIVER_VERSION

ROOT = Path(__file__).resolve().parents[2]
each_entry = pytest.mark.parametrize("entry", combinations(), ids=lambda entry: entry.title)


@each_entry
def test_the_evidence_exists(entry: Combination) -> None:
    assert entry.evidence and all(statement for _, statement in entry.evidence)
    assert [file for file, _ in entry.evidence if not (ROOT / file).is_file()] == []


@each_entry
def test_a_table_of_a_real_gpu_is_of_that_gpu_and_branch(entry: Combination) -> None:
    for file, _ in entry.evidence:
        if entry.backend == "simulated":
            assert not file.startswith("faultinject/evidence/")
        else:
            text = (ROOT / file).read_text()
            head = next(line for line in text.splitlines() if line.startswith("GPU: "))
            assert any(gpu in head for gpu in entry.gpus) and f"Driver: {entry.driver}." in head


def test_the_files_are_all_read_and_no_two_entries_meet() -> None:
    assert len(combinations()) == len(list(Path(drivers.__file__).parent.glob("*.toml"))) >= 2
    keys = [(entry.backend, entry.driver, gpu) for entry in combinations() for gpu in entry.gpus]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("backend", "driver", "gpu", "level"),
    [
        ("nvidia", "580.159.04", "NVIDIA H200", "failover"),
        ("nvidia", "580", "NVIDIA H200", "failover"),
        ("nvidia", "590.44.01", "NVIDIA H200", None),
        ("nvidia", "5800.1", "NVIDIA H200", None),
        ("nvidia", "580.159.04", "NVIDIA H200 NVL", None),
        ("nvidia", "580.159.04", "NVIDIA A100-SXM4-80GB", None),
        ("nvidia", "", "NVIDIA H200", None),
        ("simulated", DRIVER_VERSION, "Simulated GPU", "failover"),
        # A real GPU never has the proof of the simulated one, nor the other way round.
        ("nvidia", DRIVER_VERSION, "Simulated GPU", None),
        ("simulated", "580.159.04", "NVIDIA H200", None),
    ],
)
def test_a_combination_is_a_branch_and_a_whole_name(
    backend: str, driver: str, gpu: str, level: str | None
) -> None:
    found = proven(backend, driver, gpu)
    assert (found.level if found else None) == (ProtectionLevel(level) if level else None)


@pytest.mark.parametrize("line", ['level = "most"', "level = 3", ""])
def test_a_malformed_file_is_an_error(line: str) -> None:
    text = f'title = "t"\nbackend = "nvidia"\ndriver = "1"\ngpus = ["g"]\n{line}\n[evidence]\n'
    with pytest.raises((ValueError, KeyError)):
        drivers.read(text)


def test_the_stall_grows_with_contexts_where_it_is_measured() -> None:
    h200, simulated = proven("nvidia", "580.1", "NVIDIA H200"), proven("simulated", "", "Simulated GPU")
    assert h200 is not None and h200.stall is not None and simulated is not None
    assert (ROOT / h200.stall.evidence).is_file() and simulated.stall is None
    # Measured: 104 ms with 12 older contexts, 32 ms with 6 that have one copy channel.
    assert abs(h200.stall.of(12, 0) - 104) <= 4 and abs(h200.stall.of(0, 6) - 32) <= 1
