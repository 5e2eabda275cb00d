"""The checks of doctor, on machines that consist of files."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpsd.api import doctor
from mpsd.base.errors import UnsupportedError
from mpsd.base.model import ComputeMode, Gpu
from mpsd.gpu.base import Check
from mpsd.gpu.nvidia import checks as nvidia
from mpsd.mps import pipedir


def by_name(checks: list[Check]) -> dict[str, Check]:
    named = {check.name: check for check in checks}
    assert len(named) == len(checks)
    return named


def run(tmp_path: Path, **more: Any) -> dict[str, Check]:
    return by_name(doctor.run_checks([], str(tmp_path / "run"), str(tmp_path / "log"), **more))


def test_every_check_that_fails_has_a_remedy_and_nothing_is_made(tmp_path: Path) -> None:
    backend = Check("driver", False, "gone", "install it")
    pipe = str(tmp_path / "run" / "d" / "one")
    checks = doctor.run_checks([backend], str(tmp_path / "run"), str(tmp_path / "log"), pipe_dirs=[pipe])
    assert checks[0] is backend and not doctor.healthy(checks)
    named = by_name(checks)
    assert named["pidfd_getfd"].ok in (True, False)
    assert named["run directory"].ok and named["log space"].ok is not None
    assert named[f"pipe directory {pipe}"].finding == "free"
    assert all(check.remedy for check in checks if check.ok is False)
    assert os.listdir(tmp_path) == []


def test_an_ordinary_user_on_the_simulated_gpu_is_not_told_to_be_root(tmp_path: Path) -> None:
    named = run(tmp_path, privileged=False, kernel_log=None)
    assert not {"root", "way to the sockets", "kernel log"} & set(named)


def test_a_refused_duplication_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        @staticmethod
        def syscall(*arguments: int) -> int:
            ctypes.set_errno(1)
            return -1

    monkeypatch.setattr(doctor, "_libc", Refusing)
    check = run(tmp_path)["pidfd_getfd"]
    assert (
        check.ok is False and "Operation not permitted" in check.finding and "CAP_SYS_PTRACE" in check.remedy
    )


@pytest.mark.parametrize(
    ("scope", "capable", "ok"),
    [("0", False, True), ("1", True, True), ("1", False, False), ("3", True, False)],
)
def test_yama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str, capable: bool, ok: bool) -> None:
    (tmp_path / "scope").write_text(scope + "\n")
    monkeypatch.setattr(doctor, "YAMA", str(tmp_path / "scope"))
    monkeypatch.setattr(doctor, "_capable", lambda capability: capable)
    assert run(tmp_path)["yama"].ok is ok


def test_too_few_descriptors_and_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "limit").write_text("12\n")
    monkeypatch.setattr(doctor, "INOTIFY_LIMIT", str(tmp_path / "limit"))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    named = run(tmp_path)
    assert named["descriptor limit"].ok is False
    assert "1024 now, at most 4096" in named["descriptor limit"].finding
    assert named["inotify instances"].ok is False
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, resource.RLIM_INFINITY))
    assert run(tmp_path)["descriptor limit"].ok is True


def test_private_domains_need_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(path: str, name: str) -> bytes:
        raise OSError(errno.ENOTSUP, "Operation not supported", path)

    assert run(tmp_path)["private domains"].ok
    off = run(tmp_path, private=False)["private domains"]
    assert off.ok is None and "other users can enter" in off.finding
    monkeypatch.setattr(os, "getxattr", without)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    check = run(tmp_path)["private domains"]
    assert (check.ok, check.remedy) == (False, "mount it on tmpfs or ext4")
    assert check.finding.startswith(f"run_dir {tmp_path}/run is on a file system without POSIX ACLs")
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    check = run(tmp_path, still_open=("d1", "d2"))["private domains"]
    assert check.ok is False and check.finding.startswith("d1, d2: open to all users") and check.remedy
    # A user's own mpsd has directories of mode 0700.
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run(tmp_path)["private domains"].ok


def test_a_pid_namespace_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "INITIAL_PID_NAMESPACE", 1)
    check = run(tmp_path)["pid namespace"]
    assert check.ok is False and "hostPID" in check.remedy


def test_a_question_that_cannot_be_asked_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "INOTIFY_LIMIT", str(tmp_path / "none"))
    assert run(tmp_path)["inotify instances"].ok is None


def test_a_closed_directory_on_the_way_to_the_sockets(tmp_path: Path) -> None:
    closed = tmp_path / "run"
    closed.mkdir(mode=0o700)
    check = run(tmp_path)["way to the sockets"]
    assert check.ok is False
    # The test's own directory may be closed further up; the check names the first closed one from below.
    assert str(closed) in check.finding


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another user's rights")
def test_a_python_that_users_cannot_execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path("/tmp") / f"mpsd-doctor-python-{os.getpid()}"
    home.mkdir()
    python = home / "python3"
    python.write_bytes(b"")
    python.chmod(0o711)
    monkeypatch.setattr(sys, "executable", str(python))
    try:
        home.chmod(0o755)
        assert run(tmp_path)["commands for users"] == Check(
            "commands for users", True, f"users can execute {python}"
        )
        python.chmod(0o744)
        assert run(tmp_path)["commands for users"].ok is None
        python.chmod(0o711)
        home.chmod(0o700)
        check = run(tmp_path)["commands for users"]
        assert check.ok is None and f"{python}: Permission denied" in check.finding
        assert "a Python that every user can execute" in check.remedy
    finally:
        shutil.rmtree(home)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another user's rights")
def test_the_part_of_the_way_to_a_domain_that_is_closed_to_its_user(tmp_path: Path) -> None:
    base = Path("/tmp") / f"mpsd-doctor-{os.getpid()}"
    pipe = base / "d" / "d1"
    pipe.mkdir(parents=True)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(pipedir.socket_path(str(pipe)))
            os.chmod(pipedir.socket_path(str(pipe)), 0o666)
            listener.listen()
            for path in (base, pipe.parent, pipe):
                path.chmod(0o755)
            ways = {"d1": (65534, str(pipe)), "d2": (None, str(base / "d" / "d2"))}
            named = run(tmp_path, ways=ways)
            assert named["way to d1"].ok and named["way to d1"].finding == "open to its user"
            assert named["way to d2"].ok is False
            assert named["way to d2"].finding == "the pipe directory of d2 was removed"
            pipe.parent.chmod(0o700)
            check = run(tmp_path, ways=ways)["way to d1"]
            assert (check.ok, check.finding) == (False, f"{pipe.parent} is closed to its user")
            pipe.parent.chmod(0o755)
            pipe.chmod(0o700)
            check = run(tmp_path, ways={"d1": (None, str(pipe))})["way to d1"]
            assert (check.ok, check.finding) == (False, "the pipe directory of d1 is closed to other users")
    finally:
        shutil.rmtree(base)


def test_pipe_directories(tmp_path: Path) -> None:
    short = Path("/tmp") / f"mpsd-doctor-{os.getpid()}"
    short.mkdir()
    try:
        named = run(tmp_path, pipe_dirs=[str(short), "/" + "x" * 200])
        assert named[f"pipe directory {short}"].ok
        assert named["pipe directory /" + "x" * 200].ok is False
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(pipedir.socket_path(str(short)))
            listener.listen()
            check = run(tmp_path, pipe_dirs=[str(short)])[f"pipe directory {short}"]
            assert check.ok and "live" in check.finding
        check = run(tmp_path, pipe_dirs=[str(short)])[f"pipe directory {short}"]
        assert check.ok is False and "gone" in check.finding
    finally:
        for entry in short.iterdir():
            entry.unlink()
        short.rmdir()


class FakeNvml:
    """The part of Nvml that the checks use."""

    def __init__(self, mode: ComputeMode = ComputeMode.DEFAULT, addressing: str = "none") -> None:
        self._mode = mode
        self._addressing = addressing

    def gpus(self) -> list[Gpu]:
        return [Gpu(0, "GPU-0", "NVIDIA X", "0000:01:00.0", 1)]

    def driver_version(self) -> str:
        return "580.159.04"

    def minor_number(self, uuid: str) -> int:
        return 5

    def compute_mode(self, uuid: str) -> ComputeMode:
        return self._mode

    def addressing_mode(self, uuid: str) -> str:
        return self._addressing


Machine = Callable[..., dict[str, Check]]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(nvidia, "VERSION_FILE", str(tmp_path / "version"))
    monkeypatch.setattr(nvidia, "HMM_PARAMETER", str(tmp_path / "hmm"))
    monkeypatch.setattr(nvidia, "NODES", ("/dev/null", str(tmp_path / "none"), str(tmp_path / "version")))
    monkeypatch.setattr(nvidia, "WELL_KNOWN", ())
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04\nGCC\n"
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()

    def checks(nvml: FakeNvml | None = None, failure: UnsupportedError | None = None) -> dict[str, Check]:
        return by_name(nvidia.nvidia_checks(nvml, failure))  # type: ignore[arg-type]

    return checks


def test_nvidia_driver_nodes_and_binaries(machine: Machine, tmp_path: Path) -> None:
    binary = tmp_path / "bin" / nvidia.CONTROL_BINARY
    binary.touch()
    binary.chmod(0o755)
    named = machine(None, UnsupportedError("no NVML", remedy="get one"))
    assert named["driver"].ok and "580.159.04" in named["driver"].finding
    assert named["device node /dev/null"].ok
    assert "missing" in named[f"device node {tmp_path}/none"].finding
    assert "character device" in named[f"device node {tmp_path}/version"].finding
    assert named[f"binary {nvidia.CONTROL_BINARY}"].finding == str(binary)
    assert named[f"binary {nvidia.SERVER_BINARY}"].ok is False
    assert named["nvml"] == Check("nvml", False, "no NVML", "get one")


def test_closed_modules_and_no_driver(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.1\n")
    assert "closed" in machine()["driver"].finding
    (tmp_path / "version").unlink()
    assert "not loaded" in machine()["driver"].finding


@pytest.mark.parametrize(
    ("mode", "ok"),
    [(ComputeMode.DEFAULT, True), (ComputeMode.EXCLUSIVE_PROCESS, False), (ComputeMode.PROHIBITED, False)],
)
def test_compute_modes(machine: Machine, mode: ComputeMode, ok: bool) -> None:
    named = machine(FakeNvml(mode))
    assert named["compute mode of GPU 0"].ok is ok
    assert named["gpus"].ok and "device node /dev/nvidia5" in named


@pytest.mark.parametrize(
    ("mode", "parameter", "ok"),
    [
        ("none", "", True),
        ("hmm", "", False),
        ("ats", "", None),
        ("unknown", "Y", True),
        ("unknown", "N", None),
    ],
)
def test_host_pointers(machine: Machine, tmp_path: Path, mode: str, parameter: str, ok: bool | None) -> None:
    (tmp_path / "hmm").write_text(parameter + "\n")
    assert machine(FakeNvml(addressing=mode))["host pointers on GPU 0"].ok is ok
