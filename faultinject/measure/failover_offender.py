"""The client of the fail-over measurements that faults, and says what it is told."""

from __future__ import annotations

import os
import time

from faultinject.measure.client import commands, emit, fault
from faultinject.measure.cuda import Cuda, CudaError
from faultinject.measure.failover_driver import GRANULE


def host_engine_fault(cuda: Cuda) -> None:
    """A stream memory operation on an address that is unmapped before its turn comes, 20 ms later."""
    handle, _ = cuda.create_shareable()
    address, stream = cuda.map(handle), cuda.stream()
    cuda.launch("spin", 20_000_000, stream=stream)
    cuda("cuStreamWriteValue32", stream, address, 1, 0)
    cuda("cuMemUnmap", address, GRANULE)


def offender(cubin: str, kind: str) -> None:
    """Faults on command and then asks its copy for its state until told to leave."""
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
    told = ""
    while lines.empty():
        try:
            cuda.sync()
            said = "sync ok"
        except CudaError as error:
            said = f"error {error.code}"
        if said != told:
            emit("said", said=said)
            told = said
        time.sleep(0.001)
    os._exit(5)
