"""The CUDA driver calls that buffers need, through ctypes. The driver is loaded on first use.

The driver is the libcuda.so.1 that the process has loaded or would load; that may be mpsd's proxy. All calls
use the primary context, as PyTorch, CuPy and other users of the runtime API do.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from mpsd_client._protocol import errors

LIBRARY = "libcuda.so.1"
LEGACY_STREAM = 1
_PINNED, _DEVICE, _POSIX_FD, _READ_WRITE = 1, 1, 1, 3
_DISABLE_TIMING = 2
# CUresults after which a context is unusable: memory errors, faults, asserts, loss of the MPS server.
_FATAL = frozenset((214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 805, 806, 810))

_Size, _Pointer, _Handle, _Int = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int


class CudaError(errors.GpuError):
    """The CUDA driver is missing or refused a call. `status` is its CUresult, 0 without a driver."""

    code = "cuda"


class _Location(ctypes.Structure):
    _fields_ = (("type", _Int), ("id", _Int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", _Int),
        ("handle_types", _Int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", _Int))


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


_POINTER = ctypes.POINTER
_CALLS: dict[str, Sequence[type]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (_Int, _POINTER(ctypes.c_char_p)),
    "cuDeviceGetCount": (_POINTER(_Int),),
    "cuDeviceGet": (_POINTER(_Int), _Int),
    "cuDeviceGetUuid_v2": (_POINTER(_Uuid), _Int),
    "cuDevicePrimaryCtxRetain": (_POINTER(ctypes.c_void_p), _Int),
    "cuDevicePrimaryCtxRelease_v2": (_Int,),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (_POINTER(ctypes.c_void_p),),
    "cuCtxSynchronize": (),
    "cuMemGetAllocationGranularity": (_POINTER(_Size), _POINTER(_Properties), _Int),
    "cuMemCreate": (_POINTER(_Handle), _Size, _POINTER(_Properties), ctypes.c_ulonglong),
    "cuMemRelease": (_Handle,),
    "cuMemExportToShareableHandle": (_POINTER(_Int), _Handle, _Int, ctypes.c_ulonglong),
    "cuMemImportFromShareableHandle": (_POINTER(_Handle), ctypes.c_void_p, _Int),
    "cuMemAddressReserve": (_POINTER(_Pointer), _Size, _Size, _Pointer, ctypes.c_ulonglong),
    "cuMemAddressFree": (_Pointer, _Size),
    "cuMemMap": (_Pointer, _Size, _Size, _Handle, ctypes.c_ulonglong),
    "cuMemUnmap": (_Pointer, _Size),
    "cuMemSetAccess": (_Pointer, _Size, _POINTER(_Access), _Size),
    "cuMemsetD8_v2": (_Pointer, ctypes.c_ubyte, _Size),
    "cuMemcpyHtoD_v2": (_Pointer, ctypes.c_void_p, _Size),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, _Pointer, _Size),
    "cuEventCreate": (_POINTER(ctypes.c_void_p), ctypes.c_uint),
    "cuEventRecord": (ctypes.c_void_p, ctypes.c_void_p),
    "cuEventDestroy_v2": (ctypes.c_void_p,),
    "cuStreamWaitEvent": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint),
    "cuStreamQuery": (ctypes.c_void_p,),
}


class Driver:
    """Driver functions by name. Raises CudaError for every status except CUDA_SUCCESS."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise CudaError(
                f"no CUDA driver: {error}",
                remedy="run on a machine with a GPU; a container needs the driver's libraries and devices",
            ) from None
        for name, arguments in _CALLS.items():
            try:
                getattr(self._library, name).argtypes = arguments
            except AttributeError:
                raise CudaError(
                    f"the CUDA driver has no {name}", remedy="install a driver for CUDA 12 or later"
                ) from None
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function. Raises CudaError."""
        status = self.tell(name, *arguments)
        if status:
            raise self._error(name, status)

    def tell(self, name: str, *arguments: object) -> int:
        """Call a function and return its status, for callers that cannot raise."""
        return int(getattr(self._library, name)(*arguments))

    def _error(self, name: str, status: int) -> CudaError:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(text))
        what = text.value.decode() if text.value else "unknown"
        remedy = ""
        if status == 2:
            remedy = "the GPU is full: mpsd-ctl status shows the memory of each client"
        elif name == "cuInit":
            remedy = "check that a GPU is visible here: nvidia-smi, CUDA_VISIBLE_DEVICES"
        return CudaError(f"{name} failed: {what} ({status})", remedy=remedy, status=status)


_loading = threading.Lock()


@functools.cache
def _driver() -> Driver:
    return Driver()


def driver() -> Driver:
    """Return the initialised driver. Raises CudaError."""
    with _loading:
        return _driver()


class Device:
    """One GPU, by its ordinal in this process, and its primary context, retained until close().

    Raises CudaError, UsageError.
    """

    found_fault: ClassVar[bool] = False
    """Whether a context of this process had faulted when finish_work() waited for its work."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._driver = driver()
        count, handle = _Int(), _Int()
        self._driver.call("cuDeviceGetCount", ctypes.byref(count))
        if not 0 <= ordinal < count.value:
            raise errors.UsageError(
                f"there is no device {ordinal}", remedy=f"this process sees {count.value}, numbered from 0"
            )
        self._driver.call("cuDeviceGet", ctypes.byref(handle), ordinal)
        self.uuid = self._uuid_of(handle.value)
        self._handle = handle.value
        self._context = ctypes.c_void_p()
        self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._handle)
        self._pid = os.getpid()
        self._open = True

    def _uuid_of(self, handle: int) -> bytes:
        found = _Uuid()
        self._driver.call("cuDeviceGetUuid_v2", ctypes.byref(found), handle)
        return bytes(found.bytes)

    def other_with(self, uuid: bytes) -> int | None:
        """Return the ordinal of another device with this UUID, or None."""
        count, handle = _Int(), _Int()
        self._driver.call("cuDeviceGetCount", ctypes.byref(count))
        for ordinal in range(count.value):
            self._driver.call("cuDeviceGet", ctypes.byref(handle), ordinal)
            if ordinal != self.ordinal and self._uuid_of(handle.value) == uuid:
                return ordinal
        return None

    def close(self) -> None:
        """Release the context. Idempotent. Does nothing in a forked child, where CUDA is unusable."""
        if self._open and os.getpid() == self._pid:
            self._open = False
            self._driver.tell("cuDevicePrimaryCtxRelease_v2", self._handle)

    @contextmanager
    def _current(self) -> Iterator[Driver]:
        self._driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield self._driver
        finally:
            self._driver.tell("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    # -- physical memory ---------------------------------------------------------------------------------

    def _properties(self) -> _Properties:
        return _Properties(_PINNED, _POSIX_FD, _Location(_DEVICE, self._handle))

    def rounded(self, size: int) -> int:
        """Return the allocation size [bytes] for `size`: a multiple of the granularity."""
        granule = _Size()
        wanted = self._properties()
        self._driver.call("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(wanted), 0)
        return -(-size // granule.value) * granule.value

    def create(self, size: int) -> int:
        """Return a handle of new exportable memory. `size`: bytes, a multiple of the granularity."""
        handle, wanted = _Handle(), self._properties()
        with self._current() as cuda:
            cuda.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(wanted), 0)
        return handle.value

    def import_from(self, descriptor: int) -> int:
        """Return a handle of the memory behind a descriptor. The caller keeps the descriptor."""
        handle = _Handle()
        with self._current() as cuda:
            cuda.call("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, _POSIX_FD)
        return handle.value

    def export(self, handle: int) -> int:
        """Return a descriptor that keeps the memory alive. The caller closes it."""
        descriptor = _Int(-1)
        with self._current() as cuda:
            cuda.call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _POSIX_FD, 0)
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def release(self, handle: int) -> None:
        """Release a handle. The memory lives while it is mapped or a descriptor of it is open."""
        self._driver.tell("cuMemRelease", handle)

    # -- addresses ---------------------------------------------------------------------------------------

    def map(self, handle: int, size: int, hint: int = 0) -> int:
        """Map memory for reads and writes and return its address; at `hint` if possible."""
        at = _Pointer()
        access = _Access(_Location(_DEVICE, self._handle), _READ_WRITE)
        with self._current() as cuda:
            cuda.call("cuMemAddressReserve", ctypes.byref(at), size, 0, hint, 0)
            mapped = False
            try:
                cuda.call("cuMemMap", at, size, 0, handle, 0)
                mapped = True
                cuda.call("cuMemSetAccess", at, size, ctypes.byref(access), 1)
            except BaseException:
                if mapped:
                    cuda.tell("cuMemUnmap", at, size)
                cuda.tell("cuMemAddressFree", at, size)
                raise
        return at.value

    def unmap(self, address: int, size: int) -> bool:
        """Unmap memory and return whether it worked. False in a forked child.

        Waits for no work and needs no current context."""
        return os.getpid() == self._pid and not self._driver.tell("cuMemUnmap", address, size)

    def free_addresses(self, address: int, size: int) -> None:
        """Free an address range after its memory was unmapped."""
        self._driver.tell("cuMemAddressFree", address, size)

    # -- the context's work ------------------------------------------------------------------------------

    def finish_work(self) -> None:
        """Wait for all work of the context, as cuMemFree does.

        Raises nothing after a fault of the context, because the work is lost anyway."""
        if self._is_fatal("cuCtxSynchronize"):
            Device.found_fault = True

    def has_faulted(self) -> bool:
        """Return whether the context is known to have faulted. Waits for nothing."""
        return self._is_fatal("cuStreamQuery", LEGACY_STREAM)

    def _is_fatal(self, name: str, *arguments: object) -> bool:
        if os.getpid() != self._pid:
            return False
        status = self._driver.tell("cuCtxPushCurrent_v2", self._context)
        if not status:
            status = self._driver.tell(name, *arguments)
            self._driver.tell("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        return status in _FATAL

    # -- bytes, all done when the call returns -----------------------------------------------------------

    def clear(self, address: int, size: int) -> None:
        with self._current() as cuda:
            cuda.call("cuMemsetD8_v2", address, 0, size)
            cuda.call("cuCtxSynchronize")

    def write(self, address: int, data: bytes) -> None:
        with self._current() as cuda:
            cuda.call("cuMemcpyHtoD_v2", address, data, len(data))
            # A copy from pageable memory may return before its last part has arrived.
            cuda.call("cuCtxSynchronize")

    def read(self, address: int, size: int) -> bytes:
        found = ctypes.create_string_buffer(size)
        with self._current() as cuda:
            cuda.call("cuMemcpyDtoH_v2", found, address, size)
        return found.raw

    def order(self, stream: int) -> None:
        """Make `stream` wait for all earlier work of the legacy default stream."""
        event = ctypes.c_void_p()
        with self._current() as cuda:
            cuda.call("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING)
            try:
                cuda.call("cuEventRecord", event, LEGACY_STREAM)
                cuda.call("cuStreamWaitEvent", stream, event, 0)
            finally:
                cuda.tell("cuEventDestroy_v2", event)
