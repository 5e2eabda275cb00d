"""The places that hold descriptors besides the daemon: systemd's descriptor store, or a keeper.

A descriptor that keeps something alive (the lease of an exited client) is stored from the moment it is taken:
`put` returns when the other side has it. Sets are restored whole and in order, or not at all.

To end a lease, close the own descriptors first, then `remove` it: the last close, which can take tens of
milliseconds, then happens on the other side.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from mpsd.base.errors import StoreError
from mpsd.fdstore.fdset import ANSWER_TIMEOUT_S, check_new, close_all, labelled, lost, whole_sets
from mpsd.fdstore.keeperstore import KeeperStore
from mpsd.fdstore.notify import Channel, Notifier, listen_fds
from mpsd.os.samefile import can_tell, same_file

log = structlog.get_logger("mpsd.fdstore")

_FILE, _SET = "#file", "#set"
_FILE_LABEL = re.compile(r"file\.(?P<number>\d+)#file")
MAX_SET = 1 << 16


class DescriptorStore(Protocol):
    """Both stores. All methods raise StoreError; `put` does not take ownership of descriptors."""

    @property
    def kind(self) -> str: ...

    def put(self, name: str, fds: Sequence[int]) -> None:
        """Hold duplicates under a new name (printable ASCII without `:` and `#`)."""
        ...

    def remove(self, name: str) -> None:
        """Close the descriptors under the name. Returns when it is requested, not when they are closed."""
        ...

    def fetch_all(self) -> dict[str, list[int]]:
        """Return everything held, once after the start. The caller owns the close-on-exec descriptors."""
        ...

    def fileno(self) -> int:
        """Return a descriptor, readable when the store has died (call `revive`); -1 if it cannot die."""
        ...

    def revive(self) -> None:
        """Put everything into a new store after the old one has died."""
        ...

    def close(self) -> None:
        """Close the connection; the store keeps its content."""
        ...


@dataclass(slots=True, eq=False)
class _File:
    """One open file in the manager's store, under its label; `copy` is a descriptor of this process."""

    label: str
    copy: int
    uses: int = 0


class SystemdStore:
    """The service manager's store. `limit` is FileDescriptorStoreMax; the manager exceeds it silently.

    The manager keeps only one of several descriptors of one open file, and sets share files (a process with
    two address spaces has one memory map). So every open file is stored once, as `file.N#file`. A set is a
    small file of its own, `NAME#set`, that lists the labels of its files. It is stored last: a set without
    all its files was being put or removed when the daemon died.
    """

    kind = "systemd"

    def __init__(self, channel: Channel, inherited: Mapping[str, Sequence[int]], limit: int) -> None:
        self._channel = channel
        self._limit = limit
        self._files: dict[str, _File] = {}
        self._sets: dict[str, list[_File]] = {}
        self._next = 1
        self._leaving: list[str] = []
        self._inherit(inherited)
        self._fresh = list(self._sets)
        self._flush()

    def _inherit(self, inherited: Mapping[str, Sequence[int]]) -> None:
        for label, (fd, *others) in inherited.items():
            if label.endswith((_FILE, _SET)):
                close_all({label: others})
            if match := _FILE_LABEL.fullmatch(label):
                self._files[label] = _File(label, fd)
                self._next = max(self._next, int(match["number"]) + 1)
        for label, (fd, *_) in inherited.items():
            if label.endswith(_SET):
                listed = os.pread(fd, MAX_SET, 0).decode("ascii", "replace").split("\n")
                os.close(fd)
                if all(name in self._files for name in listed):
                    self._add(label.removesuffix(_SET), [self._files[name] for name in listed])
                else:
                    self._leaving.append(label)
        # Before files had names of their own, each descriptor was stored under its set's name. Systemd kept
        # the first of several descriptors of one open file, so some of these sets stay incomplete.
        whole, incomplete = whole_sets(inherited)
        self._leaving += incomplete
        for name, fds in whole.items():
            labels = [label for label, _ in labelled(name, fds)]
            self._files |= {label: _File(label, fd) for label, fd in zip(labels, fds, strict=True)}
            self._add(name, [self._files[label] for label in labels])
        for unused in [f for f in self._files.values() if not f.uses]:
            self._forget(unused)

    def _add(self, name: str, files: list[_File]) -> None:
        self._sets[name] = files
        for file in files:
            file.uses += 1

    def put(self, name: str, fds: Sequence[int]) -> None:
        check_new(name, fds, self._sets)
        self._flush()
        files: list[_File] = []
        try:
            for fd in fds:
                files.append(self._known(fd) or self._new(fd))
        except OSError as error:
            self._drop_unused(files)
            raise lost("this process", error) from error
        if len(self._files) + len(self._sets) + 1 > self._limit:
            self._drop_unused(files)
            raise StoreError(
                f"systemd's descriptor store is full ({self._limit} descriptors)",
                remedy="raise FileDescriptorStoreMax=",
            )
        fresh = [file for file in files if not file.uses]
        self._add(name, files)
        try:
            for file in dict.fromkeys(fresh):
                self._store(file.label, file.copy)
            listing = os.memfd_create("mpsd-set", os.MFD_CLOEXEC)
            try:
                os.write(listing, "\n".join(file.label for file in files).encode())
                self._store(name + _SET, listing)
            finally:
                os.close(listing)
            self._channel.barrier(ANSWER_TIMEOUT_S)
        except OSError as error:
            with contextlib.suppress(StoreError):
                self.remove(name)
            raise lost("the service manager", error) from error

    def _known(self, fd: int) -> _File | None:
        return next((f for f in self._files.values() if same_file(f.copy, fd)), None)

    def _new(self, fd: int) -> _File:
        label = f"file.{self._next}{_FILE}"
        self._next += 1
        self._files[label] = _File(label, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
        return self._files[label]

    def _store(self, label: str, fd: int) -> None:
        self._channel.send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={label}", [fd])

    def _drop_unused(self, files: Sequence[_File]) -> None:
        """Drop the files of a put that has sent nothing yet."""
        for file in dict.fromkeys(files):
            if not file.uses:
                os.close(self._files.pop(file.label).copy)

    def holds(self, name: str) -> bool:
        return name in self._sets

    def offer_again(self, names: Sequence[str]) -> None:
        """Return these sets from the next fetch_all, like inherited ones."""
        self._fresh += names

    def remove(self, name: str) -> None:
        if name in self._sets:
            self._leaving.append(name + _SET)
        for file in self._sets.pop(name, []):
            file.uses -= 1
            if not file.uses:
                self._forget(file)
        self._flush()

    def _forget(self, file: _File) -> None:
        """Close the own descriptor first: then the last close, which can take long, is the manager's."""
        os.close(self._files.pop(file.label).copy)
        self._leaving.append(file.label)

    def _flush(self) -> None:
        """Tell the manager which labels to drop. A failed message is sent again on the next occasion."""
        try:
            while self._leaving:
                self._channel.send(f"FDSTOREREMOVE=1\nFDNAME={self._leaving[0]}")
                del self._leaving[0]
        except OSError as error:
            raise lost("the service manager", error) from error

    def fetch_all(self) -> dict[str, list[int]]:
        fresh, self._fresh = self._fresh, []
        return {
            name: [fcntl.fcntl(file.copy, fcntl.F_DUPFD_CLOEXEC, 3) for file in self._sets[name]]
            for name in fresh
            if name in self._sets
        }

    def fileno(self) -> int:
        return -1

    def revive(self) -> None:
        return

    def close(self) -> None:
        for file in self._files.values():
            os.close(file.copy)
        self._files.clear()
        self._sets.clear()


def open_store(
    kind: str,
    directory: str | Path,
    limit: int,
    environ: MutableMapping[str, str],
    notifier: Notifier,
) -> DescriptorStore:
    """Open the store for the configuration ([store] kind: auto, systemd, keeper) and this machine.

    `auto` is systemd's store if systemd announces one (FDSTORE=, systemd 254 and later, which keeps it over a
    restart, too) and the kernel can compare open files. Without that comparison systemd takes all descriptors
    of one device for the same. The content of a keeper of this directory then moves to systemd. If it does
    not fit, the keeper stays, whatever is configured. Removes the LISTEN_ variables and FDSTORE from
    `environ`. Raises StoreError.
    """
    inherited = listen_fds(environ)
    offered = environ.pop("FDSTORE", "")
    capacity = int(offered) if offered.isdecimal() else 0
    if kind == "systemd" and notifier.channel is None:
        close_all(inherited)
        raise StoreError(
            "[store] kind = systemd, but there is no service manager",
            remedy="start mpsd from its unit, or use auto",
        )
    if notifier.channel is None:
        close_all({label: fds for label, fds in inherited.items() if label.endswith((_FILE, _SET))})
        return KeeperStore.open(directory, limit=limit)
    systemd = SystemdStore(notifier.channel, inherited, capacity or limit)
    if kind == "keeper" or (kind == "auto" and (capacity == 0 or not can_tell())):
        return _move_to_keeper(systemd, KeeperStore.open(directory, limit=limit))
    try:
        leftover = KeeperStore.open(directory, limit=limit, start=False)
    except StoreError:
        return systemd
    return _move_to_systemd(leftover, systemd)


class _Mover(Protocol):
    """Either store, as the target of a move."""

    def put(self, name: str, fds: Sequence[int]) -> None: ...
    def remove(self, name: str) -> None: ...
    def holds(self, name: str) -> bool: ...


def _copy(found: Mapping[str, Sequence[int]], store: _Mover) -> list[str]:
    """Put all sets that the store does not have; return their names. Raises StoreError with nothing put."""
    copied: list[str] = []
    try:
        for name, fds in found.items():
            if not store.holds(name):
                store.put(name, fds)
                copied.append(name)
    except StoreError:
        for name in copied:
            with contextlib.suppress(StoreError):
                store.remove(name)
        raise
    return copied


def _move_to_keeper(systemd: SystemdStore, keeper: KeeperStore) -> KeeperStore:
    """Move the sets: copy first, remove when all are copied. Raises StoreError."""
    close_all(keeper.fetch_all())  # This tells the keeper store its content.
    found = systemd.fetch_all()
    try:
        _copy(found, keeper)
        for name in found:
            systemd.remove(name)
    except StoreError:
        systemd.offer_again(list(found))
        raise
    finally:
        close_all(found)
    systemd.close()
    return keeper


def _move_to_systemd(keeper: KeeperStore, systemd: SystemdStore) -> DescriptorStore:
    """Move the keeper's sets to systemd, or the other way round if they do not all fit.

    If that fails too, each store keeps its own, and the keeper's sets are not read until there is space.
    """
    found = keeper.fetch_all()
    try:
        systemd.offer_again(_copy(found, systemd))
    except StoreError as error:
        log.warning("the descriptors of the keeper stay there", reason=str(error), remedy=error.remedy)
    else:
        keeper.end()
        return systemd
    finally:
        close_all(found)
    try:
        return _move_to_keeper(systemd, keeper)
    except StoreError as error:
        log.error(
            "the leases in the keeper are held, but not read",
            sets=len(found),
            reason=str(error),
            remedy="raise FileDescriptorStoreMax= and [store] max_descriptors, and restart mpsd",
        )
        keeper.close()
        return systemd
