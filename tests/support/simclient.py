"""A client of the simulated GPU under a test's command. Run as a file, with the standard library alone.

`obey`: each line of the input is a Python expression on `dev` (and `os`, `sys`); the answer is a line of
JSON. `work`: computes on the GPU and checks every result until its input ends, then reports how many. A
second argument is the user to become: only here, for that user may be unable to read the interpreter.
"""

import ctypes  # noqa: F401 - the client needs it, and cannot load it as somebody else
import json
import os
import select
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpsd.gpu.simulated.client import GpuFailure, SimulatedDevice

WORDS = 64


def say(**what: object) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def obey(dev: SimulatedDevice) -> None:
    # Not sys.stdin: its read-ahead would be lost to a program that this one execs.
    known: dict[str, object] = {"dev": dev, "os": os, "sys": sys, "say": say}

    def guard(vault_socket: str) -> int:
        """Let `zoned` allocate with guard zones from now on.

        Return the bytes of zones that the daemon grants.
        """
        from tests.support.guardzones import GuardedDevice

        known["zoned"] = GuardedDevice(dev, vault_socket)
        return known["zoned"].granted

    def failover(socket_path: str, mode: str = "keep", budgets: bool = False) -> list[object]:
        """Say HELLO on failover.sock, and keep the connection as `fo`. Return the answer."""
        from tests.support.failovering import FailoverProgram

        known["fo"] = FailoverProgram(known, socket_path)
        known["fo"].budgets = budgets
        return known["fo"].hello(mode)

    known["guard"], known["failover"] = guard, failover
    with open(0, "rb", buffering=0, closefd=False) as orders:
        for line in orders:
            try:
                result = eval(line, known)
                say(result=result.hex() if isinstance(result, bytes) else result)
            except GpuFailure as failure:
                say(error=failure.code)


def work(dev: SimulatedDevice) -> None:
    address = dev.alloc(WORDS)
    dev.launch("fill", address=address, words=WORDS, value=0)
    rounds = 0
    while not select.select([0], [], [], 0)[0]:
        rounds += 1
        dev.launch("increment", address=address, words=WORDS, duration_s=0.001)
        found = dev.read(address, 4 * WORDS)
        if found != rounds.to_bytes(4, "little") * WORDS:
            say(wrong=found.hex(), rounds=rounds)
            sys.exit(8)
        if rounds == 1:
            say(working=True)
    dev.close()
    say(rounds=rounds)


def become(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def main() -> None:
    if len(sys.argv) > 2:
        # `failover` needs modules that the other user may be unable to read.
        import tests.support.failovering  # noqa: F401

        become(int(sys.argv[2]))
    try:
        dev = SimulatedDevice.open(os.environ)
        say(pid=os.getpid(), on_mps=dev.on_mps)
        {"obey": obey, "work": work}[sys.argv[1]](dev)
    except GpuFailure as failure:
        say(error=failure.code)
        sys.exit(7)


main()
