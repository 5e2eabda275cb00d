"""Attacks by name: a process of another user that is called like one of MPS."""

from __future__ import annotations

import contextlib
import subprocess

import psutil

from tests.support.site import OTHER_UID, Site


def impostor(name: str, pipe_dir: str) -> subprocess.Popen[bytes]:
    """Start a process of another user with a name of MPS, in the environment of a domain's processes."""
    return subprocess.Popen(
        [name, "60"],
        executable="/bin/sleep",
        env={"CUDA_MPS_PIPE_DIRECTORY": pipe_dir},
        user=OTHER_UID,
        group=OTHER_UID,
        extra_groups=[],
        cwd="/",
    )


def test_a_name_of_mps_holds_no_lease(site: Site) -> None:
    """S13: a stranger's process that is named like a server does not keep the leases of a domain."""
    site.start()
    client = site.join()
    settled = site.until(
        lambda s: {d["state"] for d in s["domains"]} == {"active", "warm"}, "every domain has started"
    )
    old = {d["id"]: (d["control_pid"], d["server_pid"]) for d in settled["domains"]}
    assert all(isinstance(pid, int) for pair in old.values() for pid in pair), old
    client.do("dev.launch('forever')")
    site.kill()
    client.die()
    (site.run_dir / "state.json").unlink()
    with contextlib.ExitStack() as stack:
        for domain in old:
            for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"):
                process = impostor(name, str(site.run_dir / "d" / domain))
                stack.callback(process.wait, 20)
                stack.callback(process.kill)
        site.start()
        assert [d["pid"] for d in site.status()["dead"]] == [client.pid]
        for pair in old.values():
            for pid in pair:
                # A server ends by itself soon after its control daemon.
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
        site.until(lambda s: not s["dead"] and not s["counters"]["leases_held"], "the lease is released")
