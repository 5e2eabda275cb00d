"""Memory allocated and freed during stream captures behaves as without the proxy."""

from __future__ import annotations

from tests.libcuda.test_memory import ask
from tests.support.libcudas import Libraries


def test_a_capture_goes_on_as_without_whoever_allocates_or_frees(libraries: Libraries) -> None:
    """Captures continue in each mode while any thread allocates or frees, and the freed memory is
    returned."""
    script = """
import threading
start()
context = ctypes.c_void_p()
must(cuda.cuCtxGetCurrent(ctypes.byref(context)))
before = room()
def one(mode, other, deed):
    stream, graph, found = ctypes.c_void_p(), ctypes.c_void_p(), []
    must(cuda.cuStreamCreate(ctypes.byref(stream), 1))
    had = alloc(3 * MIB)
    def do():
        cuda.cuCtxSetCurrent(context)
        found.append(free(had) if deed == "free" else min(alloc(3 * MIB), 0))
        if deed == "free" and found[0] == 0:
            found.append(free(had) != 0)
    must(cuda.cuStreamBeginCapture_v2(stream, mode))
    if other:
        thread = threading.Thread(target=do)
        thread.start()
        thread.join()
    else:
        do()
    found.append(cuda.cuStreamEndCapture(stream, ctypes.byref(graph)))
    must(cuda.cuStreamDestroy_v2(stream))
    if found[0]:
        must(free(had))
    return found
def freed_all():
    must(free(alloc(100)))
    return room() == before
seen = [one(mode, other, "free") for mode in (0, 1, 2) for other in (False, True)]
seen.append(freed_all())
seen += [one(mode, other, "alloc") for mode in (0, 1, 2) for other in (False, True)]
stream = ctypes.c_void_p()
must(cuda.cuStreamCreate(ctypes.byref(stream), 1))
seen.append(cuda.cuMemFreeAsync(ctypes.c_uint64(alloc(3 * MIB)), stream))
print(json.dumps(seen))
"""
    without = ask(libraries, script, "0")
    assert isinstance(without, list)
    assert [900, 901] in without and [0, True, 0] in without and [-900, 901] in without and without[-1] == 0
    assert ask(libraries, script, "1") == without


def test_what_a_destroyed_stream_captured_keeps_no_memory_back(libraries: Libraries) -> None:
    script = """
start()
before, stream, had = room(), ctypes.c_void_p(), alloc(3 * MIB)
must(cuda.cuStreamCreate(ctypes.byref(stream), 1))
must(cuda.cuStreamBeginCapture_v2(stream, 2))
must(free(had))
must(cuda.cuStreamDestroy_v2(stream))
must(free(alloc(100)))
print(json.dumps(room() == before))
"""
    assert ask(libraries, script) is True


def test_what_an_ended_context_captured_keeps_no_memory_back(libraries: Libraries) -> None:
    """A context reset in the middle of a capture returns its memory; a capture on another device
    continues."""
    script = """
start()
before, stream, other, graph = room(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
must(cuda.cuStreamCreate(ctypes.byref(stream), 1))
must(cuda.cuStreamBeginCapture_v2(stream, 2))
must(cuda.cuDevicePrimaryCtxReset_v2(0))
start()
must(free(alloc(3 * MIB)))
seen = [room() == before]
must(cuda.cuStreamCreate(ctypes.byref(stream), 1))
must(cuda.cuStreamBeginCapture_v2(stream, 2))
context = ctypes.c_void_p()
must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1))
must(cuda.cuCtxSetCurrent(context))
must(cuda.cuStreamCreate(ctypes.byref(other), 1))
must(cuda.cuStreamBeginCapture_v2(other, 2))
must(cuda.cuDevicePrimaryCtxReset_v2(1))
start()
seen.append(free(alloc(3 * MIB)))
seen.append(cuda.cuStreamEndCapture(stream, ctypes.byref(graph)))
must(free(alloc(100)))
print(json.dumps([*seen, room() == before]))
"""
    for vault in ("0", "1"):
        assert ask(libraries, script, vault, MPSD_STANDIN_DEVICES="2") == [True, 0, 0, True]


def test_a_capture_begun_by_the_first_version_is_one_too(libraries: Libraries) -> None:
    """A capture begun with the first API version ends once, and the next one is seen too."""
    script = """
start()
seen, before, stream, graph = [], room(), ctypes.c_void_p(), ctypes.c_void_p()
must(cuda.cuStreamCreate(ctypes.byref(stream), 1))
must(cuda.cuStreamBeginCapture(stream))
seen.append(cuda.cuStreamEndCapture(stream, ctypes.byref(graph)))
had = alloc(3 * MIB)
must(cuda.cuStreamBeginCapture_v2(stream, 2))
seen += [free(had), cuda.cuStreamEndCapture(stream, ctypes.byref(graph))]
must(free(alloc(100)))
print(json.dumps([*seen, room() == before]))
"""
    for vault in ("0", "1"):
        assert ask(libraries, script, vault) == [0, 0, 0, True]


def test_no_allocation_waits_for_work_because_something_was_freed_in_a_capture(libraries: Libraries) -> None:
    """An allocation neither waits for work that the program completes later, nor fails on memory freed in
    a capture."""
    script = """
import select
start()
stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
must(cuda.cuStreamCreate(ctypes.byref(stream), 1))
had = alloc(48 * MIB)
must(cuda.cuStreamBeginCapture_v2(stream, 2))
seen = [free(had), cuda.cuStreamEndCapture(stream, ctypes.byref(graph))]
come, go = os.pipe()
def wait(_):
    seen.append(bool(select.select([come], [], [], 15)[0]))
function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(wait)
must(cuda.cuLaunchHostFunc(stream, function, None))
small = alloc(3 * MIB)
os.write(go, b"x")
must(cuda.cuStreamSynchronize(stream))
large = alloc(48 * MIB)
print(json.dumps([*seen, small > 0, large > 0]))
"""
    for vault in ("0", "1"):
        answer = ask(libraries, script, vault, MPSD_STANDIN_MEMORY=str(64 << 20))
        assert answer == [0, 0, True, True, True]


def test_who_may_not_wait_loses_nothing_that_was_freed_in_a_capture(libraries: Libraries) -> None:
    """A free inside a host callback is refused; deferred frees are completed with the next free."""
    script = """
start()
before, stream, graph, seen = room(), ctypes.c_void_p(), ctypes.c_void_p(), []
must(cuda.cuStreamCreate(ctypes.byref(stream), 1))
had, other = alloc(3 * MIB), alloc(3 * MIB)
must(cuda.cuStreamBeginCapture_v2(stream, 2))
must(free(had))
must(cuda.cuStreamEndCapture(stream, ctypes.byref(graph)))
function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(free(other)))
must(cuda.cuLaunchHostFunc(stream, function, None))
must(cuda.cuStreamSynchronize(stream))
print(json.dumps([*seen, free(other), before - room()]))
"""
    for vault in ("0", "1"):
        assert ask(libraries, script, vault) == [800, 0, 0]
