"""attach(): named GPU buffers that outlive their process; session(): the same where there may be no vault."""

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
from mpsd_client.vault import InUseError, NoVaultError, Piece, QuotaError, Vault

DYING_S = 30.0
# A daemon that ends in the middle is a broken protocol to who speaks to it.
_NOT_TAKEN = (NoVaultError, QuotaError, errors.DeadlineError, errors.DeniedError, errors.ProtocolError)


class NotPersistentWarning(UserWarning):
    """A buffer will not outlive its process, or not mpsd; the text says why."""


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """A buffer that a process has beside the one whose it is, until its turn: what it will call it, and how
    the other one calls it, which changes with the memory."""

    path: str
    number: int
    theirs: int
    where: Range


_borrowed: dict[str, _Borrowed] = {}
# Names that this process has attached, so that nobody maps one twice by mistake.
_attached: weakref.WeakValueDictionary[str, Buffer] = weakref.WeakValueDictionary()


def attach(name: str, size: int | None = None, *, device: int = 0, socket_path: str | None = None) -> Buffer:
    """A GPU buffer that is kept under a name: the same bytes again, in whichever process asks next.

    It is made, of zeros, where this owner (this user in this cgroup, or with this MPSD_VAULT_TOKEN) keeps
    nothing so, and outlives this process, however it ends, and mpsd. One process has it at a time.

    Under mpsd-standby a process that waits for its turn has it beside the one that works, and is not to write
    to it before wait_for_turn() has returned.

    `size`: bytes, at least 1; None: only come back to what is there, all of it, in whole granules (2 MiB).
    `device`: ordinal of the GPU as this process counts them. `socket_path`: the daemon's; by default the
    vault of mpsd-run, else that of the daemon which connect() would find.

    Raises NoVaultError where no vault is offered, NotFoundError (no `size`, and nothing there), UsageError
    (a wrong name, or what is there has another size or is on another GPU), InUseError, NameTakenError,
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
        return _noted(buffer)


def forget(name: str, *, socket_path: str | None = None) -> bool:
    """Let the vault give up what this owner keeps under a name, for good. False where there is nothing.

    Raises NoVaultError, UsageError, DeniedError, DeadlineError.
    """
    vaults.check_name(name)
    return _forget(vaults.find_vault(os.environ, socket_path), name)


class Session:
    """As attach(), but goes on without the vault: a buffer is an ordinary one then, and says so. Made by
    session(). At its end all its buffers are closed; what the vault keeps of them is kept."""

    def __init__(self, socket_path: str | None = None) -> None:
        self._socket_path = socket_path
        self._buffers: list[weakref.ref[Buffer]] = []
        self._watchers: list[Watcher] = []
        self._warned = False

    def attach(self, name: str, size: int | None = None, *, device: int = 0) -> Buffer:
        """As attach(). Where there is no vault, or it ends just then or refuses (a quota), and
        a size is given: an ordinary buffer of zeros, `persistent` False, and one NotPersistentWarning of
        the session. Everything else raises as attach() does."""
        try:
            buffer = attach(name, size, device=device, socket_path=self._socket_path)
        except _NOT_TAKEN as error:
            if size is None:
                raise
            if not self._warned:
                text = f"buffers are not persistent, they end with this process: {error}"
                warnings.warn(text, NotPersistentWarning, stacklevel=2)
                self._warned = True
            with holdings.attaching:
                _check_not_attached(name)
                buffer = _noted(_ordinary(name, size, device))
        self._buffers.append(weakref.ref(buffer))
        return buffer

    def on_event(self, callback: Callback, *, kinds: Collection[str] | None = None) -> Watcher:
        """As on_event(), until the end of the session; where no daemon is there, it is looked for."""
        watcher = Watcher(callback, kinds, self._socket_path, required=False)
        self._watchers.append(watcher)
        return watcher

    def wait_for_turn(self) -> bool:
        """As wait_for_turn()."""
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
    """A context in which attach() works with and without a daemon.

        with mpsd_client.session() as s:
            parameters = s.attach("parameters", 64 << 20)
            if not parameters.found:
                ...                               # nothing was left: begin anew

    `socket_path`: the daemon's, as for attach(). Nothing is looked for before the first attach().
    """
    return Session(socket_path)


def wait_for_turn() -> bool:
    """Under mpsd-standby: say that all is done that can be done beforehand, and return when it is this
    process's turn; all that it has attached is its own then. True where another one had a turn before it.
    Without mpsd-standby: False, at once.

    When the domain of a process that has its turn is lost, all that it has attached is taken from it before
    it is ended: its buffers are closed then, and it can attach nothing any more.

    Raises NotRunningError where mpsd-standby ends meanwhile, AmbiguousError where a buffer was made anew
    under its name since this process attached it, and what attach() raises.
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
    turn.say(turns.TOOK)
    return True


def _listen(turn: turns.Turn) -> None:
    if turn.listen(holdings.let_go):
        holdings.let_go_at_exit(turn.say_left)


def _waits() -> bool:
    turn = turns.turn()
    return turn is not None and turn.waits


def _borrow(vault: Vault, path: str, name: str, size: int | None, device: int) -> Buffer:
    """As _attach, of what another living process has."""
    found = vault.claim(name)
    if found is None:
        raise errors.NotFoundError(
            f"nothing of yours is kept as {name!r}, and a process that waits for its turn makes nothing",
            remedy="the program must attach it before it calls wait_for_turn()",
        )
    piece, theirs = found
    try:
        gpu = Device(device)
        try:
            mapping = _come_back(gpu, piece, name, size)
        except BaseException:
            gpu.close()
            raise
    finally:
        os.close(piece.descriptor)
    number = _number()
    _borrowed[name] = _Borrowed(path, number, theirs, mapping.range)
    return _buffer(mapping, path, name, piece.size if size is None else size, number, found=True)


def _take_over(name: str, borrowed: _Borrowed) -> None:
    with Vault(borrowed.path, vaults.token_of(os.environ)) as vault:
        found = vault.claim(name)
        if found is not None:
            os.close(found[0].descriptor)
        if found is None or found[1] != borrowed.theirs:
            raise errors.AmbiguousError(
                f"{name!r} was made anew, or forgotten, while this process waited for its turn",
                remedy="attach it once, before wait_for_turn(), and keep it",
            )
        piece = _take(vault, name, borrowed.number)
        if piece is not None:
            os.close(piece.descriptor)
    holdings.note(borrowed.number, borrowed.path, borrowed.where)
    del _borrowed[name]


def _take(vault: Vault, name: str, number: int) -> Piece | None:
    """As vault.take(). Under mpsd-standby whoever has it may be of the one before, and just be ending."""
    turn, began = turns.turn(), time.monotonic()
    while True:
        try:
            return vault.take(name, number)
        except InUseError:
            waited = time.monotonic() - began
            if not turns.is_followed() or (turn is not None and turn.is_first) or waited > DYING_S:
                raise
            holdings.wait(turns.until_next_look(waited))


def _check(name: str, size: int | None) -> None:
    vaults.check_name(name)
    if size is not None and size < 1:
        raise errors.UsageError(f"a buffer of {size} bytes", remedy="1 or more")


def _check_not_attached(name: str) -> None:
    if name in _attached:
        raise InUseError(
            f"{name!r} is attached in this process already", remedy="use that buffer, or close it first"
        )


def _noted(buffer: Buffer) -> Buffer:
    _attached[buffer.name] = buffer
    return buffer


def _forget(path: str, name: str) -> bool:
    with Vault(path, vaults.token_of(os.environ)) as vault:
        return vault.release(name)


def _attach(vault: Vault, path: str, name: str, size: int | None, device: int) -> Buffer:
    gpu = Device(device)
    try:
        number = _number()
        piece = _take(vault, name, number)
        if piece is not None:
            try:
                mapping = _come_back(gpu, piece, name, size)
            except BaseException:
                vault.leave(number)
                raise
            finally:
                os.close(piece.descriptor)
            whole = piece.size if size is None else size
            return _buffer(mapping, path, name, whole, number, found=True)
        if size is None:
            raise errors.NotFoundError(
                f"nothing of yours is kept as {name!r}",
                remedy="give a size to make it; mpsd-ctl vault list shows what there is, and whose",
            )
        mapping, stored = _begin(gpu, vault, name, size, number)
        if not stored:
            text = f"{name!r} outlives this process, but not yet mpsd: its descriptor store does not answer"
            warnings.warn(text, NotPersistentWarning, stacklevel=3)
        return _buffer(mapping, path, name, size, number, found=False)
    except BaseException:
        gpu.close()
        raise


def _number() -> int:
    """How this process calls a piece: odd, so none of those of mpsd's libcuda, which are addresses; by
    chance, for after an exec the process may have brought others."""
    return int.from_bytes(os.urandom(7), "big") << 1 | 1


def _come_back(gpu: Device, piece: Piece, name: str, size: int | None) -> Mapping:
    elsewhere = gpu.other_with(piece.gpu)
    if elsewhere is not None and piece.gpu != gpu.uuid:
        raise errors.UsageError(
            f"{name!r} is on device {elsewhere}, not on {gpu.ordinal}", remedy=f"device={elsewhere}"
        )
    if size is not None and gpu.rounded(size) != piece.size:
        raise errors.UsageError(
            f"{name!r} is there with {piece.size} bytes, and {size} were asked for "
            f"({gpu.rounded(size)} in whole granules)",
            remedy="ask for as much, or for no size, or forget() it first",
        )
    handle = gpu.import_from(piece.descriptor)
    try:
        return Mapping(gpu, gpu.map(handle, piece.size, piece.address), piece.size)
    finally:
        gpu.release(handle)


def _begin(gpu: Device, vault: Vault, name: str, size: int, number: int) -> tuple[Mapping, bool]:
    whole = gpu.rounded(size)
    handle = gpu.create(whole)
    try:
        address = gpu.map(handle, whole)
        try:
            gpu.clear(address, whole)
            descriptor = gpu.export(handle)
            try:
                stored = vault.bring(name, Piece(descriptor, whole, address, gpu.uuid), number)
            finally:
                os.close(descriptor)
        except BaseException:
            Range(gpu, address, whole).end()
            raise
    finally:
        gpu.release(handle)
    return Mapping(gpu, address, whole), stored


def _ordinary(name: str, size: int, device: int) -> Buffer:
    gpu = Device(device)
    try:
        whole = gpu.rounded(size)
        handle = gpu.create(whole)
        try:
            address = gpu.map(handle, whole)
        finally:
            gpu.release(handle)
        mapping = Mapping(gpu, address, whole)
    except BaseException:
        gpu.close()
        raise
    gpu.clear(address, whole)
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
