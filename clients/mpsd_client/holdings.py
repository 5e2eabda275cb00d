"""Vault memory that this process has attached, until its release is certain.

When the domain faults, or the context has faulted at the end of the process, this module unmaps the memory
and tells the vault. The process itself ends much later after a fault. Once the memory is unmapped, work in
flight cannot write to it, so another process may take it over. Memory that is not listed here, or could not
be unmapped, stays with the process until the vault sees its end.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from mpsd_client import vault as vaults
from mpsd_client._cuda import Device
from mpsd_client._protocol import errors
from mpsd_client.buffer import Range
from mpsd_client.vault import InUseError, Vault

ATTACHED_S = 1.0

attaching = threading.Lock()
"""Held while a buffer is being attached."""

_released = threading.Event()
_release_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Held:
    """`path`: the vault's socket."""

    path: str
    where: Range


# By the numbers that this process gave to the vault.
_held: dict[int, _Held] = {}


def note(number: int, path: str, where: Range) -> None:
    """Record that the vault assigned memory to this process. Call it with `attaching` held."""
    _held[number] = _Held(path, where)


def closed(number: int, release: bool) -> None:
    """Handle the end of a buffer. `release`: it is unmapped, and the next process may take it.

    Without a daemon the memory stays with this process until its end. Raises MpsdError."""
    held = _held.get(number)
    if held is None:
        return
    if release:
        _release(held.path, [number])
    elif not held.where.mapped:
        # The vault has already been asked to forget it.
        del _held[number]


def check_open() -> None:
    """Raise InUseError after let_go(): nothing may be attached then. Call it with `attaching` held."""
    if _released.is_set():
        raise InUseError(
            "another process has taken over the buffers of this program: the domain of this process faulted",
            remedy="end this process",
        )


def wait(seconds: float) -> None:
    """Sleep. Raises InUseError like check_open(), as soon as that would."""
    if _released.wait(seconds):
        check_open()


def release_all() -> bool:
    """Unmap all vault memory without waiting for work, and tell the vault. For a process of a faulted domain.

    False if some memory could not be unmapped or the vault does not answer. Idempotent."""
    _released.set()
    # A buffer that is being attached right now must be released too.
    if not attaching.acquire(timeout=ATTACHED_S):
        return False
    attaching.release()
    with _release_lock:
        held = dict(_held)
        if not all([one.where.unmap() for one in held.values()]):
            return False
        try:
            for path in {one.path for one in held.values()}:
                _release(path, [number for number, one in held.items() if one.path == path])
        except errors.MpsdError:
            return False
        return True


def _release(path: str, numbers: list[int]) -> None:
    with Vault(path, vaults.token_of(os.environ)) as vault:
        for number in numbers:
            vault.leave_segment(number)
            _held.pop(number, None)


def release_at_exit(then: Callable[[], object]) -> None:
    """Release vault memory at interpreter exit if a context of this process has faulted, and call `then`.

    A thread that waits for the request would not run any more."""
    pid = os.getpid()

    def go() -> None:
        if os.getpid() == pid and _has_faulted() and release_all():
            then()

    atexit.register(go)


def _has_faulted() -> bool:
    """Return whether the mapped memory's contexts have faulted: their work could write to it otherwise."""
    mapped = [one.where for one in dict(_held).values() if one.where.mapped]
    return all(where.device.has_faulted() for where in mapped) if mapped else Device.found_fault
