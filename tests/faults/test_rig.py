"""The harness itself: its own failures are never a pass, and no process of a run outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faultinject.campaigns.matrix import Matrix, Plan
from faultinject.registry.faults import by_name
from faultinject.registry.history import History, load
from faultinject.rig import leftovers
from faultinject.rig.node import open_node
from faultinject.rig.rig import Rig
from faultinject.rig.stage import Options
from faultinject.rig.worker import Worker, python_environment
from mpsd.base.errors import DeadlineError
from mpsd.base.model import IsolationMode

pytestmark = pytest.mark.timeout(300)


def test_a_run_that_outlives_its_deadline_is_unknown_and_ends_clean(tmp_path: Path) -> None:
    plan = Plan("simulated", (), (), Options(), deadline_s=0.01, out=tmp_path)
    entry = Matrix(plan).run_one(by_name("assert"), "stock", "simulated", tmp_path)
    assert entry["verdict"] in ("unknown", "invalid")
    assert any("not over after" in f["text"] for f in entry["findings"])
    end = load(tmp_path / "assert-stock" / "history.jsonl").last("end")
    assert end is not None and end.data["leftovers"] == []


def test_a_stock_run_does_not_get_the_mode_that_a_run_before_it_left(tmp_path: Path) -> None:
    node = open_node("simulated", tmp_path)
    try:
        part = node.backend.isolation
        assert part is not None
        part.set_mode(IsolationMode.ISOLATE)
        with History() as history, Rig(node, "stock", history):
            assert part.state().mode is IsolationMode.OFF
    finally:
        node.close()


def test_a_node_that_cannot_be_had_is_unknown(tmp_path: Path) -> None:
    entry = Matrix(Plan("nowhere", (), ())).run_one(by_name("assert"), "stock", "nowhere", tmp_path)
    assert entry["verdict"] == "unknown"
    assert "there is no backend 'nowhere'" in entry["findings"][0]["text"]


def test_what_a_run_leaves_behind_is_found_and_ended(tmp_path: Path) -> None:
    stray = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", str(tmp_path)], stdin=subprocess.PIPE
    )
    try:
        (found,) = leftovers.clear(tmp_path, grace_s=0.0)
        assert str(stray.pid) in found
        stray.wait(timeout=90)
    finally:
        stray.communicate()
    assert leftovers.clear(tmp_path, grace_s=0.0) == []


def worker(tmp_path: Path, history: History, *args: str) -> Worker:
    return Worker("w", "survivor", args, python_environment(), history, tmp_path / "w.err")


def test_a_program_that_never_says_it_is_a_missed_deadline(tmp_path: Path) -> None:
    with History() as history:
        broken = worker(tmp_path, history, "--no-such-option")
        try:
            with pytest.raises(DeadlineError, match="did not say ready"):
                broken.require("ready", timeout=90)
            assert broken.require("gone", timeout=90).data["status"] == 2
        finally:
            broken.end()


def test_a_rig_gives_back_every_descriptor_and_directory() -> None:
    before = leftovers.open_descriptors()
    with History() as history, Rig("simulated", "stock", history) as rig:
        survivor = rig.spawn("survivor-0", "survivor")
        survivor.require("ready", timeout=90)
        base = rig.base
    assert rig.leftovers == []
    assert not survivor.running
    assert not base.exists()
    assert leftovers.open_descriptors() == before


def test_programs_end_when_their_rig_does(tmp_path: Path) -> None:
    with History() as history, Rig("simulated", "stock", history) as rig:
        survivor = rig.spawn("survivor-0", "survivor")
        survivor.require("ready", timeout=90)
        assert survivor.process.stdin is not None
        survivor.process.stdin.close()
        assert survivor.require("gone", timeout=90).data["status"] == 3


def test_the_environment_of_programs_names_no_service_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    monkeypatch.setenv("MPSD_SOCKET", "/somewhere/else")
    assert not [k for k in python_environment() if k.startswith(("CUDA_MPS_", "MPSD_"))]
    assert os.environ["PATH"] == python_environment()["PATH"]
