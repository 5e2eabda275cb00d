"""A client of the simulated GPU that lays guard zones, as the libcuda proxy does on a real one.

Standard library and mpsd's layouts only, since every client pays for the imports. Simulated GPU only.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import time

from mpsd.vault import messages
from mpsd.zones import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpsd.gpu.simulated.client import SimulatedDevice

GRANULE = 1 << 16
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_DEADLINE_S = 60.0


class LedgerWriter:
    """The writing side of clients/libcuda/src/ledger.h."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("mpsd-ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, layout.SIZE)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        self.memory = mmap.mmap(self.fd, layout.SIZE)
        self._order = 0
        self._names: dict[str, int] = {}
        self.head("magic", layout.MAGIC)
        self.head("size", layout.SIZE)
        layout.HEAD_VERSION.pack_into(self.memory, layout.HEAD_VERSION_AT, layout.VERSION, os.getpid())

    def head(self, field: str, value: int) -> None:
        """Set one of the header's counters of 64 bits."""
        layout.COUNTER.pack_into(self.memory, layout.counter_at(field), value)

    def read_head(self, field: str) -> int:
        return int(layout.COUNTER.unpack_from(self.memory, layout.counter_at(field))[0])

    def add(self, field: str, by: int) -> None:
        self.head(field, self.read_head(field) + by)

    def zone(self, row: int, kind: int, role: int, start: int, end: int, born: int = 0) -> None:
        """Write a row, in one step for every reader that checks its sequence."""
        at = layout.ZONES_AT + row * layout.ZONE.size
        sequence = layout.ZONE.unpack_from(self.memory, at)[0]
        layout.SEQUENCE.pack_into(self.memory, at, sequence | 1)
        layout.ZONE.pack_into(self.memory, at, sequence | 1, kind, role, start, end, born)
        layout.SEQUENCE.pack_into(self.memory, at, (sequence | 1) + 1 & 0xFFFF_FFFF)

    def note(self, row: int, address: int, size: int, *, order: int, born: int, freed: int = 0) -> None:
        at = layout.NOTES_AT + row * layout.NOTE.size
        sequence = layout.NOTE.unpack_from(self.memory, at)[0]
        layout.NOTE.pack_into(self.memory, at, sequence | 1, 0, address, size, order, born, freed)
        layout.SEQUENCE.pack_into(self.memory, at, (sequence | 1) + 1 & 0xFFFF_FFFF)

    def launched(self, name: str) -> None:
        """Note the start of a kernel."""
        function = self._names.get(name)
        if function is None:
            function = self._names[name] = 0x5000_0000 + 64 * len(self._names)
            used = self.read_head("names_used")
            at = layout.NAMES_AT + used * layout.NAME.size
            layout.NAME.pack_into(self.memory, at, 2, 0, function, name.encode()[: layout.NAME_ROOM - 1])
            self.add("names_used", 1)
        number = self.read_head("launched")
        at = layout.LAUNCHES_AT + number % layout.LAUNCHES * layout.LAUNCH.size
        layout.LAUNCH.pack_into(self.memory, at, function, 0)
        self.add("launched", 1)

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


class GuardedDevice:
    """A context with a guard zone behind each allocation; freed allocations stay covered.

    `granted`: bytes of zones that the daemon granted; if 0, no zones are laid.
    """

    def __init__(self, device: SimulatedDevice, vault_socket: str) -> None:
        self.device = device
        self.ledger = LedgerWriter()
        self.channel: socket.socket | None = None
        self.granted = 0
        self._rows = 0
        self._notes: dict[int, tuple[int, int, int, int]] = {}
        self._orders = 0
        if vault_socket:
            self.connect(vault_socket)

    def connect(self, vault_socket: str) -> int:
        """Send the ledger, also to a daemon that was started again.

        Return the bytes granted. Raises OSError.
        """
        if self.channel is not None:
            self.channel.close()
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(_DEADLINE_S)
        self.channel.connect(vault_socket)
        self._ask(messages.Message(messages.Kind.HELLO), [])
        self.granted = self._ask(messages.Message(messages.Kind.LEDGER), [self.ledger.fd]).size
        return self.granted

    def _ask(self, message: messages.Message, fds: list[int]) -> messages.Message:
        assert self.channel is not None
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.channel.sendmsg([messages.pack(message)], rights)
        data = self.channel.recv(messages.LAYOUT.size)
        if not data:
            raise ConnectionError("the daemon closed the connection")
        return messages.unpack(data, answer=True)

    def alloc(self, words: int, asked: int | None = None) -> int:
        """Allocate memory with a zone of 64 KiB behind it.

        `asked`: bytes requested, as the ledger shall say.
        """
        address = self.device.alloc(words)
        rounded = -(-words * 4 // GRANULE) * GRANULE
        self._orders += 1
        row, born = len(self._notes), time.monotonic_ns()
        size = words * 4 if asked is None else asked
        self._notes[address] = row, rounded, size, born
        self.ledger.note(row, address, size, order=self._orders, born=born)
        if self.granted:
            self.lay(address + rounded, GRANULE)
        return address

    def free(self, address: int) -> None:
        """Free an allocation. Its addresses stay covered: quarantine."""
        row, rounded, size, born = self._notes[address]
        self.device.unmap(address)
        self.ledger.note(row, address, size, order=row + 1, born=born, freed=time.monotonic_ns())
        if self.granted:
            self.lay(address, rounded, layout.Role.QUARANTINE)

    def lay(self, base: int, length: int, role: int = layout.Role.GUARD) -> None:
        """Lay a managed zone of `length` bytes."""
        self.device.lay_managed(base, length)
        born = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        self.ledger.zone(self._rows, layout.Kind.MANAGED, role, base, base + length, born)
        self._rows += 1
        self.ledger.add("managed_zones", 1)
        self.ledger.add("managed_bytes", length)

    def launch(self, kernel: str, address: int, words: int = 1) -> None:
        """Start a kernel and note it in the ledger."""
        self.ledger.launched(kernel)
        self.device.launch(kernel, address=address, words=words)

    def synchronize(self) -> None:
        started = self.ledger.read_head("launched")
        self.device.synchronize()
        self.ledger.head("settled", started)
