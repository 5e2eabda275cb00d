"""What this process has of the vault, until it has provably let go of it.

When its domain is lost, or its context at its end, the memory is unmapped before the process has ended, which
takes much longer after a fault, and the vault is told. What was in flight writes nothing there any more then,
and whoever goes on may take it. All that is not known here, or not unmapped, is the process's until it has
ended: the vault sees to that.
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

_let_go = threading.Event()
_letting_go = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Held:
    """`path`: of the vault's socket."""

    path: str
    where: Range


# By the numbers by which the vault knows them.
_held: dict[int, _Held] = {}


def note(number: int, path: str, where: Range) -> None:
    """The vault has it as this process's. With `attaching` held."""
    _held[number] = _Held(path, where)


def closed(number: int, leaves: bool) -> None:
    """`leaves`: it is unmapped, and the next process may take it. Without a daemon it stays this one's until
    that ends. Raises MpsdError."""
    held = _held.get(number)
    if held is None:
        return
    if leaves:
        _tell(held.path, [number])
    elif not held.where.mapped:
        # The vault was made to forget it.
        del _held[number]


def check_open() -> None:
    """Raises InUseError once all was let go of: nothing is attached after that. With `attaching` held."""
    if _let_go.is_set():
        raise InUseError(
            "another process goes on with the buffers of this program: the domain of this one is lost",
            remedy="end this process",
        )


def wait(seconds: float) -> None:
    """Raises InUseError as check_open() does, as soon as it would."""
    if _let_go.wait(seconds):
        check_open()


def let_go() -> bool:
    """Unmap all of it, without waiting for any work, and tell the vault: for a process whose domain is lost.
    False where something is not unmapped, or the vault does not answer. Idempotent."""
    _let_go.set()
    # What is being attached this moment is to be let go of too.
    if not attaching.acquire(timeout=ATTACHED_S):
        return False
    attaching.release()
    with _letting_go:
        held = dict(_held)
        if not all([one.where.unmap() for one in held.values()]):
            return False
        try:
            for path in {one.path for one in held.values()}:
                _tell(path, [number for number, one in held.items() if one.path == path])
        except errors.MpsdError:
            return False
        return True


def _tell(path: str, numbers: list[int]) -> None:
    with Vault(path, vaults.token_of(os.environ)) as vault:
        for number in numbers:
            vault.leave(number)
            _held.pop(number, None)


def let_go_at_exit(then: Callable[[], object]) -> None:
    """At the interpreter's end let go, where a context of this process was lost, and call `then`. A thread
    that is told to would not come to it any more."""
    pid = os.getpid()

    def go() -> None:
        if os.getpid() == pid and _is_lost() and let_go():
            then()

    atexit.register(go)


def _is_lost() -> bool:
    """Of what is mapped it is asked anew: work of a context that is well would fault, and so harm others."""
    mapped = [one.where for one in dict(_held).values() if one.where.mapped]
    return all(where.device.is_lost() for where in mapped) if mapped else Device.found_lost
