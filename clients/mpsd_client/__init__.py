"""Client library of mpsd: queries, events, and GPU buffers that outlive a process. Standard library only.

    import mpsd_client

    with mpsd_client.connect() as mpsd:
        os.environ.update(mpsd.env())          # before CUDA is initialised
        for event in mpsd.subscribe():
            print(event["kind"])

    with mpsd_client.session() as s:           # GPU memory that outlives the process, if a vault is offered
        parameters = s.attach("parameters", 64 << 20)
        tensor = torch.from_dlpack(parameters.view("float32"))
        s.on_event(print)                      # "domain d1 lost a client: ..."

Every call has a deadline and raises MpsdError: `code` for programs, `message` and `remedy` for people.
Only creating a buffer loads CUDA; importing this package does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mpsd_client._protocol import errors
from mpsd_client.client import Client, EventStream, RemoteError, connect
from mpsd_client.env import SHELLS, export_lines
from mpsd_client.events import Event, Watcher, on_event
from mpsd_client.vault import InUseError, NameTakenError, NoVaultError, QuotaError

if TYPE_CHECKING:
    from mpsd_client._cuda import CudaError
    from mpsd_client.buffer import Buffer, View
    from mpsd_client.buffers import NotPersistentWarning, Session, attach, forget, session, wait_for_turn

MpsdError = errors.MpsdError
AmbiguousError = errors.AmbiguousError
BusyError = errors.BusyError
DeadlineError = errors.DeadlineError
DeniedError = errors.DeniedError
NotFoundError = errors.NotFoundError
NotRunningError = errors.NotRunningError
ProtocolError = errors.ProtocolError
RefusedError = errors.RefusedError
UsageError = errors.UsageError

# These modules import ctypes, which mpsd-run and mpsd-ctl do not need.
_BUFFERS = {
    "Buffer": "buffer",
    "CudaError": "_cuda",
    "NotPersistentWarning": "buffers",
    "Session": "buffers",
    "View": "buffer",
    "attach": "buffers",
    "forget": "buffers",
    "session": "buffers",
    "wait_for_turn": "buffers",
}


def __getattr__(name: str) -> object:
    if name not in _BUFFERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_BUFFERS[name]}"), name)


__all__ = [
    "SHELLS",
    "AmbiguousError",
    "Buffer",
    "BusyError",
    "Client",
    "CudaError",
    "DeadlineError",
    "DeniedError",
    "Event",
    "EventStream",
    "InUseError",
    "MpsdError",
    "NameTakenError",
    "NoVaultError",
    "NotFoundError",
    "NotPersistentWarning",
    "NotRunningError",
    "ProtocolError",
    "QuotaError",
    "RefusedError",
    "RemoteError",
    "Session",
    "UsageError",
    "View",
    "Watcher",
    "attach",
    "connect",
    "export_lines",
    "forget",
    "on_event",
    "session",
    "wait_for_turn",
]
