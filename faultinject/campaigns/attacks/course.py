"""The course of the campaign: attempts of the second user, then floods."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from faultinject.campaigns.attacks.scene import INTRUDER, UP_S, VICTIM, Scene, as_user, real, socket_of
from mpsd.base.errors import DeadlineError

FATAL = "[2026-01-01 00:00:00.000 Server 1] Server is handling a fatal GPU error."
NOTICE_S = 30.0
JOIN_S = 15.0
SETTLE_S = 1.0
FORGED_PID, FORGOTTEN_S = 1, 90.0
"""A process that is no client, and the time [s] after which mpsd must have forgotten it."""
SHORT_LINE = "[2026-01-01 00:00:00.000 Server 1] Received new client request"
LONG_LINE = "[2026-01-01 00:00:00.000 Server" + " " * (64 << 10)
BATCH_BYTES, BATCH_S = 64 << 10, 0.01
"""A writer appends this much this often: some 6 MB/s, or 100,000 short lines."""
Order = tuple[str, Mapping[str, object]]
"""An attempt's kind and its arguments."""


@dataclass(slots=True)
class Attempt:
    """One act of the intruder. `expected`: the start of an acceptable outcome."""

    name: str
    outcome: str
    expected: str = "refused"
    decided: str = ""

    @property
    def problem(self) -> str:
        if self.decided:
            return self.decided
        return "" if self.outcome.startswith(self.expected) else "not refused"


@dataclass(slots=True)
class Flood:
    """Latencies [ms] of the victim's requests during a flood, and mpsd's resident memory [MB] around it."""

    name: str
    count: int
    requests: int
    p50: float
    p99: float
    worst: float
    before: float
    after: float


def _attempts(
    pipe: str, shared_pipe: str, sockets: Mapping[str, str], pid: int
) -> Iterator[tuple[str, Order, str]]:
    """Yield name, order and the start of an acceptable outcome."""
    private = real(pipe)
    yield "list the victim's domain", ("list", {"path": private}), "refused"
    yield (
        "write a fatal line into its log FIFO",
        ("write", {"path": socket_of(private, "log"), "text": FATAL}),
        "refused",
    )
    for name in ("control_lock", "nvidia-cuda-mps-control.pid"):
        yield f"open its {name}", ("open", {"path": socket_of(private, name)}), "refused"
    for name in ("control", "control_privileged"):
        yield f"connect to its {name}", ("connect", {"path": socket_of(private, name)}), "refused"
        yield f"remove its {name}", ("remove", {"path": socket_of(private, name)}), "refused"
    yield "remove its stable path", ("remove", {"path": pipe}), "refused"
    control = sockets["control"]
    requests: Mapping[str, Mapping[str, object]] = {
        "kill": {"pid": pid},
        "drain": {},
        "zone_policy": {"pid": pid, "policy": "freeze"},
        "vault_keep": {"pid": pid, "name": "mine"},
    }
    for op, args in requests.items():
        yield f"ask mpsd: {op}", ("request", {"path": control, "op": op, "args": args}), "refused"
    if sockets.get("failover"):
        claim = {"path": sockets["failover"], "text": f"client {pid} faulted"}
        yield "claim an error of its own", ("claim", claim), ""
    shared = socket_of(real(shared_pipe), "log")
    yield "write a fatal line into the shared log FIFO", ("write", {"path": shared, "text": FATAL}), ""
    many = "\n".join(f"[2026-01-01 00:00:00.000 Control 1] NEW CLIENT {n} from user 0" for n in (1, pid))
    yield "write NEW CLIENT lines there", ("write", {"path": shared, "text": many}), ""


def fatal_lines(pid: int) -> list[str]:
    """Return log lines of a fault; the last one blames this client."""
    stamp = "[2026-01-01 00:00:00.000 Server 1]"
    return [FATAL, f"{stamp} Client {{PID: {pid}, Context ID: 1}} encountered a fatal GPU error."]


def client_lines(pids: Sequence[int]) -> list[str]:
    """Return the log lines of new clients of root."""
    stamp = "[2026-01-01 00:00:00.000 Control 1]"
    return [f"{stamp} NEW CLIENT {pid} from user 0: Server already exists" for pid in pids]


class LineWriter:
    """Appends one line to a log again and again, in a thread."""

    def __init__(self, log: Path, line: str) -> None:
        self._log, self._line = log, line.encode() + b"\n"
        self._stopping = threading.Event()
        self._count = 0
        self._thread = threading.Thread(target=self._write, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> int:
        """Stop, and return how many lines were written."""
        self._stopping.set()
        self._thread.join(UP_S)
        return self._count

    def _write(self) -> None:
        batch = max(1, BATCH_BYTES // len(self._line))
        with self._log.open("ab", buffering=0) as log:
            while not self._stopping.wait(BATCH_S):
                log.write(self._line * batch)
                self._count += batch


class Course:
    """Runs the parts in a scene. `problems`: what the victim's programs suffered, in words."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.problems: list[str] = []

    def start(self) -> None:
        """Start the victim's programs: two in the own domain, one in the shared one."""
        scene = self._scene
        scene.open()
        self.own = scene.environment(scene.victim, shared=False)
        self.shared = scene.environment(scene.victim, shared=True)
        for name, environment in (("own-1", self.own), ("own-2", self.own), ("shared-1", self.shared)):
            worker = scene.program(name, VICTIM, environment)
            if scene.listed(worker.pid, NOTICE_S) is None:
                raise DeadlineError(f"mpsd does not list {name}")

    def attempts(self) -> list[Attempt]:
        scene, own, shared = self._scene, self.own, self.shared
        sockets = {"control": str(scene.rig.mpsd.socket), "failover": own.get("MPSD_FAILOVER_SOCKET", "")}
        pipe, other = own["CUDA_MPS_PIPE_DIRECTORY"], shared["CUDA_MPS_PIPE_DIRECTORY"]
        found = []
        for name, (what, args), expected in _attempts(pipe, other, sockets, scene.programs["own-1"].pid):
            before = scene.decisions()
            outcome = scene.ask(scene.intruder, "attempted", "attempt", attempt=what, args=args)["outcome"]
            found.append(Attempt(name, outcome, expected))
            if expected == "":
                # A line needs a moment to be read; a decision by it would show by then.
                time.sleep(SETTLE_S)
            if (after := scene.decisions()) != before:
                found[-1].decided = f"{before} became {after}"
        found += self._forged_lines(other)
        found.append(self._program_outside(pipe))
        found.append(self._owners_line(pipe))
        return found

    def _log_of(self, pipe: str) -> Path:
        """Return the log of the domain to which a pipe directory leads."""
        return self._scene.rig.service.logs / Path(real(pipe)).name / "control.log"

    def _forged_lines(self, shared: str) -> list[Attempt]:
        """Append lines to logs as servers of the intruder could: no stock binary copies a FIFO into a log."""
        scene = self._scene
        own = scene.environment(scene.intruder, shared=False)["CUDA_MPS_PIPE_DIRECTORY"]
        pids = [scene.programs[name].pid for name in ("own-1", "shared-1")]
        fatal, clients = fatal_lines(pids[1]), client_lines([FORGED_PID, *pids])
        mine = Path(real(own)).name
        return [
            self._forged("forge fatal lines in the shared log", shared, fatal),
            self._forged("forge NEW CLIENT lines in the shared log", shared, clients),
            self._forged("forge fatal lines in its own log", own, fatal, apart=mine),
            self._forged("forge NEW CLIENT lines in its own log", own, clients, apart=mine),
        ]

    def _forged(self, name: str, pipe: str, lines: Sequence[str], *, apart: str = "") -> Attempt:
        """Append lines to the log of a domain. `apart`: see Scene.decisions."""
        scene, log = self._scene, self._log_of(pipe)
        before = scene.decisions(apart=apart)
        with log.open("ab", buffering=0) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
        time.sleep(SETTLE_S)
        row = Attempt(name, f"{len(lines)} lines written", "")
        if (after := scene.decisions(apart=apart)) != before:
            row.decided = f"{before} became {after}"
        return row

    def _program_outside(self, pipe: str) -> Attempt:
        """Point the intruder's program at the victim's path."""
        scene = self._scene
        worker = scene.rig.spawn(
            "outsider",
            "survivor",
            environment={**self.own, "CUDA_MPS_PIPE_DIRECTORY": pipe},
            through=as_user(INTRUDER),
        )
        message = worker.wait("ready", "error", timeout=JOIN_S)
        if message is None:
            outcome = "refused: it waits"
        elif message.what == "error":
            outcome = "refused: no context"
        else:
            outcome = "done: on MPS" if message.data["on_mps"] else "refused: outside MPS"
        if scene.listed(worker.pid, SETTLE_S) is not None:
            outcome = "done: listed as a client"
        worker.end()
        return Attempt("run a CUDA program on the victim's path", outcome)

    def _owners_line(self, pipe: str) -> Attempt:
        """Let the owner write a line into the own FIFO; then a new client of the owner comes."""
        scene = self._scene
        before = scene.decisions()
        args = {"path": socket_of(real(pipe), "log"), "text": FATAL}
        said = scene.ask(scene.victim, "attempted", "attempt", attempt="write", args=args)["outcome"]
        worker = scene.program("own-3", VICTIM, self.own)
        took = scene.listed(worker.pid, NOTICE_S)
        seen = "is not listed" if took is None else f"is listed after {took:.1f} s"
        row = Attempt("the owner writes into the own FIFO", f"{said}; the next client {seen}", said)
        if took is None:
            row.decided = "mpsd never noticed the next client"
        elif scene.decisions().faults != before.faults:
            row.decided = "a fault was recorded"
        return row

    def floods(self, seconds: float) -> list[Flood]:
        scene = self._scene
        control = str(scene.rig.mpsd.socket)
        folder = scene.rig.mpsd.socket.parent
        targets = [("no flood", "", ""), ("connections", "connections", control)]
        targets += [("garbage", "garbage", control), ("unread answers", "unread", control)]
        for name in ("vault", "failover"):
            if (path := folder / f"{name}.sock").exists():
                targets.append((f"{name} messages", "messages", str(path)))
        rows = [self._flood(name, flood, path, seconds) for name, flood, path in targets]
        return rows + self.log_floods(seconds)

    def _flood(self, name: str, flood: str, path: str, seconds: float) -> Flood:
        scene = self._scene
        done = scene.intruder.count("flooded")

        def begin() -> None:
            if flood:
                lasts = seconds + SETTLE_S
                scene.ask(scene.intruder, "flooding", "flood", flood=flood, path=path, seconds=lasts)

        def end() -> int:
            if not flood:
                return 0
            return int(scene.intruder.require("flooded", timeout=UP_S, after=done).data["count"])

        return self._under(name, begin, end, seconds)

    def log_floods(self, seconds: float) -> list[Flood]:
        """Write lines into the log of the intruder's own domain, as a server of that user could."""
        scene = self._scene
        pipe = scene.environment(scene.intruder, shared=False)["CUDA_MPS_PIPE_DIRECTORY"]
        log = self._log_of(pipe)
        found = []
        for name, line in (("log lines", SHORT_LINE), ("log lines of 64 KiB", LONG_LINE)):
            writer = LineWriter(log, line)
            found.append(self._under(name, writer.start, writer.stop, seconds))
        return found

    def _under(self, name: str, begin: Callable[[], object], end: Callable[[], int], seconds: float) -> Flood:
        """Measure the victim's requests between `begin` and `end`, which returns the number of acts."""
        scene = self._scene
        before, control = scene.rss(), str(scene.rig.mpsd.socket)
        begin()
        try:
            patience = seconds + UP_S
            answer = scene.ask(
                scene.victim, "latency", "latency", timeout=patience, socket=control, seconds=seconds
            )
        finally:
            count = end()
        time.sleep(SETTLE_S)
        ms = sorted(answer["ms"])
        p99 = ms[math.ceil(0.99 * len(ms)) - 1]
        return Flood(name, count, len(ms), median(ms), p99, max(ms), before, scene.rss())

    def end_programs(self) -> None:
        scene = self._scene
        self.problems += scene.finish(list(scene.programs))
        # mpsd waits for it when it stops its domains.
        if not scene.forgotten(FORGED_PID, FORGOTTEN_S):
            self.problems.append(f"mpsd still lists process {FORGED_PID}, which only forged lines name")
