"""`mpsd-faultinject try KIND`: one fault by hand, in an ordinary client of the running daemon."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import mpsd_client
from faultinject.evidence.files import tell_stderr
from faultinject.registry import kinds
from faultinject.registry.faults import REGISTRY, Fault, Hit, Story
from faultinject.registry.history import History
from faultinject.rig import consent
from faultinject.rig.libraries import MPSD_RUN, find_libraries
from faultinject.rig.stage import wait_for
from faultinject.rig.worker import Worker, python_environment
from mpsd.base.errors import DeadlineError, NotReadyError, UnsupportedError, UsageError
from mpsd_client.driver import find_driver, find_proxy

UP_S, ATTACHED_S, RECORD_S, ENDED_S = 30.0, 10.0, 5.0, 10.0
MEMORY = 1 << 20
NO_GPU = "a daemon on the simulated GPU (mpsd run --backend simulated) needs no GPU"


def offered() -> dict[str, Fault]:
    """Return the faults that one client can commit alone under the settings of any daemon, by kind."""
    found: dict[str, Fault] = {}
    for fault in REGISTRY:
        alone = fault.kind in kinds.GPU_KINDS + kinds.DEATH + kinds.HANG
        if alone or (fault.zoned and _is_plain_hit(fault)):
            found.setdefault(fault.kind, fault)
    return found


def _is_plain_hit(fault: Fault) -> bool:
    known_settings = set(fault.settings) == {"protect"} and not fault.host_guard_bytes
    return known_settings and fault.story is Story.INJECT and fault.hit is Hit.EVICTED


def named(kind: str) -> Fault:
    """Return the fault of this kind. Raises UsageError with the kinds for another name."""
    known = offered()
    if kind in known:
        return known[kind]
    near = get_close_matches(kind, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"{kind!r} is no kind for try", remedy=f"{hint}kinds: {', '.join(known)}")


def try_it(kind: str, *, yes: bool) -> int:
    """Let a client commit the fault, print what happens, and return 0. Raises MpsdError.

    `yes`: use a real GPU without a question.
    """
    fault = named(kind)
    with mpsd_client.connect() as daemon:
        backend = str(daemon.version()["backend"])
    if backend != "simulated":
        consent.require_on_gpu(yes=yes, tell=tell_stderr, instead=NO_GPU)
    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as folder, History() as history:
        base = Path(folder)
        device, environment = _device(fault, backend, base)
        arguments = [fault.kind, "--variant", fault.variant, "--memory", str(MEMORY), "--backend", device]
        log, through = base / "client.err", (*MPSD_RUN, "-q")
        client = Worker("client", "offender", arguments, environment, history, log, through=through)
        try:
            _play(fault, client, log)
        finally:
            client.end()
    return 0


def _device(fault: Fault, backend: str, base: Path) -> tuple[str, dict[str, str]]:
    """Return the GPU that the client opens and its environment. Raises UnsupportedError."""
    environment = {**os.environ, "PYTHONPATH": python_environment()["PYTHONPATH"]}
    if backend == "simulated":
        if not fault.zoned:
            return backend, environment
        libraries = find_libraries(backend, None, _standin(), base)
        return "standin", libraries.plain(environment) | {"MPSD_LIBCUDA_DIR": str(libraries.proxy)}
    try:
        from faultinject.programs.devices.nvidia import CUBIN, prepare_kernels
    except ImportError as error:
        raise UnsupportedError(
            f"this Python cannot use CUDA: {error}", remedy="scripts/setup --with cuda"
        ) from error
    prepare_kernels(base / "kernels.cubin")
    return backend, environment | {CUBIN: str(base / "kernels.cubin")}


def _standin() -> Path | None:
    """Return the folder of the stand-in driver that this environment names, if any."""
    if "MPSD_STANDIN_GPU" not in os.environ:
        return None
    found = find_driver(os.environ, find_proxy(os.environ))
    return Path(found).parent if found else None


def _play(fault: Fault, client: Worker, log: Path) -> None:
    print(f"{fault.kind}: {fault.title}", flush=True)
    ready = client.wait("ready", "outcome", timeout=UP_S)
    if ready is None or ready.what != "ready":
        why = str(ready.data.get("text")) if ready else log.read_text(errors="replace").strip()
        raise NotReadyError(f"the client did not start: {why}", remedy="mpsd-ctl doctor")
    row = _attached(fault, client.pid)
    level = row["protected"]["level"]
    print(f"pid {client.pid} is a client of domain {row['domain']}, protection {level}", flush=True)
    before = _last_record()
    client.tell("go")
    fired = client.wait("fire", timeout=UP_S)
    if fired is None:
        raise DeadlineError("the client did not commit its fault", remedy="mpsd-ctl doctor")
    stray = fired.data.get("stray")
    print(f"it commits the fault{f' at address {stray}' if stray else ''}", flush=True)
    if fault.story is Story.EVICTION:
        print(
            f"its kernel does not end; evict it in another terminal: mpsd-ctl kill {client.pid}", flush=True
        )
        while client.wait("outcome", "gone", timeout=UP_S) is None:
            pass
    print(_what_it_saw(client), flush=True)
    if wait_for(lambda: _last_record() > before, RECORD_S):
        print("mpsd recorded it: mpsd-ctl faults --limit 1")
    else:
        print("mpsd made no record of it: mpsd-ctl events shows what happened")
    print("your other clients: mpsd-ctl status")


def _attached(fault: Fault, pid: int) -> Mapping[str, Any]:
    """Return the client's row in status, once it is attached and has the zones that it hits.

    Raises DeadlineError, UnsupportedError.
    """
    found: list[Mapping[str, Any]] = []

    def look(holds: Callable[[Mapping[str, Any]], bool]) -> bool:
        rows = _ask(lambda daemon: daemon.status())["clients"]
        found[:] = [row for row in rows if row["pid"] == pid and row["state"] == "attached"]
        return any(map(holds, found))

    if not wait_for(lambda: look(lambda row: True), ATTACHED_S):
        raise DeadlineError(f"mpsd does not show pid {pid} as attached", remedy="mpsd-ctl status")
    if fault.zoned and not wait_for(lambda: look(_has_zones), ATTACHED_S):
        raise UnsupportedError(
            "the client has no guard zones, so its access would end other clients",
            remedy="mpsd-ctl doctor says why",
        )
    return found[0]


def _has_zones(row: Mapping[str, Any]) -> bool:
    zones = row.get("guard_zones") or {}
    return bool(zones.get("managed"))


def _what_it_saw(client: Worker) -> str:
    """Return the client's error code and how it ended."""
    # Its end may be seen before its last message.
    outcome = client.wait("outcome", timeout=ENDED_S)
    code = outcome.data.get("code") if outcome else None
    saw = "it got no error" if not code else f"it got CUDA error {code}"
    gone = client.wait("gone", timeout=ENDED_S)
    if gone is None:
        return f"{saw} and continues; it ends now"
    status = gone.data["status"]
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    return f"{saw}; its process {how}"


def _last_record() -> int:
    records = _ask(lambda daemon: daemon.faults(limit=1))
    return max((int(record["id"]) for record in records), default=0)


def _ask(request: Callable[[mpsd_client.Client], Any]) -> Any:
    with mpsd_client.connect() as daemon:
        return request(daemon)


def _run(args: argparse.Namespace) -> int:
    return try_it(args.kind, yes=args.yes)


def add_parser(commands: Any) -> None:
    """Add the options of the subcommand."""
    parser = commands.add_parser("try", help="one fault by hand, in a client of the running daemon")
    parser.add_argument("kind", metavar="KIND", help=f"one of: {', '.join(offered())}")
    parser.add_argument(
        "--yes", action="store_true", help="use the real GPU without asking, even if it is in use"
    )
    parser.set_defaults(go=_run)
