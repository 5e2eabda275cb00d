"""Which sign tells, and never too early, that the kernels of an exited client have ended?

A client counts in memory shared with a survivor and dies while its kernel runs. This process, which has no
CUDA context, holds its lease. The survivor sees the counter stop: that is the true end. Every sign that an
outsider can read is sampled meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.nvml import Nvml, Occupancy
from faultinject.campaigns.measure.rig import (
    Client,
    Domain,
    Recorder,
    attach,
    available_mib,
    now,
    relative,
)
from mpsd.base.errors import DeadlineError
from mpsd.gpu.nvidia.uvm import NvidiaUvm, UvmAddressSpace
from mpsd.gpu.nvidia.work import NvidiaWork, ProcessWork


@dataclass(frozen=True)
class Case:
    """One death. `end` is sigkill, or what the worker does itself (exit, segfault, clean).

    `flag_after_s` ends an endless kernel this long after the death, through the shared memory.
    """

    name: str
    variant: str
    seconds: float
    end: str = "sigkill"
    ballast_mib: int = 0
    kill_after_s: float = 0.1
    flag_after_s: float | None = None


CASES = (
    Case("single 0.3 s", "single", 0.3),
    Case("single 1 s", "single", 1.0),
    Case("single 3 s", "single", 3.0),
    Case("three kernels queued, 1 s in all", "queued", 1.0),
    Case("40 kernels queued, 1 s in all", "many", 1.0),
    Case("two streams 0.4 and 0.8 s", "two_streams", 0.8),
    Case("16 streams, up to 0.8 s", "streams", 0.8),
    Case("graph 3 x 0.3 s", "graph", 0.9),
    Case("graph of two branches 0.4 and 0.8 s", "fork", 0.8),
    Case("5000 launches, then 0.8 s", "warm", 0.8),
    Case("64 GiB of copies from the host, then a kernel", "copies", 0.1),
    Case("grid fills the GPU, 1 s", "fill", 1.0),
    Case("exit in mid-kernel, 1 s", "single", 1.0, "exit"),
    Case("segfault in mid-kernel, 1 s", "single", 1.0, "segfault"),
    Case("killed while idle", "idle", 0.0),
    Case("clean exit", "idle", 0.0, "clean"),
    Case("killed after its kernel ended", "single", 0.2, kill_after_s=0.6),
    Case("1 s, with 1 GiB of host and of GPU memory", "single", 1.0, ballast_mib=1024),
    Case("endless until a flag after 2.5 s", "single", 60.0, flag_after_s=2.5),
    Case("endless with a kernel queued behind, flag after 4 s", "behind", 60.0, flag_after_s=4.0),
)


def threads_of(pid: int) -> str:
    """Return how many threads and descriptors a process has."""
    base = Path(f"/proc/{pid}")
    return f"{len(os.listdir(base / 'task'))} threads, {len(os.listdir(base / 'fd'))} fds"


def sample_everything(
    domain: Domain, nvml: Nvml, server: int, worker: Client, work: Mapping[str, ProcessWork]
) -> Recorder:
    """Start all samplers."""
    recorder = Recorder()
    every = recorder.every
    every(0.005, "client_list", lambda: sorted(domain.ctl(f"get_client_list {server}").split()))
    every(0.02, "ps", lambda: [line.split()[:2] for line in domain.ctl("ps").splitlines()[1:]])
    every(0.02, "server_status", lambda: domain.ctl(f"get_server_status {server}"))
    every(0.01, "nvml_processes", nvml.processes)
    every(0.01, "nvml_mps_processes", nvml.mps_processes)
    every(0.02, "nvml_process_utilization", lambda: [s for s in nvml.utilization() if s[0] == worker.pid])
    every(0.02, "nvml_gpu_busy", nvml.gpu_busy)
    every(0.005, "nvml_used_mib", nvml.used_mib)
    every(0.005, "server_process", lambda: threads_of(server))
    every(0.1, "gpm_graphics_sm_occupancy", Occupancy(nvml))
    for name, view in work.items():
        every(0.005, f"completion_words_{name}", partial(read_completion_words, worker, view))
    return recorder


def read_completion_words(worker: Client, view: ProcessWork) -> str:
    """Return what the completion words of an exited client say."""
    if worker.death is None:
        return "alive"
    pending = view.pending()
    if pending is None:
        return "cannot tell"
    return f"pending: {pending.split(',')[0]}" if pending else "ended"


def release(space: UvmAddressSpace, nvml: Nvml, before: tuple[int, int]) -> dict[str, Any]:
    """Close the lease; return how long until GPU and host memory are free (`before` the client: MiB)."""
    held = (nvml.used_mib(), available_mib())
    began = now()
    space.close()
    closed = now()
    gpu_back = host_back = None
    while now() - closed < 0.6 and (gpu_back is None or host_back is None):
        moment = now()
        if gpu_back is None and nvml.used_mib() <= before[0] + 2:
            gpu_back = moment
        if host_back is None and available_mib() >= before[1] - 96:
            host_back = moment
        time.sleep(0.001)

    def after(moment: float | None) -> float | None:
        return None if moment is None else round((moment - began) * 1e3, 1)

    return {
        "close_ms": after(closed),
        "gpu_back_ms": after(gpu_back),
        "host_back_ms": after(host_back),
        "gpu_mib_before_held_after": [before[0], held[0], nvml.used_mib()],
        "host_mib_before_held_after": [before[1], held[1], available_mib()],
    }


def run_and_end(
    case: Case, worker: Client, survivor: Client, work: ProcessWork
) -> tuple[float, float, int | None]:
    """Start the work, end the process, wait for the end of the work; return (killed, true end, status)."""
    worker.say(f"{case.variant} {case.seconds} {case.end if case.end != 'sigkill' else 'none'}")
    launched = worker.wait("launched")["seen"]
    busy = case.variant != "idle"
    if busy and case.variant != "copies":
        survivor.wait("moving", timeout_s=3)
    work.refresh()
    time.sleep(max(0.0, launched + case.kill_after_s - now()))
    killed = now()
    if case.end == "sigkill":
        worker.kill()
    else:
        worker.say("")
    if case.flag_after_s is not None:
        time.sleep(case.flag_after_s)
        survivor.say("flag1")
    status = worker.reap()
    if not busy:
        return killed, killed, status
    still = survivor.wait("still", "error", timeout_s=case.seconds % 60 + 5)
    if still["ev"] == "error":
        raise DeadlineError(f"the survivor was lost: {still}")
    return killed, float(still["last"]), status


def first_time(changes: list[tuple[float, Any]], value: str) -> float | None:
    return next((t for t, seen in changes if seen == value), None)


class Attempt:
    """Run one case from the worker's start to the release of its lease."""

    def __init__(self, domain: Domain, survivor: Client, cubin: Path, uvm: NvidiaUvm, nvml: Nvml) -> None:
        self._domain, self._survivor, self._nvml, self._uvm = domain, survivor, nvml, uvm
        self._cubin = cubin
        self._space: UvmAddressSpace | None = None
        self._work: dict[str, ProcessWork] = {}
        self._recorder: Recorder | None = None

    def run(self, case: Case) -> dict[str, Any]:
        before = (self._nvml.used_mib(), available_mib())
        self._survivor.say("flag0")
        self._survivor.wait("flagged")
        self._survivor.forget()
        path = str(self._domain.base / "share")
        worker = self._domain.client("worker", self._cubin, path, str(case.ballast_mib))
        try:
            return self._run(case, worker, before)
        finally:
            self._clear(worker)

    def _run(self, case: Case, worker: Client, before: tuple[int, int]) -> dict[str, Any]:
        worker.wait("ready")
        self._space = attach(self._uvm, worker)
        # One view knows only the mappings at the start, one is refreshed before the death.
        for name in ("early", "late"):
            self._work[name] = NvidiaWork().open(worker.instance(), worker.pidfd)
        server = self._domain.server()
        self._recorder = recorder = sample_everything(self._domain, self._nvml, server, worker, self._work)
        time.sleep(0.05)
        killed, end, status = run_and_end(case, worker, self._survivor, self._work["late"])
        time.sleep(0.3)
        recorder.close()
        leased = self._report()
        figures = release(self._space, self._nvml, before)
        time.sleep(0.2)
        ended = {
            name: first_time(recorder.changes[f"completion_words_{name}"], "ended") for name in self._work
        }
        return {
            "case": case.name,
            "client": worker.pid,
            "exit_status": status,
            "kill_to_pidfd_ms": round(((worker.death or now()) - killed) * 1e3, 1),
            "end_after_kill_ms": round((end - killed) * 1e3, 1),
            "words_say_ended_ms_after_true_end": {
                name: None if t is None else round((t - end) * 1e3, 1) for name, t in ended.items()
            },
            "survivor_while_leased": leased,
            "survivor_after_release": self._report(),
            "release": figures,
            "samples": recorder.samples,
            "changes_ms_after_true_end": {n: relative(c, end) for n, c in recorder.changes.items()},
            "log": relative(
                [(t, x) for t, x in self._domain.log_lines.since(killed) if str(worker.pid) in x], end
            )[:12],
        }

    def _report(self) -> dict[str, Any]:
        self._survivor.forget()
        self._survivor.say("report")
        event = self._survivor.wait("alive", "error", "wrong", timeout_s=3)
        return {name: event[name] for name in ("ev", "rounds", "longest_ms", "text") if name in event}

    def _clear(self, worker: Client) -> None:
        if self._recorder is not None:
            self._recorder.close()
        if worker.process.poll() is None:
            worker.kill()
        worker.reap()
        with suppress(OSError):
            os.close(worker.pidfd)
        for view in self._work.values():
            view.close()
        if self._space is not None:
            self._space.close()


def measure(out: Path, cubin: Path, uvm: NvidiaUvm, nvml: Nvml, rows: list[Any]) -> None:
    """Run all cases; replace a domain with a harmed survivor."""
    domain: Domain | None = None
    survivor: Client | None = None
    serial = 0
    try:
        for case in CASES:
            if domain is None or survivor is None:
                domain, serial = Domain(f"end{serial}"), serial + 1
                survivor = domain.client("survivor", cubin, str(domain.base / "share"))
                survivor.wait("ready")
            try:
                rows.append(Attempt(domain, survivor, cubin, uvm, nvml).run(case))
            except Exception as error:
                rows.append({"case": case.name, "failed": f"{type(error).__name__}: {error}"})
            if survivor.find("error") or survivor.process.poll() is not None or "failed" in rows[-1]:
                rows[-1]["survivor_lost"] = survivor.find("error")
                _end(domain, survivor, out)
                domain = survivor = None
    finally:
        if domain is not None and survivor is not None:
            _end(domain, survivor, out)


def _end(domain: Domain, survivor: Client, out: Path) -> None:
    survivor.kill()
    survivor.reap()
    domain.close()
    domain.keep_logs(out / "logs" / domain.base.name.split("-")[1])
