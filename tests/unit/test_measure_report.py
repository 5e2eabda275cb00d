"""The measurements' report: computed from raw results, stable, free of what names one machine."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from faultinject.campaigns.measure import report
from faultinject.campaigns.measure.__main__ import QUESTIONS

DATA = Path(__file__).parents[1] / "data/reports"
FIGURES: dict[str, list[str]] = json.loads((DATA / "figures.json").read_text())
HEAD = {
    "schema": 1,
    "device": "NVIDIA H200",
    "driver": "580.1",
    "kernel": "6.18",
    "date": "2026-11-21T00:00:00+00:00",
    "command": "python -m faultinject.campaigns.measure --out DIR",
}


def save(directory: Path, question: str, rows: list[Any]) -> None:
    (directory / f"{question}.json").write_text(json.dumps(HEAD | {"question": question, "rows": rows}))


def test_control_replies_lose_what_names_the_machine(tmp_path: Path) -> None:
    reply = "1 GPU-f7f0e716-98a7-1abd 402 /srv/some/place/bin/python3"
    save(tmp_path, "control", [{"part": "replies", "rows": [{"command": "ps", "reply": reply}]}])
    path = report.write(tmp_path, tmp_path / "out")
    assert path.name == "NVIDIA-H200-580.1-control.json"
    made = json.loads(path.read_text())
    assert made["rows"][0]["figures"][0]["reply"] == "1 GPU-00000000-0000-0000 402 /usr/bin/python3"
    assert "/usr/bin/python3" in path.with_suffix(".md").read_text()


def test_a_context_costs_what_the_gpu_stood_still_longer_than_without_it(tmp_path: Path) -> None:
    def row(what: str, contexts: int, ms: float, kind: str = "trap") -> dict[str, Any]:
        return {"what": what, "kind": kind, "contexts": contexts, "stall ms": ms}

    rows = [row("older", 0, 10.0), row("older", 3, 34.0), row("older", 12, 112.0), row("younger", 6, 10.6)]
    save(tmp_path, "stall", [*rows, row("older", 0, 142.0, "store"), row("older", 12, 107.0, "store")])
    (made,) = report.build(tmp_path)["rows"]
    assert made["finding"] == (
        "With the bystander and two servers alone, 10 to 10 ms. Each other context adds, in ms, "
        "one fault of each: trap, older: 8 to 8.5; trap, younger: 0.1 to 0.1. "
        "An out-of-bounds store: 107 to 142 ms, with any number of contexts."
    )


def test_early_words_would_be_reported(tmp_path: Path) -> None:
    def case(ended_at: float) -> dict[str, Any]:
        return {
            "case": "single",
            "client": 7,
            "end_after_kill_ms": 100.0,
            "kill_to_pidfd_ms": 18.0,
            "survivor_while_leased": {"longest_ms": 0.4},
            "survivor_after_release": {"ev": "alive"},
            "release": {"close_ms": 17.0, "gpu_back_ms": 17.0, "host_back_ms": 17.0},
            "changes_ms_after_true_end": {
                "client_list": [[-150.0, ["7", "8"]], [-95.0, ["8"]]],
                "ps": [[-150.0, [["7", "1"]]], [-95.0, []]],
                "nvml_processes": [[-150.0, [[7, 1]]], [-80.0, []]],
                "completion_words_late": [[-150.0, "alive"], [ended_at, "ended"]],
            },
        }

    save(tmp_path, "end-signal", [case(6.0), case(-20.0), {"case": "copies", "failed": "lost"}])
    rows = report.build(tmp_path)["rows"]
    assert "1 of 2 times too early, -20 to 6 ms" in rows[0]["finding"]
    assert [row["client_list_after_end_ms"] for row in rows[0]["figures"]] == [-95.0, -95.0]
    assert rows[0]["figures"][0]["ps_after_end_ms"] is None
    assert rows[2]["figures"] == [{"case": "copies", "failed": "lost"}]


def test_no_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        report.build(tmp_path)


def test_zones_say_how_many_accesses_were_seen_and_what_storms_cost(tmp_path: Path) -> None:
    alive, lost = {"ev": "alive", "longest_ms": 0.1}, {"ev": "error", "code": 700}
    touch = {"case": "single", "what": "store at 0x10", "at": "0x10", "first ms": 0.4, "survivor": alive}
    storm = {"case": "full grid", "what": "stores", "event to termination ms": 15.0, "survivor": alive}
    rows = [
        touch | {"events": {"serviced WRITE": 1}},
        touch | {"events": {"fatal WRITE": 1}, "survivor": lost},
        storm,
        {"case": "windows", "what": "window in torch", "up": True, "inside": []},
        {"case": "GPU full", "failed": "lost"},
    ]
    save(tmp_path, "zones", rows)
    made = report.build(tmp_path)["rows"]
    assert "1 of 2 single accesses were serviced" in made[0]["finding"]
    assert "after 2 of 3 steps the survivor was unharmed" in made[0]["finding"]
    assert "Storms ended 15 to 15 ms" in made[0]["finding"]
    assert made[1]["finding"] == "torch: yes"
    assert made[2]["figures"] == [{"case": "GPU full", "failed": "lost"}]


def test_far_zones_say_what_a_gib_costs_and_what_all_addresses_would(tmp_path: Path) -> None:
    alive = {"ev": "alive", "longest_ms": 0.1}
    far = {"case": "far", "survivor": alive, "take away us": [5.0, 7.0], "GPU KiB": 0}
    rows = [
        far | {"what": "2 GiB managed", "kind": "managed", "GiB": 2, "laid": 2, "lay us": [20.0, 31.5]},
        far | {"what": "4 GiB managed", "kind": "managed", "GiB": 4, "laid": 1, "lay us": [900.0]},
        far
        | {
            "what": "1 GiB sparse",
            "kind": "sparse",
            "GiB": 1,
            "laid": 1,
            "lay us": [3700.0],
            "GPU KiB": 4096,
        },
        far
        | {
            "what": "4 GiB sparse",
            "kind": "sparse",
            "GiB": 4,
            "laid": 4,
            "lay us": [3600.0],
            "GPU KiB": 8192,
        },
    ]
    save(tmp_path, "far", rows)
    made = report.build(tmp_path)["rows"]
    assert made[0]["finding"] == (
        "Managed: laid in 20 to 31.5 us a GiB, removed in 5 to 7 us, 0 to 0 KiB of GPU memory a GiB until "
        "one is hit. Sparse: 3600 to 3700 us and 2048 to 4096 KiB of GPU memory a GiB, 8 minutes for 128 TiB."
    )
    assert len(made[0]["figures"]) == 4


@pytest.mark.parametrize("path", sorted(DATA.glob("NVIDIA-*.json")), ids=lambda path: str(path.stem))
def test_a_report_of_a_real_run_keeps_its_figures(path: Path) -> None:
    """Reports of an H200; of `measurements` the first figures of each question."""
    made = json.loads(path.read_text())
    assert {*report.HEAD, "rows", "runs"} <= made.keys()
    assert path.stem == report.name_of(made)
    lines = report.markdown(made).splitlines()
    assert [line for line in lines if line.startswith(("| ", "- "))] == FIGURES[path.stem]
    for row in made["rows"]:
        assert row.keys() == {"question", "finding", "figures"}


def test_every_question_has_a_module_that_measures_it() -> None:
    for module, _ in QUESTIONS.values():
        assert callable(import_module(f"faultinject.campaigns.measure.{module}").measure)
    assert {*report.SUMMARIES} == {*QUESTIONS}
