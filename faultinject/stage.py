"""One run set up: the survivors, the offenders, and what every story does with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faultinject import kinds
from faultinject.checkers import effective
from faultinject.faults import Fault, Hit, Need, Recording, under_kernel_part
from faultinject.history import Entry, History, clock
from faultinject.kinds import KMOD
from faultinject.observation import observe
from faultinject.programs.misdeeds import deed_of
from faultinject.proxy.library import FAR_BYTES, MPSD_RUN
from faultinject.rig import Rig
from faultinject.worker import Worker
from mpsd.errors import MpsdError, UnsupportedError

UP_S = 30.0
"""A program must be up by then, on a busy machine too."""

RECORD_S = 3.0
NEWCOMER_S = 10.0
GUARD_S = 1.5
FAR_LAID = 7 << 30
"""With so many of both sides those are laid that offenders stray into, the nearest being first."""
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Options:
    """What a user chooses for every run."""

    survivors: int = 3
    seed: int = 1
    newcomers: bool = True


def wait_for(holds: Callable[[], bool], timeout: float) -> bool:
    """Poll until it holds; False at the deadline."""
    end = clock() + timeout
    while not holds():
        if clock() > end:
            return False
        time.sleep(POLL_S)
    return True


def process_state(pid: int) -> str:
    """The state letter of a process (proc(5)), `X` for one that has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


class Stage:
    """The cast of one run. Stories call these in turn; every wait has a deadline."""

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
        """Start everybody, wait until all are ready and, with mpsd, attached. Raises MpsdError."""
        seeds = range(self.options.seed, self.options.seed + self.options.survivors)
        self.survivors = [self._survivor(i, seed * 7919) for i, seed in enumerate(seeds)]
        deed = deed_of(self.fault.kind)
        if deed is not None:
            self.offenders = [self._offender(i, deed) for i in range(self.fault.offenders)]
        for worker in (*self.survivors, *self.offenders):
            worker.must("ready", "error", "outcome", timeout=UP_S)
        if self.rig.has_mpsd:
            self._attached()
            self._spare_ready()
            active = self.rig.mpsd.active()
            self.domain_before = active["id"] if active else None
        self.memory_before = self.node.gpu_memory_used()

    def _survivor(self, number: int, seed: int) -> Worker:
        name, args = f"survivor-{number}", ("--seed", str(seed))
        if self.fault.proxied_survivors:
            return self._proxied(name, "survivor", args)
        return self.rig.spawn(name, "survivor", *args)

    def _offender(self, number: int, deed: str) -> Worker:
        fault = self.fault
        args = [deed, "--variant", fault.variant, "--busy-s", str(self.node.busy_s)]
        args += ["--memory", str(self.node.memory), *(["--fill"] if fault.fills_gpu else [])]
        args += ["--stay"] if self.mode == KMOD and under_kernel_part(fault).sunk else []
        environment: Mapping[str, str] | None = None
        if fault.kind == "other_domain":
            environment = self.rig.other_control().environ
        elif fault.kind == "outside_mps":
            environment = self.rig.environment()
        elif Need.PROXY in fault.needs:
            return self._proxied(f"offender-{number}", "offender", args)
        return self.rig.spawn(f"offender-{number}", "offender", *args, environment=environment)

    def _proxied(self, name: str, module: str, args: Sequence[str]) -> Worker:
        """An ordinary program that mpsd-run started. Raises UnsupportedError where there is no proxy."""
        libraries, service = self.rig.libraries, self.rig.mpsd
        if libraries is None:
            raise UnsupportedError(f"{self.fault.name} needs mpsd's libcuda", remedy="give --libcuda DIR")
        # Survivors have none.
        far_bytes = FAR_BYTES if name.startswith("offender") else 0
        return self.rig.spawn(
            name,
            module,
            *args,
            environment={
                **libraries.proxied(service.environment, service.socket, vault=True, far_bytes=far_bytes),
                **self.fault.environment,
            },
            through=MPSD_RUN,
            device="standin" if libraries.driver else None,
        )

    def await_attached(self, deadline_s: float = 10.0) -> float | None:
        """When mpsd had attached every client of its own that lives; None at the deadline."""
        ours = self.survivors + ([] if self.fault.elsewhere else self.offenders)
        alive = {w.pid for w in ours if w.running}

        def all_attached(status: Mapping[str, Any]) -> bool:
            return alive <= {c["pid"] for c in status["clients"] if c["state"] == "attached"}

        return self.rig.mpsd.until(all_attached, deadline_s)

    def _attached(self) -> None:
        """Note when mpsd had attached each client of its own, on the client's clock where it says so."""
        ours = {w.pid: w for w in self.survivors + ([] if self.fault.elsewhere else self.offenders)}
        at = self.await_attached()
        status = self.rig.mpsd.status()
        for client in status["clients"]:
            if client["pid"] in ours:
                self._note_attached(client, ours[client["pid"]], clock())
        if at is None:
            self.rig.note(not_attached=True)
        if self.fault.kind.startswith("guard_"):
            self._note_guard()
        if self.fault.kind in kinds.ZONE:
            self.note_zones()

    def _spare_ready(self) -> None:
        """A service that has run for a while has its spare domain: wait for it."""
        if self.rig.mpsd.until_spare(10.0) is None:
            self.rig.note(no_spare=True)

    def _note_attached(self, client: Mapping[str, Any], worker: Worker, now: float) -> None:
        """`ms` is counted from the moment at which the client itself had its context."""
        ready, took = worker.heard("ready"), client["attach_ms"]
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
            # Ranges follow a client within a second: those for what it mapped last may not be there yet.
            ages = [c["guard_checked_s"] for c in status["clients"] if c["pid"] == pid]
            return any(age is not None and clock() - age > ready for age in ages)

        def guarded(status: Mapping[str, Any]) -> bool:
            mine = (c["protections"] for c in status["clients"] if c["pid"] == pid)
            return any(p.startswith(f"guard:{wanted} ") for shown in mine for p in shown)

        self.rig.mpsd.until(checked, GUARD_S)
        on = guarded(self.rig.mpsd.status())
        self.history.add("mpsd", "guard", on=on)

    def note_zones(self, patience_s: float = GUARD_S) -> None:
        """Wait for the offender's guard zones, and note what `status` says of them."""
        wanted, least = "sparse" if self.fault.hit is Hit.SILENT else "managed", 1
        if self.fault.kind in kinds.DISTANT:
            wanted, least = "far_bytes", FAR_LAID
        pid = self.offenders[0].pid

        def zones(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
            mine = (c.get("guard_zones") for c in status["clients"] if c["pid"] == pid)
            return next((found for found in mine if found), None)

        self.rig.mpsd.until(lambda status: (zones(status) or {}).get(wanted, 0) >= least, patience_s)
        self.history.add("mpsd", "zones", zones=zones(self.rig.mpsd.status()))

    # ---- the fault

    def fire(self) -> None:
        """Tell every offender to go, and wait until each has begun."""
        for offender in self.offenders:
            offender.tell("go")
        for offender in self.offenders:
            offender.wait("fire", "gone", timeout=UP_S)

    def fill_gpu(self) -> Worker:
        """Start a client that takes what memory is left; `full` in the history says how much still was."""
        filler = self.rig.spawn("filler", "filler")
        said = filler.must("full", "error", "gone", timeout=UP_S)
        if said.what == "full" and said.data["left"] is None:
            # The GPU of all clients is the simulated one, which tells what is used.
            total = sum(gpu.memory_bytes for gpu in self.node.backend.devices.gpus())
            self.history.add("rig", "left", bytes=total - self.node.gpu_memory_used())
        elif said.what == "full":
            self.history.add("rig", "left", bytes=said.data["left"])
        return filler

    def end_filler(self, filler: Worker) -> None:
        """Have it look at what it holds, and wait until its memory is back."""
        filler.tell("look")
        filler.wait("done", "error", "gone", timeout=UP_S)
        filler.wait("gone", timeout=UP_S)

    def prove_alive(self) -> None:
        """Have the offender compute something, where what it did is to be absorbed."""
        for offender in self.offenders:
            offender.wait("outcome", "gone", timeout=self.node.busy_s + UP_S)
            offender.tell("prove")
            offender.wait("lived", "gone", timeout=UP_S)

    def await_frozen(self) -> None:
        """Note when mpsd has stopped the offender, and what the system says of its process then."""
        pid = self.offenders[0].pid

        def frozen(status: Mapping[str, Any]) -> bool:
            return any(c["pid"] == pid and c["frozen"] for c in status["clients"])

        at = self.rig.mpsd.until(frozen, RECORD_S)
        stopped = wait_for(lambda: process_state(pid) == "T", 2.0)
        self.history.add("mpsd", "frozen", told=at is not None, stopped=stopped)

    def fired_by_rig(self, **what: Any) -> None:
        self.history.add("rig", "fire", **what)

    def await_record(self) -> Entry | None:
        """With mpsd, wait for the record that is owed, or look in vain for one that is not."""
        if not self.rig.has_mpsd:
            return None
        owed = effective(self.fault, observe(self.history)).recording is Recording.REQUIRED
        patience = RECORD_S + (10.0 if self.fault.poisons else 0.0)
        wait_for(lambda: self.history.first("record") is not None, patience if owed else 0.1)
        return self.history.first("record")

    def evict(self, offender: Worker) -> None:
        """Ask for the eviction as an operator would; the answer goes into the history."""
        ready = offender.heard("ready")
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
        """Start a client now, to see how soon it can work."""
        if not self.options.newcomers:
            return
        name = f"newcomer-{len(self.newcomers)}"
        deadline = ("--deadline", str(NEWCOMER_S))
        self.newcomers.append(self.rig.spawn(name, "newcomer", "--spawned", str(clock()), *deadline))

    def watch_fresh(self, record: Entry | None) -> None:
        """Note when a fresh server is ACTIVE, counted from the record."""
        takes_domain = effective(self.fault, observe(self.history)).takes_domain
        if not self.rig.has_mpsd or record is None or not takes_domain:
            return

        def fresh(status: Mapping[str, Any]) -> bool:
            return any(
                d["role"] == "active" and d["state"] == "active" and d["id"] != self.domain_before
                for d in status["domains"]
            )

        at = self.rig.mpsd.until(fresh, 5.0)
        if at is not None:
            self.history.add("mpsd", "fresh", t=at, ms=round((at - record.t) * 1e3, 3))

    def watch_memory(self) -> None:
        """Note when nothing of the offender is held any more, and NVML's count is back."""
        gone = self.offenders[0].wait("gone", timeout=UP_S)
        if not self.rig.has_mpsd or gone is None:
            return
        pid = self.offenders[0].pid
        most = self.memory_before - self.node.memory // 2

        def released(status: Mapping[str, Any]) -> bool:
            known = {c["pid"] for c in (*status["clients"], *status["dead"])}
            return pid not in known and self.node.gpu_memory_used() <= most

        at = self.rig.mpsd.until(released, 5.0)
        if at is not None:
            self.history.add("mpsd", "memory_back", t=at, ms=round((at - gone.t) * 1e3, 3))

    def watch_poison(self) -> None:
        """Note whether mpsd says of a domain that it is poisoned."""

        def poisoned(status: Mapping[str, Any]) -> bool:
            return any(d["state"] == "poisoned" for d in status["domains"])

        if self.rig.has_mpsd and self.rig.mpsd.until(poisoned, 10.0) is not None:
            self.history.add("mpsd", "poisoned")

    def settle(self) -> None:
        """Wait until whatever the fault still does to the survivors must have happened."""
        must = effective(self.fault, observe(self.history)).survive.get(self.mode)
        if must is False:
            wait_for(lambda: all(s.heard("error", "gone") for s in self.survivors), self.node.loss_s)
        for offender in self.offenders:
            offender.wait("outcome", "gone", timeout=self.node.busy_s + 1.0)
        if must is not False:
            time.sleep(self.node.quiet_s)

    def let_kernels_end(self) -> None:
        """Wait as long as a dead client's kernel may still run."""
        time.sleep(self.node.busy_s)

    def finish(self) -> None:
        """Stop everybody, collect what mpsd knows."""
        # Who ends after this was ended by the rig.
        self.history.add("rig", "finishing")
        for newcomer in self.newcomers:
            newcomer.wait("first_kernel", "gone", timeout=NEWCOMER_S + 5)
        for survivor in self.survivors:
            survivor.tell("stop")
        for survivor in self.survivors:
            survivor.wait("done", "error", "gone", timeout=10.0)
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
