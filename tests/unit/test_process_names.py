"""A name of MPS alone proves nothing: which processes count as a domain's, and which rows status hides."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mpsd.api import statusview
from mpsd.api.statusview import GpuView
from mpsd.base.model import Gpu, GpuProcess, ProcessFacts
from mpsd.clients.orphans import pin_domain
from mpsd.core.state import State
from mpsd.os import processes as procs
from mpsd.os import procfs
from tests.support.core import facts
from tests.support.site import OTHER_UID

PIPE = "/nowhere/d1"


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """A process of another user, with the name of a server, whose parent is no control daemon."""
    if os.geteuid() != 0:
        pytest.skip("only root starts processes of other users")
    process = subprocess.Popen(
        ["nvidia-cuda-mps-server", "60"],
        executable="/bin/sleep",
        env={"CUDA_MPS_PIPE_DIRECTORY": PIPE},
        user=OTHER_UID,
        group=OTHER_UID,
        extra_groups=[],
    )
    yield process
    process.kill()
    process.wait()


def pinned() -> list[int]:
    found = pin_domain(PIPE)
    for process in found:
        process.close()
    return [process.instance.pid for process in found]


@pytest.mark.parametrize(
    ("ours", "its", "counts"),
    [
        ("/system.slice/mpsd.service", "/system.slice/mpsd.service", True),
        ("/system.slice/mpsd.service", "/user.slice", False),
        ("/", "/", False),
        ("", "", False),
    ],
)
def test_a_server_without_its_control_daemon_counts_in_the_cgroup_of_mpsd(
    server: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, ours: str, its: str, counts: bool
) -> None:
    monkeypatch.setattr(procfs, "unified_cgroup", lambda pid: its if pid == server.pid else ours)
    assert pinned() == ([server.pid] if counts else [])


def test_a_control_daemon_counts_if_root_or_the_user_of_mpsd_runs_it(
    server: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pinned() == []
    monkeypatch.setattr(procs, "users", lambda process: procs.Users(0, 0, 0))
    assert pinned() == [server.pid]
    monkeypatch.setattr(procs, "users", lambda process: procs.Users(0, OTHER_UID, 0))
    assert pinned() == []


def test_the_cgroup_of_a_process_is_read_from_the_unified_hierarchy() -> None:
    with open("/proc/self/cgroup") as file:
        unified = [line[3:].rstrip("\n") for line in file if line.startswith("0::")]
    assert procfs.unified_cgroup(os.getpid()) == (unified[0] if unified else "")
    assert procfs.unified_cgroup(2**22 + 1) == ""


def test_status_hides_a_gpu_process_by_name_for_root_alone() -> None:
    named = {
        pid: replace(facts(pid, uid=uid), command=command)
        for pid, uid, command in (
            (1, 0, "/usr/bin/nvidia-cuda-mps-server"),
            (2, OTHER_UID, "/usr/bin/nvidia-cuda-mps-server"),
            (3, OTHER_UID, "python"),
        )
    }
    view = view_of(named)
    assert [row["pid"] for row in statusview._not_on_mps(State(), view)] == [2, 3]


def view_of(named: dict[int, ProcessFacts]) -> GpuView:
    gpu = Gpu(0, "GPU-0", "a GPU", "0000:01:00.0", 1 << 30)
    processes = [GpuProcess(pid, 1, False) for pid in named]
    return GpuView(gpu, processes=processes, other_processes=named)
