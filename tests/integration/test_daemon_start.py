"""`mpsd run` as a process: how it starts, refuses to start, shows its work, and what it never loads."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

import mpsd_client
from mpsd.base.conditions import Code
from mpsd.base.errors import DeniedError, NotReadyError
from tests.support.conditioning import rows_of
from tests.support.site import DEADLINE_S, OTHER_UID, Site, until

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site() as started:
        yield started.start()


def refuse(site: Site, uid: int | None = None) -> tuple[int, str]:
    """Run a daemon that must not start. Return its status and its output."""
    process = site.launch(uid=uid)
    try:
        status = process.wait(DEADLINE_S)
    finally:
        site.abandon()
    said = site.tail()
    assert "Traceback" not in said
    return status, said


def made_by(site: Site) -> set[str]:
    """Return the configured directories that a refused daemon has left behind."""
    places = (site.run_dir, site.log_dir, site.state_dir, site.node_dir)
    return {str(path) for path in places if os.path.lexists(path)}


def test_status_has_the_keys_of_schema_1(site: Site) -> None:
    client = site.join()
    status = site.attached(client)
    assert status["schema"] == 1
    assert set(status) >= {
        *("schema", "version", "backend", "pid", "uptime_s", "draining"),
        *("gpus", "domains", "clients", "dead", "counters"),
    }
    gpu, domain = status["gpus"][0], status["domains"][0]
    assert set(gpu) >= {
        *("index", "uuid", "name", "memory_used_bytes", "memory_total_bytes"),
        *("compute_mode", "not_on_mps", "limits"),
    }
    assert set(domain) >= {
        *("id", "gpus", "uid", "user", "role", "state", "control_pid", "server_pid", "uptime_s", "clients"),
        *("clients_limit", "last_fault", "path", "reach", "refused_807"),
        *("held_gpu_bytes", "held_host_bytes"),
    }
    assert set(status["clients"][0]) >= {
        *("domain", "pid", "start_ticks", "space", "uid", "user", "command", "state"),
        *("memory_bytes", "age_s", "attach_ms", "protections"),
    }
    assert status["backend"] == "simulated"
    assert status["pid"] == site.pid
    client.finish()


def test_a_client_is_leased_tracked_and_guarded(site: Site) -> None:
    client = site.join()

    def protected(status: Mapping[str, Any]) -> bool:
        row = next(c for c in status["clients"] if c["pid"] == client.pid)
        texts = " ".join(row["protections"])
        return all(word in texts for word in ("lease", "tracker", "guard:low"))

    status = site.until(protected, "lease, tracker and guard")
    row = next(c for c in status["clients"] if c["pid"] == client.pid)
    assert row["attach_ms"] is not None
    assert (row["uid"], row["state"]) == (os.geteuid(), "attached")
    assert status["domains"][0]["role"] == "active"
    assert client.finish() == {}
    site.gone(client)


def test_a_client_joins_by_the_path_that_env_gives(site: Site) -> None:
    path = Path(site.client_environ()["CUDA_MPS_PIPE_DIRECTORY"])
    active = next(d for d in site.status()["domains"] if d["role"] == "active")
    assert path.is_symlink()
    assert str(path) == active["path"]
    assert os.path.basename(os.readlink(path)) == active["id"]


def test_a_spare_gets_warm(site: Site) -> None:
    site.client_environ()
    spare = site.until(lambda s: [d for d in s["domains"] if d["state"] == "warm"], "a warm spare")
    assert [d["role"] for d in spare["domains"]] == ["active", "spare"]


def test_gpu_processes_that_are_not_on_mps_are_listed(site: Site) -> None:
    outside = site.program(
        environ=site.environ() | {"MPSD_SIM_DIR": str(site.node_dir), "CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}
    )
    listed = site.until(lambda s: s["gpus"][0]["not_on_mps"], "the process outside MPS")
    assert [row["pid"] for row in listed["gpus"][0]["not_on_mps"]] == [outside.pid]
    assert outside.pid not in {c["pid"] for c in listed["clients"]}
    outside.finish()


def test_version_explain_and_doctor_answer(site: Site) -> None:
    version = site.ask(lambda c: c.version())
    assert version["backend"] == "simulated"
    assert "hang" in site.ask(lambda c: c.explain("hang"))
    site.client_environ()
    checks = {c["name"]: c for c in site.ask(lambda c: c.doctor())}
    assert checks["simulated GPU"]["ok"] and checks["protection"]["finding"].startswith("observe (")
    # A simulated node needs neither root nor the machine's kernel log.
    assert not {"root", "kernel log"} & set(checks)
    assert checks[f"pipe directory {site.run_dir}/d/d1"]["ok"]


def test_an_unknown_operation_and_an_unknown_class_are_refused(site: Site) -> None:
    with pytest.raises(mpsd_client.NotFoundError, match="no-such-class"):
        site.ask(lambda c: c.explain("no-such-class"))
    with pytest.raises(mpsd_client.NotFoundError, match="there is no GPU '7'"):
        site.ask(lambda c: c.env(gpu="7"))


def test_a_second_daemon_on_the_same_run_directory_refuses(site: Site) -> None:
    done = subprocess.run(
        site.command(),
        env=site.environ(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    status, said = done.returncode, done.stderr
    assert status == 1
    assert f"another mpsd (pid {site.pid}) runs on {site.run_dir}" in said
    assert site.status()["pid"] == site.pid


def test_descriptors_do_not_grow_with_clients(site: Site) -> None:
    first = site.join()
    first.finish()
    site.gone(first)
    before = psutil.Process(site.pid).num_fds()
    for _ in range(3):
        clients = [site.program() for _ in range(2)]
        site.attached(*clients)
        for client in clients:
            client.finish()
            site.gone(client)
    until(lambda: psutil.Process(site.pid).num_fds() <= before, "as many descriptors as before")


def open_files(pid: int) -> set[str]:
    """Return the targets of a process's descriptors. A descriptor that is closed meanwhile is left out."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def test_no_descriptor_of_mpsd_is_inherited_by_control_daemons(site: Site) -> None:
    """A lease leaked into a control daemon would never end; a leaked pipe would cause SIGPIPE."""
    client = site.join()
    domain = next(d for d in site.status()["domains"] if d["role"] == "active")
    sockets = {target for target in open_files(site.pid) if target.startswith(("socket:", "pipe:"))}
    for pid in (domain["control_pid"], domain["server_pid"]):
        assert not open_files(pid) & sockets
    client.finish()


def test_the_running_daemon_has_no_cuda_loaded(site: Site) -> None:
    client = site.join()
    client.finish()
    maps = Path(f"/proc/{site.pid}/maps").read_text()
    assert "/libcuda" not in maps
    assert "libnvrtc" not in maps


def test_a_daemon_with_a_client_imports_no_cuda_module() -> None:
    with Site() as site:
        site.launch(python=["-X", "importtime"])
        site.wait_ready()
        client = site.join()
        client.finish()
        site.gone(client)
        assert site.terminate() == 0
        lines = site.log.read_text().splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "mpsd.daemon.assembly" in imported
    assert not [name for name in imported if name.split(".")[0] in ("cuda", "cupy", "torch", "numba")]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"domains.spar": "true"}, ["domains.spar", "spare"]),
        ({"domains.spare": '"maybe"'}, ["domains.spare"]),
        ({"lease.linger_limit_s": "-1"}, ["lease.linger_limit_s"]),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_key(setting: dict[str, str], words: list[str]) -> None:
    with Site() as site:
        site.write_config(**setting)
        status, said = refuse(site)
        assert not made_by(site)
    assert status == 2
    for word in words:
        assert word in said


def test_a_run_directory_too_long_for_sockets_is_refused() -> None:
    with Site() as site:
        site.run_dir = site.base / ("x" * 60)
        site.write_config()
        status, said = refuse(site)
    assert status == 2
    assert "too long" in said
    assert "choose a run_dir that is" in said


def test_directories_that_cannot_be_made_are_named() -> None:
    with Site() as site:
        blocker = site.base / "file"
        blocker.write_text("")
        site.state_dir = blocker / "s"
        site.write_config()
        status, said = refuse(site)
        # The refused daemon started no simulated GPU.
        assert not made_by(site)
    assert status == 2
    assert str(site.state_dir) in said


@root_only
def test_an_ordinary_user_without_rights_is_told_what_to_do() -> None:
    with Site() as site:
        for directory in (site.run_dir, site.log_dir, site.state_dir):
            directory.mkdir(mode=0o755)
        site.node_dir.mkdir()
        shutil.chown(site.node_dir, OTHER_UID, OTHER_UID)
        status, said = refuse(site, uid=OTHER_UID)
    assert status == 2
    assert str(site.run_dir) in said
    assert "run as" in said


@root_only
@pytest.mark.parametrize("setting", [{"domains.mode": '"shared"'}, {"domains.serve_default_path": "true"}])
def test_an_ordinary_user_cannot_serve_everybody(setting: dict[str, str]) -> None:
    with Site() as site:
        shutil.chown(site.base, OTHER_UID, OTHER_UID)
        site.write_config(**setting)
        status, said = refuse(site, uid=OTHER_UID)
        assert not made_by(site)
    assert status == 2
    assert next(iter(setting)).partition(".")[2] in said
    assert "as root" in said


@root_only
def test_an_ordinary_user_runs_a_whole_daemon_on_the_simulated_gpu() -> None:
    with Site() as site:
        shutil.chown(site.base, OTHER_UID, OTHER_UID)
        site.launch(uid=OTHER_UID, environ={"HOME": str(site.base)})
        site.wait_ready()
        with pytest.raises(DeniedError, match="for that user alone, not for all users"):
            site.ask(lambda c: c.env(shared=True), uid=OTHER_UID)
        client = site.join(uid=OTHER_UID)
        row = site.attached(client)["clients"][0]
        assert (row["uid"], row["state"]) == (OTHER_UID, "attached")
        assert {"lease", "tracker"} <= set(row["protections"])
        client.busy(0.3)
        client.die()
        assert site.gone(client)["counters"]["leases_held"] == 0
        assert site.terminate() == 0


def test_nvidia_without_a_driver_is_refused_and_never_replaced_by_the_simulation() -> None:
    with Site() as site:
        site.write_config(backend='"nvidia"')
        if os.path.exists("/dev/nvidiactl"):
            pytest.skip("this machine has a driver")
        status, said = refuse(site)
        assert status == 1
        assert "mpsd: " in said
        assert not made_by(site)


def test_a_socket_that_a_dead_daemon_left_is_replaced() -> None:
    with Site() as site:
        site.run_dir.mkdir()
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(site.socket)
        site.start()
        assert site.status()["pid"] == site.pid


def test_why_no_domain_starts_is_said_to_whoever_waits_for_one() -> None:
    with Site(domains__start_retry_s="0.1") as site:
        site.start()
        # The control daemon starts, but has no directory for its files.
        shutil.rmtree(site.run_dir / "d")
        (site.run_dir / "d").write_text("")
        with pytest.raises(
            NotReadyError, match=r"no domain starts for \S+: cannot make directory .*/d/d\d+: "
        ):
            site.ask(lambda c: c.env())
        assert any("no domain starts for" in text for text in site.status()["problems"])
        (site.run_dir / "d").unlink()
        (site.run_dir / "d").mkdir(mode=0o755)
        site.until(lambda s: any(d["state"] == "active" for d in s["domains"]), "an active domain")
        assert not any("no domain starts for" in text for text in site.status()["problems"])


def test_starts_that_fail_leave_no_directory_behind() -> None:
    with Site(domains__start_retry_s="0.1") as site:
        site.start()
        # Its output cannot be written, so the control daemon does not start.
        for number in range(1, 5):
            (site.log_dir / f"d{number}").write_text("")
        with pytest.raises(NotReadyError, match="no domain starts"):
            site.ask(lambda c: c.env())
        site.until(lambda s: any(d["state"] == "active" for d in s["domains"]), "an active domain")
        known = {d["id"] for d in site.status()["domains"]}
        assert {path.name for path in (site.run_dir / "d").iterdir()} <= known


def test_gpus_of_the_configuration_that_are_not_there_are_told() -> None:
    with Site() as site:
        site.start()
        here = site.status()["gpus"][0]["uuid"]
        assert not rows_of(site.status(), Code.GPU_ABSENT)
        site.terminate()
        site.write_config(
            domains__span=f'[["{here}", "GPU-gone"]]',
            limits__pinned_device_memory=f'{{ "0" = "1G", "1" = "1G", "{here}" = "1G", "GPU-away" = "1G" }}',
        )
        site.start()
        told = rows_of(site.status(), Code.GPU_ABSENT)
        assert [row["subject"] for row in told] == ["GPU-gone", "1", "GPU-away"]
        until(lambda: len([e for e in site.said("degraded") if e["code"] == "gpu-absent"]) == 3, "logged")
        checks = [c for c in site.ask(lambda c: c.doctor()) if c["name"] == "gpu-absent"]
        assert [(c["ok"], c["finding"], c["remedy"]) for c in checks] == [
            (False, row["text"], row["remedy"]) for row in told
        ]
        # The GPUs that are present are served nevertheless.
        assert site.client_environ()["CUDA_MPS_PIPE_DIRECTORY"]


def test_a_daemon_carries_no_tls() -> None:
    with Site() as site:
        site.start()
        maps = Path(f"/proc/{site.pid}/maps").read_text()
        assert "/libssl" not in maps and "/libcrypto" not in maps
        assert site.status()["pid"] == site.pid


def test_env_says_where_a_standby_process_waits(site: Site) -> None:
    site.join()
    status = site.until(lambda s: sorted(d["state"] for d in s["domains"]) == ["active", "warm"], "a spare")
    names = {d["state"]: d["id"] for d in status["domains"]}

    def asked(client: mpsd_client.Client) -> tuple[str, str, str]:
        path = client.env(standby=True)["CUDA_MPS_PIPE_DIRECTORY"]
        found = (path, client.domain, client.directory)
        assert client.env()["CUDA_MPS_PIPE_DIRECTORY"] == str(site.run_dir / "s" / Path(path_of(site)).name)
        assert client.domain == names["active"]
        return found

    there = str(site.run_dir / "d" / names["warm"])
    assert site.ask(asked) == (there, names["warm"], there)


def path_of(site: Site) -> str:
    return site.client_environ()["CUDA_MPS_PIPE_DIRECTORY"]


def test_where_no_standby_is_kept_env_says_what_would_keep_one() -> None:
    with Site(domains__spare="false") as site:
        site.start()
        with pytest.raises(mpsd_client.MpsdError, match="no standby domain") as told:
            site.ask(lambda client: client.env(standby=True))
        assert "spare = true" in told.value.remedy
