"""Where descriptors are held besides the daemon: systemd's descriptor store, or a keeper.

A descriptor that keeps something alive (the lease of a dead client) is stored from the moment it is
taken: `put` returns when the other side has it. Sets come back whole and in order, or not at all.

To end a lease close your own descriptors first, then `remove`: the last close, which can take tens
of milliseconds, then happens on the other side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Protocol

from mpsd.errors import StoreError
from mpsd.fdset import ANSWER_TIMEOUT_S, check_new, close_all, labelled, lost, whole_sets
from mpsd.keeperstore import KeeperStore
from mpsd.notify import Channel, Notifier, listen_fds


class DescriptorStore(Protocol):
    """Both stores. All methods raise StoreError; none takes ownership of what `put` is given."""

    @property
    def kind(self) -> str: ...

    def put(self, name: str, fds: Sequence[int]) -> None:
        """Hold duplicates under a new name (printable ASCII without `:` and `#`)."""
        ...

    def remove(self, name: str) -> None:
        """Close what is held under the name. Returns when asked, not when closed."""
        ...

    def fetch_all(self) -> dict[str, list[int]]:
        """Everything held, once after the start. The caller owns the close-on-exec descriptors."""
        ...

    def fileno(self) -> int:
        """Readable when the store has died (call `revive`); -1 where that cannot happen."""
        ...

    def revive(self) -> None:
        """Put everything into a new store after the old one has died."""
        ...

    def close(self) -> None:
        """Let go of the store; it keeps what it holds."""
        ...


class SystemdStore:
    """The manager's store. `limit` is FileDescriptorStoreMax; the manager itself does not tell when
    it is exceeded. It keeps only one of several duplicates of one open file: store each file once."""

    kind = "systemd"

    def __init__(self, channel: Channel, inherited: Mapping[str, Sequence[int]], limit: int) -> None:
        self._channel = channel
        self._limit = limit
        self._counts: dict[str, int] = {}
        self._inherited, incomplete = whole_sets(inherited)
        for label in incomplete:
            self._send(f"FDSTOREREMOVE=1\nFDNAME={label}")
        self._counts = {name: len(fds) for name, fds in self._inherited.items()}

    def put(self, name: str, fds: Sequence[int]) -> None:
        check_new(name, fds, self._counts)
        if sum(self._counts.values()) + len(fds) > self._limit:
            raise StoreError(
                f"systemd's descriptor store is full ({self._limit})", remedy="raise FileDescriptorStoreMax="
            )
        self._counts[name] = len(fds)
        try:
            for label, fd in labelled(name, fds):
                self._channel.send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={label}", [fd])
            self._channel.barrier(ANSWER_TIMEOUT_S)
        except OSError as error:
            with contextlib.suppress(StoreError):
                self.remove(name)
            raise lost("the service manager", error) from error

    def adopt(self, name: str, fds: Sequence[int]) -> None:
        """`put`, and give the set back from fetch_all like those that were inherited."""
        self.put(name, fds)
        self._inherited[name] = list(fds)

    def remove(self, name: str) -> None:
        count = self._counts.pop(name, 0)
        for index in range(count):
            self._send(f"FDSTOREREMOVE=1\nFDNAME={name}#{index}/{count}")

    def fetch_all(self) -> dict[str, list[int]]:
        inherited, self._inherited = self._inherited, {}
        return inherited

    def fileno(self) -> int:
        return -1

    def revive(self) -> None:
        return

    def close(self) -> None:
        close_all(self.fetch_all())

    def _send(self, text: str) -> None:
        try:
            self._channel.send(text)
        except OSError as error:
            raise lost("the service manager", error) from error


def open_store(
    kind: str,
    directory: str | Path,
    limit: int,
    environ: MutableMapping[str, str],
    notifier: Notifier,
) -> DescriptorStore:
    """The store that the configuration and this machine give ([store] kind: auto, systemd, keeper).

    `auto` is systemd's where it says that it has one (FDSTORE=, systemd 254 and later, which keeps
    it over a restart too). What a keeper of the directory still holds then moves over. Takes the
    LISTEN_ variables and FDSTORE out of `environ`. Raises StoreError.
    """
    inherited = listen_fds(environ)
    offered = environ.pop("FDSTORE", "")
    room = int(offered) if offered.isdecimal() else 0
    if kind == "systemd" and notifier.channel is None:
        close_all(inherited)
        raise StoreError(
            "[store] kind = systemd, but no service manager is there",
            remedy="start mpsd from its unit, or use auto",
        )
    if notifier.channel is None:
        close_all(whole_sets(inherited)[0])
        return KeeperStore.open(directory, limit=limit)
    systemd = SystemdStore(notifier.channel, inherited, room or limit)
    if kind == "keeper" or (kind == "auto" and room == 0):
        return _move_to_keeper(systemd, KeeperStore.open(directory, limit=limit))
    with contextlib.suppress(StoreError):
        _move_to_systemd(KeeperStore.open(directory, limit=limit, start=False), systemd)
    return systemd


def _move_to_keeper(systemd: SystemdStore, keeper: KeeperStore) -> KeeperStore:
    for name, fds in systemd.fetch_all().items():
        keeper.put(name, fds)
        systemd.remove(name)
        close_all({name: fds})
    return keeper


def _move_to_systemd(keeper: KeeperStore, systemd: SystemdStore) -> None:
    for name, fds in keeper.fetch_all().items():
        systemd.adopt(name, fds)
    keeper.end()
