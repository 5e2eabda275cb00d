"""The SDK of the simulated GPU, which programs use instead of CUDA.

Standard library only and quick to import. One SimulatedDevice is one context on one GPU, for one thread at a
time. Words are 32 bits, little-endian.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys

from mpsd.gpu.simulated import packets, paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from mpsd.gpu.simulated.packets import Message

WORD = 4
_INVALID_VALUE, _NO_DEVICE, _UNAVAILABLE, _RPC_FAILURE, _CONNECTION_FAILED = 1, 100, 46, 806, 805
# CUDA errors of a single call: the context stays usable. All other errors are sticky.
_HARMLESS = frozenset({1, 2, 100})
_WINDOW_BASE, _WINDOW_SIZE = 0x1000_0000_0000, 1 << 40
_FAR_AWAY = 0x7E00_0000_0000
_CONNECT_S = 30.0


class GpuFailure(Exception):
    """A CUDA error. Every later call of a broken context raises its code again."""

    def __init__(self, code: int, what: str = "") -> None:
        super().__init__(f"CUDA error {code}" + (f" in {what}" if what else ""))
        self.code = code


class SimulatedDevice:
    """A context. Every method raises GpuFailure."""

    def __init__(self, channel: socket.socket, descriptors: list[int], *, on_mps: bool, uuid: str) -> None:
        self.pid = os.getpid()
        self.on_mps = on_mps
        self.gpu_uuid = uuid
        self._channel = channel
        # The context's "UVM descriptors": held until the process ends or closes them.
        self._descriptors = descriptors
        self._error = 0
        self._request = 0
        self._memory: dict[int, tuple[mmap.mmap, int]] = {}

    @classmethod
    def open(cls, environ: Mapping[str, str]) -> Self:
        """Initialise CUDA and create a context: under MPS if CUDA_MPS_PIPE_DIRECTORY has a control daemon.

        Raises GpuFailure: 807 (server not ready), 808 (too many clients), 805 (the server died), 2 (no memory
        for a context), 100 (no such GPU, or no simulated node runs), 46 (compute mode).
        """
        server, directory, limits = _join_mps(environ)
        directory = directory or paths.run_directory(environ)
        _allow_duplication()
        try:
            channel = packets.connect(paths.gpu_socket(directory), _CONNECT_S)
        except packets.Gone:
            raise GpuFailure(_NO_DEVICE, f"open: no simulated GPU in {directory}") from None
        wanted = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or None
        message = {
            "op": "attach",
            "server": server,
            "gpu": wanted,
            "command": _command(),
            "limit": _limit(environ, wanted, limits),
        }
        try:
            answer, fds = packets.call(channel, message)
        except packets.Gone:
            answer, fds = {"error": _NO_DEVICE}, []
        if answer.get("error") or len(fds) != 2:
            channel.close()
            packets.close_all(fds)
            raise GpuFailure(int(answer.get("error") or _UNAVAILABLE), "open")
        channel.settimeout(None)
        _reserve_window()
        return cls(channel, fds, on_mps=server is not None, uuid=str(answer["uuid"]))

    # -- memory -----------------------------------------------------------------------------------------

    def alloc(self, words: int) -> int:
        """Allocate device memory and return its address."""
        return self._allocate(words, writable=True)

    def map_read_only(self, words: int) -> int:
        """Allocate memory that kernels may only read. The program itself can write it."""
        return self._allocate(words, writable=False)

    def _allocate(self, words: int, *, writable: bool) -> int:
        answer, fds = self._call({"op": "alloc", "words": words, "writable": writable})
        memory = mmap.mmap(fds[0], int(answer["size"]))
        packets.close_all(fds)
        self._memory[int(answer["address"])] = (memory, int(answer["size"]))
        return int(answer["address"])

    def free(self, address: int) -> None:
        self._release(address, keep=False)

    def unmap(self, address: int) -> None:
        """Unmap memory and keep its address reserved: a later access is use after unmap."""
        self._release(address, keep=True)

    def _release(self, address: int, *, keep: bool) -> None:
        self.synchronize()
        self._call({"op": "unmap", "address": address, "keep": keep})
        memory, _ = self._memory.pop(address)
        memory.close()

    def write(self, address: int, data: bytes) -> None:
        """Copy to the device, after earlier launches."""
        self.synchronize()
        memory, offset = self._locate(address, len(data))
        memory[offset : offset + len(data)] = data

    def read(self, address: int, size: int) -> bytes:
        """Copy from the device, after earlier launches."""
        self.synchronize()
        memory, offset = self._locate(address, size)
        return memory[offset : offset + size]

    def host_register(self, address: int, size: int) -> None:
        """Pin host memory. Error 1 under a guard."""
        self._call({"op": "host_register", "address": address, "size": size})

    def lay_managed(self, base: int, length: int) -> None:
        """Absorb stray accesses in [base, base+length) and report them to trackers that ask for them."""
        self._call({"op": "managed", "base": base, "length": length})

    def take_managed(self, base: int, length: int) -> None:
        """End managed ranges in [base, base+length)."""
        self._call({"op": "unmanaged", "base": base, "length": length})

    def lay_sparse(self, base: int, length: int) -> None:
        """Absorb stray accesses in [base, base+length) without a report."""
        self._call({"op": "sparse", "base": base, "length": length})

    def take_sparse(self, base: int, length: int) -> None:
        self._call({"op": "unsparse", "base": base, "length": length})

    def _locate(self, address: int, size: int) -> tuple[mmap.mmap, int]:
        for base, (memory, length) in self._memory.items():
            if base <= address and address + size <= base + length:
                return memory, address - base
        raise GpuFailure(_INVALID_VALUE, "copy")

    # -- work -------------------------------------------------------------------------------------------

    def launch(
        self,
        kernel: str,
        *,
        address: int = 0,
        words: int = 0,
        value: int = 0,
        duration_s: float = 0.0,
        fill_gpu: bool = False,
    ) -> None:
        """Start a kernel and return: increment, fill, spin, forever, or a fault kind by its name.

        A kind that needs an address gets a suitable one by default: far from every mapping, an unmapped or
        read-only buffer, or an address of this process for guard kinds.
        """
        self._raise_sticky("launch")
        address = address or self._fitting_address(kernel)
        self._send({"op": "launch", "k": [kernel, address, words, value, duration_s, fill_gpu]})

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait for all launches. Raises TimeoutError after `timeout_s` seconds."""
        self._raise_sticky("synchronize")
        self._channel.settimeout(timeout_s)
        try:
            self._call({"op": "sync"})
        finally:
            self._channel.settimeout(None)

    def close(self) -> None:
        """Wait for the work, then destroy the context and its memory. Idempotent."""
        if self._channel.fileno() < 0:
            return
        try:
            if not self._error:
                self.synchronize()
                self._call({"op": "close"})
        except GpuFailure:
            pass
        finally:
            for memory, _ in self._memory.values():
                memory.close()
            self._memory.clear()
            self._channel.close()
            packets.close_all(self._descriptors)
            self._descriptors = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the connection ---------------------------------------------------------------------------------

    def _fitting_address(self, kernel: str) -> int:
        if kernel in ("store", "load", "atomic", "wild_call", "pbdma"):
            return _FAR_AWAY
        if kernel == "read_only":
            return self.map_read_only(1)
        if kernel == "use_after_unmap":
            address = self.alloc(1)
            self.unmap(address)
            return address
        if kernel.startswith("guard_"):
            return _own_address(kernel)
        return 0

    def _call(self, message: Message) -> tuple[Message, list[int]]:
        """Send one request and return its answer. Discard answers to requests that timed out."""
        self._raise_sticky(str(message["op"]))
        self._request += 1
        self._send({"id": self._request, **message})
        while True:
            try:
                answer, fds = packets.receive(self._channel)
            except packets.Gone:
                raise self._broken() from None
            if answer.get("id") == self._request:
                break
            packets.close_all(fds)
        if answer.get("error"):
            packets.close_all(fds)
            code = int(answer["error"])
            if code not in _HARMLESS:
                self._error = code
            raise GpuFailure(code, str(message["op"]))
        return answer, fds

    def _send(self, message: Message) -> None:
        try:
            packets.send(self._channel, message)
        except packets.Gone:
            raise self._broken() from None

    def _broken(self) -> GpuFailure:
        # Without the GPU process, the device looks as if it fell off the bus.
        self._error = _UNAVAILABLE
        return GpuFailure(self._error, "connection to the GPU")

    def _raise_sticky(self, what: str) -> None:
        if self._error:
            raise GpuFailure(self._error, what)


def _join_mps(environ: Mapping[str, str]) -> tuple[int | None, str, list[int | None]]:
    """Return (pid of the server, directory of the node, memory limits).

    As libcuda does, run outside MPS without an error where no daemon can be reached: no server is returned
    where none listens, and where this user may not enter the directory.
    """
    path = os.path.join(paths.pipe_directory(environ), "control")
    try:
        sock = packets.connect(path, _CONNECT_S)
    except packets.Gone:
        return None, "", []
        # A client of another user waits here for its turn, without a limit.
    sock.settimeout(None)
    try:
        answer, fds = packets.call(sock, {"client": os.getpid()})
    except packets.Gone:
        raise GpuFailure(_CONNECTION_FAILED, "open: the control daemon closed the connection") from None
    finally:
        sock.close()
    packets.close_all(fds)
    if answer.get("error"):
        raise GpuFailure(int(answer["error"]), "open")
    return int(answer["server"]), str(answer["node"]), list(answer.get("limits", []))


def _limit(environ: Mapping[str, str], wanted: str | None, limits: list[int | None]) -> int | None:
    """Return the lower of the server's limit and CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, in bytes."""
    ordinal = int(wanted) if wanted and wanted.isdigit() else 0
    found = [limits[ordinal]] if ordinal < len(limits) else []
    for item in environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "").split(","):
        device, _, value = item.partition("=")
        if device.strip() in (str(ordinal), wanted) and value[:-1].isdigit():
            found.append(int(value[:-1]) << (30 if value[-1] in "gG" else 20))
    return min((limit for limit in found if limit is not None), default=None)


def _command() -> str:
    with open("/proc/self/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip()


def _allow_duplication() -> None:
    """Let all processes of this user duplicate our descriptors, if Yama allows only parents to trace."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope", encoding="ascii") as file:
            if file.read().strip() != "1":
                return
    except OSError:
        return
    import ctypes

    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)


_window_reserved = False


def _reserve_window() -> None:
    """Keep the GPU's address window free in this process, as libcuda does with inaccessible mappings."""
    global _window_reserved
    if _window_reserved or sys.maxsize < 1 << 40:
        return
    import ctypes

    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    # PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE. After a refusal only the
    # process's memory map looks different.
    libc.mmap(_WINDOW_BASE, _WINDOW_SIZE, 0, 0x2 | 0x20 | 0x4000 | 0x100000, -1, 0)
    _window_reserved = True


def _own_address(kernel: str) -> int:
    """Return an address of this process that a guard of the named class would cover."""
    if kernel == "guard_low":
        return 0x40000
    wanted = {"guard_heap": "[heap]", "guard_stack": "[stack]"}.get(kernel, ".so")
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        rows = [row.split(maxsplit=5) for row in file]
    spans = [row[0].split("-") for row in rows if len(row) > 5 and wanted in row[5]]
    if not spans:
        raise GpuFailure(_INVALID_VALUE, f"{kernel}: this process has no such mapping")
    start, end = max(((int(a, 16), int(b, 16)) for a, b in spans), key=lambda span: span[1] - span[0])
    return (start + end) // 2 // 8 * 8
