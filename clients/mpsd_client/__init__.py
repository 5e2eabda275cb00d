"""Talks to mpsd, the supervisor for NVIDIA MPS. The standard library alone.

    import mpsd_client

    with mpsd_client.connect() as mpsd:
        os.environ.update(mpsd.env())          # before CUDA is initialised
        for event in mpsd.subscribe():
            print(event["kind"])

Every call has a deadline and raises MpsdError: `code` for programs, `message` and `remedy` for people.
"""

from mpsd_client._protocol import errors
from mpsd_client.client import Client, EventStream, RemoteError, connect
from mpsd_client.env import SHELLS, export_lines

MpsdError = errors.MpsdError
AmbiguousError = errors.AmbiguousError
BusyError = errors.BusyError
DeadlineError = errors.DeadlineError
DeniedError = errors.DeniedError
NotFoundError = errors.NotFoundError
NotRunningError = errors.NotRunningError
ProtocolError = errors.ProtocolError
UsageError = errors.UsageError

__all__ = [
    "SHELLS",
    "AmbiguousError",
    "BusyError",
    "Client",
    "DeadlineError",
    "DeniedError",
    "EventStream",
    "MpsdError",
    "NotFoundError",
    "NotRunningError",
    "ProtocolError",
    "RemoteError",
    "UsageError",
    "connect",
    "export_lines",
]
