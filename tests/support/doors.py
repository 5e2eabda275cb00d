"""The daemon's three sockets, as other users see them: connections that are held, and callers.

As a program (python doors.py UID SOCKETS...) it is a caller of its own: it greets at each socket in turn and
prints the answers. With "latency SECONDS" it prints the times of its `status` calls instead, and with
"flood KIND" it floods the control socket until it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.site import Site

DEADLINE_S = 60.0
VICTIM_UID = 65533
DOORS = {
    "mpsd.sock": socket.SOCK_STREAM,
    "vault.sock": socket.SOCK_SEQPACKET,
    "failover.sock": socket.SOCK_SEQPACKET,
}


@contextlib.contextmanager
def held(
    path: Path, kind: socket.SocketKind, uids: Iterable[int], each: int
) -> Iterator[list[socket.socket]]:
    """Hold silent connections: `each` of every user; the daemon may refuse some of them.

    They block while the daemon's queue is full. Raises BlockingIOError if it stays so.
    """
    from tests.support.site import as_user

    found: list[socket.socket] = []
    try:
        for uid in uids:
            with as_user(uid):
                for _ in range(each):
                    found.append(made := socket.socket(socket.AF_UNIX, kind))
                    made.setsockopt(
                        socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(DEADLINE_S), 0)
                    )
                    with contextlib.suppress(ConnectionError):
                        made.connect(str(path))
        yield found
    finally:
        for one in found:
            one.close()


FLOODS = ("connect", "ask", "garbage", "deaf")


@contextlib.contextmanager
def flooding(site: Site, kind: str, uid: int = 65534) -> Iterator[None]:
    """Let a process of another user flood the control socket meanwhile; see FLOODS and _flood()."""
    command = [sys.executable, __file__, str(uid), "", str(site.run_dir), "flood", kind]
    with subprocess.Popen(
        command, env=site.environ(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"begins\n"
            yield
            assert process.poll() is None, "the flood has ended early"
        finally:
            process.kill()


@dataclass(frozen=True)
class Latency:
    """Times of `status` calls [s]."""

    calls: int
    p50: float
    p99: float
    worst: float


def control_latency(site: Site, seconds: float, uid: int = VICTIM_UID) -> Latency:
    """Return the latency of `status` for a user of its own, over so many seconds, beside whatever runs."""
    times = sorted(json.loads(_caller(site, uid, ["latency", str(seconds)], seconds + DEADLINE_S)))
    assert times, "no call was answered"
    return Latency(len(times), times[len(times) // 2], times[len(times) * 99 // 100], times[-1])


def served(
    site: Site, uid: int, groups: Sequence[int] = (), doors: Sequence[str] = tuple(DOORS)
) -> dict[str, str]:
    """Return what each door says to a new process of this user; "served" is the good answer."""
    found: dict[str, str] = json.loads(_caller(site, uid, doors, DEADLINE_S, groups))
    return found


def _caller(
    site: Site, uid: int, arguments: Sequence[str], deadline_s: float, groups: Sequence[int] = ()
) -> str:
    command = [sys.executable, __file__, str(uid), ",".join(map(str, groups)), str(site.run_dir), *arguments]
    done = subprocess.run(
        command,
        env=site.environ(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _greet(door: str, run_dir: str) -> str:
    import mpsd_client
    from mpsd.failover import messages as failover
    from mpsd.vault import messages as vault

    path = f"{run_dir}/{door}"
    try:
        if door == "mpsd.sock":
            with mpsd_client.connect(path) as client:
                client.status()
            return "served"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect(path)
            if door == "vault.sock":
                sock.send(vault.pack(vault.Message(vault.Kind.HELLO)))
            else:
                sock.send(failover.pack(failover.Message(failover.Kind.HELLO)))
            return "served" if sock.recv(4096) else "closed"
    except (OSError, mpsd_client.MpsdError) as error:
        return repr(error)


def _latencies(run_dir: str, seconds: float) -> list[float]:
    import mpsd_client

    times: list[float] = []
    end = time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        with mpsd_client.connect(f"{run_dir}/mpsd.sock") as client:
            client.status()
        times.append(time.monotonic() - began)
        time.sleep(0.005)
    return times


def _flood(kind: str, path: str) -> None:
    """Flood a socket: new connections, requests on 32 of them, garbage, or requests without reading."""
    from mpsd.wire import codec
    from mpsd.wire.messages import Request
    from tests.support.listening import RawClient, frame

    print("begins", flush=True)
    if kind in ("connect", "garbage"):
        while True:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
                sock.connect(path)
                if kind == "garbage":
                    sock.send(b"garbage" * 100)
    clients = [RawClient(Path(path)) for _ in range(32)]
    number = 0
    for client in clients:
        client.socket.setblocking(False)
    while True:
        for client in clients:
            number += 1
            with contextlib.suppress(OSError):
                client.socket.send(frame(codec.encode(Request(number, "status", {}, 5000))))
                while kind == "ask" and client.socket.recv(1 << 16):
                    pass


def main() -> None:
    uid, groups, run_dir, *arguments = sys.argv[1:]
    # Imports first: the user may not be allowed to read the packages.
    import mpsd_client  # noqa: F401
    from mpsd.failover import messages as _failover  # noqa: F401
    from mpsd.vault import messages as _vault  # noqa: F401
    from tests.support import listening as _listening  # noqa: F401

    if int(uid) != os.getuid():
        os.setgroups([int(g) for g in groups.split(",") if g])
        os.setgid(int(uid))
        os.setuid(int(uid))
    if arguments[0] == "latency":
        print(json.dumps(_latencies(run_dir, float(arguments[1]))))
    elif arguments[0] == "flood":
        _flood(arguments[1], f"{run_dir}/mpsd.sock")
    else:
        print(json.dumps({door: _greet(door, run_dir) for door in arguments}))


if __name__ == "__main__":
    main()
