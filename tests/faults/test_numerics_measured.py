"""The campaign `numerics` on the simulated GPU, whose programs make wrong results up, and its verdicts."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from faultinject.__main__ import main
from faultinject.campaigns import numerics
from faultinject.evidence import files
from faultinject.programs.numerics import products
from mpsd.base.errors import UsageError
from mpsd.base.percentages import from_view

pytestmark = pytest.mark.timeout(300)
SAMPLE = Path(__file__).parents[1] / "data" / "reports" / "kinds" / "numerics.json"


def test_wrong_percentages_are_found_and_become_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, table = tmp_path / "report.json", tmp_path / "table.toml"
    asked = ["numerics", "--percentages", "31-34,40", "--jobs", "5"]
    # Not all percentages were measured, but each that was asked for.
    assert main([*asked, "--json", str(path), "--write-table", str(table)]) == 0
    written = tomllib.loads(table.read_text())["numerics"]
    found = from_view(written)
    assert (found.wrong, found.cublas, written["evidence"]) == ({32, 33, 40}, "simulated", "simulated")
    assert found.missing == {*range(1, 101)} - {31, 32, 33, 34, 40}
    assert not json.loads(path.read_text())["leftovers"]
    capsys.readouterr()
    assert main(["check", str(path)]) == 0
    assert main(["render", str(path)]) == 0
    page = capsys.readouterr().out
    assert "| 31,34 |  |" in page and "| 40 | 52 |" in page and "Simulated" in page


def report() -> dict[str, Any]:
    """Return a report of the percentages 39 to 43, of which 40 and 43 are wrong."""
    found: dict[str, Any] = json.loads(SAMPLE.read_text())
    return found


def row(finished: Mapping[str, Any], percentage: int) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in finished["rows"] if row["percentage"] == percentage)
    return found


def defects(finished: Mapping[str, Any]) -> dict[str, str]:
    return {name: verdict for name, verdict in numerics.verdicts(finished) if verdict != "valid"}


def test_the_verdict_on_a_percentage_comes_from_its_errors() -> None:
    finished = report()
    assert numerics.verdict_of(row(finished, 39)) == "right"
    assert numerics.verdict_of(row(finished, 40)).startswith("wrong: bf16 gemm")
    fine = row(finished, 41)
    fine["products"][0]["error"] = products.BOUND
    assert numerics.verdict_of(fine) == "right"
    fine["products"][0]["error"] = products.BOUND * 1.01
    assert numerics.verdict_of(fine).startswith("wrong")
    fine["products"][0] |= {"error": None, "nan": True}
    assert numerics.verdict_of(fine).startswith("wrong")


def test_a_percentage_without_all_results_is_not_measured_unless_one_is_wrong() -> None:
    finished = report()
    del row(finished, 39)["products"][-1]
    row(finished, 41)["problem"] = "the program died: no message"
    del row(finished, 40)["products"][-1]
    assert numerics.verdict_of(row(finished, 39)) == "not measured: results are missing"
    assert numerics.verdict_of(row(finished, 41)) == "not measured: the program died: no message"
    assert numerics.verdict_of(row(finished, 40)).startswith("wrong")
    assert defects(finished) == {"percentages": "invalid: not measured: 39,41"}
    assert {39, 41} <= numerics.measured(finished).missing


def test_a_percentage_with_the_sms_of_a_wrong_one_is_wrong() -> None:
    finished = report()
    row(finished, 41)["sms"] = row(finished, 40)["sms"]
    assert numerics.measured(finished).wrong == {40, 41, 43}


def test_a_measurement_that_proves_nothing_is_invalid() -> None:
    whole = copy.deepcopy(row(report(), 40)) | {"percentage": 100, "sms": 132}
    finished = report()
    finished["rows"].append(whole)
    assert "at 100 %" in defects(finished)
    finished = report()
    row(finished, 43)["sms"] = 2
    assert "SMs" in defects(finished)
    finished = report()
    row(finished, 43)["cublas"] = "13.1"
    assert "cuBLAS" in defects(finished)
    finished = report()
    row(finished, 43)["products"] = copy.deepcopy(row(finished, 39)["products"])
    assert "simulated table" in defects(finished)
    assert defects({**report(), "rows": []})["percentages"].startswith("invalid")


def test_a_report_of_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"kind": "bench", "schema": 1}))
    assert numerics.load(files.read(path), path) is None
    path.write_text(json.dumps({"kind": numerics.KIND, "schema": 1}))
    with pytest.raises(UsageError):
        numerics.load(files.read(path), path)
    for wrong in ("0", "101", "40-", "x", "9-3"):
        with pytest.raises(SystemExit):
            main(["numerics", "--percentages", wrong])


def test_an_error_is_relative_to_the_exact_value_and_the_rms() -> None:
    exact = [3.0, -4.0, 0.0, 5.0]
    rms = (50 / 4) ** 0.5
    assert products.worst_error(exact, exact) == 0.0
    assert products.worst_error([3.0, -4.0, 1.0, 5.0], exact) == pytest.approx(1 / rms)
    assert products.worst_error([3.0, -4.0, float("nan"), 5.0], exact) is None
    assert products.worst_error([3.0, -4.0, float("inf"), 5.0], exact) is None


def test_large_results_are_judged_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np = pytest.importorskip("numpy")
    from faultinject.programs.numerics import arrays

    small = products.Case("2 times 5x4x3 linear", 5, 4, 3, batch=2, transposed=True)
    monkeypatch.setattr(arrays, "CASES", (small,))
    arrays.prepare(tmp_path, 1)
    exact = np.fromfile(tmp_path / "2-times-5x4x3-linear-reference", np.float32)
    for kind in products.TYPES:
        a, b = (arrays.decoded(data, kind) for data in arrays.inputs(tmp_path, small, kind))
        made = np.einsum("bij,bkj->bik", a.reshape(2, 5, 3), b.reshape(2, 4, 3)).ravel()
        assert (made == exact).all()
        right = arrays.encoded(exact, kind)
        assert arrays.error_of(right.tobytes(), kind, tmp_path, small) == 0.0
        spoilt = made.copy()
        spoilt[7] += 16
        error = arrays.error_of(arrays.encoded(spoilt, kind).tobytes(), kind, tmp_path, small)
        assert error == pytest.approx(products.worst_error(list(spoilt), list(exact)))
        unwritten = b"\xff" * 2 * len(exact)
        assert arrays.error_of(unwritten, kind, tmp_path, small) is None


def test_a_client_of_a_gpu_compares_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst of all rounds counts, and an element that was not written is found."""
    np = pytest.importorskip("numpy")
    from faultinject.programs.devices import driver
    from faultinject.programs.numerics import arrays, cublas, gemm

    case = products.Case("4x4x4", 4, 4, 4)
    monkeypatch.setattr(products, "CASES", (case,))
    monkeypatch.setattr(arrays, "CASES", (case,))
    arrays.prepare(tmp_path, 1)
    memory: dict[int, bytearray] = {}

    class Driver:
        def call(self, name: str, value: Any, *rest: int) -> None:
            assert (name, rest) == ("cuDeviceGetAttribute", (gemm.SM_COUNT, 0))
            value._obj.value = 52

        def alloc(self, size: int) -> int:
            memory[len(memory) + 1] = bytearray(size)
            return len(memory)

        def write(self, address: int, data: bytes) -> None:
            memory[address][: len(data)] = data

        def set(self, address: int, value: int, size: int) -> None:
            memory[address][:size] = bytes([value]) * size

        def read(self, address: int, size: int) -> bytes:
            return bytes(memory[address][:size])

        def free(self, address: int) -> None:
            assert address in memory

        def synchronize(self) -> None:
            pass

    class Cublas:
        version = "13.0.2"

        def __init__(self, driver: Driver, named: str) -> None:
            self.calls = 0

        def multiply(self, path: str, case: products.Case, kind: str, a: int, b: int, c: int) -> None:
            left, right = (arrays.decoded(bytes(memory[x]), kind).reshape(4, 4) for x in (a, b))
            made = (left @ right).ravel()
            self.calls += 1
            if self.calls % 2 == 0 and path == "lt":
                made[3] += 64
            encoded = bytearray(arrays.encoded(made.astype(np.float32), kind).tobytes())
            if self.calls % 2 == 1 and (kind, path) == ("fp16", "gemm"):
                encoded[6:8] = b"\xff\xff"
            memory[c][:] = encoded

    said: list[dict[str, Any]] = []
    monkeypatch.setattr(driver, "Driver", Driver)
    monkeypatch.setattr(cublas, "Cublas", Cublas)
    monkeypatch.setattr(gemm, "say", lambda what, **facts: said.append(facts))
    found = {(each.type, each.path): each for each in gemm.on_gpu(tmp_path, "")}
    assert (said[0]["sms"], said[0]["cublas"]) == (52, "13.0.2")
    assert found["bf16", "gemm"].error == 0.0
    assert found["fp16", "gemm"].nan and found["fp16", "gemm"].error is None
    for kind in products.TYPES:
        assert (found[kind, "lt"].error or 0.0) > 1.0
