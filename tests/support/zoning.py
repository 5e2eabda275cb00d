"""Guard zones seen from outside: a program under command, its ledger, a vault that only grants.

The ledger is read here by the numbers of clients/libcuda/src/ledger.h, so that a mistake in the daemon's own
reader cannot hide one in the writer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mpsd.base.model import ProcessInstance
from mpsd.os import procfs
from mpsd.vault.messages import LAYOUT, Kind, Message, Status, pack, unpack
from tests.support.obeying import Obeys
from tests.support.waiting import DEADLINE_S

MIB = 1 << 20
# clients/libcuda/src: DEFAULT_ZONE of limits.c, on each side of a segment; REPORTED of zones.c, of a freed
# one.
ZONE = 18 * MIB
REPORTED = 16 * MIB
MANAGED, SPARSE = 1, 2
GUARD, QUARANTINE, NULL_PAGE, FAR = 0, 1, 2, 3

_HEAD = struct.Struct("=QIIQ27Q")
_FIELDS = (
    "launched",
    "settled",
    "names_used",
    "notes_lost",
    "managed_bytes",
    "sparse_bytes",
    "managed_zones",
    "sparse_zones",
    "uncovered",
    "quarantine_bytes",
    "quarantine_count",
    "null_page",
    "far_bytes",
    "far_zones",
)
_ZONE, _NOTE, _LAUNCH, _NAME = map(struct.Struct, ("=IHHQQQ", "=IIQQQQQ", "=QQ", "=IIQ112s"))
_ZONES, _NOTES, _LAUNCHES, _NAMES = 8192, 65536, 64, 4096
_SIZE = (
    _HEAD.size + _ZONE.size * _ZONES + _NOTE.size * _NOTES + _LAUNCH.size * _LAUNCHES + _NAME.size * _NAMES
)

# Under command: each line is an expression, answered with its repr. hit() and look() return the code of a
# wait after a kernel's one store or one load at an address.
_PROGRAM = """
import ctypes, os, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, module = ctypes.c_void_p(), ctypes.c_void_p()
def must(code):
    assert code == 0, code
def alloc(size):
    pointer = ctypes.c_uint64()
    must(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)))
    return pointer.value
def free(address):
    return cuda.cuMemFree_v2(ctypes.c_uint64(address))
def function(name):
    found = ctypes.c_void_p()
    must(cuda.cuModuleGetFunction(ctypes.byref(found), module, name))
    return found
def launch(name, *values):
    kept = [ctypes.c_uint64(value) for value in values]
    arguments = (ctypes.c_void_p * len(kept))(*(ctypes.addressof(one) for one in kept))
    return cuda.cuLaunchKernel(function(name), 1, 1, 1, 1, 1, 1, 0, None, arguments, None)
def sync():
    return cuda.cuCtxSynchronize()
def hit(address):
    must(launch(b"store", address, 7))
    return sync()
def look(address):
    must(launch(b"sum", scratch, address, 1))
    return sync()
def word(address):
    found = ctypes.c_uint32()
    must(cuda.cuMemcpyDtoH_v2(ctypes.byref(found), ctypes.c_uint64(address), ctypes.c_size_t(4)))
    return found.value
def room():
    left, total = ctypes.c_size_t(), ctypes.c_size_t()
    must(cuda.cuMemGetInfo_v2(ctypes.byref(left), ctypes.byref(total)))
    return left.value
def start():
    must(cuda.cuInit(0))
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    must(cuda.cuCtxSetCurrent(context))
    kernels = b"".join(b"kernel " + one + b" " + one + b" 0\\n" for one in (b"store", b"sum", b"fill"))
    must(cuda.cuModuleLoadData(ctypes.byref(module), b"standin module\\n" + kernels))
def forked(work):
    child = os.fork()
    if not child:
        os._exit(work())
    return os.waitpid(child, 0)[1]
start()
scratch = alloc(512) if "SCRATCH" in os.environ else 0
print("there", flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""


@dataclass(frozen=True)
class Zone:
    kind: int
    role: int
    start: int
    end: int
    born_ns: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Note:
    address: int
    size: int
    order: int
    born_ns: int
    freed_ns: int


class LedgerView:
    """A view of a ledger, read anew at each query. Owns its descriptor."""

    def __init__(self, fd: int) -> None:
        assert os.fstat(fd).st_size == _SIZE
        self.fd = fd
        magic, version, self.pid, size, *_ = self._head()
        assert (magic, version, size) == (0x726764656C64706D, 2, _SIZE)

    def _head(self) -> tuple[int, ...]:
        return _HEAD.unpack(os.pread(self.fd, _HEAD.size, 0))

    def __getattr__(self, name: str) -> int:
        if name not in _FIELDS:
            raise AttributeError(name)
        return self._head()[4 + _FIELDS.index(name)]

    def _rows(self, layout: struct.Struct, at: int, count: int) -> Iterator[tuple[Any, ...]]:
        return layout.iter_unpack(os.pread(self.fd, layout.size * count, at))

    def zones(self) -> list[Zone]:
        rows = self._rows(_ZONE, _HEAD.size, _ZONES)
        found = [Zone(*row) for sequence, *row in rows if row[0] and not sequence % 2]
        return sorted(found, key=lambda zone: zone.start)

    def notes(self) -> list[Note]:
        rows = self._rows(_NOTE, _HEAD.size + _ZONE.size * _ZONES, _NOTES)
        found = [Note(*row) for sequence, _, *row in rows if row[1] and not sequence % 2]
        return sorted(found, key=lambda note: note.order)

    def launches(self) -> list[tuple[int, int]]:
        """Return (function, stream) of the launch ring, in the ring's order."""
        at = _HEAD.size + _ZONE.size * _ZONES + _NOTE.size * _NOTES
        return [(function, stream) for function, stream in self._rows(_LAUNCH, at, _LAUNCHES)]

    def names(self) -> dict[int, str]:
        rows = self._rows(_NAME, _SIZE - _NAME.size * _NAMES, self.names_used)
        return {function: name.partition(b"\0")[0].decode() for _, _, function, name in rows}

    def close(self) -> None:
        os.close(self.fd)


class Obedient(Obeys):
    """A context: a program that is ended with it. `ledger` opens the program's ledger."""

    def __init__(self, environment: Mapping[str, str], command: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*command, sys.executable, "-c", _PROGRAM],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.views: list[LedgerView] = []

    def __enter__(self) -> Obedient:
        assert self.line() == "there", self.process.communicate(timeout=DEADLINE_S)[1]
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for view in self.views:
            view.close()
        if kind is not None:
            self.process.kill()
        said = self.process.communicate(timeout=DEADLINE_S)[1]
        assert kind is not None or (self.process.returncode, said) == (0, "")

    @property
    def instance(self) -> ProcessInstance:
        return ProcessInstance(self.process.pid, procfs.start_ticks(self.process.pid))

    def ledger(self) -> LedgerView:
        self.views.append(ledger_of(self.process.pid))
        return self.views[-1]


def ledger_of(pid: int) -> LedgerView:
    """Open the ledger by the process's own descriptors, as only its user and root can."""
    (path,) = (path for path in Path(f"/proc/{pid}/fd").iterdir() if _leads_to_ledger(path))
    return LedgerView(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def _leads_to_ledger(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(path).startswith("/memfd:mpsd-ledger")
    return False


class GrantingVault:
    """A context: a vault's socket that accepts all memory, keeps none, and answers LEDGER with `grant`.

    `grant` is (bytes, zones) or the status of a refusal, `reads_far` whether the vault knows far zones.
    `answer` is an event: LEDGER gets no answer before it is set.
    """

    def __init__(
        self,
        path: Path,
        grant: tuple[int, int] | Status,
        *,
        answers: bool = True,
        reads_far: bool = False,
    ) -> None:
        self.grant = grant
        self.reads_far = reads_far
        self.answer = threading.Event()
        self.asked = threading.Event()
        self.puts = 0
        self.ledgers: list[LedgerView] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._open: list[socket.socket] = []
        if answers:
            self.answer.set()

    def __enter__(self) -> GrantingVault:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.answer.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE_S)
        self._listener.close()
        for ledger in self.ledgers:
            ledger.close()

    def _serve(self) -> None:
        """Serve one connection after another."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                with connection, contextlib.suppress(OSError):
                    while self._obey(connection):
                        pass

    def _obey(self, connection: socket.socket) -> bool:
        data, fds, _, _ = socket.recv_fds(connection, LAYOUT.size, 4)
        if not data:
            return False
        message = unpack(data)
        reply = replace(message, status=Status.OK)
        if message.kind is Kind.LEDGER:
            self.ledgers.append(LedgerView(fds.pop()))
            self.asked.set()
            assert self.answer.wait(DEADLINE_S)
            reply = self._granted(reply)
        for fd in fds:
            os.close(fd)
        connection.sendall(pack(reply, answer=True))
        # Count the message as received, however the connection ends: else the next vault would get it again.
        self.puts += message.kind is Kind.PUT
        return True

    def _granted(self, reply: Message) -> Message:
        if isinstance(self.grant, Status):
            return replace(reply, status=self.grant)
        return replace(reply, index=int(self.reads_far), size=self.grant[0], count=self.grant[1])
