"""The cost of a waiting standby domain: memory, CPU, time to start, effect on its neighbour."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.nvml import Nvml
from faultinject.campaigns.measure.rig import (
    Client,
    Domain,
    clients,
    domain,
    now,
)
from mpsd.gpu.nvidia.uvm import NvidiaUvm


def resident_kib(pid: int) -> dict[str, int]:
    """Return RSS and its private part of a process."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        words = line.split()
        if words[0] in ("Rss:", "Pss:", "Private_Dirty:"):
            found[words[0].rstrip(":")] = int(words[1])
    return found


def cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e3 / os.sysconf("SC_CLK_TCK")


def start_one(mps_domain: Domain, nvml: Nvml) -> dict[str, Any]:
    """Start a server in a fresh domain; times in ms, memory in MiB."""
    used = nvml.used_mib()
    began = now()
    reply, status, took = mps_domain.ctl_full("start_server -uid 0", 5)
    server = 0
    while not server and now() - began < 5:
        server = mps_domain.server()
    listed = now()
    states: list[tuple[float, str]] = []
    while now() - began < 5:
        state = mps_domain.ctl(f"get_server_status {server}", 3)
        if not states or states[-1][1] != state:
            states.append((round((now() - began) * 1e3, 1), state))
        if state == "ACTIVE":
            break
    time.sleep(0.3)
    cpu = [cpu_ms(server), cpu_ms(mps_domain.control.pid)]
    time.sleep(2)
    return {
        "socket_ms": round(mps_domain.socket_after_s * 1e3, 1),
        "start_server_reply": [reply, status, round(took * 1e3, 1)],
        "listed_ms": round((listed - began) * 1e3, 1),
        "states": states,
        "gpu_used_mib_before_after": [used, nvml.used_mib()],
        "nvml_processes": nvml.processes(),
        "server_kib": resident_kib(server),
        "control_kib": resident_kib(mps_domain.control.pid),
        "cpu_ms_in_2_s_server_control": [cpu_ms(server) - cpu[0], cpu_ms(mps_domain.control.pid) - cpu[1]],
    }


def timed(client: Client) -> Any:
    client.forget()
    client.say("run")
    event = client.wait("timed", timeout_s=10)
    return {key: event[key] for key in event if key.endswith("p99")}


def measure(out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml, rows: list[Any]) -> None:
    with (
        domain("standby-main", out, start_server=True) as main,
        clients(main.client("bench", cubin)) as (client,),
    ):
        client.wait("ready")
        timed(client)
        rows.append({"what": "kernel times alone", **timed(client)})
        with domain("standby-1", out) as first:
            rows.append({"what": "first standby domain", **start_one(first, nvml)})
            rows.append({"what": "kernel times beside one standby domain", **timed(client)})
            with domain("standby-2", out) as second:
                rows.append({"what": "second standby domain", **start_one(second, nvml)})
                rows.append({"what": "kernel times beside two standby domains", **timed(client)})
        rows.append({"what": "kernel times alone again", **timed(client)})
        with domain("standby-3", out) as third:
            began = now()
            with clients(third.client("starter", cubin, "3")) as (late,):
                late.wait("ready")
                rows.append(
                    {
                        "what": "first kernel of a client that starts its own server, ms",
                        "ms": round((now() - began) * 1e3, 1),
                    }
                )
        with domain("standby-4", out, start_server=True) as fourth:
            time.sleep(0.5)
            began = now()
            with clients(fourth.client("starter", cubin, "3")) as (late,):
                late.wait("ready")
                rows.append(
                    {
                        "what": "the same where the server already waits, ms",
                        "ms": round((now() - began) * 1e3, 1),
                    }
                )
