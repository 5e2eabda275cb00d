"""An LLM server in small: a batch of slots, at every step a token for each; who waits longest gets the next.

It knows nothing of faults: an error of the GPU's is its end, as it is that of any server over transformers.
`requests` come by its standard input, and each step says at once which request has had which token.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from faultinject.programs.device import BACKENDS, DeviceError
from faultinject.programs.talk import Inbox, identity, no_core_dumps, say
from faultinject.serving.batch import SLOTS, Batch, Request
from faultinject.serving.model import Model, open_model, step


class Server:
    def __init__(self, model: Model, slots: int) -> None:
        self.model, self.batch = model, Batch(slots)
        self.steps = 0

    def hear(self, order: Mapping[str, Any]) -> None:
        self.batch.add([Request.of(data) for data in order["requests"]])

    def step(self) -> None:
        """One token for everybody who has a slot. Raises DeviceError."""
        tokens = step(self.model, self.batch)
        self.steps += 1
        say("step", number=self.steps, tokens=tokens)


def serve(server: Server, inbox: Inbox) -> None:
    """Until told to stop. Raises DeviceError."""
    while True:
        order = inbox.wait(None if server.batch.idle else 0)
        if order is not None and order["do"] == "requests":
            server.hear(order)
        elif order is not None:
            return
        else:
            server.step()


def _end(status: int) -> NoReturn:
    """Not through the interpreter's exit: after an error of the GPU's clean-up calls may hang."""
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
        # Before anybody waits: what is loaded lazily is loaded now.
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
