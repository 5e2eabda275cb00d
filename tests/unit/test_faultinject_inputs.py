"""Input errors of mpsd-faultinject and its helpers: one line and a status, no traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faultinject import __main__ as command
from faultinject.programs.devices.base import NO_DEVICE, DeviceError, open_device
from tests.support.site import DEADLINE_S, ROOT

PROGRAMS = ("twogpus", "crowd", "filler", "holder", "idlers", "managed", "memory_end", "survivor", "standby")


def ended(*words: str, **environ: str) -> tuple[int, str]:
    """Return the exit status and stderr of a module."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=ROOT,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_refuses_a_backend_that_there_is_not(program: str) -> None:
    status, said = ended(f"faultinject.programs.{program}", "--backend", "simulatd")
    assert status == 2
    assert "invalid choice: 'simulatd' (choose from 'nvidia', 'simulated', 'standin')" in said


@pytest.mark.parametrize("count", ["-1", "x", "100000"])
def test_idlers_refuse_a_number_of_clients_that_cannot_be(count: str) -> None:
    status, said = ended("faultinject.programs.idlers", "--backend", "simulated", "--clients", count)
    assert (status, f"{count!r} is no number from 0 to 1000" in said) == (2, True)


def test_idlers_that_get_no_context_say_why(tmp_path: Path) -> None:
    status, said = ended("faultinject.programs.idlers", "--backend", "simulated", MPSD_SIM_DIR=str(tmp_path))
    assert status == 1
    assert said.startswith("idlers: no client got a context: ") and len(said.splitlines()) == 1
    assert str(tmp_path) in said and "mpsd-ctl env" in said


@pytest.mark.parametrize("error", [ImportError("no cuda"), OSError("no libcuda"), RuntimeError("no libcuda")])
def test_a_backend_without_its_driver_is_an_answer_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def absent(backend: str) -> None:
        raise error

    monkeypatch.setattr("faultinject.programs.devices.base._opened", absent)
    with pytest.raises(DeviceError, match=f"nvidia cannot be opened here: {error}") as told:
        open_device("nvidia")
    assert told.value.code == NO_DEVICE


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["run", "--backend", "simulated", "--libcuda", "/nonexistent"], "--libcuda /nonexistent: there is"),
        (["run", "--backend", "simulated", "--driver", "/nonexistent"], "--driver /nonexistent: there is"),
        (["sweep", "--from", "5", "--to", "2"], "--to 2 is before --from 5"),
        (["check", sys.executable], " is not JSON: "),
    ],
)
def test_bad_input_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert command.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("mpsd-faultinject: ") and complaint in said and len(said.splitlines()) == 1


def test_a_place_that_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/somewhere")

    monkeypatch.setattr(command, "_list", fail)
    assert command.main(["list"]) == 1
    assert capsys.readouterr().err == "mpsd-faultinject: cannot use /somewhere: Permission denied\n"


def test_the_simulated_gpu_refuses_a_number_of_gpus_as_a_mistake(tmp_path: Path) -> None:
    status, said = ended("mpsd.gpu.simulated", "gpu", "--dir", str(tmp_path), "--gpus", "0")
    assert (status, "1 to 16 GPUs, not 0" in said) == (2, True)


def test_who_looks_for_the_simulated_gpu_in_the_wrong_place_is_told_of_dir(tmp_path: Path) -> None:
    status, said = ended("mpsd.gpu.simulated", "stop", MPSD_SIM_DIR=str(tmp_path))
    assert (status, said.splitlines()) == (
        3,
        [f"no simulated GPU serves {tmp_path} (--dir DIR where mpsd's configuration sets [simulated] dir)"],
    )


@pytest.mark.parametrize("words", [["--only", "foo"], ["--only", "guard", "--out", "/dev/null/x"]])
def test_measure_refuses_what_it_cannot_do_before_it_looks_for_a_gpu(
    tmp_path: Path, words: list[str]
) -> None:
    status, said = ended("faultinject.campaigns.measure", "--out", str(tmp_path), *words)
    assert (status, "error: --" in said) == (2, True)
