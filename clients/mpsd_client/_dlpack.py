"""DLPack capsules of GPU memory, created with ctypes. Structures: https://dmlc.github.io/dlpack

A capsule, and the consumer that takes it over, hold `keeper` until they call the deleter: from any thread,
with or without the interpreter's lock. At interpreter exit no Python code may run any more, so exported
structures then get a deleter from the C library that does nothing.

A capsule has no destructor. A consumer that refuses a capsule frees it while its exception is raised, and a
ctypes callback would clear that exception. This module therefore holds all capsules and releases unused ones
in sweep(): when it creates another capsule, when a buffer is closed and at garbage collection.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import itertools
import sys
from collections.abc import Sequence

CUDA = 2
VERSION = (1, 0)
_NAME, _VERSIONED = b"dltensor", b"dltensor_versioned"


class DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


class Export:
    """One export: the structure that a consumer reads, and the objects that must live as long."""

    def __init__(
        self, managed: DLManagedTensor | DLManagedTensorVersioned, arrays: object, keeper: object
    ) -> None:
        self.managed = managed
        self.arrays = arrays
        self.keeper = keeper
        self.capsule: object = None
        """Held until a consumer has taken the capsule over."""

    @property
    def others(self) -> int:
        """Return the reference count of the capsule as seen from here."""
        return sys.getrefcount(self.capsule)


# By the number in the structure's manager context field.
_lent: dict[int, Export] = {}
_numbers = itertools.count(1)

_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_keep_for_ever = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


def _end(structure: type[DLManagedTensor] | type[DLManagedTensorVersioned], at: int) -> None:
    try:
        _lent.pop(structure.from_address(at).context or 0, None)
    except BaseException:
        # The caller's pending exception: the first call would raise it and clear it.
        _lent.pop(structure.from_address(at).context or 0, None)


def _delete(at: int) -> None:
    _end(DLManagedTensor, at)


def _delete_versioned(at: int) -> None:
    _end(DLManagedTensorVersioned, at)


def sweep() -> None:
    """Release capsules that no consumer has taken over and no consumer can reach."""
    # Copy only numbers: allocating objects could start a garbage collection, which calls sweep() again.
    for number in list(_lent):
        lent = _lent.get(number)
        if lent is None or lent.capsule is None:
            continue
        # In this order, because a consumer that holds the capsule could take it over in between.
        alone = lent.others == _OURS_ALONE
        if not any(_is_valid(lent.capsule, name) for name in (_NAME, _VERSIONED)):
            # The consumer renamed the capsule and will call the deleter.
            lent.capsule = None
        elif alone:
            _lent.pop(number, None)


def _when_collected(phase: str, _: object) -> None:
    if phase == "stop" and _lent:
        sweep()


def _at_end(nothing: int | None) -> None:
    for lent in list(_lent.values()):
        lent.managed.deleter = nothing
        _keep_for_ever(lent)


# abs(3) reads its argument and returns; every C library has it.
atexit.register(_at_end, ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value)
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_DELETER_VERSIONED = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete_versioned)
for _callback in (_DELETER, _DELETER_VERSIONED):
    _keep_for_ever(_callback)


def _ours_alone() -> int:
    lent = Export(DLManagedTensor(), None, None)
    lent.capsule = _new(ctypes.addressof(lent.managed), _NAME, None)
    return lent.others


_OURS_ALONE = _ours_alone()
gc.callbacks.append(_when_collected)


def export_count() -> int:
    """Return the number of exports that a consumer still holds."""
    sweep()
    return len(_lent)


def capsule(
    keeper: object,
    address: int,
    device: int,
    shape: Sequence[int],
    dtype: tuple[int, int],
    *,
    versioned: bool,
) -> object:
    """Return a capsule of a C-contiguous array. `address`: its first element; `dtype`: (code, bits)."""
    axes = len(shape)
    sizes = (ctypes.c_int64 * axes)(*shape)
    strides = (ctypes.c_int64 * axes)()
    step = 1
    for axis in reversed(range(axes)):
        strides[axis] = step
        step *= shape[axis]
    number = next(_numbers)
    pointer = ctypes.POINTER(ctypes.c_int64)
    tensor = DLTensor(
        address,
        DLDevice(CUDA, device),
        axes,
        DLDataType(*dtype, 1),
        ctypes.cast(sizes, pointer),
        ctypes.cast(strides, pointer),
        0,
    )
    managed: DLManagedTensor | DLManagedTensorVersioned
    if versioned:
        deleter = ctypes.cast(_DELETER_VERSIONED, ctypes.c_void_p).value
        managed = DLManagedTensorVersioned(*VERSION, number, deleter, 0, tensor)
    else:
        deleter = ctypes.cast(_DELETER, ctypes.c_void_p).value
        managed = DLManagedTensor(tensor, number, deleter)
    sweep()
    lent = Export(managed, (sizes, strides), keeper)
    made: object = _new(ctypes.addressof(managed), _VERSIONED if versioned else _NAME, None)
    lent.capsule = made
    _lent[number] = lent
    return made
