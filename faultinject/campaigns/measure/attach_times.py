"""When does each sign of a new client appear, and is it harmless to attach early?

Times are on the client's own clock.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.nvml import Nvml
from faultinject.campaigns.measure.rig import (
    Client,
    Domain,
    Recorder,
    clients,
    domain,
    now,
)
from mpsd.base.errors import GpuError, MpsdError
from mpsd.gpu.nvidia.uvm import NvidiaUvm


def uvm_descriptors(pid: int) -> int:
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            count += os.readlink(f"/proc/{pid}/fd/{name}") == "/dev/nvidia-uvm"
        except OSError:
            pass
    return count


class Hammer:
    """Opens, tracks and closes a client's address space repeatedly while the client starts."""

    def __init__(self, uvm: NvidiaUvm, client: Client, pause_s: float) -> None:
        self.first: float | None = None
        self.attempts = self.opened = 0
        self.errors: dict[str, int] = {}
        self.took: list[float] = []
        self._stop = threading.Event()
        self._uvm, self._client, self._pause = uvm, client, pause_s
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.attempts += 1
            began = now()
            try:
                for space in self._uvm.open(self._client.instance(), self._client.pidfd):
                    space.track().close()
                    space.close()
                self.opened += 1
                self.took.append(now() - began)
                if self.first is None:
                    self.first = began
            except (MpsdError, OSError) as error:
                text = type(error).__name__ + (f" {error.status:#x}" if isinstance(error, GpuError) else "")
                self.errors[text] = self.errors.get(text, 0) + 1
            self._stop.wait(self._pause)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(3)


def measure_start(mps_domain: Domain, cubin: Path, uvm: NvidiaUvm, nvml: Nvml) -> dict[str, Any]:
    """Start one client with every sign watched. Times in ms after the client's context was finished."""
    server = mps_domain.server()
    with clients(mps_domain.client("starter", cubin, "60")) as (client,):
        recorder = Recorder()
        pid = client.pid
        recorder.every(0.0005, "uvm_fds", lambda: uvm_descriptors(pid))
        recorder.every(
            0.001, "get_client_list", lambda: str(pid) in mps_domain.ctl(f"get_client_list {server}").split()
        )
        recorder.every(0.001, "ps", lambda: str(pid) in mps_domain.ctl("ps").split())
        recorder.every(0.002, "nvml", lambda: any(p[0] == pid for p in nvml.processes()))
        hammer = Hammer(uvm, client, 0.001)
        ready = client.wait("ready")
        client.wait("checked")
        hammer.close()
        recorder.close()
        zero = ready["stamps"]["context_end"]
        row = {
            "spawned": client.spawned,
            "main": ready["started"],
            "imports_done": ready["stamps"]["import_end"],
            "cuinit_returned": ready["stamps"]["cuinit_end"],
            "context_finished": zero,
            "first_kernel_done": ready["first_kernel"],
            "tracker_accepted": hammer.first,
        }
        for name, found in recorder.changes.items():
            for t, value in found:
                if value:
                    row[f"{name}={value if name == 'uvm_fds' else 'yes'}"] = t
        for t, line in mps_domain.log_lines.since(client.spawned):
            if f"NEW CLIENT {pid}" in line:
                row["control.log line arrived"] = t
        for t, line in mps_domain.log_lines.since(client.spawned):
            if "new client request" in line.lower() or str(pid) in line:
                row.setdefault(f"server.log: {line.split('] ')[-1][:60]}", t)
        return {name: None if t is None else round((t - zero) * 1e3, 2) for name, t in row.items()}


def attach_repeatedly(mps_domain: Domain, cubin: Path, uvm: NvidiaUvm, count: int) -> dict[str, Any]:
    """Start `count` clients at once while each is attached every millisecond: are all results right?"""
    with clients(*[mps_domain.client("starter", cubin, "60") for _ in range(count)]) as started:
        hammers = [Hammer(uvm, client, 0.001) for client in started]
        outcome = []
        for client in started:
            try:
                client.wait("ready", "failed", timeout_s=15)
                outcome.append(client.wait("checked", "failed", "error", "wrong", timeout_s=15)["ev"])
            except MpsdError as error:
                outcome.append(str(error)[:300])
        for hammer in hammers:
            hammer.close()
        waits = []
        for client, hammer in zip(started, hammers, strict=True):
            ready = client.find("ready")
            if ready and hammer.first:
                waits.append(round((hammer.first - ready["stamps"]["context_end"]) * 1e3, 2))
        took = sorted(t for hammer in hammers for t in hammer.took)
        errors: dict[str, int] = {}
        for hammer in hammers:
            for text, number in hammer.errors.items():
                errors[text] = errors.get(text, 0) + number
        return {
            "clients": count,
            "all_right": outcome.count("checked") == count,
            "outcome": sorted(set(outcome)),
            "attempts": sum(h.attempts for h in hammers),
            "opened": sum(h.opened for h in hammers),
            "refusals": errors,
            "first_open_ms_after_context": waits,
            "open_track_close_ms_median_max": [
                round(1e3 * took[len(took) // 2], 2) if took else None,
                round(1e3 * took[-1], 2) if took else None,
            ],
        }


def log_latency(mps_domain: Domain) -> list[float]:
    """Return ms from a request to the control daemon until its audit line arrives through inotify."""
    waits = []
    for _ in range(10):
        began = now()
        mps_domain.ctl("get_default_active_thread_percentage")
        time.sleep(0.02)
        arrived = [t for t, line in mps_domain.log_lines.since(began) if "Cmd" in line or "NEW UI" in line]
        if arrived:
            waits.append(round((arrived[0] - began) * 1e3, 2))
    return waits


def measure(out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml, rows: list[Any]) -> None:
    with domain("attach", out, start_server=True) as mps_domain:
        rows.append(
            {"what": "control.log audit line after the command was sent, ms", "ms": log_latency(mps_domain)}
        )
        rows += [
            {"what": "signs of a start, ms after the context", **measure_start(mps_domain, cubin, uvm, nvml)}
            for _ in range(5)
        ]
        baseline = [_plain(mps_domain, cubin) for _ in range(3)]
        rows.append({"what": "starts without any attaching", "starts": baseline})
        rows += [{"what": "sequential", **attach_repeatedly(mps_domain, cubin, uvm, 1)} for _ in range(20)]
        rows.append({"what": "at once", **attach_repeatedly(mps_domain, cubin, uvm, 8)})


def _plain(mps_domain: Domain, cubin: Path) -> dict[str, float]:
    with clients(mps_domain.client("starter", cubin, "60")) as (client,):
        ready = client.wait("ready")
        checked = client.wait("checked")
        stamps = ready["stamps"]
        return {
            "cuinit_ms": round((stamps["cuinit_end"] - stamps["import_end"]) * 1e3, 1),
            "context_ms": round((stamps["context_end"] - stamps["cuinit_end"]) * 1e3, 1),
            "longest_round_ms": checked["longest_ms"],
        }
