"""Thread percentages at which cuBLAS computes wrong results: the verdict, and the tables of the drivers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpsd.base.percentages import Finding, Measured, effective, from_view, read, together, verdict
from mpsd.gpu import numerics

ROOT = Path(__file__).resolve().parents[2]
TABLE = Measured("1.2.3", 0.02, frozenset({33, 40, 41, 43, 100}), frozenset({50}))


@pytest.mark.parametrize(
    ("percentage", "finding", "below", "above"),
    [
        (39, Finding.RIGHT, None, None),
        (40, Finding.WRONG, 39, 42),
        (41, Finding.WRONG, 39, 42),
        (43, Finding.WRONG, 42, 44),
        (100, Finding.WRONG, 99, None),
        (50, Finding.NOT_MEASURED, None, None),
        # A decimal has the SMs of one of its neighbours.
        (33.3, Finding.WRONG, 32, 34),
        (32.5, Finding.WRONG, 32, 34),
        (42.5, Finding.WRONG, 42, 44),
        (34.5, Finding.RIGHT, None, None),
        (50.5, Finding.NOT_MEASURED, None, None),
        (0.5, Finding.NOT_MEASURED, None, None),
    ],
)
def test_a_percentage_is_judged_by_its_whole_neighbours(
    percentage: float, finding: Finding, below: int | None, above: int | None
) -> None:
    found = verdict(percentage, TABLE)
    assert (found.finding, found.below, found.above) == (finding, below, above)


def test_the_nearest_right_percentage_is_never_a_missing_one() -> None:
    table = Measured("1", 0.02, frozenset({2}), frozenset({1, 3}))
    assert (verdict(2, table).below, verdict(2, table).above) == (None, 4)
    everywhere = Measured("1", 0.02, frozenset(range(1, 101)))
    assert verdict(50, everywhere).text == "50 % is wrong, the nearest right percentages: none"


def test_without_a_table_nothing_is_measured() -> None:
    assert verdict(40, None).finding is Finding.NOT_MEASURED
    assert verdict(40, None).text == "40 % is not measured"


def test_a_wrong_percentage_names_the_nearest_right_ones() -> None:
    assert verdict(33.3, TABLE).text == "33.3 % is wrong, the nearest right percentages: 32 % and 34 %"


def test_several_gpus_are_wrong_where_one_of_them_is() -> None:
    one = Measured("13.0", 0.02, frozenset({40}), frozenset({7}))
    other = Measured("12.9", 0.03, frozenset({7}), frozenset({8}))
    assert together([]) is None
    assert together([one, other]) == Measured("13.0, 12.9", 0.03, frozenset({7, 40}), frozenset({8}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("40", 40.0), (" 33.3 ", 33.3), ("40%", 40.0), ("0", None), ("101", None), ("nan", None), ("x", None)],
)
def test_a_setting_is_read(text: str, expected: float | None) -> None:
    assert read(text) == expected


def test_a_client_can_only_lower_the_limit_of_its_domain() -> None:
    assert effective(50.0, 40.0) == effective(40.0, 50.0) == effective(None, 40.0) == 40.0
    assert effective(None, None) is None


def test_a_table_survives_its_view() -> None:
    assert from_view(TABLE.view()) == TABLE


@pytest.mark.parametrize(
    "change", [{"wrong": [0]}, {"wrong": [101]}, {"wrong": [50]}, {"bound": 0.0}, {"bound": 1.0}]
)
def test_a_malformed_table_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="whole numbers from 1 to 100"):
        from_view(TABLE.view() | change)


def test_a_combination_is_found_by_backend_branch_and_name() -> None:
    found = numerics.read(
        'title = "driver 580 on H"\nbackend = "nvidia"\ndriver = "580"\ngpus = ["H"]\n'
        '[numerics]\nevidence = "numerics"\ncublas = "13.0"\nbound = 0.02\nwrong = [40]\nmissing = []\n'
    )
    assert found is not None and found.measured == Measured("13.0", 0.02, frozenset({40}))
    assert found.matches("nvidia", "580.159.04", "H")
    for other in (("simulated", "580.1", "H"), ("nvidia", "590.1", "H"), ("nvidia", "580.1", "H2")):
        assert not found.matches(*other)


def test_the_simulated_gpu_has_a_table_and_an_unknown_gpu_has_none() -> None:
    known = numerics.table_of("simulated", "580.1", "Simulated GPU")
    assert known is not None and 40 in known.wrong
    assert numerics.table_of("nvidia", "1.0", "Simulated GPU") is None


def test_each_table_of_a_real_gpu_names_an_evidence_table() -> None:
    for each in numerics.tables():
        page = ROOT / "faultinject" / "evidence" / f"{each.evidence}.md"
        assert (each.evidence == "simulated") is (each.backend == "simulated")
        assert each.backend == "simulated" or page.is_file(), f"{each.title}: there is no {page}"
