"""UVM unmaps the memory of a driver instance, and the moment from which that is known.

UVM_FREE takes a range out of the GPU's page tables, waits for that, and then for the resource manager, so a
thread of its own calls it. Another thread sees that the range is gone, because it can reserve it only then.
"""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Iterable
from typing import Any

from faultinject.programs.devices.instance import now
from mpsd.gpu.nvidia import uvm_abi

PATIENCE_S = 2.0
LOOK_S = 0.00002


def _ask(fd: int, request: int, buffer: bytearray, status_at: int) -> int:
    """Return the driver's status, or UNWRITTEN."""
    try:
        fcntl.ioctl(fd, request, buffer, True)
    except OSError:
        return uvm_abi.UNWRITTEN
    return uvm_abi.read_u32(buffer, status_at)


def _free(fds: Iterable[int], address: int, size: int, result: dict[str, Any]) -> None:
    layout = uvm_abi.FREE_WITH_LENGTH
    for fd in fds:
        buffer = uvm_abi.encode_free(layout, address, size)
        if _ask(fd, uvm_abi.UVM_FREE, buffer, layout.status_at) == 0:
            result["freed"] = now()
            return


def _may_lie_there(fds: Iterable[int], address: int, size: int) -> bool:
    """Call UVM_FREE on the descriptor of the address space; another descriptor takes no range."""
    request = uvm_abi.UVM_CREATE_EXTERNAL_RANGE
    return any(_ask(fd, request, uvm_abi.encode_external_range(address, size), 16) == 0 for fd in fds)


def cut_off(fds: Iterable[int], address: int, size: int) -> dict[str, Any]:
    """`ended`: when the range was known to be gone (absent: never); `freed`: when the call returned."""
    fds, result = tuple(fds), dict[str, Any]()
    end = now() + PATIENCE_S
    threading.Thread(target=_free, args=(fds, address, size, result), daemon=True).start()
    while now() < end:
        if _may_lie_there(fds, address, size):
            result["ended"] = now()
            break
        time.sleep(LOOK_S)
    return result
