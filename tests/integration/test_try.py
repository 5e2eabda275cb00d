"""`mpsd-faultinject try` beside a client, under a running daemon on the simulated GPU."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.site import Site

DEADLINE_S = 60.0


def try_kind(site: Site, kind: str) -> subprocess.CompletedProcess[str]:
    environ = site.environ() | {"MPSD_SOCKET": str(site.socket), "MPSD_SIM_DIR": str(site.node_dir)}
    command = [sys.executable, "-m", "faultinject", "try", kind]
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def test_a_fault_by_hand_is_recorded_with_its_client_as_the_offender() -> None:
    with Site() as site:
        site.start()
        done = try_kind(site, "store")
        assert (done.returncode, done.stderr) == (0, "")
        client = re.search(r"^pid (\d+) is a client of domain (d\d+), protection observe$", done.stdout, re.M)
        assert client, done.stdout
        (record,) = site.ask(lambda daemon: daemon.faults(limit=1))
        assert (record["offender"]["pid"], record["domain"]) == (int(client[1]), client[2])
        assert "it got CUDA error 700; its process exited with status 5" in done.stdout
        assert "mpsd recorded it: mpsd-ctl faults --limit 1" in done.stdout
