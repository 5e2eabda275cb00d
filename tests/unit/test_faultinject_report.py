"""The report keeps to its schema, can be read back, and renders without inventing numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from faultinject.__main__ import main
from faultinject.campaigns import matrixreport
from faultinject.campaigns.matrix import command, passed
from faultinject.evidence import files
from faultinject.registry.checkers import check
from faultinject.registry.faults import by_name
from faultinject.registry.history import History, load
from faultinject.registry.observation import observe
from faultinject.rig.stage import Options
from mpsd.base.errors import UsageError


def history_of_a_kill(path: Path | None = None) -> History:
    """A run in which a client was killed in mid-kernel and no other client noticed."""
    history = History(path)
    history.add("rig", "begin", t=0.0, kind="sigkill_running", variant="", mode="mpsd", seed=1, survivors=1)
    for name, pid in (("survivor-0", 11), ("offender-0", 12)):
        history.add(name, "spawned", t=0.1, pid=pid, module=name.split("-")[0])
        history.add(name, "ready", t=0.3, pid=pid, start_ticks=7, context_at=0.25, on_mps=True)
    history.add("mpsd", "attached", t=0.4, pid=11, ms=3.5, state="attached", protections=[])
    history.add("offender-0", "fire", t=1.0)
    history.add("offender-0", "gone", t=1.01, status=-9)
    history.add("newcomer-0", "spawned", t=1.1, pid=13, module="newcomer")
    history.add("newcomer-0", "first_kernel", t=1.35, pid=13, start_ticks=8, wrong=0, on_mps=True)
    history.add("survivor-0", "done", t=2.0, steps=90, wrong=0, longest=[[0.9, 1.004], [1.5, 1.503]])
    history.add("mpsd", "counters", t=2.1, counters={"faults": 0})
    history.add("rig", "end", t=2.2, leftovers=[])
    return history


def entry() -> dict[str, Any]:
    fault, seen = by_name("sigkill_running"), observe(history_of_a_kill())
    findings = check(fault, seen, bars=True)
    return matrixreport.run_entry(
        fault, "mpsd", seen, findings, seed=1, command="x", duration_s=2.2, verdict="valid"
    )


def whole(*runs: dict[str, Any]) -> dict[str, Any]:
    return matrixreport.assemble(
        device="NVIDIA H200",
        driver="580.159.04",
        backend="nvidia",
        date="2026-11-21T00:00:00+00:00",
        command="mpsd-faultinject run",
        seed=1,
        runs=list(runs),
    )


def test_measures_come_from_the_history() -> None:
    run = entry()
    assert run["stall_ms"] == pytest.approx(4.0)
    assert run["new_client_ms"] == pytest.approx(250.0)
    assert run["attach_ms"] == 3.5
    assert (run["survivors"], run["lost"], run["refused_807"]) == (1, 0, 0)
    assert run["findings"] == []


def test_what_was_not_measured_is_null() -> None:
    run = entry()
    assert all(run[k] is None for k in ("record_ms", "evict_ms", "fault_class", "named", "fresh_ms"))
    skipped = matrixreport.run_entry(
        by_name("pid_reuse"), "mpsd", None, (), not_run="needs root", seed=1, command="x"
    )
    assert skipped["verdict"] is None and skipped["lost"] is None
    assert matrixreport.validate(whole(run, skipped)) == []


def test_schema_names_the_keys_that_the_project_promises() -> None:
    assert {"device", "driver", "date", "command", "runs"} <= matrixreport.SCHEMA.keys()
    promised = "kind mode fault_class survivors lost named confidence record_ms evict_ms stall_ms"
    assert {*promised.split(), "new_client_ms", "verdict"} <= matrixreport.RUN_SCHEMA.keys()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ({"schema": 2}, "schema is 2"),
        ({"runs": [3]}, "is no object"),
        ({"device": None}, "device is NoneType"),
        ({"extra": 1}, "extra is not in the schema"),
    ],
)
def test_a_damaged_report_is_refused(tmp_path: Path, damage: dict[str, Any], complaint: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(whole(entry()) | damage))
    with pytest.raises(UsageError, match=complaint):
        matrixreport.load(files.read(path), path)


def test_numbers_of_the_wrong_type_are_refused() -> None:
    assert matrixreport.validate(whole(entry() | {"lost": "3"})) == ["report.runs[0].lost is str"]
    assert matrixreport.validate(whole(entry() | {"lost": True})) == ["report.runs[0].lost is bool"]


def test_saved_report_is_rendered_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    files.save(whole(entry()), path)
    assert main(["render", str(path)]) == 0
    text = capsys.readouterr().out
    assert "| sigkill_running | mpsd | - | 0 of 1 |" in text
    assert "NVIDIA H200, driver 580.159.04" in text


def test_history_is_judged_again_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    with history_of_a_kill(path) as written:
        entries = list(written)
    assert list(load(path)) == entries
    assert main(["check", str(path)]) == 0
    assert "survivors live: valid" in capsys.readouterr().out


def test_a_file_that_is_no_history_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text('{"t": 1}\n')
    with pytest.raises(UsageError, match=r"h\.jsonl:1 is no line"):
        load(path)
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path / "absent")


def test_file_names() -> None:
    assert files.file_name("NVIDIA H200", "580.159.04", "matrix") == "NVIDIA-H200-580.159.04-matrix.json"


def test_the_command_repeats_the_run() -> None:
    words = command("simulated", ["store", "endless@fill"], ["mpsd"], Options(survivors=2, seed=9))
    assert words == (
        "mpsd-faultinject run --backend simulated --kinds store,endless@fill --modes mpsd "
        "--survivors 2 --seed 9"
    )


def test_unknown_is_not_passed() -> None:
    assert passed(whole(entry()))
    assert not passed(whole(entry(), entry() | {"verdict": "unknown"}))
    assert not passed(whole())


def test_later_revisions_replace_a_record_but_not_its_time() -> None:
    history = history_of_a_kill()
    for t, revision, name in ((1.1, 0, "sm-exception"), (1.3, 1, "sm-trap"), (1.4, 0, "sm-exception")):
        record = {"id": 4, "revision": revision, "class": name, "offender": None, "confidence": "unknown"}
        history.add("mpsd", "record", t=t, record=record)
    seen = observe(history)
    assert (seen.fault_class, seen.fire_to_record_ms) == ("sm-trap", pytest.approx(100.0))
    assert (seen.named, seen.confidence) == ("unknown", "unknown")


@pytest.mark.parametrize("option", ["--json", "--markdown"])
@pytest.mark.parametrize("command", [["run", "--backend", "simulated"], ["bench"], ["sweep"]])
def test_a_report_that_could_not_be_written_is_refused_before_the_run(
    command: list[str],
    option: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("faultinject.__main__.tempfile", None)
    missing = tmp_path / "no" / "x.json"
    assert main([*command, option, str(missing)]) == UsageError.exit_code
    assert f"there is no directory {missing.parent}" in capsys.readouterr().err
    assert not missing.parent.exists()


def test_a_report_goes_where_one_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "old.json"
    old.write_text("{}")
    for fine in (None, tmp_path, old, tmp_path / "new.json"):
        files.check_target(fine, "--json")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for wrong in (tmp_path, old, tmp_path / "new.json"):
        with pytest.raises(UsageError, match="may not be written"):
            files.check_target(wrong, "--json")


@pytest.mark.parametrize("number", ["0", "17", "-1", "three"])
def test_a_run_has_survivors_to_judge(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--backend", "simulated", "--survivors", number])
    assert ended.value.code == 2
    assert "from 1 to 16" in capsys.readouterr().err
