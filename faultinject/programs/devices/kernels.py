"""CUDA kernels of the harness, compiled at run time with NVRTC.

`KERNELS` says which parameters each kernel takes. Fault kernels have the name of the fault kind that they
cause (read_only and use_after_unmap are `store` to such memory). The `asm` kernels bypass the compiler, which
would remove or refuse the same code in C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mpsd.base.errors import GpuError, UnsupportedError

SOURCE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ __forceinline__ u64 nanoseconds()
{
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

static __device__ __forceinline__ u64 thread_index()
{
    return blockIdx.x * (u64)blockDim.x + threadIdx.x;
}

extern "C" __device__ void __assertfail(const char *, const char *, u32, const char *, size_t);

extern "C" {

// ---- work whose results can be checked

__global__ void increment(u32 *words, u64 count)
{
    for (u64 i = thread_index(); i < count; i += gridDim.x * (u64)blockDim.x)
        words[i] += 1;
}

__global__ void fill(u32 *words, u64 count, u32 value)
{
    for (u64 i = thread_index(); i < count; i += gridDim.x * (u64)blockDim.x)
        words[i] = value;
}

// Writes by its first parameter, and only reads by its second.
__global__ void weigh(u32 *words, const u32 *weights, u64 count)
{
    for (u64 i = thread_index(); i < count; i += gridDim.x * (u64)blockDim.x)
        words[i] = 5 * words[i] + weights[i];
}

// Writes where none of its parameters lead.
__global__ void follow(u32 **pointer, u32 value) { **pointer = value; }

__device__ u32 tallied;

__global__ void tally() { tallied += 1; }

// Counts the words that differ from `value` into *wrong.
__global__ void verify(const u32 *words, u64 count, u32 value, u64 *wrong)
{
    u64 seen = 0;
    for (u64 i = thread_index(); i < count; i += gridDim.x * (u64)blockDim.x)
        seen += words[i] != value;
    if (seen)
        atomicAdd(wrong, seen);
}

__global__ void spin(u64 duration_ns)
{
    u64 begin = nanoseconds();
    while (nanoseconds() - begin < duration_ns) { }
}

// Runs for duration_ns or until *stop is set; meanwhile the first thread counts in *counter.
__global__ void count(u64 *counter, u64 duration_ns, const volatile u32 *stop)
{
    u64 begin = nanoseconds();
    bool counts = thread_index() == 0;
    while (nanoseconds() - begin < duration_ns && *stop == 0) {
        if (counts) {
            atomicAdd(counter, 1ull);
            __threadfence_system();
        }
    }
}

// Counts in word[0] for duration_ns, once at least, or until *stop is set; word[1] is when it last did.
__global__ void pulse(volatile u64 *word, u64 duration_ns, const volatile u32 *stop)
{
    u64 begin = nanoseconds();
    do {
        word[1] = nanoseconds();
        word[0] += 1;
        __threadfence_system();
    } while (nanoseconds() - begin < duration_ns && *stop == 0);
}

__global__ void forever(const volatile u32 *stop)
{
    while (*stop == 0) { }
}

// ---- faults

__global__ void store(u32 *address) { *(volatile u32 *)address = 1; }

__global__ void load(const u32 *address, u32 *out) { *out = *(const volatile u32 *)address; }

__global__ void atomic(u32 *address) { atomicAdd(address, 1u); }

// A prefetch into L2: no access of the program's.
__global__ void prefetch(const char *address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Every thread strays over [begin, begin + length) for duration_ns: mode 0 stores, 1 loads, 2 atomics.
__global__ void stray(char *begin, u64 length, u64 duration_ns, u32 mode)
{
    u64 started = nanoseconds(), state = thread_index() * 0x9e3779b97f4a7c15ull + 1;
    while (nanoseconds() - started < duration_ns) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        volatile u32 *at = (volatile u32 *)(begin + (state % (length / 4)) * 4);
        if (mode == 0)
            *at = 1;
        else if (mode == 1)
            (void)*at;
        else
            atomicAdd((u32 *)at, 1u);
    }
}

__global__ void misaligned(char *address) { *(volatile u32 *)(address + 1) = 1; }

__global__ void shared_window(u32 offset)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(offset), "r"(1u) : "memory");
}

__global__ void local_window(u32 offset)
{
    asm volatile("st.local.u32 [%0], %1;" ::"r"(offset), "r"(1u) : "memory");
}

// A word of each page in `span` bytes, over and over; each thread begins at a page of its own.

static __device__ __forceinline__ u32 *wild_word(u32 *address, u64 span, u64 turn)
{
    u64 pages = (span + 4095) / 4096;
    return (u32 *)((char *)address + (thread_index() + turn) % pages * 4096);
}

__global__ void wild_store(u32 *address, u64 span, u64 duration_ns)
{
    u64 begin = nanoseconds(), turn = 0;
    do {
        *(volatile u32 *)wild_word(address, span, turn++) = 1;
    } while (nanoseconds() - begin < duration_ns);
}

__global__ void wild_load(u32 *address, u64 span, u64 duration_ns, u32 *out)
{
    u64 begin = nanoseconds(), turn = 0;
    u32 seen = 0;
    do {
        seen += *(const volatile u32 *)wild_word(address, span, turn++);
    } while (nanoseconds() - begin < duration_ns);
    *out = seen;
}

__global__ void wild_atomic(u32 *address, u64 span, u64 duration_ns)
{
    u64 begin = nanoseconds(), turn = 0;
    do {
        atomicAdd(wild_word(address, span, turn++), 1u);
    } while (nanoseconds() - begin < duration_ns);
}

__global__ void trap() { asm volatile("trap;"); }

__global__ void breakpoint() { asm volatile("brkpt;"); }

__device__ __noinline__ u32 descend(u32 depth, volatile u32 *out)
{
    volatile u32 frame[96];
    frame[depth % 96] = depth;
    if (depth == 0)
        return frame[0];
    u32 below = descend(depth - 1, out);
    out[0] = below;
    return below + frame[depth % 96];
}

__global__ void stack_overflow(u32 depth, u32 *out) { out[0] = descend(depth, out); }

__global__ void wild_call(u64 address)
{
    void (*target)() = (void (*)())address;
    target();
}

__global__ void assertion(u32 value)
{
    if (value != 0)
        __assertfail("value == 0", "harness", 1, "assertion", 1);
}

}
"""

_ADDRESS = ctypes.c_void_p
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64

# Kernel name -> ctypes types of its parameters, in order.
KERNELS: Mapping[str, tuple[type[Any], ...]] = MappingProxyType(
    {
        "increment": (_ADDRESS, _U64),
        "fill": (_ADDRESS, _U64, _U32),
        "weigh": (_ADDRESS, _ADDRESS, _U64),
        "verify": (_ADDRESS, _U64, _U32, _ADDRESS),
        "spin": (_U64,),
        "count": (_ADDRESS, _U64, _ADDRESS),
        "pulse": (_ADDRESS, _U64, _ADDRESS),
        "forever": (_ADDRESS,),
        "store": (_ADDRESS,),
        "load": (_ADDRESS, _ADDRESS),
        "atomic": (_ADDRESS,),
        "prefetch": (_ADDRESS,),
        "stray": (_ADDRESS, _U64, _U64, _U32),
        "misaligned": (_ADDRESS,),
        "shared_window": (_U32,),
        "local_window": (_U32,),
        "wild_store": (_ADDRESS, _U64, _U64),
        "wild_load": (_ADDRESS, _U64, _U64, _ADDRESS),
        "wild_atomic": (_ADDRESS, _U64, _U64),
        "trap": (),
        "breakpoint": (),
        "stack_overflow": (_U32, _ADDRESS),
        "wild_call": (_U64,),
        "assertion": (_U32,),
    }
)


def compile(arch: str) -> bytes:
    """Return the kernels as a cubin for `arch`, for example "sm_90".

    Makes no CUDA context. Raises UnsupportedError without NVRTC, GpuError with the compiler's own message
    when it refuses.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise UnsupportedError(
            "NVRTC is not installed", remedy="install the extra, in mpsd's sources: pip install '.[cuda]'"
        ) from error
    result, program = nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"harness.cu", 0, [], [])
    _check(nvrtc, result)
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(result):
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise GpuError(f"kernels do not compile for {arch}: {log.decode(errors='replace')}")
    result, size = nvrtc.nvrtcGetCUBINSize(program)
    _check(nvrtc, result)
    cubin = bytearray(size)
    (result,) = nvrtc.nvrtcGetCUBIN(program, cubin)
    _check(nvrtc, result)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


def _check(nvrtc: Any, result: Any) -> None:
    if int(result):
        raise GpuError(f"NVRTC: {nvrtc.nvrtcGetErrorString(result)[1].decode()}", status=int(result))
