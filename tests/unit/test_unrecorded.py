"""The identity of domains that no state file names: what proves it, and what does not."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from mpsd.daemon.unrecorded import identify
from mpsd.os import acl, processes, procfs
from tests.support.waiting import until

GPU, OTHER_GPU = "GPU-a", "GPU-b"
USER, OTHER = 65534, 65533
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")
# A shell with children, as a control daemon has servers.
SERVER = "setpriv --reuid {uid} --regid {uid} --clear-groups sleep 60 & "


def found(
    base: Path,
    *arguments: str,
    gpus: str = GPU,
    servers: tuple[int, ...] = (),
    admits: int | None = None,
    mode: int = 0o755,
) -> tuple[tuple[str, ...], int | None] | None:
    base.chmod(mode)
    if admits is not None:
        acl.only_for(str(base), admits)
    script = "".join(SERVER.format(uid=uid) for uid in servers) + "read line"
    with subprocess.Popen(
        ["nvidia-cuda-mps-control", "-c", script, "-f", *arguments],
        executable=shutil.which("sh"),
        stdin=subprocess.PIPE,
        env={"CUDA_VISIBLE_DEVICES": gpus, "PATH": os.environ["PATH"]},
        start_new_session=True,
    ) as control:
        try:
            _until_it_runs(control.pid, servers)
            return identify(str(base), processes.facts(control.pid).instance, {GPU, OTHER_GPU})
        finally:
            os.killpg(control.pid, 9)


def _until_it_runs(pid: int, servers: tuple[int, ...]) -> None:
    def there() -> bool:
        rows = [c for c in psutil.Process(pid).children() if c.name() == "sleep"]
        # An exec that is under way shows no environment yet.
        return bool(procfs.environment(pid)) and sorted(c.uids().real for c in rows) == sorted(servers)

    until(there, "the processes run")


def test_the_user_of_its_server(tmp_path: Path) -> None:
    assert found(tmp_path, servers=(USER,)) == ((GPU,), USER)
    assert found(tmp_path, servers=(0,), gpus=f"{GPU},{OTHER_GPU}") == ((GPU, OTHER_GPU), 0)


def test_servers_of_two_users_or_none_prove_nothing(tmp_path: Path) -> None:
    assert found(tmp_path, servers=(USER, OTHER)) is None
    assert found(tmp_path) is None


def test_the_user_whom_the_directory_admits(tmp_path: Path) -> None:
    assert found(tmp_path, admits=USER) == ((GPU,), USER)
    assert found(tmp_path, admits=USER, servers=(USER,)) == ((GPU,), USER)
    assert found(tmp_path, admits=USER, servers=(OTHER,)) is None


def test_a_closed_directory_is_that_of_the_user_of_mpsd(tmp_path: Path) -> None:
    assert found(tmp_path, mode=0o700) == ((GPU,), 0)
    assert found(tmp_path, mode=0o700, servers=(USER,)) is None


def test_a_shared_domain(tmp_path: Path) -> None:
    assert found(tmp_path, "-multiuser-server") == ((GPU,), None)


@pytest.mark.parametrize("gpus", ["", "0", f"{GPU},GPU-elsewhere"])
def test_gpus_of_another_machine_prove_nothing(tmp_path: Path, gpus: str) -> None:
    assert found(tmp_path, "-multiuser-server", gpus=gpus) is None
