"""The client of the fail-over measurements that faults, and reports its errors."""

from __future__ import annotations

import os
import time

from faultinject.campaigns.measure.clients.cuda import Cuda, CudaError
from faultinject.campaigns.measure.clients.roles import commands, emit, fault
from faultinject.programs.devices.instance import GRANULE


def host_engine_fault(cuda: Cuda) -> None:
    """A stream memory operation on an address that is unmapped before its turn comes, 20 ms later."""
    handle, _ = cuda.create_shareable()
    address, stream = cuda.map(handle), cuda.stream()
    cuda.launch("spin", 20_000_000, stream=stream)
    cuda("cuStreamWriteValue32", stream, address, 1, 0)
    cuda("cuMemUnmap", address, GRANULE)


def offender(cubin: str, kind: str) -> None:
    """Fault on command, then query the state of the driver instance until told to end."""
    cuda = Cuda(cubin)
    word = cuda.alloc(4096)
    cuda.launch("increment", word, 1)
    cuda.sync()
    lines = commands()
    emit("ready", pid=os.getpid())
    lines.get()
    if kind == "pbdma":
        host_engine_fault(cuda)
    else:
        fault(cuda, kind)
    emit("fired")
    last_state = ""
    while lines.empty():
        try:
            cuda.sync()
            state = "sync ok"
        except CudaError as error:
            state = f"error {error.code}"
        if state != last_state:
            emit("said", said=state)
            last_state = state
        time.sleep(0.001)
    os._exit(5)
