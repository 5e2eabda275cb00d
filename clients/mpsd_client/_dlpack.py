"""DLPack capsules of GPU memory, made with ctypes. https://dmlc.github.io/dlpack has the structures.

A capsule holds what it was given as `keeper`, and so does whoever takes it over, until the deleter is called:
from any thread, with or without the interpreter's lock. At the end of the interpreter no Python may be called
any more: what is lent out then gets a deleter of the C library's that does nothing.

A capsule has no destructor: a consumer that refuses it frees it while its error is under way, and no error
outlives a callback of ctypes. So capsules are held here, and those that nobody else has are let go of at the
next look: as another is made, as a buffer is closed, as garbage is collected.
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


class Lent:
    """One export: the structure a consumer reads, and what must live as long as it does."""

    def __init__(
        self, managed: DLManagedTensor | DLManagedTensorVersioned, arrays: object, keeper: object
    ) -> None:
        self.managed = managed
        self.arrays = arrays
        self.keeper = keeper
        self.capsule: object = None
        """Until somebody has taken it over."""

    @property
    def others(self) -> int:
        """How many refer to the capsule, and as many more as it takes to ask."""
        return sys.getrefcount(self.capsule)


# By the number that is in the structure's own field for its maker.
_lent: dict[int, Lent] = {}
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
        # Of whoever calls this: its error shows in what is called first, and is gone after that.
        _lent.pop(structure.from_address(at).context or 0, None)


def _delete(at: int) -> None:
    _end(DLManagedTensor, at)


def _delete_versioned(at: int) -> None:
    _end(DLManagedTensorVersioned, at)


def sweep() -> None:
    """Let go of capsules that nobody has taken over, nor ever will."""
    # Only numbers are copied: to make more could collect garbage, and so come here again.
    for number in list(_lent):
        lent = _lent.get(number)
        if lent is None or lent.capsule is None:
            continue
        # In this order: who has it could take it over in between, and nobody else.
        alone = lent.others == _OURS_ALONE
        if not any(_is_valid(lent.capsule, name) for name in (_NAME, _VERSIONED)):
            # Its consumer has given it another name, and calls the deleter.
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


# abs(3) reads its argument and answers; it is in every C library.
atexit.register(_at_end, ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value)
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_DELETER_VERSIONED = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete_versioned)
for _callback in (_DELETER, _DELETER_VERSIONED):
    _keep_for_ever(_callback)


def _ours_alone() -> int:
    lent = Lent(DLManagedTensor(), None, None)
    lent.capsule = _new(ctypes.addressof(lent.managed), _NAME, None)
    return lent.others


_OURS_ALONE = _ours_alone()
gc.callbacks.append(_when_collected)


def lent_out() -> int:
    """How many exports somebody still has."""
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
    """`address` of the first element, `shape` of a C-contiguous array, `dtype` as (code, bits)."""
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
    lent = Lent(managed, (sizes, strides), keeper)
    made: object = _new(ctypes.addressof(managed), _VERSIONED if versioned else _NAME, None)
    lent.capsule = made
    _lent[number] = lent
    return made
