"""A small LLM server: a batch of slots, one token for each at every step.

It knows nothing of faults: a GPU error ends it, as any server over transformers. Requests come by its
standard input, and each step reports at once which request got which token.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from faultinject.programs.basics.messages import (
    Inbox,
    identity,
    no_core_dumps,
    say,
)
from faultinject.programs.devices.base import BACKENDS, DeviceError
from faultinject.programs.llm.batch import SLOTS, Batch, Request
from faultinject.programs.llm.model import Model, open_model, step


class Server:
    def __init__(self, model: Model, slots: int) -> None:
        self.model, self.batch = model, Batch(slots)
        self.steps = 0

    def accept_requests(self, order: Mapping[str, Any]) -> None:
        self.batch.add([Request.of(data) for data in order["requests"]])

    def step(self) -> None:
        """Compute one token for every request with a slot. Raises DeviceError."""
        tokens = step(self.model, self.batch)
        self.steps += 1
        say("step", number=self.steps, tokens=tokens)


def serve(server: Server, inbox: Inbox) -> None:
    """Serve until told to stop. Raises DeviceError."""
    while True:
        order = inbox.wait(None if server.batch.idle else 0)
        if order is not None and order["do"] == "requests":
            server.accept_requests(order)
        elif order is not None:
            return
        else:
            server.step()


def _end(status: int) -> NoReturn:
    """Not through the interpreter's exit: after a GPU error clean-up calls may hang."""
    sys.stdout.flush()
    os._exit(status)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=BACKENDS)
    parser.add_argument("--slots", type=int, default=SLOTS)
    args = parser.parse_args(argv)
    no_core_dumps()
    inbox = Inbox()
    try:
        server = Server(open_model(args.backend, args.slots), args.slots)
        # Before any request: this loads modules that are loaded lazily.
        server.model.begin(0, (1, 2))
        server.model.step([0])
        say("ready", model=server.model.name, **identity())
        serve(server, inbox)
        server.model.close()
        say("done", steps=server.steps)
    except ImportError as error:
        say("lacking", text=f"{error.name or error} is not installed")
    except DeviceError as error:
        say("error", code=error.code, text=str(error))
        _end(1)
    _end(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
