"""A program under mpsd-standby: it counts in a named buffer, and outlives its context.

The first argument, WHAT, adds to that:

count   when its buffer is closed by mpsd-standby, it prints which operations still work, and stays
child   the first process has a child with a buffer of its own; later processes want that buffer too
exit    it ends with an error when its context is lost
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import mpsd_client
from mpsd_client import turns

CHILD = "import mpsd_client, signal; b = mpsd_client.attach('child', 100); print(flush=True); signal.pause()"


def say(*words: object) -> None:
    print(*words, flush=True)


def count_on(buffer: mpsd_client.Buffer) -> None:
    """Count until that fails. Raise CudaError when the context is lost, UsageError when the buffer is
    closed."""
    number = int.from_bytes(buffer.read(8), "little")
    while True:
        number += 1
        buffer.write(number.to_bytes(8, "little"))
        say(number, os.getpid())
        time.sleep(0.005)


def tell_what_is_left(
    session: mpsd_client.Session, buffer: mpsd_client.Buffer, view: mpsd_client.View
) -> None:
    for what in (lambda: buffer.pointer, lambda: view.read(1), lambda: session.attach("more", 100)):
        try:
            say("still", what())
        except mpsd_client.MpsdError as error:
            say("refused", error.code)
    say(buffer)
    session.close()
    say("closed")


def main(what: str) -> int:
    first = os.environ[turns.VARIABLE].endswith(" first")
    with mpsd_client.session() as session:
        buffer = session.attach("count", 100)
        view = buffer.view("int64")
        if what == "child" and first:
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, start_new_session=True
            )
            assert child.stdout is not None and child.stdout.readline()
            say("child", child.pid)
        elif what == "child":
            session.attach("child")
        session.wait_for_turn()
        while True:
            try:
                count_on(buffer)
            except mpsd_client.CudaError:
                if what == "exit":
                    return 1
                time.sleep(0.001)
            except mpsd_client.UsageError:
                tell_what_is_left(session, buffer, view)
                signal.pause()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
