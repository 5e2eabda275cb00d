"""One case of the fail-over measurements, a process of its own.

`python -m faultinject.campaigns.measure.failover.cases NAME OUT CUBIN FOLDER SECONDS` appends its findings
to OUT/failover-NAME.jsonl as they come.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.rig import (
    Client,
    Domain,
    clients,
    domain,
    now,
)
from mpsd.base.errors import DeadlineError


class Case:
    """A case: the folder of its files, its deadline, and the file of its findings."""

    def __init__(self, name: str, out: str, cubin: str, folder: str, seconds: str) -> None:
        self.name, self.out, self.cubin, self.folder = name, Path(out), Path(cubin), folder
        self.end = now() + float(seconds)
        self._file = (self.out / f"failover-{name}.jsonl").open("a")

    def record(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, default=str) + "\n")
        self._file.flush()

    def remaining_s(self) -> float:
        return self.end - now()

    @contextmanager
    def domain(self, name: str) -> Iterator[Domain]:
        """Start a domain that the parent of this case can end, too."""
        with domain(f"failover-{self.name}-{name}", self.out, start_server=True) as mps_domain:
            self.record({"control": mps_domain.control.pid})
            yield mps_domain

    def client(self, mps_domain: Domain, role: str, *arguments: str) -> Client:
        """Start a client with a role of survivors.py in this domain."""
        return mps_domain.client("failover", self.cubin, role, *arguments)


def listed(mps_domain: Domain) -> list[str]:
    """Return the server's state and its clients."""
    server = mps_domain.server()
    return [
        mps_domain.ctl(f"get_server_status {server}"),
        *mps_domain.ctl(f"get_client_list {server}").split(),
    ]


def technique(case: Case) -> None:
    """Try every way to make the second driver instance, one process each."""
    with case.domain("a") as a, case.domain("b") as b:
        for how in ("nothing", "slots", "symbols"):
            client = case.client(a, "once", case.folder, str(b.pipe), how)
            with clients(client):
                try:
                    message = client.wait("told", timeout_s=5)
                    row = {key: message[key] for key in message if key not in ("ev", "t", "seen", "pid")}
                    pid = str(message["pid"])
                    row["sockets"] = [name.replace(pid, "PID") for name in row["sockets"]]
                    row["client of"] = [
                        n for n, mps_domain in (("A", a), ("B", b)) if pid in listed(mps_domain)
                    ]
                except DeadlineError as error:
                    row = {"how": how, "failed": str(error)}
                case.record(row)


def faults(case: Case) -> None:
    from faultinject.campaigns.measure.failover import rounds

    rounds.run(case)


def cuts(case: Case) -> None:
    from faultinject.campaigns.measure.failover import rounds

    rounds.run(case, rounds.CUT_PLAN)


CASES: dict[str, Callable[[Case], None]] = {
    "technique": technique,
    "faults": faults,
    "cuts": cuts,
}

if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", os.getcwd())
    CASES[sys.argv[1]](Case(*sys.argv[1:]))
