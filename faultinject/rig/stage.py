"""One run: the survivors, the offenders, and the steps that every story uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faultinject.programs.injection.inject import action_of
from faultinject.registry import kinds
from faultinject.registry.checkers import effective
from faultinject.registry.faults import (
    Fault,
    Hit,
    Need,
    Recording,
    under_kernel_module,
)
from faultinject.registry.history import Entry, History, clock
from faultinject.registry.kinds import AUTO, KMOD
from faultinject.registry.observation import observe
from faultinject.rig.libraries import FAR_BYTES, MPSD_RUN, Libraries
from faultinject.rig.rig import Rig
from faultinject.rig.worker import Worker
from mpsd.base.errors import DeadlineError, MpsdError, UnsupportedError

UP_S = 30.0
"""A program must be ready within this time, also on a busy machine."""

# What happens in time ends these waits at once, so a busy machine may have more.
RECORD_S = 15.0
NEWCOMER_S = 30.0
GUARD_S = 4.0
STEP_S = 20.0
FAR_LAID = 7 << 30
"""With this many on both sides the zones that offenders access exist: the nearest come first."""
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Options:
    """The user's choices for every run."""

    survivors: int = 3
    seed: int = 1
    newcomers: bool = True


def wait_for(condition: Callable[[], bool], timeout: float) -> bool:
    """Poll until the condition holds; return False at the deadline."""
    end = clock() + timeout
    while not condition():
        if clock() > end:
            return False
        time.sleep(POLL_S)
    return True


def process_state(pid: int) -> str:
    """Return the state letter of a process (proc(5)), `X` for one that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


class Stage:
    """The programs of one run. Stories call these methods in turn; every wait has a deadline."""

    def __init__(self, rig: Rig, fault: Fault, options: Options) -> None:
        self.rig, self.fault, self.options = rig, fault, options
        self.history: History = rig.history
        self.node, self.mode = rig.node, rig.mode
        self.survivors: list[Worker] = []
        self.offenders: list[Worker] = []
        self.newcomers: list[Worker] = []
        self.domain_before: str | None = None
        self.memory_before = 0

    # ---- before

    def bring_up(self) -> None:
        """Start every program, wait until all are ready and, with mpsd, attached. Raises MpsdError."""
        seeds = range(self.options.seed, self.options.seed + self.options.survivors)
        self.survivors = [self._survivor(i, seed * 7919) for i, seed in enumerate(seeds)]
        action = action_of(self.fault.kind)
        if action is not None:
            self.offenders = [self._offender(i, action) for i in range(self.fault.offenders)]
        for worker in (*self.survivors, *self.offenders):
            worker.require("ready", "error", "outcome", timeout=UP_S)
        if self.rig.has_mpsd:
            self._record_attached()
            self._await_standby()
            if self.mode == AUTO:
                self._await_protected()
            active = self.rig.mpsd.active()
            self.domain_before = active["id"] if active else None
        self.memory_before = self.node.gpu_memory_used()

    def _survivor(self, number: int, seed: int) -> Worker:
        name, args = f"survivor-{number}", ("--seed", str(seed))
        if self.fault.proxied_survivors or self.mode == AUTO:
            return self._proxied(name, "survivor", args)
        return self.rig.spawn(name, "survivor", *args)

    def _offender(self, number: int, action: str) -> Worker:
        fault = self.fault
        args = [action, "--variant", fault.variant, "--busy-s", str(self.node.busy_s)]
        args += ["--memory", str(self.node.memory), *(["--fill"] if fault.fills_gpu else [])]
        args += ["--stay"] if self.mode == KMOD and under_kernel_module(fault).absorbed else []
        environment: Mapping[str, str] | None = None
        if fault.kind == "other_domain":
            environment = self.rig.other_control().environ
        elif fault.kind == "outside_mps":
            environment = self.rig.environment()
        elif fault.bare:
            return self._with_driver(f"offender-{number}", "offender", args)
        elif Need.PROXY in fault.needs:
            return self._proxied(f"offender-{number}", "offender", args)
        return self.rig.spawn(f"offender-{number}", "offender", *args, environment=environment)

    def _proxied(self, name: str, module: str, args: Sequence[str]) -> Worker:
        """Start an ordinary program with mpsd-run. Raises UnsupportedError without a proxy."""
        libraries, service = self._libraries(), self.rig.mpsd
        # Survivors have none.
        far_bytes = FAR_BYTES if name.startswith("offender") else 0
        return self.rig.spawn(
            name,
            module,
            *args,
            environment=libraries.proxied(
                service.environment,
                service.socket,
                vault=True,
                far_bytes=far_bytes,
                host_guard_bytes=self.fault.host_guard_bytes,
            ),
            through=MPSD_RUN,
            device="standin" if libraries.driver else None,
        )

    def _libraries(self) -> Libraries:
        """Raises UnsupportedError without a proxy."""
        if self.rig.libraries is None:
            raise UnsupportedError(f"{self.fault.name} needs mpsd's libcuda", remedy="give --libcuda DIR")
        return self.rig.libraries

    def _with_driver(self, name: str, module: str, args: Sequence[str]) -> Worker:
        """Start an ordinary program of the CUDA driver without the proxy. Raises UnsupportedError."""
        libraries = self._libraries()
        environment = libraries.plain(self.rig.service.client_environment())
        device = "standin" if libraries.driver else None
        return self.rig.spawn(name, module, *args, environment=environment, device=device)

    def _await_protected(self) -> None:
        """Wait until every survivor has the level of the node, which a note then says.

        Raises DeadlineError.
        """
        level = self.rig.mpsd.status()["protection"]["level"]
        pids = {w.pid for w in self.survivors}

        def protected(status: Mapping[str, Any]) -> bool:
            return pids <= {c["pid"] for c in status["clients"] if c["protected"]["level"] == level}

        if self.rig.mpsd.until(protected, UP_S) is None:
            shown = [c["protected"] for c in self.rig.mpsd.status()["clients"] if c["pid"] in pids]
            raise DeadlineError(f"not every survivor had level {level} within {UP_S:.0f} s: {shown}")
        self.rig.note(level=level)

    def await_attached(self, deadline_s: float = 10.0) -> float | None:
        """Return when mpsd had attached every living client of this run; None at the deadline."""
        own_workers = self.survivors + ([] if self.fault.elsewhere else self.offenders)
        alive = {w.pid for w in own_workers if w.running}

        def all_attached(status: Mapping[str, Any]) -> bool:
            return alive <= {c["pid"] for c in status["clients"] if c["state"] == "attached"}

        return self.rig.mpsd.until(all_attached, deadline_s)

    def _record_attached(self) -> None:
        """Record when mpsd attached each client, on the client's clock where the client tells it."""
        workers_by_pid = {w.pid: w for w in self.survivors + ([] if self.fault.elsewhere else self.offenders)}
        at = self.await_attached()
        status = self.rig.mpsd.status()
        for client in status["clients"]:
            if client["pid"] in workers_by_pid:
                self._note_attached(client, workers_by_pid[client["pid"]], clock())
        if at is None:
            self.rig.note(not_attached=True)
        if self.fault.kind.startswith("guard_"):
            self._note_guard()
        if self.fault.zoned:
            self.note_zones()

    def _await_standby(self) -> None:
        """Wait for the standby domain, which a service has once it has run for a while."""
        if self.rig.mpsd.until_standby(10.0) is None:
            self.rig.note(no_standby=True)

    def _note_attached(self, client: Mapping[str, Any], worker: Worker, now: float) -> None:
        """Record the time from the client's own context to its attachment."""
        ready, took = worker.first_message("ready"), client["attach_ms"]
        late = None
        if ready is not None and took is not None:
            attached_at = now - client["noticed_s"] + took / 1e3
            late = round(max(0.0, attached_at - ready.data["context_at"]) * 1e3, 3)
        facts = {k: client[k] for k in ("pid", "state", "protections")}
        self.history.add("mpsd", "attached", ms=late, noticed_to_attached_ms=took, **facts)

    def _note_guard(self) -> None:
        wanted = self.fault.kind.removeprefix("guard_")
        pid, ready = self.offenders[0].pid, clock()

        def checked(status: Mapping[str, Any]) -> bool:
            # Guards follow new mappings of a client within a second.
            ages = [c["guard_checked_s"] for c in status["clients"] if c["pid"] == pid]
            return any(age is not None and clock() - age > ready for age in ages)

        def guarded(status: Mapping[str, Any]) -> bool:
            shown_for_pid = (c["protections"] for c in status["clients"] if c["pid"] == pid)
            return any(p.startswith(f"guard:{wanted} ") for shown in shown_for_pid for p in shown)

        self.rig.mpsd.until(checked, GUARD_S)
        on = guarded(self.rig.mpsd.status())
        self.history.add("mpsd", "guard", on=on)

    def note_zones(self, patience_s: float = GUARD_S) -> None:
        """Wait for the offender's guard zones, and record what `status` says of them."""
        wanted, least = "sparse" if self.fault.hit is Hit.SILENT else "managed", 1
        if self.fault.kind in kinds.DISTANT:
            wanted, least = "far_bytes", FAR_LAID
        pid = self.offenders[0].pid

        def zones(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
            zones_for_pid = (c.get("guard_zones") for c in status["clients"] if c["pid"] == pid)
            return next((found for found in zones_for_pid if found), None)

        self.rig.mpsd.until(lambda status: (zones(status) or {}).get(wanted, 0) >= least, patience_s)
        self.history.add("mpsd", "zones", zones=zones(self.rig.mpsd.status()))

    # ---- the fault

    def fire(self) -> None:
        """Tell every offender to commit its fault, and wait until each has begun."""
        for offender in self.offenders:
            offender.tell("go")
        for offender in self.offenders:
            offender.wait("fire", "gone", timeout=UP_S)

    def fill_gpu(self) -> Worker:
        """Start a client that takes the remaining memory; the history says how much was left."""
        filler = self.rig.spawn("filler", "filler")
        message = filler.require("full", "error", "gone", timeout=UP_S)
        if message.what == "full" and message.data["left"] is None:
            # The memory of the simulated GPU counts for all clients; the stand-in tells only its own.
            total = sum(gpu.memory_bytes for gpu in self.node.backend.devices.gpus())
            self.history.add("rig", "left", bytes=total - self.node.gpu_memory_used())
        elif message.what == "full":
            self.history.add("rig", "left", bytes=message.data["left"])
        return filler

    def end_filler(self, filler: Worker) -> None:
        """Let it compare what it holds, and wait until its memory is free."""
        filler.tell("look")
        filler.wait("done", "error", "gone", timeout=UP_S)
        filler.wait("gone", timeout=UP_S)

    def prove_alive(self) -> None:
        """Let the offender compute, where its access is to be absorbed."""
        for offender in self.offenders:
            offender.wait("outcome", "gone", timeout=self.node.busy_s + UP_S)
            offender.tell("prove")
            offender.wait("lived", "gone", timeout=UP_S)

    def await_frozen(self) -> None:
        """Record when mpsd stopped the offender, and the state of its process then."""
        pid = self.offenders[0].pid

        def frozen(status: Mapping[str, Any]) -> bool:
            return any(c["pid"] == pid and c["frozen"] for c in status["clients"])

        at = self.rig.mpsd.until(frozen, RECORD_S)
        stopped = wait_for(lambda: process_state(pid) == "T", STEP_S)
        self.history.add("mpsd", "frozen", told=at is not None, stopped=stopped)

    def fired_by_rig(self, **what: Any) -> None:
        self.history.add("rig", "fire", **what)

    def await_record(self) -> Entry | None:
        """With mpsd, wait for the record that must come, or for the time in which none may come."""
        if not self.rig.has_mpsd:
            return None
        is_required = effective(self.fault, observe(self.history)).recording is Recording.REQUIRED
        patience = RECORD_S + (10.0 if self.fault.poisons else 0.0)
        wait_for(lambda: self.history.first("record") is not None, patience if is_required else 0.1)
        return self.history.first("record")

    def evict(self, offender: Worker) -> None:
        """Request the eviction as an operator would; the answer goes into the history."""
        ready = offender.first_message("ready")
        ticks = ready.data["start_ticks"] if ready else None
        self.ask_to_kill(offender, ticks)

    def ask_to_kill(self, target: Worker, start_ticks: int | None) -> None:
        self.history.add("rig", "asked", op="kill", pid=target.pid, start_ticks=start_ticks)
        try:
            answer = self.rig.service.evict(target, start_ticks)
            self.history.add("rig", "answered", op="kill", ok=True, result=dict(answer))
        except MpsdError as error:
            self.history.add("rig", "answered", op="kill", ok=False, code=error.code, text=str(error))

    # ---- afterwards

    def send_newcomer(self) -> None:
        """Start a client now, to measure how soon it can work."""
        if not self.options.newcomers:
            return
        name = f"newcomer-{len(self.newcomers)}"
        deadline = ("--deadline", str(NEWCOMER_S))
        self.newcomers.append(self.rig.spawn(name, "newcomer", "--spawned", str(clock()), *deadline))

    def watch_fresh(self, record: Entry | None) -> None:
        """Record when a fresh server is ACTIVE, counted from the record."""
        takes_domain = effective(self.fault, observe(self.history)).takes_domain
        if not self.rig.has_mpsd or record is None or not takes_domain:
            return

        def fresh(status: Mapping[str, Any]) -> bool:
            return any(
                d["role"] == "active" and d["state"] == "active" and d["id"] != self.domain_before
                for d in status["domains"]
            )

        at = self.rig.mpsd.until(fresh, STEP_S)
        if at is not None:
            self.history.add("mpsd", "fresh", t=at, ms=round((at - record.t) * 1e3, 3))

    def watch_memory(self) -> None:
        """Record when mpsd holds nothing of the offender and NVML shows its memory as free."""
        exit_message = self.offenders[0].wait("gone", timeout=UP_S)
        if not self.rig.has_mpsd or exit_message is None:
            return
        pid = self.offenders[0].pid
        most = self.memory_before - self.node.memory // 2

        def released(status: Mapping[str, Any]) -> bool:
            known = {c["pid"] for c in (*status["clients"], *status["dead"])}
            return pid not in known and self.node.gpu_memory_used() <= most

        at = self.rig.mpsd.until(released, STEP_S)
        if at is not None:
            self.history.add("mpsd", "memory_back", t=at, ms=round((at - exit_message.t) * 1e3, 3))

    def watch_poison(self) -> None:
        """Record whether mpsd reports a domain as poisoned, where it must."""
        if not effective(self.fault, observe(self.history)).poisons:
            return

        def poisoned(status: Mapping[str, Any]) -> bool:
            return any(d["state"] == "poisoned" for d in status["domains"])

        if self.rig.has_mpsd and self.rig.mpsd.until(poisoned, STEP_S) is not None:
            self.history.add("mpsd", "poisoned")

    def settle(self) -> None:
        """Wait until every effect of the fault on the survivors must have shown."""
        must = effective(self.fault, observe(self.history)).survive.get(self.mode)
        if must is False:
            wait_for(lambda: all(s.first_message("error", "gone") for s in self.survivors), self.node.loss_s)
        for offender in self.offenders:
            offender.wait("outcome", "gone", timeout=self.node.busy_s + 1.0)
            if self._is_evicted_by_mpsd():
                offender.wait("gone", timeout=UP_S)
        if must is not False:
            time.sleep(self.node.quiet_s)

    def _is_evicted_by_mpsd(self) -> bool:
        if self.mode == KMOD and under_kernel_module(self.fault).absorbed:
            return True
        return self.rig.has_mpsd and self.fault.zoned and self.fault.hit is Hit.EVICTED

    def let_kernels_end(self) -> None:
        """Wait as long as the kernel of an exited client may still run."""
        time.sleep(self.node.busy_s)

    def finish(self) -> None:
        """Stop every program, and collect what mpsd knows."""
        # The rig ends every process that ends after this.
        self.history.add("rig", "finishing")
        for newcomer in self.newcomers:
            newcomer.wait("first_kernel", "gone", timeout=NEWCOMER_S + 5)
        for survivor in self.survivors:
            survivor.tell("stop")
        for survivor in self.survivors:
            survivor.wait("done", "error", "gone", timeout=UP_S)
        self._read_kernel_log()
        if self.rig.has_mpsd:
            active = self.rig.mpsd.active()
            if active is not None and self.domain_before not in (None, active["id"]):
                self.history.add("mpsd", "moved", domain=active["id"])
            self.rig.mpsd.collect()

    def _read_kernel_log(self) -> None:
        log = self.node.backend.kernel_log
        for line in log.drain() if log is not None else ():
            self.history.add("gpu", "xid", xid=line.xid, pid=line.pid, text=line.text)
