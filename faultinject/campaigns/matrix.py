"""Every chosen fault in every chosen mode: run, judge, report."""

from __future__ import annotations

import shlex
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faultinject.campaigns import matrixreport
from faultinject.evidence.files import tell_stderr
from faultinject.registry.checkers import check, verdict
from faultinject.registry.faults import Fault, Need
from faultinject.registry.history import History, clock
from faultinject.registry.kinds import AUTO, KMOD
from faultinject.registry.observation import observe
from faultinject.registry.verdicts import Verdict
from faultinject.rig.libraries import Libraries, find_libraries, installed
from faultinject.rig.logdisk import disk_can_be_filled
from faultinject.rig.node import (
    Node,
    may_choose_pids,
    may_map_null,
    open_node,
)
from faultinject.rig.rig import Rig
from faultinject.rig.scenarios import play
from faultinject.rig.stage import Options, Stage
from mpsd.base.errors import MpsdError

Tell = Callable[[str], None]


@dataclass(slots=True)
class Plan:
    """What to run. `out` keeps the histories, and the logs of runs that are not valid.

    `libcuda`: the folder with the proxy; `driver`: that of the stand-in (rig/libraries.py).
    `before`, `total`: the runs of earlier plans and of all plans, for the lines of progress; 0: of this one.
    """

    backend: str
    faults: Sequence[Fault]
    modes: Sequence[str]
    options: Options = field(default_factory=Options)
    deadline_s: float = 120.0
    jobs: int = 1
    out: Path | None = None
    tell: Tell = tell_stderr
    libcuda: Path | None = None
    driver: Path | None = None
    before: int = 0
    total: int = 0

    def pairs(self) -> list[tuple[Fault, str]]:
        return [(f, m) for f in self.faults for m in self.modes if f.runs_in(m)]


def command(
    backend: str, kinds: Iterable[str], modes: Iterable[str], options: Options, libcuda: Path | None = None
) -> str:
    """Return the command line that repeats these runs, without the folder of the proxy."""
    words = ["mpsd-faultinject", "run", "--backend", backend, "--kinds", ",".join(kinds)]
    words += ["--modes", ",".join(modes), "--survivors", str(options.survivors), "--seed", str(options.seed)]
    words += ["--libcuda", "DIR"] if libcuda else []
    return shlex.join(words)


def missing_requirement(
    fault: Fault, mode: str, base: Path, no_proxy: str = "", no_kernel_module: str = ""
) -> str | None:
    """Return what this machine lacks for this fault, in words; None when nothing is missing.

    `no_proxy`, `no_kernel_module`: why these are missing, although the run needs them.
    """
    if mode == KMOD and no_kernel_module:
        return no_kernel_module
    if no_proxy:
        return no_proxy
    if Need.NULL_PAGE in fault.needs and not may_map_null():
        return "address 0 may not be mapped here (needs root, or vm.mmap_min_addr = 0)"
    if Need.CHOOSE_PID in fault.needs and not may_choose_pids():
        return "the next pid cannot be chosen here (/proc/sys/kernel/ns_last_pid; needs root)"
    if Need.LOG_DISK in fault.needs and mode == "stock" and not disk_can_be_filled(base):
        return "no small log disk can be mounted here (needs root and the right to mount)"
    return None


class Matrix:
    """Runs a plan. The node of a real GPU is opened once, a simulated one for each run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.device, self.driver = plan.backend.upper(), "unknown"
        self.libraries: Libraries | None = None
        self._no_proxy: str | None = None
        self._done = 0
        self._lock = threading.Lock()

    def run(self, base: Path) -> dict[str, Any]:
        """Run all of it and return the report. `base`: a directory shared by all runs. Raises MpsdError."""
        pairs, plan = self.plan.pairs(), self.plan
        date = datetime.now(UTC).isoformat(timespec="seconds")
        shared = open_node(plan.backend, base) if plan.backend != "simulated" else None
        jobs = 1 if shared is not None else plan.jobs
        try:
            with ThreadPoolExecutor(max_workers=jobs) as pool:
                work = [
                    pool.submit(self._run_and_report, f, m, shared or plan.backend, base) for f, m in pairs
                ]
                try:
                    runs = [w.result() for w in work]
                except BaseException:
                    # Told to stop: runs in progress end in order, the rest does not start.
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        finally:
            if shared is not None:
                shared.close()
        kinds = dict.fromkeys(f.name for f in plan.faults)
        return matrixreport.assemble(
            device=self.device,
            driver=self.driver,
            backend=plan.backend,
            date=date,
            command=command(plan.backend, kinds, plan.modes, plan.options, plan.libcuda),
            seed=plan.options.seed,
            runs=runs,
        )

    def _run_and_report(self, fault: Fault, mode: str, node: Node | str, base: Path) -> dict[str, Any]:
        entry = self.run_one(fault, mode, node, base)
        with self._lock:
            self._done += 1
            done, total = self.plan.before + self._done, self.plan.total or len(self.plan.pairs())
            self.plan.tell(f"[{done}/{total}] {_progress(entry)}")
            if entry["verdict"] != "valid" and entry["verdict"] is not None:
                self.plan.tell(f"    repeat: {entry['command']}")
        return entry

    def run_one(self, fault: Fault, mode: str, node: Node | str, base: Path) -> dict[str, Any]:
        """Run and judge one fault. A failure of the run is a verdict; nothing is raised."""
        repeat = command(self.plan.backend, [fault.name], [mode], self.plan.options, self.plan.libcuda)
        if fault.bare:
            repeat = f"mpsd-faultinject demo --backend {self.plan.backend}"
        more = {"seed": self.plan.options.seed, "command": repeat}
        no_proxy = self._find_proxy(base) if Need.PROXY in fault.needs or mode == AUTO else ""
        # A simulated node has the patched kernel module.
        no_kernel_module = node.backend.no_isolation.why if isinstance(node, Node) else ""
        missing = missing_requirement(fault, mode, base, no_proxy, no_kernel_module)
        if missing is not None:
            return matrixreport.run_entry(fault, mode, None, (), not_run=missing, **more)
        began = clock()
        where = self.plan.out / f"{fault.name}-{mode}" if self.plan.out else None
        if where is not None:
            where.mkdir(parents=True, exist_ok=True)
        with History(where / "history.jsonl" if where else None) as history:
            self._record_run(fault, mode, node, history, where)
            seen = observe(history)
            begin = history.first("node")
        findings = check(fault, seen, bars=bool(begin and begin.data["bars"]))
        judged = verdict(findings)
        if where is not None and judged is Verdict.VALID:
            shutil.rmtree(where / "logs", ignore_errors=True)
        more |= {"duration_s": round(clock() - began, 2), "verdict": judged.value}
        return matrixreport.run_entry(fault, mode, seen, findings, **more)

    def _find_proxy(self, base: Path) -> str:
        """Return why there is no proxy, empty if there is one. Only a named or installed one counts."""
        with self._lock:
            if self._no_proxy is None:
                self._no_proxy = self._search_proxy(base)
            return self._no_proxy

    def _search_proxy(self, base: Path) -> str:
        plan = self.plan
        if installed(plan.libcuda) is None and plan.libcuda is None:
            return "no libcuda of mpsd's is installed or named (--libcuda DIR)"
        try:
            self.libraries = find_libraries(plan.backend, plan.libcuda, plan.driver, base / "libraries")
        except MpsdError as error:
            return str(error)
        return ""

    def _record_run(
        self, fault: Fault, mode: str, node: Node | str, history: History, where: Path | None
    ) -> None:
        options = self.plan.options
        facts: dict[str, Any] = {"kind": fault.kind, "variant": fault.variant, "mode": mode}
        facts["seed"] = options.seed
        history.add("rig", "begin", survivors=options.survivors, backend=self.plan.backend, **facts)
        small_disk = Need.LOG_DISK in fault.needs
        logs = where / "logs" if where else None
        # Mode auto takes the level that the node has, at whatever level the kind runs otherwise.
        kept = {name: value for name, value in fault.settings.items() if mode != AUTO or name != "protect"}
        more: dict[str, Any] = {"settings": kept, "logs_to": logs, "libraries": self.libraries}
        rig = Rig(node, mode, history, small_disk=small_disk, **more)
        watchdog = threading.Timer(self.plan.deadline_s, _end_overdue_run, (rig, self.plan.deadline_s))
        watchdog.daemon = True
        watchdog.start()
        try:
            with rig:
                self.device, self.driver = rig.node.device, rig.node.driver
                history.add("rig", "node", device=rig.node.device, driver=rig.node.driver, bars=rig.node.bars)
                play(Stage(rig, fault, options))
        except MpsdError as error:
            history.add("rig", "failed", text=f"{error.code}: {error}")
        except Exception as error:  # a broken rig must not look like a product that failed, or passed
            history.add("rig", "failed", text=f"the rig failed: {error!r}")
        finally:
            watchdog.cancel()
        history.add("rig", "end", leftovers=rig.leftovers)


def _end_overdue_run(rig: Rig, deadline_s: float) -> None:
    """End the programs of a run that exceeded its deadline, so that its waits end too."""
    rig.history.add("rig", "failed", text=f"the run was not over after {deadline_s:g} s")
    rig.end_workers()


def _progress(entry: Mapping[str, Any]) -> str:
    if entry["not_run"]:
        return f"{matrixreport.cell(entry, 'kind')} ({entry['mode']}): not run: {entry['not_run']}"
    parts = [f"lost {matrixreport.cell(entry, 'lost')}"]
    if entry["named"] is not None:
        parts.append(f"named {entry['named']}" + (f" ({entry['confidence']})" if entry["confidence"] else ""))
    if entry["fault_class"]:
        parts.append(entry["fault_class"])
    if entry["record_ms"] is not None:
        parts.append(f"record {entry['record_ms']:.1f} ms")
    line = f"{matrixreport.cell(entry, 'kind')} ({entry['mode']}): {entry['verdict']}: {', '.join(parts)}"
    why = "; ".join(f"{f['law']}: {f['text']}" for f in entry["findings"])
    return f"{line}, {entry['duration_s']:.1f} s" + (f"\n    {why}" if why else "")


def passed(finished: Mapping[str, Any]) -> bool:
    """Return whether no verdict is invalid or unknown, and something was run."""
    verdicts = [r["verdict"] for r in finished["runs"]]
    return all(v in ("valid", None) for v in verdicts) and "valid" in verdicts
