"""Answers of `status` for tests of its text: a GPU, domains and clients as the daemon sends them."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
GIB = 1 << 30

GPU: Row = {
    "index": 0,
    "uuid": "GPU-a",
    "name": "NVIDIA H200",
    "memory_used_bytes": int(12.4 * GIB),
    "memory_total_bytes": 140 * GIB,
    "compute_mode": "default",
    "not_on_mps": [],
    "limits": [],
    "protection": {"level": "failover", "why": "", "remedy": ""},
}
DOMAIN: Row = {
    "id": "d1",
    "slot": "a-u0",
    "gpus": ["GPU-a"],
    "uid": 0,
    "user": "root",
    "role": "active",
    "state": "active",
    "control_pid": 10,
    "server_pid": 11,
    "uptime_s": 3700.0,
    "clients": 3,
    "clients_limit": 48,
    "last_fault": 4,
    "fault": None,
    "private": True,
    "refused_807": 0,
    "problem": "",
    "reach": "a fault reaches all clients of user root on one GPU",
}
STANDBY: Row = DOMAIN | {"id": "d2", "role": "spare", "state": "warm", "clients": 0, "last_fault": None}
CLIENT: Row = {
    "domain": "d1",
    "pid": 4702,
    "start_ticks": 1,
    "user": "root",
    "state": "attached",
    "memory_bytes": int(8.2 * GIB),
    "age_s": 61.0,
    "protections": ["guard:low 8052 MiB (silent)", "lease", "tracker"],
    "command": "python train.py",
    "problem": "",
    "lost": False,
    "protected": {"level": "failover", "why": "", "cost_bytes": int(1.6 * GIB)},
}
EXITED: Row = {
    "pid": 4712,
    "start_ticks": 1,
    "user": "root",
    "domain": "d1",
    "state": "lingering",
    "held_gpu_bytes": None,
    "held_host_bytes": None,
    "since_s": 1.5,
    "command": "python",
    "pending": "kernel 0x203037f34",
}


def fault(**changes: Any) -> Row:
    """Return the last fault of a slot or domain."""
    offender = {"pid": 4711, "start_ticks": 9, "uid": 0, "user": "root", "command": "python buggy.py"}
    whole: Row = {
        "id": 4,
        "class": "sm-trap",
        "time": "2026-11-29T12:00:00.000+00:00",
        "age_s": 190.0,
        "domain": "d1",
        "offender": offender,
        "confidence": "certain",
        "suspects": 0,
        "outcome": "evicted",
    }
    return whole | changes


def client(pid: int, level: str = "failover", why: str = "", cost: int | None = 0, **changes: Any) -> Row:
    """Return the row of a client with that protection."""
    return CLIENT | {"pid": pid, "protected": {"level": level, "why": why, "cost_bytes": cost}} | changes


def three_clients() -> list[Row]:
    """Return a client at each level."""
    return [
        CLIENT,
        client(4710, "guard", "snapshot needs 14 GiB", memory_bytes=52 * GIB, command="python serve.py"),
        client(4720, "observe", "started without mpsd-run", memory_bytes=int(1.1 * GIB), command="./legacy"),
    ]


def view(**changes: Any) -> Row:
    """Return an answer with one GPU, a domain with its standby domain, and three clients."""
    whole: Row = {
        "version": "0.1.0",
        "backend": "nvidia",
        "pid": 1,
        "uptime_s": 5.0,
        "draining": False,
        "drained_gpus": [],
        "problems": [],
        "conditions": [],
        "gpus": [GPU],
        "slots": [{"id": "a-u0", "fault": fault()}],
        "domains": [DOMAIN, STANDBY],
        "clients": three_clients(),
        "dead": [],
    }
    return whole | changes
