"""Zones of managed memory around a client's buffers: the accesses they absorb, their reports and cost.

Each case has its own domain with a survivor that checks every result, a client that accesses zones, and a
tracker on that client for serviced and fatal faults.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.hostguard import ask, mappings
from faultinject.campaigns.measure.nvml import Nvml
from faultinject.campaigns.measure.rig import (
    Client,
    Domain,
    attach,
    available_mib,
    clients,
    domain,
    now,
)
from mpsd.base.model import UvmEvent
from mpsd.gpu.nvidia import uvm_abi
from mpsd.gpu.nvidia.uvm import NvidiaUvm, UvmTracker

BOTH = (1 << uvm_abi.EVENT_GPU_FAULT) | (1 << uvm_abi.EVENT_FATAL_FAULT)
WINDOW, WINDOW_END = 0x2000_0000_0000, 0x2800_0000_0000
PROGRAMS = {
    "torch": "import torch; x = torch.ones(1 << 20, device='cuda'); (x @ x).item()",
    "cupy": "import cupy; x = cupy.ones(1 << 20); float((x * x).sum())",
    "jax": "import jax, jax.numpy as n; float((n.ones(1 << 20) * 2).sum())",
}


class Watch:
    """Takes the events of one tracker on a thread, and remembers when each batch came."""

    def __init__(self, tracker: UvmTracker) -> None:
        self._tracker = tracker
        self.events: list[tuple[float, UvmEvent]] = []
        self.dropped = 0
        self.arrived = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            batch = self._tracker.drain()
            self.events += [(now(), event) for event in batch.events]
            self.dropped += batch.dropped
            if batch.events:
                self.arrived.set()
            else:
                time.sleep(0.0002)

    def clear(self) -> None:
        self.events, self.dropped = [], 0
        self.arrived.clear()

    def summary(self, since: float) -> dict[str, Any]:
        """Return the events since then: kinds, addresses, and the delay of the first in ms."""
        rows = list(self.events)
        kinds = Counter(f"{'fatal' if e.fatal else 'serviced'} {e.access.name}" for _, e in rows)
        return {
            "events": dict(kinds),
            "dropped": self.dropped,
            "first ms": round((rows[0][0] - since) * 1e3, 2) if rows else None,
            "addresses": sorted({hex(e.address) for _, e in rows})[:4],
        }

    def close(self) -> None:
        self._ended.set()
        self._thread.join(2)
        self._tracker.close()


def state_of(survivor: Client) -> dict[str, Any]:
    """Return whether the survivor lives, and its longest round since the last report."""
    event = survivor.find("error", "wrong")
    if event is None:
        survivor.forget()
        survivor.say("report")
        event = survivor.wait("alive", "error", "wrong", timeout_s=5)
    return {key: event[key] for key in ("ev", "longest_ms", "code") if key in event}


Rows = list[Any]
Case = Callable[[Domain, Client, Client, Watch, Rows], None]


def single(where: str, _: Domain, survivor: Client, zone_client: Client, watch: Watch, rows: Rows) -> None:
    """Access the zones on either side, the null page, and a freed buffer, once by each kind."""
    rows.append({"what": "laying", **ask(zone_client, f"lay {where}")})
    touches = [
        ("store", "0x200000"), ("store", "-4"), ("load", "0x1800000"), ("atomic", "0x1a00000"),
        ("store", "0x1200000"), ("prefetch", "0x1400000"), ("store", "null"), ("load", "null"),
    ]  # fmt: skip
    for kind, offset in touches:
        watch.clear()
        answer = ask(zone_client, f"touch {kind} {offset}")
        watch.arrived.wait(0.3)
        rows.append({
            "what": f"{kind} at {offset}", **answer, **watch.summary(answer.get("launched", now())),
            "survivor": state_of(survivor),
        })  # fmt: skip
    # The last one is fatal.
    for command in (
        "quarantine", "register", "managed 64", "fork", "rss", "many 512", "unmap_under_work",
    ):  # fmt: skip
        watch.clear()
        rows.append({"what": command, **ask(zone_client, command), **watch.summary(now())})
        rows[-1]["survivor"] = state_of(survivor)


def storm(mode: str, mib: int, grid: int, leave_mib: int | None = None, *, where: str = "gpu") -> Case:
    """Run a grid over zones until it is terminated, with plenty of GPU memory or nearly none."""

    def run(mps_domain: Domain, survivor: Client, zone_client: Client, watch: Watch, rows: Rows) -> None:
        ask(zone_client, f"lay {where}")
        row: dict[str, Any] = {"what": f"{mode}s over {mib} MiB, {grid} blocks, pages on the {where}"}
        if mib > 32:
            ask(zone_client, f"zone {0x200000 + (32 << 20):#x} {mib - 32}")
        if leave_mib is not None:
            row["filled"] = ask(zone_client, f"fill {leave_mib}")
            row["what"] += f", {leave_mib} MiB of GPU memory left"
        row["before"] = state_of(survivor)
        server, host_mib = mps_domain.server(), available_mib()
        watch.clear()
        zone_client.forget()
        zone_client.say(" ".join(("stray", mode, "0x200000", str(mib), "400", str(grid))))
        watch.arrived.wait(2)
        seen = now()
        # As long as an eviction takes to begin: the storm goes on meanwhile.
        reply = mps_domain.ctl(f"terminate_client {server} {zone_client.pid}", 2)
        ended = now()
        zone_client.kill()
        row |= {
            "event to termination ms": round((ended - seen) * 1e3, 1),
            "reply": reply,
            "host MiB taken": host_mib - available_mib(),
            **watch.summary(seen),
        }
        zone_client.reap()
        time.sleep(0.5)
        rows.append(row | {"survivor": state_of(survivor), "server": mps_domain.ctl("get_server_list")})

    return run


def endure(mode: str, mib: int, grid: int, *, where: str = "gpu") -> Case:
    """Run such a grid for 100 ms without terminating it: what does it cost the other clients?"""

    def run(_: Domain, survivor: Client, zone_client: Client, watch: Watch, rows: Rows) -> None:
        ask(zone_client, f"lay {where}")
        state_of(survivor)
        watch.clear()
        host_mib = available_mib()
        answer = ask(zone_client, " ".join(("stray", mode, "0x200000", str(mib), "100", str(grid))))
        rows.append({
            "what": f"{mode}s over {mib} MiB for 100 ms, {grid} blocks, {where}", **answer,
            **watch.summary(answer.get("launched", now())), "host MiB taken": host_mib - available_mib(),
            "survivor": state_of(survivor), "memory": ask(zone_client, "rss"),
        })  # fmt: skip

    return run


def full(where: str, _: Domain, survivor: Client, zone_client: Client, watch: Watch, rows: Rows) -> None:
    """Access zones when the GPU has no memory left; once, because the driver has to find pages."""
    rows.append({"what": "laying", **ask(zone_client, f"lay {where}")})
    rows.append({"what": "fill", **ask(zone_client, "fill 0")})
    for kind, offset in (
        ("store", "0x200000"),
        ("atomic", "0x1400000"),
        ("load", "-4"),
        ("store", "null"),
    ):
        watch.clear()
        answer = ask(zone_client, f"touch {kind} {offset}")
        watch.arrived.wait(0.3)
        seen = watch.summary(answer.get("launched", now()))
        rows.append({"what": f"{kind} at {offset}", **answer, **seen, "survivor": state_of(survivor)})
    rows.append({"what": "drain", **ask(zone_client, "drain"), "survivor": state_of(survivor)})


def windows(mps_domain: Domain) -> list[Any]:
    """Check whether the addresses of the window are free in programs of other libraries."""
    rows = []
    for name, source in PROGRAMS.items():
        code = source + "\nprint('up', flush=True); import sys; sys.stdin.readline()"
        environment = mps_domain.env | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        program = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        timer = threading.Timer(40, program.kill)
        timer.start()
        assert program.stdout is not None
        try:
            up = program.stdout.readline().strip() == "up"
            found = mappings(program.pid) if up else []
        finally:
            program.kill()
            program.communicate()
            timer.cancel()
        rows.append({
            "what": f"window in {name}", "up": up, "mappings": len(found),
            "inside": [[hex(a), hex(b), n] for a, b, _, n in found if a < WINDOW_END and b > WINDOW],
            "large": [[hex(a), hex(b), p, n] for a, b, p, n in found if b - a >= 1 << 30],
        })  # fmt: skip
    return rows


ALL_SMS = 132 * 8
CASES: dict[str, Case] = {
    "single accesses": partial(single, "gpu"),
    "single accesses, host": partial(single, "host"),
    "one block": storm("store", 32, 1),
    "full grid": storm("store", 32, ALL_SMS),
    "full grid, host": storm("store", 32, ALL_SMS, where="host"),
    "loads": storm("load", 32, ALL_SMS),
    "loads, host": storm("load", 32, ALL_SMS, where="host"),
    "atomics": storm("atomic", 32, ALL_SMS),
    "atomics, host": storm("atomic", 32, ALL_SMS, where="host"),
    "16 MiB": storm("store", 16, ALL_SMS),
    "16 MiB, host": storm("store", 16, ALL_SMS, where="host"),
    "64 MiB": storm("store", 64, ALL_SMS),
    "64 MiB, host": storm("store", 64, ALL_SMS, where="host"),
    "256 MiB": storm("store", 256, ALL_SMS),
    "256 MiB, host": storm("store", 256, ALL_SMS, where="host"),
    "SMs left": storm("store", 32, 64),
    "SMs left, host": storm("store", 32, 64, where="host"),
    "GPU nearly full": storm("store", 32, ALL_SMS, 128),
    "GPU full": partial(full, "gpu"),
    "GPU full, host": partial(full, "host"),
    "endured": endure("store", 32, ALL_SMS),
    "endured, host": endure("store", 32, ALL_SMS, where="host"),
    "endured, free SMs": endure("store", 32, 8),
}


def run_cases(cases: Mapping[str, Case], out: Path, cubin: Path, uvm: NvidiaUvm, rows: list[Any]) -> None:
    """Run each case in a domain of its own, with a survivor and the client that lays zones."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    for index, (name, case) in enumerate(cases.items()):
        with domain(f"zones{index}", out, start_server=True) as mps_domain:
            survivor, zone_client = mps_domain.client("survivor", cubin), mps_domain.client("zones", cubin)
            with clients(survivor, zone_client):
                found: Rows = []
                try:
                    survivor.wait("ready")
                    zone_client.wait("ready")
                    space = attach(uvm, zone_client)
                    watch = Watch(space.track(BOTH))
                    try:
                        case(mps_domain, survivor, zone_client, watch, found)
                    finally:
                        watch.close()
                        space.close()
                except Exception as error:
                    found.append({"failed": f"{type(error).__name__}: {error}"})
                rows += [{"case": name, **row} for row in found]


def measure(out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml, rows: list[Any]) -> None:
    run_cases(CASES, out, cubin, uvm, rows)
    with domain("windows", out, start_server=True) as mps_domain:
        rows += [{"case": "windows", **row} for row in windows(mps_domain)]
