"""attach(): named GPU buffers that outlive their process. session(): the same with or without a vault."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType

from mpsd_client import holdings, turns
from mpsd_client import vault as vaults
from mpsd_client._cuda import Device
from mpsd_client._protocol import errors
from mpsd_client.buffer import Buffer, Mapping, Range
from mpsd_client.events import Callback, Watcher
from mpsd_client.vault import InUseError, NoVaultError, QuotaError, Segment, Vault

DYING_S = 30.0
# A daemon that ends during a message looks like a protocol error.
_NOT_TAKEN = (NoVaultError, QuotaError, errors.DeadlineError, errors.DeniedError, errors.ProtocolError)


class NotPersistentWarning(UserWarning):
    """A buffer will not outlive its process, or not mpsd. The text states the reason."""


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """A buffer that a waiting process maps beside its present owner, until its turn.

    Holds both numbers for it: this process's future one, and the owner's, which changes with the memory."""

    path: str
    number: int
    owner_number: int
    where: Range


_borrowed: dict[str, _Borrowed] = {}
# Names that this process has attached, so that it maps none twice by mistake.
_attached: weakref.WeakValueDictionary[str, Buffer] = weakref.WeakValueDictionary()


def attach(name: str, size: int | None = None, *, device: int = 0, socket_path: str | None = None) -> Buffer:
    """Return a GPU buffer that the vault keeps under a name: the same bytes for the next process that asks.

    If this owner (this user in this cgroup, or with this MPSD_VAULT_TOKEN) keeps nothing under the name, the
    buffer is created with zeros. It outlives this process, however that ends, and mpsd. One process owns it
    at a time. Under mpsd-standby a waiting process maps it beside the working process, and must not write to
    it before wait_for_turn() has returned.

    `size`: bytes, at least 1; None: only attach what exists, all of it, a multiple of 2 MiB.
    `device`: ordinal of the GPU in this process. `socket_path`: the daemon's; by default the vault of
    mpsd-run, else that of the daemon that connect() would use.

    Raises NoVaultError if no vault is offered, NotFoundError (no `size`, and nothing exists), UsageError (an
    invalid name, or the existing buffer has another size or is on another GPU), InUseError, NameTakenError,
    QuotaError, DeniedError, DeadlineError, CudaError.
    """
    _check(name, size)
    path = vaults.find_vault(os.environ, socket_path)
    with holdings.attaching:
        holdings.check_open()
        _check_not_attached(name)
        with Vault(path, vaults.token_of(os.environ)) as vault:
            make = _borrow if _waits() else _attach
            buffer = make(vault, path, name, size, device)
        return _remember(buffer)


def forget(name: str, *, socket_path: str | None = None) -> bool:
    """Make the vault release what this owner keeps under a name, for good. False if there is nothing.

    Raises NoVaultError, UsageError, DeniedError, DeadlineError.
    """
    vaults.check_name(name)
    return _forget(vaults.find_vault(os.environ, socket_path), name)


class Session:
    """Like attach(), but continues without a vault, with ordinary buffers and a warning.

    Created by session(). Its end closes all its buffers; the vault keeps what it has."""

    def __init__(self, socket_path: str | None = None) -> None:
        self._socket_path = socket_path
        self._buffers: list[weakref.ref[Buffer]] = []
        self._watchers: list[Watcher] = []
        self._warned = False

    def attach(self, name: str, size: int | None = None, *, device: int = 0) -> Buffer:
        """Attach a buffer like attach(), or create an ordinary one.

        Without a vault, or if the vault ends or refuses (a quota), and with a size: an ordinary buffer of
        zeros with `persistent` False, and one NotPersistentWarning per session. Other errors as attach()."""
        try:
            buffer = attach(name, size, device=device, socket_path=self._socket_path)
        except _NOT_TAKEN as error:
            if size is None:
                raise
            if not self._warned:
                text = f"buffers are not persistent and end with this process: {error}"
                warnings.warn(text, NotPersistentWarning, stacklevel=2)
                self._warned = True
            with holdings.attaching:
                _check_not_attached(name)
                buffer = _remember(_not_persistent(name, size, device))
        self._buffers.append(weakref.ref(buffer))
        return buffer

    def on_event(self, callback: Callback, *, kinds: Collection[str] | None = None) -> Watcher:
        """Like on_event(), until the end of the session. Without a daemon, tries to connect until then."""
        watcher = Watcher(callback, kinds, self._socket_path, required=False)
        self._watchers.append(watcher)
        return watcher

    def wait_for_turn(self) -> bool:
        """Like the function wait_for_turn()."""
        return wait_for_turn()

    def close(self) -> None:
        """Close all buffers and watchers of the session. Idempotent."""
        for watcher in self._watchers:
            watcher.close()
        self._watchers.clear()
        for reference in self._buffers:
            buffer = reference()
            if buffer is not None:
                buffer.close()
        self._buffers.clear()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def session(socket_path: str | None = None) -> Session:
    """Return a context manager in which attach() works with and without a daemon.

        with mpsd_client.session() as s:
            parameters = s.attach("parameters", 64 << 20)
            if not parameters.found:
                ...                               # the buffer is new: initialise it

    `socket_path`: the daemon's, as for attach(). The session connects at the first attach().
    """
    return Session(socket_path)


def wait_for_turn() -> bool:
    """Report to mpsd-standby that the preparation is complete, and return when this process has its turn.

    All that the process has attached is its own then. Returns True if another process had a turn before,
    False at once without mpsd-standby. When the domain of the working process faults, all buffers are taken
    from it before it is ended: they are closed, and attach() fails.

    Raises NotRunningError if mpsd-standby ends meanwhile, AmbiguousError if a buffer was created again under
    its name since this process attached it, and the errors of attach().
    """
    turn = turns.turn()
    if turn is None:
        return False
    if not turn.waits:
        _listen(turn)
        turn.say(turns.READY)
        return not turn.is_first
    turn.say(turns.READY)
    turn.wait()
    with holdings.attaching:
        for name, borrowed in tuple(_borrowed.items()):
            _take_over(name, borrowed)
    _listen(turn)
    turn.say(turns.TOOK_OVER)
    return True


def _listen(turn: turns.Turn) -> None:
    if turn.listen(holdings.release_all):
        holdings.release_at_exit(turn.report_released)


def _waits() -> bool:
    turn = turns.turn()
    return turn is not None and turn.waits


def _borrow(vault: Vault, path: str, name: str, size: int | None, device: int) -> Buffer:
    """Attach what another living process owns, like _attach."""
    found = vault.claim(name)
    if found is None:
        raise errors.NotFoundError(
            f"no buffer {name!r} exists, and a process that waits for its turn cannot create one",
            remedy="the program must attach it before it calls wait_for_turn()",
        )
    segment, owner_number = found
    try:
        gpu = Device(device)
        try:
            mapping = _remap(gpu, segment, name, size)
        except BaseException:
            gpu.close()
            raise
    finally:
        os.close(segment.descriptor)
    number = _number()
    _borrowed[name] = _Borrowed(path, number, owner_number, mapping.range)
    return _buffer(mapping, path, name, segment.size if size is None else size, number, found=True)


def _take_over(name: str, borrowed: _Borrowed) -> None:
    with Vault(borrowed.path, vaults.token_of(os.environ)) as vault:
        found = vault.claim(name)
        if found is not None:
            os.close(found[0].descriptor)
        if found is None or found[1] != borrowed.owner_number:
            raise errors.AmbiguousError(
                f"{name!r} was created again, or forgotten, while this process waited for its turn",
                remedy="attach it once, before wait_for_turn(), and keep it",
            )
        segment = _take(vault, name, borrowed.number)
        if segment is not None:
            os.close(segment.descriptor)
    holdings.note(borrowed.number, borrowed.path, borrowed.where)
    del _borrowed[name]


def _take(vault: Vault, name: str, number: int) -> Segment | None:
    """Take over a buffer like vault.take(), retrying under mpsd-standby: its owner may be just ending."""
    turn, began = turns.turn(), time.monotonic()
    while True:
        try:
            return vault.take(name, number)
        except InUseError:
            waited = time.monotonic() - began
            if not turns.is_followed() or (turn is not None and turn.is_first) or waited > DYING_S:
                raise
            holdings.wait(turns.poll_pause(waited))


def _check(name: str, size: int | None) -> None:
    vaults.check_name(name)
    if size is not None and size < 1:
        raise errors.UsageError(f"a buffer cannot have {size} bytes", remedy="use a size of 1 or more")


def _check_not_attached(name: str) -> None:
    if name in _attached:
        raise InUseError(
            f"{name!r} is already attached in this process", remedy="use that buffer, or close it first"
        )


def _remember(buffer: Buffer) -> Buffer:
    _attached[buffer.name] = buffer
    return buffer


def _forget(path: str, name: str) -> bool:
    with Vault(path, vaults.token_of(os.environ)) as vault:
        return vault.release(name)


def _attach(vault: Vault, path: str, name: str, size: int | None, device: int) -> Buffer:
    gpu = Device(device)
    try:
        number = _number()
        segment = _take(vault, name, number)
        if segment is not None:
            try:
                mapping = _remap(gpu, segment, name, size)
            except BaseException:
                vault.leave_segment(number)
                raise
            finally:
                os.close(segment.descriptor)
            rounded_size = segment.size if size is None else size
            return _buffer(mapping, path, name, rounded_size, number, found=True)
        if size is None:
            raise errors.NotFoundError(
                f"no buffer {name!r} exists",
                remedy="give a size to make it; mpsd-ctl vault list shows all buffers and their owners",
            )
        mapping, stored = _create(gpu, vault, name, size, number)
        if not stored:
            text = f"{name!r} outlives this process, but not mpsd yet: its descriptor store does not answer"
            warnings.warn(text, NotPersistentWarning, stacklevel=3)
        return _buffer(mapping, path, name, size, number, found=False)
    except BaseException:
        gpu.close()
        raise


def _number() -> int:
    """Return a number for a segment: odd, because mpsd's libcuda uses addresses, which are even.

    Random, because the process may have brought other segments before an exec."""
    return int.from_bytes(os.urandom(7), "big") << 1 | 1


def _remap(gpu: Device, segment: Segment, name: str, size: int | None) -> Mapping:
    elsewhere = gpu.other_with(segment.gpu)
    if elsewhere is not None and segment.gpu != gpu.uuid:
        raise errors.UsageError(
            f"{name!r} is on device {elsewhere}, not on {gpu.ordinal}", remedy=f"use device={elsewhere}"
        )
    if size is not None and gpu.rounded(size) != segment.size:
        raise errors.UsageError(
            f"{name!r} has {segment.size} bytes, but {size} were requested "
            f"({gpu.rounded(size)} with the granularity)",
            remedy="request the same size, or no size, or forget() it first",
        )
    handle = gpu.import_from(segment.descriptor)
    try:
        return Mapping(gpu, gpu.map(handle, segment.size, segment.address), segment.size)
    finally:
        gpu.release(handle)


def _create(gpu: Device, vault: Vault, name: str, size: int, number: int) -> tuple[Mapping, bool]:
    rounded_size = gpu.rounded(size)
    handle = gpu.create(rounded_size)
    try:
        address = gpu.map(handle, rounded_size)
        try:
            gpu.clear(address, rounded_size)
            descriptor = gpu.export(handle)
            try:
                stored = vault.put_named(name, Segment(descriptor, rounded_size, address, gpu.uuid), number)
            finally:
                os.close(descriptor)
        except BaseException:
            Range(gpu, address, rounded_size).end()
            raise
    finally:
        gpu.release(handle)
    return Mapping(gpu, address, rounded_size), stored


def _not_persistent(name: str, size: int, device: int) -> Buffer:
    gpu = Device(device)
    try:
        rounded_size = gpu.rounded(size)
        handle = gpu.create(rounded_size)
        try:
            address = gpu.map(handle, rounded_size)
        finally:
            gpu.release(handle)
        mapping = Mapping(gpu, address, rounded_size)
    except BaseException:
        gpu.close()
        raise
    gpu.clear(address, rounded_size)
    return _buffer(mapping, "", name, size, 0, found=False)


def _buffer(mapping: Mapping, path: str, name: str, size: int, number: int, *, found: bool) -> Buffer:
    if path and name not in _borrowed:
        holdings.note(number, path, mapping.range)

    def closed(leaves: bool) -> None:
        _attached.pop(name, None)
        if _borrowed.pop(name, None) is None:
            with contextlib.suppress(errors.MpsdError):
                holdings.closed(number, leaves)

    return Buffer(
        mapping,
        name,
        size,
        found=found,
        persistent=bool(path),
        forget=lambda: _forget(path, name),
        closed=closed,
    )
