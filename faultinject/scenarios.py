"""How a run goes: one function for each story, and what surrounds all of them."""

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

from faultinject.faults import Fault, Heal, Hit, Story
from faultinject.history import clock
from faultinject.programs.talk import UNDERWAY_S
from faultinject.stage import UP_S, Stage, process_state, wait_for
from mpsd.errors import UnsupportedError

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
PID_BACK_S = 30.0


def misdeed(stage: Stage) -> None:
    """The offender commits its misdeed; then: record, a new client, a fresh server."""
    stage.fire()
    if stage.fault.hit in (Hit.ABSORBED, Hit.SILENT):
        stage.prove_alive()
    aftermath(stage)


def gpu_full(stage: Stage) -> None:
    """The same while another client holds all of the GPU's memory; newcomers come when it is back."""
    filler = stage.fill_gpu()
    stage.fire()
    stage.await_record()
    for offender in stage.offenders:
        offender.wait("gone", timeout=stage.node.busy_s + UP_S)
    # What a fault does to others shows in this time: the GPU stays full for as long.
    time.sleep(stage.node.quiet_s)
    stage.end_filler(filler)
    aftermath(stage)


def frozen(stage: Stage) -> None:
    """The offender is stopped by mpsd; while it stands the others compute; then it is evicted on request."""
    stage.fire()
    stage.await_record()
    stage.await_frozen()
    time.sleep(stage.node.quiet_s)
    stage.evict(stage.offenders[0])
    stage.offenders[0].wait("gone", timeout=UP_S)
    aftermath(stage)


def hit_after_restart(stage: Stage) -> None:
    """mpsd dies while programs have guard zones; under the next one, once they are back, a zone is hit."""
    mpsd = stage.rig.mpsd
    mpsd.kill()
    mpsd.start()
    at = stage.await_attached()
    pids = [w.pid for w in (*stage.survivors, *stage.offenders)]
    stage.history.add("mpsd", "readopted", all=at is not None, pids=pids)
    stage.note_zones(UP_S)
    misdeed(stage)


def aftermath(stage: Stage) -> None:
    """What every fault is followed by."""
    record = stage.await_record()
    if record is None and not stage.rig.has_mpsd:
        # Under stock MPS nobody says when: a newcomer tries as soon as a survivor has seen it.
        wait_for(lambda: any(s.heard("error", "gone") for s in stage.survivors), stage.node.quiet_s)
    if stage.fault.memory_back:
        # First, because a newcomer would take memory of its own meanwhile.
        stage.watch_memory()
    stage.send_newcomer()
    stage.watch_fresh(record)
    if stage.fault.poisons:
        stage.watch_poison()
    if stage.fault.kind.endswith("_running") and stage.fault.variant != "endless":
        stage.let_kernels_end()
    stage.settle()


def eviction(stage: Stage) -> None:
    """The offender's kernel runs; it is stopped, or killed from elsewhere, or just evicted."""
    stage.fire()
    time.sleep(UNDERWAY_S)
    offender, kind = stage.offenders[0], stage.fault.kind
    if kind == "sigstop":
        offender.signal(signal.SIGSTOP)
        wait_for(lambda: process_state(offender.pid) == "T", 2.0)
    if kind == "sigstop" and not stage.rig.has_mpsd:
        # Stock MPS has no safe way out: asked to terminate a stopped client it stalls everyone.
        time.sleep(UNDERWAY_S)
        offender.signal(signal.SIGCONT)
    elif kind == "dies_while_evicted":
        asking = threading.Thread(target=stage.evict, args=(offender,))
        asking.start()
        # Not before mpsd has begun (or is done already): a dead process is nobody to evict.
        wait_for(lambda: not asking.is_alive() or being_evicted(stage, offender.pid), UP_S)
        offender.signal(signal.SIGKILL)
        asking.join()
    else:
        stage.evict(offender)
    offender.wait("gone", timeout=UP_S)
    aftermath(stage)


def being_evicted(stage: Stage, pid: int) -> bool:
    """Whether mpsd has taken up a request to evict this client."""
    clients = stage.rig.mpsd.status()["clients"]
    return any(c["pid"] == pid and c["state"] in ("terminating", "killing") for c in clients)


def part_dies(stage: Stage) -> None:
    """SIGKILL of the MPS server or of the control daemon."""
    part = stage.fault.kind.removesuffix("_death")
    pid = stage.rig.service.part(part)
    if pid is None:
        raise UnsupportedError(f"the {part} of the active domain is not known")
    stage.fired_by_rig(part=part, pid=pid)
    os.kill(pid, signal.SIGKILL)
    aftermath(stage)


def daemon_dies(stage: Stage) -> None:
    """A client dies with its kernel running, mpsd dies at once; a new mpsd takes over."""
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

    at = mpsd.until(readopted, 10.0)
    stage.history.add("mpsd", "readopted", all=at is not None, pids=sorted(alive))
    stage.send_newcomer()
    stage.settle()


def disk_full(stage: Stage) -> None:
    """No byte can be written to the logs any more; then a client is killed in mid-kernel."""
    disk = stage.rig.disk
    if disk is not None and disk.mounted:
        disk.fill()
        stage.rig.note(disk="tmpfs filled")
    else:
        # Without a disk of its own: nothing that mpsd itself writes to a file gets longer any more.
        resource.prlimit(stage.rig.mpsd.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        stage.rig.note(disk="file size limit of mpsd set to 0")
    stage.fire()
    aftermath(stage)


def pid_reuse(stage: Stage) -> None:
    """A client exits; its pid comes back as a stranger, whom somebody asks to evict."""
    client = stage.offenders[0]
    ready = client.must("ready", timeout=UP_S)
    stage.fire()
    client.wait("gone", timeout=UP_S)
    client.end()
    stranger = process_with_pid(client.pid)
    if stranger is None:
        raise UnsupportedError(f"pid {client.pid} did not come back in {PID_BACK_S:g} s")
    try:
        for ticks in (int(ready.data["start_ticks"]), None):
            stage.ask_to_kill(client, ticks)
        alive = stranger.poll() is None
        stage.history.add("rig", "innocent", alive=alive, pid=stranger.pid)
    finally:
        stranger.kill()
        stranger.wait()
    stage.send_newcomer()
    stage.settle()


def process_with_pid(pid: int) -> subprocess.Popen[bytes] | None:
    """A process that sleeps, with this very pid; None when others had it all the time."""
    end = time.monotonic() + PID_BACK_S
    while time.monotonic() < end:
        # Who was quicker has it until it ends.
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), end - time.monotonic())
        LAST_PID.write_text(str(pid - 1))
        child = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
        if child.pid == pid:
            return child
        child.kill()
        child.wait()
    return None


def churn(stage: Stage) -> None:
    """As many clients as the node's driver takes, of which the crowd's come and go."""
    members = stage.node.clients - stage.options.survivors - 1
    crowd = stage.rig.spawn("crowd", "crowd", "--clients", str(members), "--seed", str(stage.options.seed))
    crowd.must("ready", timeout=UP_S)
    stage.fired_by_rig(members=members)
    time.sleep(stage.node.churn_s)
    crowd.tell("stop")
    crowd.wait("done", "gone", timeout=60.0)
    stage.send_newcomer()
    if stage.rig.has_mpsd:
        ours = {w.pid for w in stage.survivors}

        def calm(status: Mapping[str, Any]) -> bool:
            return not status["dead"] and {c["pid"] for c in status["clients"]} <= ours

        stage.newcomers[0].wait("gone", timeout=UP_S) if stage.newcomers else None
        at = stage.rig.mpsd.until(calm, 10.0)
        stage.rig.note(all_forgotten=at is not None)
    stage.settle()


STORIES: Mapping[Story, Callable[[Stage], None]] = {
    Story.MISDEED: misdeed,
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
    """Undo what does not undo itself, whatever became of the story."""
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
    """The whole run: bring up, story, heal, finish. Raises MpsdError where the rig itself failed."""
    began = clock()
    stage.bring_up()
    try:
        STORIES[stage.fault.story](stage)
    finally:
        heal(stage, stage.fault)
    stage.finish()
    stage.rig.note(played_s=round(clock() - began, 3))
