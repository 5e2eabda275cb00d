"""GPU memory of this process: views that other libraries wrap without copying, and the buffer they show."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

from mpsd_client import _dlpack
from mpsd_client._protocol import errors

if TYPE_CHECKING:
    from mpsd_client._cuda import Device

_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6
# Name: DLPack's code, bits, and the array interface's string, which has none for bfloat16.
_DTYPES: dict[str, tuple[int, int, str]] = {
    "bool": (_BOOL, 8, "|b1"),
    "int8": (_INT, 8, "|i1"),
    "int16": (_INT, 16, "<i2"),
    "int32": (_INT, 32, "<i4"),
    "int64": (_INT, 64, "<i8"),
    "uint8": (_UINT, 8, "|u1"),
    "uint16": (_UINT, 16, "<u2"),
    "uint32": (_UINT, 32, "<u4"),
    "uint64": (_UINT, 64, "<u8"),
    "float16": (_FLOAT, 16, "<f2"),
    "bfloat16": (_BFLOAT, 16, ""),
    "float32": (_FLOAT, 32, "<f4"),
    "float64": (_FLOAT, 64, "<f8"),
    "complex64": (_COMPLEX, 64, "<c8"),
    "complex128": (_COMPLEX, 128, "<c16"),
}


class Range:
    """Addresses of this process with memory behind them, until cuMemUnmap of them has returned well."""

    def __init__(self, device: Device, address: int, size: int) -> None:
        self.device, self.address, self.size = device, address, size
        self.mapped = True
        self.usable = True
        """False as soon as it is being unmapped."""
        # Reentrant: a finalizer may run anywhere, so also in the thread that is just unmapping another one.
        self._lock = threading.RLock()

    def unmap(self) -> bool:
        """Waits for no work: that is the caller's to have done, unless the context is lost, which writes
        nothing there any more once this returns. Whether it is unmapped."""
        self.usable = False
        with self._lock:
            if self.mapped and self.device.unmap(self.address, self.size):
                self.mapped = False
        return not self.mapped

    def end(self) -> None:
        """When all work of its context is done: that may use it."""
        self.device.finish_work()
        with self._lock:
            was_mapped = self.mapped
            if self.unmap() and was_mapped:
                self.device.free_addresses(self.address, self.size)


class Mapping:
    """Memory at an address of this process, until nobody refers to it any more.

    `size` in bytes, whole granules. Takes `device` over. It is not unmapped at the end of the interpreter:
    others may use it to the last, and the end of the process does it.
    """

    def __init__(self, device: Device, address: int, size: int) -> None:
        self.device = device
        self.address = address
        self.range = Range(device, address, size)
        weakref.finalize(self, _end, self.range).atexit = False


def _end(where: Range) -> None:
    where.end()
    where.device.close()


def dtype_name(dtype: object) -> str:
    """The name of a dtype given as text ("float32"), or as an object of NumPy's, CuPy's or PyTorch's.

    Raises UsageError.
    """
    given = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)
    # NumPy 1 has its "bool_".
    name = str(given).rpartition(".")[2].removesuffix("_")
    if name not in _DTYPES:
        raise errors.UsageError(f"no such dtype: {dtype!r}", remedy="one of " + ", ".join(_DTYPES))
    return name


class View:
    """A C-contiguous array in GPU memory, for torch.from_dlpack, torch.as_tensor, cupy.asarray and the like.

    Nothing is copied. The memory stays mapped while this object, or anything made from it, is there.
    """

    def __init__(self, mapping: Mapping, dtype: str, shape: tuple[int, ...], offset: int) -> None:
        self._mapping: Mapping | None = mapping
        self._lent = False
        self.dtype = dtype
        """Name of the element type, as "float32"."""
        self.shape = shape
        """Elements along each axis."""
        self._offset = offset

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _DTYPES[self.dtype][1] // 8

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def pointer(self) -> int:
        """The device address of the first element (a CUdeviceptr). Raises UsageError once closed."""
        return self._there().address + self._offset

    def _there(self) -> Mapping:
        if self._closed_here or self._mapping is None:
            raise errors.UsageError("the buffer is closed", remedy="attach it again")
        return self._mapping

    @property
    def _closed_here(self) -> bool:
        return self._mapping is None or not self._mapping.range.usable

    def __dlpack_device__(self) -> tuple[int, int]:
        """(2, ordinal): CUDA, and the device as this process counts them."""
        return _dlpack.CUDA, self._there().device.ordinal

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A DLPack capsule; versioned where the consumer can take one.

        `stream`: the consumer's, as the array API has it for CUDA: None or 1 the legacy default one, 2 the
        per-thread default one, above that a CUstream, -1 no ordering wanted. It waits for what the legacy
        default stream was given before; other streams are the caller's to order. Raises BufferError for
        what cannot be done without a copy, ValueError for stream 0, UsageError once closed.
        """
        mapping = self._there()
        if stream == 0 or (stream is not None and stream < -1):
            raise ValueError(f"stream {stream} means no CUDA stream: 1 is the legacy default one")
        if copy:
            raise BufferError("the memory is lent, never copied: copy what you made of it")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the memory is on {self.__dlpack_device__()}, not on {tuple(dl_device)}")
        if stream is not None and stream > 1:
            mapping.device.order(stream)
        code, bits, _ = _DTYPES[self.dtype]
        versioned = max_version is not None and max_version[0] >= _dlpack.VERSION[0]
        return _dlpack.capsule(
            mapping, self.pointer, mapping.device.ordinal, self.shape, (code, bits), versioned=versioned
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, C-contiguous, writable; no stream, for nothing of ours is ever under way.

        Raises AttributeError for bfloat16, which that interface has no name for (DLPack has), and once
        closed: whoever asks then finds no such interface.
        """
        kind = _DTYPES[self.dtype][2]
        if self._closed_here or not kind:
            why = "the buffer is closed" if kind else "bfloat16 has no name there: use __dlpack__"
            raise AttributeError(f"no __cuda_array_interface__: {why}")
        # Whoever read it refers to this object alone: the memory has to stay as long as this does.
        self._lent = True
        return {
            "shape": self.shape,
            "typestr": kind,
            "data": (self.pointer if self.nbytes else 0, False),  # As its specification wants it.
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def read(self, size: int | None = None, offset: int = 0) -> bytes:
        """A copy of `size` bytes from byte `offset` on; by default all. Raises UsageError, CudaError.

        It is ordered after what the legacy default stream was given, as cudaMemcpy is.
        """
        size = self.nbytes - offset if size is None else size
        self._check(offset, size)
        return self._there().device.read(self.pointer + offset, size) if size else b""

    def write(self, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Copy bytes to byte `offset` and the following, done on return. Raises UsageError, CudaError."""
        given = data if isinstance(data, bytes) else bytes(data)
        self._check(offset, len(given))
        if given:
            self._there().device.write(self.pointer + offset, given)

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.nbytes:
            raise errors.UsageError(
                f"bytes {offset} to {offset + size} are not within {self.nbytes}",
                remedy="offset and size count bytes from the start",
            )

    def __repr__(self) -> str:
        where = "closed" if self._closed_here else hex(self.pointer)
        return f"<{type(self).__name__} {self.dtype}{list(self.shape)} at {where}>"


class Buffer(View):
    """A named piece of GPU memory, as an array of bytes; view() shows it as others.

    Made by attach() and session().attach(). As a context, it is closed at the end.
    """

    def __init__(
        self,
        mapping: Mapping,
        name: str,
        size: int,
        *,
        found: bool,
        persistent: bool,
        forget: Callable[[], object],
        closed: Callable[[bool], object],
    ) -> None:
        """`forget` has the vault let go; `closed` is told at the end, once, whether nothing is mapped any
        more and the vault may hand it to others."""
        super().__init__(mapping, "uint8", (size,), 0)
        self.name = name
        self.device = mapping.device.ordinal
        """Ordinal of the GPU as this process counts them."""
        self.found = found
        """True: it was there, with the bytes that an earlier process (or this one) left. False: it is new,
        and all zeros."""
        self.persistent = persistent
        """True: the vault has it, and it outlives this process. False: it ends with it, as any memory."""
        self._forget = forget
        self._closed = closed

    def view(
        self, dtype: object = "uint8", shape: SupportsIndex | Sequence[int] | None = None, offset: int = 0
    ) -> View:
        """The memory from byte `offset` on as a C-contiguous array; without a `shape`, one axis of all that
        fits. `dtype`: a name ("float32"), or NumPy's, CuPy's or PyTorch's object. Raises UsageError."""
        name = dtype_name(dtype)
        itemsize = _DTYPES[name][1] // 8
        if shape is None:
            axes: tuple[int, ...] = (max(0, self.nbytes - offset) // itemsize,)
        elif isinstance(shape, SupportsIndex):
            axes = (shape.__index__(),)
        else:
            axes = tuple(int(axis) for axis in shape)
        if any(axis < 0 for axis in axes) or offset % itemsize:
            raise errors.UsageError(
                f"no view of {name}{list(axes)} at byte {offset}",
                remedy=f"axes of 0 or more, and an offset that {itemsize} divides",
            )
        self._check(offset, math.prod(axes) * itemsize)
        return View(self._there(), name, axes, offset)

    def close(self) -> None:
        """This object shows the memory no more. It stays mapped while a view, a capsule or a tensor made of
        it is there (and this object, where somebody read its __cuda_array_interface__); then that is undone,
        after a wait for the work of its context. Idempotent.

        What the vault has, it keeps. Where nothing stayed mapped another process may attach it from now on;
        else when this one has ended, or has attached it again and closed it."""
        if self._mapping is None:
            return
        _dlpack.sweep()
        where = self._mapping.range
        if self._lent:
            # They hold this object: what it refers to goes when it goes.
            self._last = self._mapping
        self._mapping = None
        self._closed(self.persistent and not where.mapped)

    def forget(self) -> None:
        """Let the vault give the memory up, for good: it is not found again. Here it can be used until it is
        closed. Raises NoVaultError, DeadlineError, ProtocolError."""
        if self.persistent:
            self._forget()
            self.persistent = False

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = "persistent" if self.persistent else "not persistent"
        where = "closed" if self._closed_here else hex(self.pointer)
        return f"<Buffer {self.name!r} of {self.nbytes} bytes at {where}, {kind}>"
