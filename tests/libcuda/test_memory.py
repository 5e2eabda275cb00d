"""cuMemAlloc in exportable memory (vault=1) behaves as the driver's, except for its addresses."""

from __future__ import annotations

import json
import sys

import pytest

from mpsd_libcuda.stats import Window
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
    answer, said = heard(libraries, script, vault, **extra)
    assert said == ""
    return answer


def heard(libraries: Libraries, script: str, vault: str = "1", **extra: str) -> tuple[object, str]:
    """Return the answer of a script and its stderr."""
    environment = libraries.environment(proxied=True, vault=vault, **extra)
    done = run([sys.executable, "-c", PREAMBLE + script], environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_program_sees_no_difference(libraries: Libraries) -> None:
    """A program sees no difference, except for a copy past the end of an allocation within its last 512
    bytes."""
    program = libraries.program("sequence")
    without = run([program], libraries.environment(proxied=False)).stdout.splitlines()
    environment = libraries.environment(proxied=True, vault="1")
    done = run([program, "getproc"], environment)
    assert (done.returncode, done.stderr) == (0, "")
    different = [pair for pair in zip(without, done.stdout.splitlines(), strict=True) if pair[0] != pair[1]]
    assert different == [("cuMemcpyDtoH_v2 1", "cuMemcpyDtoH_v2 0")]


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
    """A pointer's attributes describe its allocation, one by one and together.

    CONTEXT 1, MEMORY_TYPE 2, RANGE_START_ADDR 11, RANGE_SIZE 12.
    """
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


def test_a_program_finds_no_handle_in_it(libraries: Libraries) -> None:
    """Memory of cuMemAlloc has no handle, as with the driver: the slab's handle would expose other
    allocations."""
    script = """
start()
handle, kinds = ctypes.c_uint64(), ctypes.c_uint64(7)
codes = []
for address in (alloc(4 * MIB), alloc(100)):
    codes.append(cuda.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address)))
    must(cuda.cuPointerGetAttribute(ctypes.byref(kinds), 14, ctypes.c_uint64(address)))
    codes.append(kinds.value)
print(json.dumps(codes))
"""
    for vault in ("0", "1"):
        assert ask(libraries, script, vault) == [1, 0, 1, 0]


def test_each_allocation_has_an_id_and_a_flag_of_its_own(libraries: Libraries) -> None:
    """Each allocation has its own BUFFER_ID (7) and SYNC_MEMOPS (6), even at the address of an earlier
    one."""
    script = """
start()
def attribute(number, address):
    answer = ctypes.c_uint64()
    code = cuda.cuPointerGetAttribute(ctypes.byref(answer), number, ctypes.c_uint64(address))
    return answer.value if code == 0 else -code
def set_sync(address, value):
    flag = ctypes.c_uint(value)
    return cuda.cuPointerSetAttribute(ctypes.byref(flag), 6, ctypes.c_uint64(address))
first, second = alloc(100), alloc(100)
ids = [attribute(7, first), attribute(7, second), attribute(7, first + 50)]
flags = [set_sync(first, 1), attribute(6, first), attribute(6, first + 99), attribute(6, second)]
copies = [cuda.cuMemcpyDtoD_v2(ctypes.c_uint64(second), ctypes.c_uint64(first), ctypes.c_size_t(100)),
          set_sync(first, 0), attribute(6, first), set_sync(first, 1)]
must(free(first))
again = alloc(100)
ids += [attribute(7, again)]
print(json.dumps([[i > 0 for i in ids], len(set(ids)), ids[0] == ids[2], flags, copies, attribute(6, again),
                  set_sync(4096, 1), cuda.cuPointerSetAttribute(None, 6, ctypes.c_uint64(again))]))
"""
    for vault in ("0", "1"):
        expected = [[True] * 4, 3, True, [0, 1, 1, 0], [0, 0, 0, 0], 0, 1, 1]
        assert ask(libraries, script, vault) == expected


def test_copies_end_where_the_allocation_ends(libraries: Libraries) -> None:
    """A copy must end in its allocation, rounded up to 512 bytes in the window; other allocations share
    the slab."""
    script = """
start()
class Plane(ctypes.Structure):
    _fields_ = [(n, t) for side in ("src", "dst") for n, t in (
        (side + "X", ctypes.c_size_t), (side + "Y", ctypes.c_size_t), (side + "Type", ctypes.c_int),
        (side + "Host", ctypes.c_void_p), (side + "Device", ctypes.c_uint64),
        (side + "Array", ctypes.c_void_p), (side + "Pitch", ctypes.c_size_t))]
    _fields_ += [("Width", ctypes.c_size_t), ("Height", ctypes.c_size_t)]
address, other, size = alloc(1024), alloc(1024), ctypes.c_size_t
a, b, host = ctypes.c_uint64(address), ctypes.c_uint64(other), ctypes.create_string_buffer(4096)
def plane(height, y=0):
    given = Plane(dstType=2, dstDevice=address, dstPitch=256, dstY=y, Width=100, Height=height, srcType=1,
                  srcHost=ctypes.addressof(host), srcPitch=128)
    return cuda.cuMemcpy2D_v2(ctypes.byref(given))
codes = []
for n in (1024, 1025, 1536):
    codes += [cuda.cuMemcpyHtoD_v2(a, host, size(n)), cuda.cuMemcpyDtoH_v2(host, a, size(n)),
              cuda.cuMemcpyDtoD_v2(a, b, size(n)), cuda.cuMemcpyDtoD_v2(b, a, size(n)),
              cuda.cuMemcpy(a, b, size(n)),
              cuda.cuMemsetD8_v2(a, 1, size(n)), cuda.cuMemsetD16_v2(a, 1, size((n + 1) // 2)),
              cuda.cuMemsetD32_v2(a, 1, size((n + 3) // 4))]
codes += [plane(4), plane(5), plane(1, 3), plane(1, 8)]
must(free(other))
codes += [cuda.cuMemcpyDtoH_v2(host, b, size(1)), cuda.cuMemcpyDtoH_v2(host, b, size(0))]
must(cuda.cuCtxSetCurrent(None))
codes += [cuda.cuMemcpyDtoH_v2(host, a, size(2000))]
print(json.dumps(codes))
"""
    without = ask(libraries, script, "0")
    assert without == [0] * 8 + [1] * 16 + [0, 1, 0, 1, 1, 0, 201]
    assert ask(libraries, script, "1") == without


def test_what_is_not_vaulted_is_counted(libraries: Libraries) -> None:
    script = """
import mmap
start()
pointer = ctypes.c_void_p()
must(cuda.cuMemHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(100), 0))
must(cuda.cuMemAllocHost_v2(ctypes.byref(pointer), ctypes.c_size_t(100)))
room_for_it = mmap.mmap(-1, 4096)
where = ctypes.addressof(ctypes.c_char.from_buffer(room_for_it))
must(cuda.cuMemHostRegister_v2(ctypes.c_void_p(where), ctypes.c_size_t(4096), 0))
cuda.cuMemHostRegister_v2(ctypes.c_void_p(where), ctypes.c_size_t(4096), 0)
class Property(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("place", ctypes.c_int),
                ("id", ctypes.c_int), ("meta", ctypes.c_void_p), ("flags", ctypes.c_uint64)]
handle, wanted, none = ctypes.c_uint64(), Property(1, 1, 1, 0, None, 0), ctypes.c_uint64(0)
must(cuda.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(2 * MIB), ctypes.byref(wanted), none))
alloc(100)
found = read_stats(os.getpid())
print(json.dumps([found.passed_host, found.passed_exportable, found.passed_pool, found.passed_managed,
                  found.vault_passed, found.vault_allocations]))
"""
    assert ask(libraries, script) == [3, 1, 0, 0, 0, 1]


# -- location of the window --------------------------------------------------------------------------------

WINDOW = """
start()
found = []
if os.environ.get("TAKEN"):
    import mmap
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_uint64
    at = int(os.environ["TAKEN"], 0)
    page, none = ctypes.c_size_t(4096), ctypes.c_long(0)
    assert libc.mmap(ctypes.c_void_p(at), page, 3, 0x22 | 0x100000, -1, none) == at
address = alloc(3 * MIB)
stats = read_stats(os.getpid())
print(json.dumps([stats.window, stats.window_base, address - stats.window_base, stats.vault_allocations]))
"""


def test_the_window_lies_where_it_is_wanted(libraries: Libraries) -> None:
    base = 0x310000000000
    answer = ask(libraries, WINDOW, window_base=hex(base), window_bytes=str(256 * MIB))
    assert answer == [Window.AS_WANTED, base, 0, 1]


def test_a_window_has_as_many_bytes_as_are_wanted(libraries: Libraries) -> None:
    """A window has the configured size; allocations that do not fit come from the driver."""
    script = """
start()
count = len([alloc(2 * MIB) for _ in range(70)])
print(json.dumps([count, held()[0], held()[3]]))
"""
    assert ask(libraries, script, window_bytes=hex(128 * MIB)) == [70, 64, 6]


def test_a_window_that_collides_goes_elsewhere_and_says_so(libraries: Libraries) -> None:
    base = 0x310000000000
    chosen = {
        "window_base": hex(base),
        "window_bytes": str(256 * MIB),
        "TAKEN": hex(base + 16 * MIB),
    }
    answer, said = heard(libraries, WINDOW, **chosen)
    assert isinstance(answer, list) and answer[1] != base
    assert [answer[0], *answer[2:]] == [Window.ELSEWHERE, 0, 1]
    assert said.count("\n") == 1
    assert f"instead of {hex(base)} (window_base): {base + 16 * MIB:x}-" in said


@pytest.mark.parametrize(
    "name, value",
    [
        ("window_base", "0x310000000001"),
        ("window_base", "0x200000"),
        ("window_base", "0xffff800000000000"),
        ("window_base", "there"),
        ("window_bytes", "-2097152"),
        ("window_bytes", "1000"),
        ("window_bytes", "99999999999999999999"),
    ],
)
def test_a_window_that_cannot_be_is_refused_by_name(libraries: Libraries, name: str, value: str) -> None:
    """An impossible window setting is refused by name, and the program gets the default window."""
    answer, said = heard(libraries, WINDOW, **{name: value})
    assert isinstance(answer, list) and answer[3] == 1
    assert said.count("\n") == 1 and f"MPSD_DEBUG: {name}={value} is not a multiple of 2097152" in said


# -- the end of memory -------------------------------------------------------------------------------------


def test_what_is_said_to_be_free_can_be_had(libraries: Libraries) -> None:
    script = """
start()
some = [alloc(size) for size in (100, 5000, 3 * MIB, 2 * MIB - 1)]
first = room()
large = alloc(first)
must(free(large))
for address in some:
    must(free(address))
print(json.dumps([large > 0, room(), alloc(room()) > 0]))
"""
    memory = {"MPSD_STANDIN_MEMORY": str(64 * MIB + 3 * 4096)}
    for vault in ("0", "1"):
        assert ask(libraries, script, vault, **memory) == [True, 64 * MIB + 3 * 4096, True]


@pytest.mark.parametrize("seed", range(3))
def test_a_mix_of_sizes_finds_as_much_memory_as_without(libraries: Libraries, seed: int) -> None:
    """A mix of sizes gets as much memory as without the proxy, within 1 %."""
    script = f"""
import random
start()
chance = random.Random({seed})
sizes = [chance.choice((chance.randint(1, 64 << 10), chance.randint(1, MIB), chance.randint(MIB, 2 * MIB),
                        chance.randint(2 * MIB, 9 * MIB))) for _ in range(4000)]
print(json.dumps(sum(size for size in sizes if alloc(size) > 0)))
"""
    memory = {"MPSD_STANDIN_MEMORY": str(512 * MIB)}
    without, within = (ask(libraries, script, vault, **memory) for vault in ("0", "1"))
    assert isinstance(without, int) and isinstance(within, int)
    assert without > 256 * MIB
    assert within >= 0.99 * without


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


def test_a_forked_child_has_no_driver(libraries: Libraries) -> None:
    script = """
start()
address, byte = ctypes.c_uint64(alloc(100)), ctypes.create_string_buffer(1)
size = ctypes.c_size_t(1)
if not (child := os.fork()):
    codes = {cuda.cuMemcpyDtoH_v2(byte, address, size), cuda.cuMemFree_v2(address), range_of(address.value),
             cuda.cuMemsetD8_v2(address, 1, ctypes.c_size_t(1 << 40)), cuda.cuIpcCloseMemHandle(address)}
    os._exit(0 if codes == {3} else 1)
print(json.dumps([os.waitpid(child, 0)[1], cuda.cuMemcpyDtoH_v2(byte, address, size)]))
"""
    for vault in ("0", "1"):
        assert ask(libraries, script, vault) == [0, 0]


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
    """Without address space for a window, each allocation passes through to the driver and is counted."""
    script = """
import resource
start()
limit = 2 * MIB * 1024
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
address = alloc(MIB)
print(json.dumps([address > 0, free(address), held(), read_stats(os.getpid()).window]))
"""
    answer, said = heard(libraries, script)
    assert answer == [True, 0, [0, 0, 0, 1], Window.NONE]
    assert "no window of 0x" in said and "vault disabled" in said and said.count("\n") == 1
