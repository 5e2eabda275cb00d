"""The course of a run: one function for each story, and what surrounds all of them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from faultinject.programs.basics.messages import UNDERWAY_S
from faultinject.registry.faults import (
    Fault,
    Heal,
    Hit,
    Story,
)
from faultinject.registry.history import clock
from faultinject.rig.stage import (
    STEP_S,
    UP_S,
    Stage,
    process_state,
    wait_for,
)
from mpsd.base.errors import UnsupportedError

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
PID_BACK_S = 30.0


def inject(stage: Stage) -> None:
    """Let the offender commit its fault; then wait for the record, a new client, a fresh server."""
    stage.fire()
    if stage.fault.hit in (Hit.ABSORBED, Hit.SILENT):
        stage.prove_alive()
    aftermath(stage)


def gpu_full(stage: Stage) -> None:
    """The same while another client holds all GPU memory; new clients start when it is free again."""
    filler = stage.fill_gpu()
    stage.fire()
    stage.await_record()
    for offender in stage.offenders:
        offender.wait("gone", timeout=stage.node.busy_s + UP_S)
    # Effects on other clients show within this time, so the GPU stays full for as long.
    time.sleep(stage.node.quiet_s)
    stage.end_filler(filler)
    aftermath(stage)


def frozen(stage: Stage) -> None:
    """Let mpsd stop the offender; the others compute meanwhile; then evict it on request."""
    stage.fire()
    stage.await_record()
    stage.await_frozen()
    time.sleep(stage.node.quiet_s)
    stage.evict(stage.offenders[0])
    stage.offenders[0].wait("gone", timeout=UP_S)
    aftermath(stage)


def hit_after_restart(stage: Stage) -> None:
    """Kill mpsd while programs have guard zones; restart it, adopt them, then hit a zone."""
    mpsd = stage.rig.mpsd
    mpsd.kill()
    mpsd.start()
    at = stage.await_attached()
    pids = [w.pid for w in (*stage.survivors, *stage.offenders)]
    stage.history.add("mpsd", "readopted", all=at is not None, pids=pids)
    stage.note_zones(UP_S)
    inject(stage)


def aftermath(stage: Stage) -> None:
    """Take the steps that follow every fault."""
    record = stage.await_record()
    if record is None and not stage.rig.has_mpsd:
        # Stock MPS reports nothing: a new client starts as soon as a survivor has seen the fault.
        wait_for(lambda: any(s.first_message("error", "gone") for s in stage.survivors), stage.node.quiet_s)
    if stage.fault.memory_back:
        # First, because a new client takes memory too.
        stage.watch_memory()
    stage.send_newcomer()
    stage.watch_fresh(record)
    stage.watch_poison()
    if stage.fault.kind.endswith("_running") and stage.fault.variant != "endless":
        stage.let_kernels_end()
    stage.settle()


def eviction(stage: Stage) -> None:
    """Let the offender's kernel run, and stop, kill or evict the offender."""
    stage.fire()
    time.sleep(UNDERWAY_S)
    offender, kind = stage.offenders[0], stage.fault.kind
    if kind == "sigstop":
        offender.signal(signal.SIGSTOP)
        wait_for(lambda: process_state(offender.pid) == "T", STEP_S)
    if kind == "sigstop" and not stage.rig.has_mpsd:
        # Stock MPS cannot evict a stopped client: terminate_client would block every client.
        time.sleep(UNDERWAY_S)
        offender.signal(signal.SIGCONT)
    elif kind == "dies_while_evicted":
        asking = threading.Thread(target=stage.evict, args=(offender,))
        asking.start()
        # Not before mpsd has begun (or is done): a process that has ended cannot be evicted.
        wait_for(lambda: not asking.is_alive() or being_evicted(stage, offender.pid), UP_S)
        offender.signal(signal.SIGKILL)
        asking.join()
    else:
        stage.evict(offender)
    offender.wait("gone", timeout=UP_S)
    aftermath(stage)


def being_evicted(stage: Stage, pid: int) -> bool:
    """Return whether mpsd has begun to evict this client."""
    clients = stage.rig.mpsd.status()["clients"]
    return any(c["pid"] == pid and c["state"] in ("terminating", "killing") for c in clients)


def part_dies(stage: Stage) -> None:
    """Send SIGKILL to the MPS server or the control daemon."""
    part = stage.fault.kind.removesuffix("_death")
    pid = stage.rig.service.part(part)
    if pid is None:
        raise UnsupportedError(f"the {part} of the active domain is not known")
    stage.fired_by_rig(part=part, pid=pid)
    os.kill(pid, signal.SIGKILL)
    aftermath(stage)


def daemon_dies(stage: Stage) -> None:
    """Let a client die with its kernel running, and mpsd right after it. A restarted mpsd adopts the rest."""
    stage.fire()
    stage.offenders[0].wait("gone", timeout=UP_S)
    mpsd = stage.rig.mpsd
    mpsd.kill()
    stage.let_kernels_end()
    time.sleep(stage.node.quiet_s)
    mpsd.start()
    alive = {s.pid for s in stage.survivors if s.running}

    def readopted(status: Mapping[str, Any]) -> bool:
        return alive <= {c["pid"] for c in status["clients"] if c["state"] == "attached"}

    at = mpsd.until(readopted, STEP_S)
    stage.history.add("mpsd", "readopted", all=at is not None, pids=sorted(alive))
    stage.send_newcomer()
    stage.settle()


def disk_full(stage: Stage) -> None:
    """Fill the log disk; then kill a client while its kernel runs."""
    disk = stage.rig.disk
    if disk is not None and disk.mounted:
        disk.fill()
        stage.rig.note(disk="tmpfs filled")
    else:
        # Without a disk of its own: no file of mpsd's may grow any more.
        resource.prlimit(stage.rig.mpsd.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        stage.rig.note(disk="file size limit of mpsd set to 0")
    stage.fire()
    aftermath(stage)


def pid_reuse(stage: Stage) -> None:
    """Let a client exit and another process get its pid; then request the eviction of that pid."""
    client = stage.offenders[0]
    ready = client.require("ready", timeout=UP_S)
    stage.fire()
    client.wait("gone", timeout=UP_S)
    client.end()
    other_process = process_with_pid(client.pid)
    if other_process is None:
        raise UnsupportedError(f"pid {client.pid} did not come back in {PID_BACK_S:g} s")
    try:
        for ticks in (int(ready.data["start_ticks"]), None):
            stage.ask_to_kill(client, ticks)
        alive = other_process.poll() is None
        stage.history.add("rig", "innocent", alive=alive, pid=other_process.pid)
    finally:
        other_process.kill()
        other_process.wait()
    stage.send_newcomer()
    stage.settle()


def process_with_pid(pid: int) -> subprocess.Popen[bytes] | None:
    """Return a sleeping process with exactly this pid; None if other processes kept it."""
    end = time.monotonic() + PID_BACK_S
    while time.monotonic() < end:
        # Another process was quicker, and keeps the pid until it ends.
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), end - time.monotonic())
        LAST_PID.write_text(str(pid - 1))
        child = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
        if child.pid == pid:
            return child
        child.kill()
        child.wait()
    return None


def churn(stage: Stage) -> None:
    """Start as many clients as the driver takes; those of the crowd start and end all the time."""
    members = stage.node.clients - stage.options.survivors - 1
    crowd = stage.rig.spawn("crowd", "crowd", "--clients", str(members), "--seed", str(stage.options.seed))
    crowd.require("ready", timeout=UP_S)
    stage.fired_by_rig(members=members)
    time.sleep(stage.node.churn_s)
    crowd.tell("stop")
    crowd.wait("done", "gone", timeout=60.0)
    stage.send_newcomer()
    if stage.rig.has_mpsd:
        own_pids = {w.pid for w in stage.survivors}

        def quiet(status: Mapping[str, Any]) -> bool:
            return not status["dead"] and {c["pid"] for c in status["clients"]} <= own_pids

        stage.newcomers[0].wait("gone", timeout=UP_S) if stage.newcomers else None
        at = stage.rig.mpsd.until(quiet, STEP_S)
        stage.rig.note(all_forgotten=at is not None)
    stage.settle()


STORIES: Mapping[Story, Callable[[Stage], None]] = {
    Story.INJECT: inject,
    Story.EVICTION: eviction,
    Story.PART_DIES: part_dies,
    Story.DAEMON_DIES: daemon_dies,
    Story.DISK_FULL: disk_full,
    Story.PID_REUSE: pid_reuse,
    Story.CHURN: churn,
    Story.GPU_FULL: gpu_full,
    Story.FROZEN: frozen,
    Story.HIT_AFTER_RESTART: hit_after_restart,
}


def heal(stage: Stage, fault: Fault) -> None:
    """Repair what does not heal by itself, however the story ended."""
    match fault.heal:
        case Heal.KILL_OFFENDER:
            for offender in stage.offenders:
                offender.signal(signal.SIGKILL)
        case Heal.RESTART_DAEMON if stage.rig.mpsd.ended:
            stage.rig.mpsd.start()
        case Heal.FREE_DISK if stage.rig.disk is not None and stage.rig.disk.mounted:
            stage.rig.disk.free()
        case Heal.FREE_DISK if stage.rig.has_mpsd:
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(stage.rig.mpsd.pid, resource.RLIMIT_FSIZE, unlimited)


def play(stage: Stage) -> None:
    """Run everything: set up, story, heal, finish. Raises MpsdError when the rig itself failed."""
    began = clock()
    stage.bring_up()
    try:
        STORIES[stage.fault.story](stage)
    finally:
        heal(stage, stage.fault)
    stage.finish()
    stage.rig.note(played_s=round(clock() - began, 3))
