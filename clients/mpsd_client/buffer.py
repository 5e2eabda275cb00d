"""GPU buffers of this process, and views of them that other libraries wrap without copying."""

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
# Name: DLPack's code, bits, and the string of the array interface (none for bfloat16).
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
    """An address range with memory behind it, until cuMemUnmap has succeeded."""

    def __init__(self, device: Device, address: int, size: int) -> None:
        self.device, self.address, self.size = device, address, size
        self.mapped = True
        self.usable = True
        """False once unmapping begins."""
        # Reentrant: a finalizer may run in a thread that is unmapping another range.
        self._lock = threading.RLock()

    def unmap(self) -> bool:
        """Unmap the range and return whether it is unmapped. Waits for no work.

        The caller has waited for the work, or the context has faulted and writes nothing more."""
        self.usable = False
        with self._lock:
            if self.mapped and self.device.unmap(self.address, self.size):
                self.mapped = False
        return not self.mapped

    def end(self) -> None:
        """Unmap the range after all work of its context, which may use it."""
        self.device.finish_work()
        with self._lock:
            was_mapped = self.mapped
            if self.unmap() and was_mapped:
                self.device.free_addresses(self.address, self.size)


class Mapping:
    """Memory at an address of this process, unmapped when the last reference to it is gone.

    `size`: bytes, a multiple of the granularity. Owns `device`. Not unmapped at interpreter exit, because
    other libraries may still use it; the end of the process unmaps it.
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
    """Return the name of a dtype: a string ("float32"), or an object of NumPy, CuPy or PyTorch.

    Raises UsageError.
    """
    given = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)
    # NumPy 1 names it "bool_".
    name = str(given).rpartition(".")[2].removesuffix("_")
    if name not in _DTYPES:
        raise errors.UsageError(f"unknown dtype {dtype!r}", remedy="use one of " + ", ".join(_DTYPES))
    return name


class View:
    """A C-contiguous array in GPU memory, for torch.from_dlpack, torch.as_tensor, cupy.asarray and the like.

    Nothing is copied. The memory stays mapped while this object, or an array created from it, exists.
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
        """Device address of the first element (a CUdeviceptr). Raises UsageError once closed."""
        return self._open_mapping().address + self._offset

    def _open_mapping(self) -> Mapping:
        if self._is_closed or self._mapping is None:
            raise errors.UsageError("the buffer is closed", remedy="attach it again")
        return self._mapping

    @property
    def _is_closed(self) -> bool:
        return self._mapping is None or not self._mapping.range.usable

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return (2, ordinal): kDLCUDA and the device's ordinal in this process."""
        return _dlpack.CUDA, self._open_mapping().device.ordinal

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return a DLPack capsule, versioned if the consumer supports it.

        `stream`: the consumer's, as the array API defines it for CUDA: None or 1 the legacy default stream, 2
        the per-thread default stream, a CUstream, or -1 for no ordering. The stream waits for earlier work of
        the legacy default stream; ordering other streams is the caller's task. Raises BufferError for a
        request that needs a copy, ValueError for stream 0, UsageError once closed.
        """
        mapping = self._open_mapping()
        if stream == 0 or (stream is not None and stream < -1):
            raise ValueError(f"stream {stream} is no CUDA stream: use 1 for the legacy default stream")
        if copy:
            raise BufferError("the memory cannot be copied here: copy the array that you create from it")
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
        """The array interface, version 3: C-contiguous, writable, without a stream.

        No stream, because this object never has work in flight. Raises AttributeError for bfloat16, which the
        interface cannot name (DLPack can), and once closed, so that hasattr() is False.
        """
        kind = _DTYPES[self.dtype][2]
        if self._is_closed or not kind:
            why = "the buffer is closed" if kind else "it cannot name bfloat16: use __dlpack__"
            raise AttributeError(f"no __cuda_array_interface__: {why}")
        # The reader of the interface refers only to this object, so the memory must live as long as it.
        self._lent = True
        return {
            "shape": self.shape,
            "typestr": kind,
            "data": (self.pointer if self.nbytes else 0, False),  # 0 for size 0, by the specification.
            "strides": None,
            "stream": None,
            "version": 3,
        }

    def read(self, size: int | None = None, offset: int = 0) -> bytes:
        """Return a copy of `size` bytes from byte `offset` on; by default all. Raises UsageError, CudaError.

        Ordered after earlier work of the legacy default stream, like cudaMemcpy.
        """
        size = self.nbytes - offset if size is None else size
        self._check(offset, size)
        return self._open_mapping().device.read(self.pointer + offset, size) if size else b""

    def write(self, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Copy bytes into the memory from byte `offset` on; done on return. Raises UsageError, CudaError."""
        given = data if isinstance(data, bytes) else bytes(data)
        self._check(offset, len(given))
        if given:
            self._open_mapping().device.write(self.pointer + offset, given)

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.nbytes:
            raise errors.UsageError(
                f"bytes {offset} to {offset + size} exceed the buffer of {self.nbytes} bytes",
                remedy="give offset and size in bytes from the start of the buffer",
            )

    def __repr__(self) -> str:
        where = "closed" if self._is_closed else hex(self.pointer)
        return f"<{type(self).__name__} {self.dtype}{list(self.shape)} at {where}>"


class Buffer(View):
    """A named GPU buffer, as an array of bytes; view() returns it as other types.

    Created by attach() and session().attach(). A context manager that closes it.
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
        """`forget` makes the vault release the memory. `closed` is called once, at the end.

        Its argument: nothing is mapped any more, so the vault may give the memory to another process."""
        super().__init__(mapping, "uint8", (size,), 0)
        self.name = name
        self.device = mapping.device.ordinal
        """Ordinal of the GPU in this process."""
        self.found = found
        """True: the buffer has the bytes that an earlier process (or this one) left. False: it is new and
        all zeros."""
        self.persistent = persistent
        """True: the vault keeps it, so it outlives this process. False: it ends with this process."""
        self._forget = forget
        self._closed = closed

    def view(
        self, dtype: object = "uint8", shape: SupportsIndex | Sequence[int] | None = None, offset: int = 0
    ) -> View:
        """Return the memory from byte `offset` on as a C-contiguous array. Raises UsageError.

        Without a `shape`: one axis with all elements that fit. `dtype`: a name ("float32"), or an object of
        NumPy, CuPy or PyTorch."""
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
                f"{name}{list(axes)} at byte {offset} is not a valid view",
                remedy=f"use axes of 0 or more, and an offset that is a multiple of {itemsize}",
            )
        self._check(offset, math.prod(axes) * itemsize)
        return View(self._open_mapping(), name, axes, offset)

    def close(self) -> None:
        """Close the buffer. Idempotent.

        The memory stays mapped while a view, a capsule or a tensor of it exists, and while this object exists
        if its __cuda_array_interface__ was read. It is unmapped after that, when its context has no work.
        The vault keeps the memory. Another process may attach it at once if nothing stayed mapped; otherwise
        after the end of this process, or after this process has attached and closed it again."""
        if self._mapping is None:
            return
        _dlpack.sweep()
        where = self._mapping.range
        if self._lent:
            # Readers of the array interface hold this object, so it must keep the memory mapped.
            self._last = self._mapping
        self._mapping = None
        self._closed(self.persistent and not where.mapped)

    def forget(self) -> None:
        """Make the vault release the memory for good. This process can use it until it closes the buffer.

        Raises NoVaultError, DeadlineError, ProtocolError."""
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
        where = "closed" if self._is_closed else hex(self.pointer)
        return f"<Buffer {self.name!r} of {self.nbytes} bytes at {where}, {kind}>"
