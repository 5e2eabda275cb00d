"""Consumers of a buffer's arrays, by ctypes: run by tests/libcuda/test_arrays.py on the stand-in."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import threading
from types import ModuleType

RENAMED = b"used_dltensor"
api = ctypes.pythonapi
get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", api)
)
set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", api))


class Tensor(ctypes.Structure):
    """DLTensor, written from its specification a second time, without nested structures."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def consume(capsule: object, name: bytes = b"dltensor") -> int:
    """Take a capsule over, as a consumer does; return the address of its managed tensor."""
    at = get_pointer(capsule, name)
    assert set_name(capsule, RENAMED) == 0
    return int(at)


def tensor(at: int) -> Tensor:
    return Tensor.from_address(at)


def delete(at: int) -> None:
    """Call the deleter without the interpreter's lock, which ctypes releases around calls of CFUNCTYPE."""
    Deleter(ctypes.c_void_p.from_address(at + ctypes.sizeof(Tensor) + 8).value)(at)


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return maps.read().count("mpsd-standin-vmm")


def fill(address: int, size: int) -> None:
    """Fill with the GPU: the CPU cannot access the address of mapped memory."""
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    assert driver.cuMemsetD8_v2(ctypes.c_uint64(address), 7, ctypes.c_size_t(size)) == 0
    assert driver.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0


def unversioned(m: ModuleType) -> None:
    with m.session() as s:
        buffer = s.attach("a", 1000)
        view = buffer.view("float32", (2, 3, 4), offset=64)
        at = consume(view.__dlpack__())
        found = tensor(at)
        assert (found.data, found.byte_offset) == (buffer.pointer + 64, 0)
        assert (found.device_type, found.device_id) == view.__dlpack_device__() == (2, 0)
        assert (found.ndim, found.code, found.bits, found.lanes) == (3, 2, 32, 1)
        assert (found.shape[:3], found.strides[:3]) == ([2, 3, 4], [12, 4, 1])
        delete(at)
        for name, code, bits in [("bool", 6, 8), ("bfloat16", 4, 16), ("complex64", 5, 64), ("int8", 0, 8)]:
            at = consume(buffer.view(name, 3).__dlpack__(stream=None))
            assert (tensor(at).code, tensor(at).bits, tensor(at).shape[0]) == (code, bits, 3)
            delete(at)


def versioned(m: ModuleType) -> None:
    with m.session() as s:
        buffer = s.attach("a", 1000)
        capsule = buffer.__dlpack__(stream=1, max_version=(1, 1), dl_device=(2, 0), copy=False)
        at = consume(capsule, b"dltensor_versioned")
        head = (ctypes.c_uint32 * 2).from_address(at)
        assert (tuple(head), ctypes.c_uint64.from_address(at + 24).value) == ((1, 0), 0)
        found = Tensor.from_address(at + 32)
        assert (found.data, found.ndim, found.shape[0], found.code, found.bits) == (
            buffer.pointer,
            1,
            1000,
            1,
            8,
        )
        deleter = ctypes.c_void_p.from_address(at + 16).value
        Deleter(deleter)(at)
        # A consumer older than versioned capsules does not mention them.
        assert "versioned" not in repr(buffer.__dlpack__(max_version=(0, 8)))


def lifetime(m: ModuleType) -> None:
    """A buffer stays mapped until its last holder releases it, on any thread."""
    buffer = m.session().attach("a", 1000)
    kept, address = buffer.view("int32"), buffer.pointer
    lent = [consume(buffer.__dlpack__()), consume(kept.__dlpack__())]
    unused = buffer.__dlpack__()
    buffer.close()
    assert mappings() == 1
    # The bytes are at the same address.
    fill(address, 1000)
    del kept
    delete(lent.pop())
    del unused
    gc.collect()
    assert mappings() == 1
    thread = threading.Thread(target=delete, args=(lent.pop(),))
    thread.start()
    thread.join()
    assert mappings() == 0


def errors(m: ModuleType) -> None:
    """A failing consumer frees its capsule while its error is pending, and the error is unchanged."""
    buffer = m.session().attach("a", 1000)
    for versioned in (None, (1, 0)):
        for refuse in (int, len, ord):
            try:
                refuse(buffer.__dlpack__(max_version=versioned))
            except TypeError:
                pass
    first, second = consume(buffer.__dlpack__()), consume(buffer.__dlpack__())
    buffer.close()
    # Python's first lookup of a name can clear a pending error.
    delete(first)
    assert mappings() == 1
    drop_amid_an_error(second)
    assert mappings() == 0


def drop_amid_an_error(at: int) -> None:
    """Call the deleter with an error pending, a state that Python hides from its own destructors."""
    deleter = ctypes.CDLL(None)._FuncPtr(ctypes.c_void_p.from_address(at + ctypes.sizeof(Tensor) + 8).value)
    deleter.restype, argument = None, ctypes.c_void_p(at)
    freed = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(lambda _: deleter(argument))
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    make = new(("PyCapsule_New", api))
    try:
        int(make(at, b"a tensor", ctypes.cast(freed, ctypes.c_void_p)))
    except (TypeError, SystemError):
        pass


def arrays(m: ModuleType) -> None:
    """A reader of __cuda_array_interface__ keeps the object alive that provides it, and nothing else."""
    buffer = m.session().attach("a", 1000)
    interface = buffer.view("float16", (5, 10)).__cuda_array_interface__
    assert interface == {
        "shape": (5, 10),
        "typestr": "<f2",
        "data": (buffer.pointer, False),
        "strides": None,
        "stream": None,
        "version": 3,
    }
    assert not hasattr(buffer.view("bfloat16"), "__cuda_array_interface__")
    empty = buffer.view("float32", (0, 3), offset=1000).__cuda_array_interface__
    assert (empty["data"], empty["shape"]) == ((0, False), (0, 3))
    view = buffer.view("uint8")
    assert view.__cuda_array_interface__["typestr"] == "|u1"
    assert buffer.__cuda_array_interface__["shape"] == (1000,)
    buffer.close()
    assert not hasattr(buffer, "__cuda_array_interface__")
    # This function holds the buffer and the view, as a consumer would.
    assert mappings() == 1
    del view
    assert mappings() == 1
    del buffer
    assert mappings() == 0


def refusals(m: ModuleType) -> None:
    buffer = m.session().attach("a", 1000)
    for wrong, kind in [
        (lambda: buffer.__dlpack__(stream=0), ValueError),
        (lambda: buffer.__dlpack__(stream=-2), ValueError),
        (lambda: buffer.__dlpack__(copy=True), BufferError),
        (lambda: buffer.__dlpack__(dl_device=(1, 0)), BufferError),
        (lambda: buffer.view("float99"), m.UsageError),
        (lambda: buffer.view("float32", 251), m.UsageError),
        (lambda: buffer.view("float32", offset=2), m.UsageError),
        (lambda: buffer.view("float32", (-1, 2)), m.UsageError),
        (lambda: buffer.view("int8", offset=1001), m.UsageError),
        (lambda: buffer.read(5, 996), m.UsageError),
        (lambda: buffer.write(b"12345", 996), m.UsageError),
        (lambda: buffer.write(b"1", -1), m.UsageError),
    ]:
        try:
            wrong()
        except kind as error:
            assert str(error)
        else:
            raise AssertionError("not refused")
    assert buffer.view("float32", 250).nbytes == buffer.view("float32").nbytes == 1000
    assert buffer.view("complex128").shape == (62,) and buffer.view("int8", (2, 0, 3)).nbytes == 0

    class Like:
        def __str__(self) -> str:
            return "torch.float32"

    assert buffer.view(Like()).dtype == "float32"
    assert buffer.view(type("bool_", (), {})).dtype == "bool"
    buffer.close()
    for late in (buffer.__dlpack__, buffer.read, buffer.view, buffer.__dlpack_device__):
        try:
            late()
        except m.UsageError as error:
            assert "closed" in str(error)
        else:
            raise AssertionError("not closed")


def streams(m: ModuleType) -> None:
    """A stream that is not ordered with the legacy stream waits for the legacy stream's earlier work."""
    cuda = ctypes.CDLL("libcuda.so.1")
    buffer = m.session().attach("a", 1000)
    context, stream, started = ctypes.c_void_p(), ctypes.c_void_p(), threading.Event()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
    may_go = threading.Event()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def wait(_: object) -> None:
        started.set()
        may_go.wait(20)

    query = lambda: cuda.cuStreamQuery(stream)  # noqa: E731
    assert cuda.cuLaunchHostFunc(None, wait, None) == 0
    assert started.wait(20)
    unordered = buffer.__dlpack__(stream=-1)
    assert query() == 0
    ordered = buffer.__dlpack__(stream=stream.value)
    assert query() == 600, "it waits"
    may_go.set()
    assert cuda.cuStreamSynchronize(stream) == 0
    del ordered, unordered
    buffer.close()
    assert cuda.cuCtxSetCurrent(None) == 0
    assert cuda.cuDevicePrimaryCtxRelease_v2(0) == 0


def at_the_end(m: ModuleType) -> None:
    """A tensor that lives until the exit calls its deleter when no Python code may run any more."""
    lent = consume(m.session().attach("a", 1000).__dlpack__())
    # Handlers run in reverse order: this one, registered before that of mpsd_client, runs after it.
    END.append(lambda: delete(lent))


END: list = []


@atexit.register
def _last() -> None:
    for call in END:
        call()
        call()
        os.write(1, b"deleted\n")


if __name__ == "__main__":
    import warnings

    import mpsd_client

    warnings.simplefilter("ignore")
    globals()[sys.argv[1]](mpsd_client)
    gc.collect()
    print("done", flush=True)
