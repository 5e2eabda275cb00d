"""The vault without a daemon: its socket on a loop of its own, a store in memory, and clients.

As a program (python vaulting.py SOCKET COUNT) it plays many clients: each brings memory and is killed.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mpsd.vault.messages import LAYOUT, Kind, Message, pack, unpack

if TYPE_CHECKING:
    from mpsd.os.descriptors import DescriptorBudget
    from mpsd.peers.vaultserver import LedgerTaker, VaultServer, VaultServerLimits
    from mpsd.vault.holdings import Vault

T = TypeVar("T")
DEADLINE_S = 60.0
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def kernel_refuses_descriptors() -> bool:
    """Return whether this kernel refuses descriptors for a socket that does not take them (Linux 6.16)."""
    from mpsd.peers.receive import SO_PASSRIGHTS

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            return probe.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS) == 1
        except OSError:
            return False


def memory(size: int = 4096, content: bytes = b"") -> int:
    """Return memory as the stand-in driver exports it."""
    fd = os.memfd_create("mpsd-standin-vmm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, content, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def lingering() -> tuple[int, socket.socket]:
    """Return a descriptor that blocks in its last close, and the socket that ends the block when closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    sender.setblocking(False)
    try:
        while True:
            sender.send(bytes(1 << 16))
    except BlockingIOError:
        pass
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
    return sender.detach(), receiver


class VaultClient:
    """A connection; `greet` says HELLO at once."""

    def __init__(self, path: Path | str, *, token: bytes = bytes(32), greet: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(str(path))
        if greet:
            assert self.ask(Message(Kind.HELLO, token=token)).status == 0

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([data], rights)

    def receive(self) -> tuple[Message, list[int]]:
        """Raises EOFError if the connection is closed."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, LAYOUT.size, 4)
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            raise EOFError
        return unpack(data, answer=True), fds

    def ask(self, message: Message, fds: Sequence[int] = ()) -> Message:
        self.send(pack(message), fds)
        answer, got = self.receive()
        assert not got and (answer.kind, answer.sequence) == (message.kind, message.sequence)
        return answer

    def put(self, number: int, size: int = 4096, content: bytes = b"") -> Message:
        fd = memory(size, content)
        try:
            return self.ask(Message(Kind.PUT, number=number, size=size, address=number), [fd])
        finally:
            os.close(fd)

    def keep_alone(self, name: str, number: int, content: bytes = b"", size: int = 4096) -> Message:
        fd = memory(size, content)
        try:
            return self.ask(Message(Kind.PUT_NAMED, number=number, size=size, name=name), [fd])
        finally:
            os.close(fd)

    def take(self, name: str, number: int) -> tuple[Message, list[int]]:
        self.send(pack(Message(Kind.TAKE, name=name, number=number)))
        return self.receive()

    def claim(self, name: str, index: int = 0) -> tuple[Message, list[int]]:
        self.send(pack(Message(Kind.CLAIM, name=name, index=index)))
        return self.receive()

    def open(self, token: bytes) -> tuple[Message, list[int]]:
        self.send(pack(Message(Kind.OPEN, token=token)))
        return self.receive()

    def is_closed(self) -> bool:
        """Wait for the other end to close the connection. An answer before that does not count."""
        try:
            while True:
                self.receive()
        except EOFError:
            return True

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> VaultClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemoryStore:
    """A DescriptorStore that is a dictionary. `closed` ends nothing: the next daemon fetches from it."""

    kind = "memory"

    def __init__(self) -> None:
        self.held: dict[str, list[int]] = {}

    def put(self, name: str, fds: Sequence[int]) -> None:
        assert name not in self.held
        self.held[name] = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in fds]

    def remove(self, name: str) -> None:
        for fd in self.held.pop(name, []):
            os.close(fd)

    def fetch_all(self) -> dict[str, list[int]]:
        return {
            name: [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in fds] for name, fds in self.held.items()
        }

    def fileno(self) -> int:
        return -1

    def revive(self) -> None:
        pass

    def close(self) -> None:
        pass

    def empty(self) -> None:
        for name in tuple(self.held):
            self.remove(name)


class RunningVault:
    """A context: vault and socket on a thread's loop, on simulated memory of one GPU of 1 GiB."""

    def __init__(
        self,
        path: Path,
        store: MemoryStore,
        ledger_limits: Any,
        door_limits: VaultServerLimits | None = None,
        take_ledger: LedgerTaker | None = None,
        budget: DescriptorBudget | None = None,
    ) -> None:
        self.budget = budget
        self.path, self.store = path, store
        self._take_ledger = take_ledger
        self._limits = ledger_limits, door_limits
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self.vault: Vault
        self.door: VaultServer

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def look(self, at: Callable[[], T]) -> T:
        async def look() -> T:
            return at()

        return self.call(look())

    async def _start(self) -> None:
        from mpsd.fdstore.queue import LeaseStore
        from mpsd.gpu.simulated.exported import SimulatedMemory
        from mpsd.peers.vaultserver import VaultServer
        from mpsd.vault.holdings import Vault

        self._lease_store = LeaseStore(self.store, budget=self.budget)
        memory = SimulatedMemory({"GPU-0": 1 << 30})
        self.vault = Vault(self._limits[0], memory, self._lease_store, self.budget)
        for name, fds in self._lease_store.fetch_all().items():
            assert self.vault.takes(name, fds)
        await self.vault.adopt()
        self.door = VaultServer(self.path, self.vault, self._limits[1], self._take_ledger)
        self.door.start()

    async def _stop(self) -> None:
        await self.door.close()
        await self.vault.close()
        await self._lease_store.close(DEADLINE_S, end=False)

    def __enter__(self) -> RunningVault:
        self._thread.start()
        self.call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()


def many(path: str, count: int) -> None:
    """Run clients one by one: each brings two segments and is killed; every tenth keeps them."""
    for number in range(count):
        heard, said = os.pipe()
        child = os.fork()
        if child == 0:
            with VaultClient(path) as client:
                client.put(1)
                client.put(2)
                if number % 10 == 0:
                    client.ask(Message(Kind.KEEP, name=f"job-{number}"))
                os.write(said, b"x")
                signal.pause()
        os.close(said)
        assert os.read(heard, 1) == b"x"
        os.close(heard)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    many(sys.argv[1], int(sys.argv[2]))
