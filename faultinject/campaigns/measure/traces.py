"""The traces of each kind of fault under stock MPS: log lines, Xids, states, client errors."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.nvml import Nvml, Xids
from faultinject.campaigns.measure.rig import (
    Client,
    Domain,
    KernelMessages,
    Recorder,
    attach,
    clients,
    domain,
    now,
    relative,
)
from mpsd.base.errors import DeadlineError, GpuError
from mpsd.gpu.nvidia.uvm import NvidiaUvm, UvmTracker

KINDS = (
    *("store", "load", "atomic", "null", "use_after_unmap", "read_only", "noncanonical", "misaligned"),
    *("shared_window", "local_window", "trap", "breakpoint", "stack_overflow", "wild_call"),
    *("wild_call_low", "pbdma", "assert", "sigkill_running", "exit_running", "segfault_running"),
    *("sigkill_idle", "clean_exit", "endless"),
)

# Kinds that the survivor is expected to outlive: do not wait long for its death.
_SURVIVED = {"assert", "sigkill_idle", "clean_exit", "wild_call_low", "endless"}


def watch_fault(
    mps_domain: Domain, kind: str, survivor: Client, offender: Client, tracker: UvmTracker | None
) -> float:
    """Inject the fault, and wait for what follows; return when it was injected."""
    fired = now()
    offender.say("go")
    with suppress(DeadlineError):
        survivor.wait("error", timeout_s=0.7 if kind in _SURVIVED else 2.5)
    time.sleep(0.1)
    return fired


def finish_endless(mps_domain: Domain, kind: str, server: int, offender: Client) -> dict[str, Any]:
    """Return how an endless kernel was ended."""
    if kind != "endless":
        return {}
    reply, status, took = mps_domain.ctl_full(f"terminate_client {server} {offender.pid}", 2.0)
    return {"terminate_client": [reply, status, round(took * 1e3, 1)]}


def measure_kind(out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml, xids: Xids, kind: str) -> dict[str, Any]:
    kmsg = KernelMessages()
    row: dict[str, Any] = {"kind": kind}
    with domain(f"kind-{kind}", out) as mps_domain:
        survivor = mps_domain.client("survivor", cubin)
        offender = mps_domain.client("offender", cubin, kind)
        with clients(survivor, offender):
            survivor.wait("ready")
            offender.wait("ready")
            server = mps_domain.server()
            space = attach(uvm, offender)
            tracker = space.track()
            space.close()
            recorder = Recorder()
            recorder.every(0.004, "server_status", lambda: mps_domain.ctl(f"get_server_status {server}", 1.5))
            recorder.every(0.002, "nvml_used_mib", nvml.used_mib)
            events: list[tuple[float, Any]] = []
            recorder.every(0.0005, "uvm_events", lambda: _drain(tracker, events))
            time.sleep(0.05)
            fired = watch_fault(mps_domain, kind, survivor, offender, tracker)
            row |= finish_endless(mps_domain, kind, server, offender)
            offender.say("leave")
            offender.reap(0.7 if kind in _SURVIVED else 1.5)
            exited_at = now()
            time.sleep(0.25)
            if kind in _SURVIVED and not survivor.find("error"):
                survivor.say("stop")
            survivor.reap(2)
            time.sleep(0.15)
            row |= {
                "server": server,
                "survivor_pid": survivor.pid,
                "offender_pid": offender.pid,
                "offender_left_ms": round((exited_at - fired) * 1e3, 1),
                "server_after": [
                    mps_domain.ctl("get_server_list"),
                    mps_domain.ctl(f"get_server_status {server}"),
                ],
            }
            recorder.close()
            tracker.close()
            row |= {
                "offender": _client_messages(offender, fired),
                "survivor": _client_messages(survivor, fired),
                "uvm_events": [[round((t - fired) * 1e3, 2), text] for t, text in events],
                "nvml_xids": relative(xids.since(fired), fired),
                "server_status": relative(recorder.changes["server_status"], fired),
                "server_log": relative(mps_domain.log_lines.since(fired), fired),
                "control_log": relative(
                    [(t, line) for t, line in mps_domain.log_lines.since(fired) if "UI" not in line][:12],
                    fired,
                ),
            }
    kmsg.close()
    row["kmsg"] = relative(kmsg.since(fired), fired)
    return row


def _drain(tracker: UvmTracker, into: list[tuple[float, Any]]) -> int:
    batch = tracker.drain()
    into += [(now(), f"{e.fault_type.name} {e.access} {e.reason.name} {e.address:#x}") for e in batch.events]
    return batch.dropped


def _client_messages(client: Client, fired: float) -> list[list[Any]]:
    wanted = ("fired", "dying", "sync_ok", "error", "stall", "wrong", "survived", "failed", "text")
    messages = [
        [round((e["t" if "t" in e else "seen"] - fired) * 1e3, 1), e]
        for e in client.events
        if e["ev"] in wanted
    ]
    for _, event in messages:
        event.pop("seen", None)
        event.pop("t", None)
    return [*messages, ["exit status", client.process.returncode]]


def measure(out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml, rows: list[Any]) -> None:
    xids = Xids(nvml)
    try:
        for kind in KINDS:
            try:
                rows.append(measure_kind(out, cubin, uvm, nvml, xids, kind))
            except (GpuError, DeadlineError, OSError, AssertionError) as error:
                rows.append({"kind": kind, "failed": f"{type(error).__name__}: {error}"})
    finally:
        xids.close()
