"""Exact replies of the control binary, and what outlives the control daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.nvml import Nvml
from faultinject.campaigns.measure.rig import (
    CONTROL,
    Client,
    Domain,
    clients,
    domain,
    now,
)
from mpsd.gpu.nvidia.uvm import NvidiaUvm


def ask(mps_domain: Domain, command: str, timeout_s: float = 3.0) -> dict[str, Any]:
    reply, status, took = mps_domain.ctl_full(command, timeout_s)
    return {"command": command, "reply": reply, "exit": status, "ms": round(took * 1e3, 1)}


def replies(mps_domain: Domain, cubin: Path) -> list[Any]:
    rows = [
        ask(mps_domain, c)
        for c in ("get_server_list", "ps", "get_server_status 999999", "get_client_list 999999")
    ]
    rows += [ask(mps_domain, c) for c in ("nonsense", "", "help", "get_default_active_thread_percentage")]
    rows += [ask(mps_domain, c) for c in ("start_server -uid 0", "get_server_list")]
    server = mps_domain.server()
    rows += [
        ask(mps_domain, f"get_server_status {server}"),
        ask(mps_domain, f"get_client_list {server}"),
        ask(mps_domain, "ps"),
    ]
    first = mps_domain.client("survivor", cubin)
    with clients(first):
        first.wait("ready")
        rows += [ask(mps_domain, f"get_client_list {server}"), ask(mps_domain, "ps")]
        others = [mps_domain.client("survivor", cubin) for _ in range(2)]
        with clients(*others):
            for other in others:
                other.wait("ready")
            rows += [
                ask(mps_domain, f"get_client_list {server}"),
                ask(mps_domain, "ps"),
                ask(mps_domain, f"ps -p {server}"),
            ]
            rows += [
                ask(mps_domain, c) for c in (f"get_device_client_list {server}", "get_device_client_list")
            ]
            rows += [ask(mps_domain, c) for c in ("device_query", "lspart")]
            killed_client = others[1]
            killed_client.kill()
            killed_client.reap()
            rows.append(
                {"note": "the next client was killed just before"}
                | ask(mps_domain, f"terminate_client {server} {killed_client.pid}")
            )
            rows.append(ask(mps_domain, f"terminate_client {server} 1"))
            rows.append(
                {"note": "own pid, no client"} | ask(mps_domain, f"terminate_client {server} {os.getpid()}")
            )
            rows.append(ask(mps_domain, f"terminate_client 999999 {first.pid}"))
            rows.append(
                {"note": "an idle client"} | ask(mps_domain, f"terminate_client {server} {others[0].pid}")
            )
            time.sleep(0.1)
            rows.append({"note": "that client then saw", "event": others[0].find("error")})
        rows += settings(mps_domain, server)
        first.say("report")
        rows.append({"note": "survivor after all that", "event": first.wait("alive", "error", timeout_s=3)})
        rows.append({"note": "quit -t 1 with one client"} | ask(mps_domain, "quit -t 1", 6))
        time.sleep(0.3)
        rows.append({"note": "its client saw", "events": [e for e in first.events if e["ev"] != "ready"]})
    return rows


def settings(mps_domain: Domain, server: int) -> list[Any]:
    commands = (
        "set_default_active_thread_percentage 50",
        "get_default_active_thread_percentage",
        f"set_active_thread_percentage {server} 70",
        f"get_active_thread_percentage {server}",
        "set_default_device_pinned_mem_limit 0 2G",
        "get_default_device_pinned_mem_limit 0",
        "set_default_device_pinned_mem_limit 99 2G",
        "get_default_device_pinned_mem_limit 0",
        *(f"set_default_device_pinned_mem_limit 0 {text}" for text in ("1.5G", "512m", "2048", "2 G")),
        "get_default_device_pinned_mem_limit 0",
        *(f"set_default_active_thread_percentage {text}" for text in ("50%", "33.333", "1e1")),
        "get_default_active_thread_percentage",
        f"get_active_thread_percentage {server}",
        f"set_device_pinned_mem_limit {server} 0 3G",
        f"get_device_pinned_mem_limit {server} 0",
        "set_default_client_priority 1",
        "get_default_client_priority",
        "set_default_active_thread_percentage 100",
    )
    return [ask(mps_domain, command) for command in commands]


def lives(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def without_daemon() -> list[Any]:
    rows: list[Any] = []
    for arguments in (["-v"], ["--version"], ["get_server_list"]):
        env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": "/tmp/mm-nobody", "CUDA_MPS_LOG_DIRECTORY": "/tmp"}
        done = subprocess.run(
            [CONTROL, *arguments], env=env, capture_output=True, text=True, timeout=4, input=""
        )
        rows.append({"arguments": arguments, "out": done.stdout, "err": done.stderr, "exit": done.returncode})
    return rows


def second_daemon(mps_domain: Domain) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [CONTROL, "-f"], env=mps_domain.env, capture_output=True, text=True, timeout=2, input=""
        )
        return {
            "note": "second -f on the same pipe directory",
            "out": done.stdout + done.stderr,
            "exit": done.returncode,
        }
    except subprocess.TimeoutExpired:
        return {"note": "second -f on the same pipe directory", "out": "TIMEOUT"}


def daemon_ends(out: Path, cubin: Path, how: signal.Signals) -> list[Any]:
    """Send the control daemon a signal with a client running; what outlives it?"""
    rows: list[Any] = []
    with (
        domain(f"control-{how.name}", out) as mps_domain,
        clients(mps_domain.client("survivor", cubin)) as (client,),
    ):
        client.wait("ready")
        server = mps_domain.server()
        if how is signal.SIGTERM:
            rows.append(second_daemon(mps_domain))
        began = now()
        mps_domain.control.send_signal(how)
        try:
            status: int | str = mps_domain.control.wait(2)
        except subprocess.TimeoutExpired:
            status = "still running after 2 s"
        rows.append({"signal": how.name, "control_exit": status, "ms": round((now() - began) * 1e3, 1)})
        time.sleep(0.5)
        client.say("report")
        rows.append({"client": _event(client, "alive", "error"), "server_alive": lives(server)})
        rows.append({"files_left": sorted(p.name for p in mps_domain.pipe.iterdir())})
        if lives(server):
            cmdline = Path(f"/proc/{server}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            environ = Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
            stat = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
            rows.append(
                {
                    "server_cmdline": cmdline,
                    "server_ppid": int(stat[1]),
                    "server_session": int(stat[3]),
                    "server_env": sorted(w.decode() for w in environ if w.startswith(b"CUDA"))[:6],
                }
            )
        if mps_domain.control.poll() is None:
            return rows
        rows.append({"note": "command after the daemon's death"} | ask(mps_domain, "get_server_list"))
        late = mps_domain.client("starter", cubin, "3")
        with clients(late):
            rows.append(
                {"note": "a client started without the daemon", "event": _event(late, "ready", "failed")}
            )
            rows.append(
                {
                    "its server count in log": len(
                        [1 for _, s in mps_domain.log_lines.lines if str(late.pid) in s]
                    )
                }
            )
        rows += restart(mps_domain, client, server, cubin)
    return rows


def restart(mps_domain: Domain, client: Client, server: int, cubin: Path) -> list[Any]:
    """Start a new control daemon on the pipe directory of a killed one."""
    with (mps_domain.base / "stdout2").open("wb") as output:
        new_daemon = subprocess.Popen(
            [CONTROL, "-f"],
            env=mps_domain.env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    time.sleep(0.4)
    rows: list[Any] = [
        {
            "note": "new daemon on the old directory",
            "running": new_daemon.poll() is None,
            "text": (mps_domain.base / "stdout2").read_text()[-600:],
        }
    ]
    rows += [ask(mps_domain, "get_server_list"), ask(mps_domain, f"get_client_list {server}")]
    if new_daemon.poll() is None:
        with clients(mps_domain.client("starter", cubin, "3")) as (late,):
            rows.append({"note": "client of the new daemon", "event": _event(late, "ready", "failed")})
            rows.append(ask(mps_domain, "get_server_list"))
    client.say("report")
    client.forget()
    rows.append(
        {
            "note": "old client",
            "event": _event(client, "alive", "error"),
            "old server alive": lives(server),
        }
    )
    client.kill()
    client.reap()
    time.sleep(0.3)
    rows.append({"note": "old client gone", "old server alive": lives(server)})
    if new_daemon.poll() is None:
        mps_domain.ctl("quit -t 1", 4)
        try:
            new_daemon.wait(3)
        except subprocess.TimeoutExpired:
            new_daemon.kill()
            new_daemon.wait(3)
    if lives(server) and b"nvidia-cuda-mps-server" in Path(f"/proc/{server}/cmdline").read_bytes():
        os.kill(server, signal.SIGTERM)
        time.sleep(0.3)
        rows.append({"note": "old server after SIGTERM", "alive": lives(server)})
        if lives(server):
            os.kill(server, signal.SIGKILL)
    return rows


def _event(client: Client, *names: str) -> Any:
    try:
        return client.wait(*names, timeout_s=6)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def server_dies(out: Path, cubin: Path) -> list[Any]:
    """Send SIGKILL to the server with a client running."""
    with (
        domain("server-death", out) as mps_domain,
        clients(mps_domain.client("survivor", cubin)) as (client,),
    ):
        client.wait("ready")
        server = mps_domain.server()
        began = now()
        os.kill(server, signal.SIGKILL)
        event = _event(client, "error")
        rows: list[Any] = [
            {"note": "SIGKILL of the server", "client": event, "ms": round((now() - began) * 1e3, 1)}
        ]
        rows.append(ask(mps_domain, "get_server_list"))
        with clients(mps_domain.client("starter", cubin, "3")) as (late,):
            rows.append({"note": "new client", "event": _event(late, "ready", "failed")})
            rows.append(ask(mps_domain, "get_server_list"))
        rows.append({"control_log": [line for _, line in mps_domain.log_lines.since(began)][:30]})
        return rows


def in_fault(out: Path, cubin: Path) -> list[Any]:
    """Send commands to a server in FAULT, each with a time-out; the victim stays until the end."""
    rows: list[Any] = []
    with domain("in-fault", out) as mps_domain:
        victim, offender = (
            mps_domain.client("offender", cubin, "none"),
            mps_domain.client("offender", cubin, "trap"),
        )
        with clients(victim, offender):
            victim.wait("ready")
            offender.wait("ready")
            server = mps_domain.server()
            offender.say("go")
            _event(offender, "error", "sync_ok")
            time.sleep(0.3)
            for command in (
                f"get_server_status {server}",
                f"get_client_list {server}",
                "get_server_list",
                "ps",
            ):
                rows.append({"state": "FAULT, all clients there"} | ask(mps_domain, command, 2))
            late = mps_domain.client("starter", cubin, "3")
            with clients(late):
                rows.append({"note": "client started in FAULT", "event": _event(late, "ready", "failed")})
            offender.kill()
            offender.reap()
            time.sleep(0.2)
            for command in (
                f"get_server_status {server}",
                f"get_client_list {server}",
                "ps",
                "start_server -uid 0",
            ):
                rows.append({"state": "FAULT, offender gone"} | ask(mps_domain, command, 2))
            victim.kill()
            exited_at = now()
            victim.reap()
            while now() - exited_at < 2 and mps_domain.ctl(f"get_server_status {server}", 1) != "ACTIVE":
                time.sleep(0.001)
            rows.append(
                {"note": "ACTIVE after the last client left, ms", "ms": round((now() - exited_at) * 1e3, 1)}
            )
            rows.append(ask(mps_domain, "get_server_list"))
            with clients(mps_domain.client("starter", cubin, "3")) as (late,):
                rows.append({"note": "client after recovery", "event": _event(late, "ready", "failed")})
    return rows


def measure(out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml, rows: list[Any]) -> None:
    parts = (
        ("without a daemon", without_daemon),
        ("replies", lambda: _in_domain(out, cubin)),
        ("SIGTERM", lambda: daemon_ends(out, cubin, signal.SIGTERM)),
        ("SIGKILL", lambda: daemon_ends(out, cubin, signal.SIGKILL)),
        ("server death", lambda: server_dies(out, cubin)),
        ("FAULT", lambda: in_fault(out, cubin)),
    )
    for name, part in parts:
        try:
            rows.append({"part": name, "rows": part()})
        except Exception as error:
            rows.append({"part": name, "failed": f"{type(error).__name__}: {error}"})


def _in_domain(out: Path, cubin: Path) -> list[Any]:
    with domain("replies", out) as mps_domain:
        return replies(mps_domain, cubin)
