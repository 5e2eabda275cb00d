"""The sources of Xids and of the kernel log, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import MpsdError
from mpsd.base.model import Gpu, KernelXid, NvmlXid
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.gpu.base import Backend, KernelLog, XidSource


class FaultSources:
    """The available sources. A missing one is a condition, not an error."""

    def __init__(self, backend: Backend, gpus: Sequence[Gpu], post: Callable[[ev.Event], None]) -> None:
        self.conditions: list[Condition] = []
        self._gpus = gpus
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._sources: list[XidSource | KernelLog] = []
        try:
            xids = backend.devices.watch_xids()
            self._loop.add_reader(xids.fileno(), self._read_xids, xids)
            self._sources.append(xids)
        except MpsdError as error:
            self.conditions.append(Condition(Code.XIDS_NOT_SEEN, detail=str(error)))
        self._kernel_log = backend.kernel_log
        if self._kernel_log is None:
            self.conditions.append(Condition(Code.KERNEL_LOG_NOT_READ))
        else:
            self._loop.add_reader(self._kernel_log.fileno(), self._read_kernel_log, self._kernel_log)
            self._sources.append(self._kernel_log)
            self._post(mev.KernelLogFollowed(True))

    def read_kernel_log(self) -> None:
        """Post the Xids of the kernel log up to now, before an event that is decided with their help."""
        if self._kernel_log is not None:
            self._read_kernel_log(self._kernel_log)

    def close(self) -> None:
        self._kernel_log = None
        for source in self._sources:
            self._loop.remove_reader(source.fileno())
            source.close()

    def _read_xids(self, source: XidSource) -> None:
        for xid in self._drained(source):
            assert isinstance(xid, NvmlXid)
            self._post(ev.NvmlXidSeen(xid))

    def _read_kernel_log(self, source: KernelLog) -> None:
        before = source.overruns
        for xid in self._drained(source):
            assert isinstance(xid, KernelXid)
            gpu = next((g.uuid for g in self._gpus if g.pci.startswith(xid.pci.lower())), None)
            self._post(ev.KernelXidSeen(gpu, xid))
        if source.overruns != before and self._kernel_log is source:
            # It is followed anew: lines are missing.
            self._post(mev.KernelLogFollowed(True))

    def _drained(self, source: XidSource | KernelLog) -> Sequence[NvmlXid | KernelXid]:
        try:
            return source.drain()
        except (MpsdError, OSError) as error:
            # Without this the descriptor would stay readable forever.
            self._loop.remove_reader(source.fileno())
            if source is self._kernel_log:
                self._kernel_log = None
                self._post(mev.KernelLogFollowed(False))
            self.conditions.append(Condition(Code.SIGNS_LOST, detail=str(error)))
            return ()
