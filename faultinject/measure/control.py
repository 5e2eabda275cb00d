"""Exact replies of the control binary, and what lives on when the control daemon dies."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from faultinject.measure.nvml import Nvml
from faultinject.measure.rig import CONTROL, Client, Domain, clients, domain, now
from mpsd.gpu.nvidia.uvm import NvidiaUvm


def ask(made: Domain, command: str, timeout_s: float = 3.0) -> dict[str, Any]:
    reply, status, took = made.ctl_full(command, timeout_s)
    return {"command": command, "reply": reply, "exit": status, "ms": round(took * 1e3, 1)}


def replies(made: Domain, cubin: Path) -> list[Any]:
    rows = [
        ask(made, c) for c in ("get_server_list", "ps", "get_server_status 999999", "get_client_list 999999")
    ]
    rows += [ask(made, c) for c in ("nonsense", "", "help", "get_default_active_thread_percentage")]
    rows += [ask(made, c) for c in ("start_server -uid 0", "get_server_list")]
    server = made.server()
    rows += [
        ask(made, f"get_server_status {server}"),
        ask(made, f"get_client_list {server}"),
        ask(made, "ps"),
    ]
    first = made.client("survivor", cubin)
    with clients(first):
        first.wait("ready")
        rows += [ask(made, f"get_client_list {server}"), ask(made, "ps")]
        others = [made.client("survivor", cubin) for _ in range(2)]
        with clients(*others):
            for other in others:
                other.wait("ready")
            rows += [ask(made, f"get_client_list {server}"), ask(made, "ps"), ask(made, f"ps -p {server}")]
            rows += [ask(made, c) for c in (f"get_device_client_list {server}", "get_device_client_list")]
            rows += [ask(made, c) for c in ("device_query", "lspart")]
            gone = others[1]
            gone.kill()
            gone.reap()
            rows.append(
                {"note": "the next client was killed just before"}
                | ask(made, f"terminate_client {server} {gone.pid}")
            )
            rows.append(ask(made, f"terminate_client {server} 1"))
            rows.append(
                {"note": "own pid, no client"} | ask(made, f"terminate_client {server} {os.getpid()}")
            )
            rows.append(ask(made, f"terminate_client 999999 {first.pid}"))
            rows.append({"note": "an idle client"} | ask(made, f"terminate_client {server} {others[0].pid}"))
            time.sleep(0.1)
            rows.append({"note": "that client then saw", "event": others[0].find("error")})
        rows += settings(made, server)
        first.say("report")
        rows.append({"note": "survivor after all that", "event": first.wait("alive", "error", timeout_s=3)})
        rows.append({"note": "quit -t 1 with one client"} | ask(made, "quit -t 1", 6))
        time.sleep(0.3)
        rows.append({"note": "its client saw", "events": [e for e in first.events if e["ev"] != "ready"]})
    return rows


def settings(made: Domain, server: int) -> list[Any]:
    commands = (
        "set_default_active_thread_percentage 50",
        "get_default_active_thread_percentage",
        f"set_active_thread_percentage {server} 70",
        f"get_active_thread_percentage {server}",
        "set_default_device_pinned_mem_limit 0 2G",
        "get_default_device_pinned_mem_limit 0",
        "set_default_device_pinned_mem_limit 99 2G",
        f"set_device_pinned_mem_limit {server} 0 3G",
        f"get_device_pinned_mem_limit {server} 0",
        "set_default_client_priority 1",
        "get_default_client_priority",
        "set_default_active_thread_percentage 100",
    )
    return [ask(made, command) for command in commands]


def lives(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
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


def second_daemon(made: Domain) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [CONTROL, "-f"], env=made.env, capture_output=True, text=True, timeout=2, input=""
        )
        return {
            "note": "second -f on the same pipe directory",
            "out": done.stdout + done.stderr,
            "exit": done.returncode,
        }
    except subprocess.TimeoutExpired:
        return {"note": "second -f on the same pipe directory", "out": "TIMEOUT"}


def daemon_ends(out: Path, cubin: Path, how: signal.Signals) -> list[Any]:
    """The control daemon gets a signal with a client running; what lives on?"""
    rows: list[Any] = []
    with domain(f"control-{how.name}", out) as made, clients(made.client("survivor", cubin)) as (client,):
        client.wait("ready")
        server = made.server()
        if how is signal.SIGTERM:
            rows.append(second_daemon(made))
        began = now()
        made.control.send_signal(how)
        try:
            status: int | str = made.control.wait(2)
        except subprocess.TimeoutExpired:
            status = "still running after 2 s"
        rows.append({"signal": how.name, "control_exit": status, "ms": round((now() - began) * 1e3, 1)})
        time.sleep(0.5)
        client.say("report")
        rows.append({"client": _event(client, "alive", "error"), "server_alive": lives(server)})
        rows.append({"files_left": sorted(p.name for p in made.pipe.iterdir())})
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
        if made.control.poll() is None:
            return rows
        rows.append({"note": "command after the daemon's death"} | ask(made, "get_server_list"))
        late = made.client("starter", cubin, "3")
        with clients(late):
            rows.append(
                {"note": "a client started without the daemon", "event": _event(late, "ready", "failed")}
            )
            rows.append(
                {"its server count in log": len([1 for _, s in made.log_lines.lines if str(late.pid) in s])}
            )
        rows += restart(made, client, server, cubin)
    return rows


def restart(made: Domain, client: Client, server: int, cubin: Path) -> list[Any]:
    """A new control daemon on the pipe directory of the dead one."""
    with (made.base / "stdout2").open("wb") as sink:
        again = subprocess.Popen(
            [CONTROL, "-f"],
            env=made.env,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    time.sleep(0.4)
    rows: list[Any] = [
        {
            "note": "new daemon on the old directory",
            "running": again.poll() is None,
            "text": (made.base / "stdout2").read_text()[-600:],
        }
    ]
    rows += [ask(made, "get_server_list"), ask(made, f"get_client_list {server}")]
    if again.poll() is None:
        with clients(made.client("starter", cubin, "3")) as (late,):
            rows.append({"note": "client of the new daemon", "event": _event(late, "ready", "failed")})
            rows.append(ask(made, "get_server_list"))
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
    if again.poll() is None:
        made.ctl("quit -t 1", 4)
        try:
            again.wait(3)
        except subprocess.TimeoutExpired:
            again.kill()
            again.wait(3)
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
    """SIGKILL of the server with a client running."""
    with domain("server-death", out) as made, clients(made.client("survivor", cubin)) as (client,):
        client.wait("ready")
        server = made.server()
        began = now()
        os.kill(server, signal.SIGKILL)
        event = _event(client, "error")
        rows: list[Any] = [
            {"note": "SIGKILL of the server", "client": event, "ms": round((now() - began) * 1e3, 1)}
        ]
        rows.append(ask(made, "get_server_list"))
        with clients(made.client("starter", cubin, "3")) as (late,):
            rows.append({"note": "new client", "event": _event(late, "ready", "failed")})
            rows.append(ask(made, "get_server_list"))
        rows.append({"control_log": [line for _, line in made.log_lines.since(began)][:30]})
        return rows


def in_fault(out: Path, cubin: Path) -> list[Any]:
    """Commands to a server in FAULT, each with a time-out; the victim stays until the end."""
    rows: list[Any] = []
    with domain("in-fault", out) as made:
        victim, offender = made.client("offender", cubin, "none"), made.client("offender", cubin, "trap")
        with clients(victim, offender):
            victim.wait("ready")
            offender.wait("ready")
            server = made.server()
            offender.say("go")
            _event(offender, "error", "sync_ok")
            time.sleep(0.3)
            for command in (
                f"get_server_status {server}",
                f"get_client_list {server}",
                "get_server_list",
                "ps",
            ):
                rows.append({"state": "FAULT, all clients there"} | ask(made, command, 2))
            late = made.client("starter", cubin, "3")
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
                rows.append({"state": "FAULT, offender gone"} | ask(made, command, 2))
            victim.kill()
            left = now()
            victim.reap()
            while now() - left < 2 and made.ctl(f"get_server_status {server}", 1) != "ACTIVE":
                time.sleep(0.001)
            rows.append(
                {"note": "ACTIVE after the last client left, ms", "ms": round((now() - left) * 1e3, 1)}
            )
            rows.append(ask(made, "get_server_list"))
            with clients(made.client("starter", cubin, "3")) as (late,):
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
    with domain("replies", out) as made:
        return replies(made, cubin)
