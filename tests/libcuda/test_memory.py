"""cuMemAlloc in exportable memory (MPSD_VAULT=1): the same to the program, but for where it lies."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.libcudas import ROOT, Libraries, run

MIB = 1 << 20

PREAMBLE = f"""
import ctypes, json, os, sys
sys.path.insert(0, {str(ROOT / "clients" / "libcuda")!r})
from mpsd_libcuda.stats import read_stats
cuda = ctypes.CDLL("libcuda.so.1")
MIB = 1 << 20
def must(code):
    assert code == 0, code
def alloc(size):
    pointer = ctypes.c_uint64()
    code = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
    return pointer.value if code == 0 else -code
def free(address):
    return cuda.cuMemFree_v2(ctypes.c_uint64(address))
def range_of(address):
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    code = cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return (base.value, size.value) if code == 0 else code
def room():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    must(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    return free.value
def held():
    found = read_stats(os.getpid())
    return [found.vault_allocations, found.vault_bytes, found.vault_mapped, found.vault_passed]
def start():
    context = ctypes.c_void_p()
    must(cuda.cuInit(0))
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    must(cuda.cuCtxSetCurrent(context))
"""


def ask(libraries: Libraries, script: str, vault: str = "1", **extra: str) -> object:
    environment = libraries.environment(proxied=True, MPSD_VAULT=vault, **extra)
    done = run([sys.executable, "-c", PREAMBLE + script], environment)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_the_program_sees_no_difference(libraries: Libraries) -> None:
    """But for two accesses past the end of an allocation that its slab still has."""
    program = libraries.program("sequence")
    without = run([program], libraries.environment(proxied=False)).stdout.splitlines()
    environment = libraries.environment(proxied=True, MPSD_VAULT="1")
    done = run([program, "getproc"], environment)
    assert (done.returncode, done.stderr) == (0, "")
    different = [pair for pair in zip(without, done.stdout.splitlines(), strict=True) if pair[0] != pair[1]]
    assert different == [("cuMemsetD8_v2 1", "cuMemsetD8_v2 0"), ("cuMemcpyDtoH_v2 1", "cuMemcpyDtoH_v2 0")]


def test_small_allocations_share_a_slab_and_large_ones_do_not(libraries: Libraries) -> None:
    script = """
start()
before = room()
small = [alloc(100), alloc(513), alloc(MIB)]
large = alloc(3 * MIB)
counted = held()
ranges = [range_of(small[1] + 512), range_of(large + MIB), range_of(small[0] + 100)]
inside = [small[1] - small[0], small[2] - small[1], large % (2 * MIB), [a % 512 for a in small]]
expected = [(small[1], 513), (large, 3 * MIB), 500]
again = [free(a) for a in (*small, large)] + [free(large), free(0)]
print(json.dumps([counted, ranges == expected, inside, again, held(), room() == before]))
"""
    small_bytes = 100 + 513 + MIB
    answer = ask(libraries, script)
    assert answer == [
        [4, small_bytes + 3 * MIB, 2 * MIB + 4 * MIB, 0],
        True,
        [512, 1024, 0, [0, 0, 0]],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0],
        True,
    ]


def test_a_pointer_is_described_as_its_allocation(libraries: Libraries) -> None:
    """CONTEXT 1, MEMORY_TYPE 2, RANGE_START_ADDR 11, RANGE_SIZE 12, one by one and together."""
    script = """
start()
mine = ctypes.c_void_p()
must(cuda.cuCtxGetCurrent(ctypes.byref(mine)))
alloc(100)
address = alloc(3000)
def one(attribute):
    answer = ctypes.c_uint64()
    must(cuda.cuPointerGetAttribute(ctypes.byref(answer), attribute, ctypes.c_uint64(address + 700)))
    return answer.value
attributes = (ctypes.c_int * 4)(1, 2, 11, 12)
answers = [ctypes.c_uint64() for _ in attributes]
pointers = (ctypes.c_void_p * 4)(*(ctypes.addressof(answer) for answer in answers))
must(cuda.cuPointerGetAttributes(4, attributes, pointers, ctypes.c_uint64(address + 700)))
expected = [mine.value, 2, address, 3000]
print(json.dumps([[one(a) for a in attributes] == expected, [a.value for a in answers] == expected]))
"""
    for vault in ("0", "1"):
        assert ask(libraries, script, vault) == [True, True]


def test_it_is_exportable(libraries: Libraries) -> None:
    script = """
start()
address = alloc(4 * MIB)
must(cuda.cuMemsetD8_v2(ctypes.c_uint64(address), 7, ctypes.c_size_t(4 * MIB)))
handle, fd = ctypes.c_uint64(), ctypes.c_int()
must(cuda.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address)))
must(cuda.cuMemExportToShareableHandle(ctypes.byref(fd), handle, 1, ctypes.c_uint64(0)))
must(cuda.cuMemRelease(handle))
must(free(address))
print(json.dumps([os.fstat(fd.value).st_size, os.pread(fd.value, 4, 4 * MIB - 4).hex()]))
"""
    assert ask(libraries, script) == [4 * MIB, "07070707"]


@pytest.mark.parametrize("size", [2 * MIB, MIB, 4096])
def test_memory_ends_where_it_ends_without(libraries: Libraries, size: int) -> None:
    script = f"""
start()
count = 0
while alloc({size}) > 0:
    count += 1
print(json.dumps([count, alloc({size}), held()[0]]))
"""
    memory = {"MPSD_STANDIN_MEMORY": str(16 * MIB)}
    whole = 16 * MIB // size
    assert ask(libraries, script, "0", **memory) == [whole, -2, 0]
    assert ask(libraries, script, "1", **memory) == [whole, -2, whole]


def test_the_end_of_the_context_is_the_end_of_its_memory(libraries: Libraries) -> None:
    script = """
start()
whole = room()
addresses = [alloc(size) for size in (100, MIB, 5 * MIB, 700)]
must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0))
must(cuda.cuDevicePrimaryCtxRelease_v2(0))
kept = held()[0]
must(cuda.cuDevicePrimaryCtxReset_v2(0))
dropped = held()[:3]
start()
print(json.dumps([kept, dropped, room() == whole, free(addresses[0]), alloc(100) == addresses[0]]))
"""
    assert ask(libraries, script) == [4, [0, 0, 0], True, 1, True]


def test_errors_are_the_driver_s(libraries: Libraries) -> None:
    script = """
codes = [alloc(1), free(4096)]
must(cuda.cuInit(0))
codes += [alloc(1), free(4096)]
start()
codes += [alloc(0), alloc(1 << 60), free(4096), range_of(4096)]
print(json.dumps(codes))
"""
    without = ask(libraries, script, "0")
    assert without == [-3, 3, -201, 201, -1, -2, 1, 500]
    assert ask(libraries, script, "1") == without


def test_a_driver_that_cannot_is_asked_for_plain_memory(libraries: Libraries) -> None:
    """Addresses limited so that there is no window: every allocation passes, and is counted."""
    script = """
import resource
start()
limit = 2 * MIB * 1024
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
address = alloc(MIB)
print(json.dumps([address > 0, free(address), held()]))
"""
    assert ask(libraries, script) == [True, 0, [0, 0, 0, 1]]
