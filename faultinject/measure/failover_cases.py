"""One case of the fail-over measurements: `python -m faultinject.measure.failover_cases NAME OUT CUBIN
FOLDER SECONDS`. Appends its findings to OUT/failover-NAME.jsonl as they come.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faultinject.measure.rig import Client, Domain, clients, domain, now
from mpsd.errors import DeadlineError


class Case:
    """Where a case's files are, when it must end, and where its findings go."""

    def __init__(self, name: str, out: str, cubin: str, folder: str, seconds: str) -> None:
        self.name, self.out, self.cubin, self.folder = name, Path(out), Path(cubin), folder
        self.end = now() + float(seconds)
        self._file = (self.out / f"failover-{name}.jsonl").open("a")

    def record(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, default=str) + "\n")
        self._file.flush()

    def left(self) -> float:
        return self.end - now()

    @contextmanager
    def domain(self, name: str) -> Iterator[Domain]:
        """A domain that whoever ends this case can end, too."""
        with domain(f"failover-{self.name}-{name}", self.out, start_server=True) as made:
            self.record({"control": made.control.pid})
            yield made

    def client(self, made: Domain, role: str, *arguments: str) -> Client:
        """A client of a role of failover_twin in this domain."""
        return made.client("failover", self.cubin, role, *arguments)


def listed(made: Domain) -> list[str]:
    """The server's state and its clients."""
    server = made.server()
    return [made.ctl(f"get_server_status {server}"), *made.ctl(f"get_client_list {server}").split()]


def collect(case: Case, client: Client, timeout_s: float) -> None:
    """Record the client's rows as they come, until it has told all or has died."""
    done, end = 0, now() + timeout_s
    while True:
        over = client.find("told", "failed") is not None
        late = now() > end or (client.death is not None and now() > client.death + 0.3)
        rows = [event for event in list(client.events) if event["ev"] == "row"]
        for event in rows[done:]:
            case.record({key: event[key] for key in event if key not in ("ev", "t", "seen")})
        done = len(rows)
        if over or late:
            break
        time.sleep(0.02)
    if client.find("told") is None:
        status = client.reap(0.1) if client.death else "running"
        failed = client.find("failed") or {}
        case.record({
            "what": "the client did not end well", "failed": failed.get("text", f"status {status}"),
            "stderr": client.stderr(),
        })  # fmt: skip


def alone(case: Case) -> None:
    """A case whose client does everything itself."""
    with case.domain("a") as a, case.domain("b") as b:
        client = case.client(a, case.name, case.folder, str(b.pipe))
        with clients(client):
            collect(case, client, case.left() - 1)


def technique(case: Case) -> None:
    """Every way to make the second copy, one process each."""
    with case.domain("a") as a, case.domain("b") as b:
        for how in ("nothing", "slots", "symbols"):
            client = case.client(a, "once", case.folder, str(b.pipe), how)
            with clients(client):
                try:
                    told = client.wait("told", timeout_s=5)
                    row = {key: told[key] for key in told if key not in ("ev", "t", "seen", "pid")}
                    pid = str(told["pid"])
                    row["sockets"] = [name.replace(pid, "PID") for name in row["sockets"]]
                    row["client of"] = [n for n, made in (("A", a), ("B", b)) if pid in listed(made)]
                except DeadlineError as error:
                    row = {"how": how, "failed": str(error)}
                case.record(row)


def _until_active(made: Domain, server: int, timeout_s: float) -> list[Any]:
    """Milliseconds until the server says ACTIVE, and what it said at last."""
    began = now()
    while True:
        said = made.ctl(f"get_server_status {server}", 1.5)
        if said == "ACTIVE" or now() > began + timeout_s:
            return [round((now() - began) * 1e3, 1), said]
        time.sleep(0.01)


def cycles(case: Case) -> None:
    """Faults one after another in a domain that the same process enters again and again."""
    with case.domain("a") as a, case.domain("b") as b:
        client = case.client(a, "cycles", case.folder, str(b.pipe))
        with clients(client):
            for number, kind in enumerate(("trap", "misaligned", "store", "stack_overflow"), 1):
                try:
                    client.wait(f"armed {number}", timeout_s=4)
                    one_cycle(case, a, client, number, kind)
                except DeadlineError as error:
                    case.record({"what": f"cycle of {kind}", "failed": str(error)})
                    break
            collect(case, client, min(3.0, case.left()))


def one_cycle(case: Case, a: Domain, client: Client, number: int, kind: str) -> None:
    """A fault in the domain, the client's reset, the offender's end, and the server's state."""
    offender = a.client("offender", case.cubin, kind)
    with clients(offender):
        offender.wait("ready")
        server = a.server()
        client.say("fault comes")
        time.sleep(0.02)
        offender.say("go")
        client.wait(f"was reset {number}", timeout_s=4)
        before = listed(a)[0]
    state = _until_active(a, server, 2)
    servers = a.ctl("get_server_list").split()
    case.record({
        "what": f"domain after {kind}", "with the offender there": before,
        "after its end: ms, state": state, "same server": str(server) in servers,
    })  # fmt: skip
    client.say("go on")


def faults(case: Case) -> None:
    from faultinject.measure import failover_faults

    failover_faults.run(case)


def cuts(case: Case) -> None:
    from faultinject.measure import failover_faults

    failover_faults.run(case, failover_faults.CUT_PLAN)


CASES: dict[str, Callable[[Case], None]] = {
    "technique": technique,
    "host": alone,
    "graph": alone,
    "window": alone,
    "many": alone,
    "cycles": cycles,
    "faults": faults,
    "cuts": cuts,
}

if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", os.getcwd())
    CASES[sys.argv[1]](Case(*sys.argv[1:]))
