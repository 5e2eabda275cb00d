"""Generator for calls that fail-over carries from one driver instance to the next: carry.toml to carry.c."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from libcuda_build.header import Function

HANDLES = ("CUcontext", "CUstream", "CUevent", "CUmodule", "CUfunction", "CUlibrary", "CUkernel")
"""The types of virtual handles: the program keeps the values that the original driver instance gave out."""

CLASSES = ("ask", "work", "waits_all", "waits_stream", "waits_legacy", "waits", "give", "make", "end")

BEHIND = "behind"
"""Calls that change objects used by earlier launches: those launches go first (exact/relay.h)."""

SETTLES = ("settles", "settles_stream", "settles_event")
"""Work of mode `exact` before a call that destroys something."""

ASKED_OFTEN = ("cuCtxGetDevice", "cuCtxGetDevice_v2", "cuDevicePrimaryCtxGetState")
"""Queries that PyTorch makes thousands of times per token. None of them has a wrapper of its own."""

_WAITS = {"waits_all": "ALL", "waits_stream": "STREAM", "waits_legacy": "COPY", "waits": "EVENT"}
_CONFIG = "const CUlaunchConfig *config"
_WORDS = ("cuuint32_t value", "cuuint64_t value", "CUstreamBatchMemOpParams ")
_FUNCTIONS = ("CUhostFn ", "CUstreamCallback ")
_INSIDE = (
    _CONFIG,
    "CUgraphExec ",
    "CUDA_MEMCPY",
    "CUcontext dstContext",
    *_FUNCTIONS,
    *_WORDS,
)
"""Parameters of work that are functions, contain handles or addresses, or have a type that says too
little."""
_LAUNCHES = ("cuLaunchKernel", "cuLaunchKernelEx")
_BEGINS = {"cuStreamWaitEvent": "mpsd_work_that_waits"}
_ROWS = r"const CUDA_MEMCPY[23]D \*pCopy$"
_NAME = re.compile(r"(\w+)(?:\[\w*\])?$")


class CarryError(Exception):
    """carry.toml has an invalid entry."""


@dataclass(frozen=True)
class Carried:
    """A function and its class."""

    function: Function
    does: str
    polls: bool = False
    settles: str = ""
    behind: bool = False


@dataclass(frozen=True)
class PerThread:
    """A function of the per-thread default stream, and the function that does the same in a given stream."""

    function: Function
    by: Carried
    waits: bool = False


def read_per_thread(
    path: Path, functions: Mapping[str, Function], carried: Sequence[Carried]
) -> tuple[PerThread, ...]:
    """Return the `_ptsz` counterparts of carried functions, with [per_thread]. Raises CarryError."""
    known = {one.function.name: one for one in carried}
    found = [
        PerThread(functions[f"{name}_ptsz"], one)
        for name, one in known.items()
        if f"{name}_ptsz" in functions
    ]
    for name, by in tomllib.loads(path.read_text()).get("per_thread", {}).items():
        if name not in functions or by not in known:
            raise CarryError(f"{path.name}: {by} cannot stand in for {name}")
        found.append(PerThread(functions[name], known[by], name.startswith("cuMemcpy")))
    return tuple(found)


def read_carried(
    path: Path, functions: Mapping[str, Function], absent: Set[str] = frozenset()
) -> tuple[Carried, ...]:
    """Return the functions of carry.toml, sorted by name, without those in `absent`. Raises CarryError."""
    table = tomllib.loads(path.read_text())
    table.pop("per_thread", {})
    table = {key: [name for name in names if name not in absent] for key, names in table.items()}
    polls = table.pop("polls", [])
    settles = {name: kind for kind in SETTLES for name in table.pop(kind, [])}
    behind = table.pop(BEHIND, [])
    unknown = sorted(set(table) - set(CLASSES))
    if unknown:
        raise CarryError(f"{path.name}: unknown class: {', '.join(unknown)}")
    does: dict[str, str] = {}
    for kind, names in table.items():
        for name in names:
            if name in does:
                raise CarryError(f"{path.name}: {name} is listed twice")
            if name not in functions:
                raise CarryError(f"{path.name}: cuda.h does not declare {name}")
            does[name] = kind
    for name in polls:
        if not does.get(name, "").startswith("waits"):
            raise CarryError(f"{path.name}: {name} is listed under polls but has no waiting class")
    for name in settles:
        if name not in does:
            raise CarryError(f"{path.name}: {name} is listed under {settles[name]} but has no class")
    for name in behind:
        if does.get(name) != "make":
            raise CarryError(f"{path.name}: {name} is listed under {BEHIND} but not under make")
    return tuple(
        Carried(
            functions[name],
            does[name],
            name in polls,
            settles.get(name, ""),
            does[name] == "end" or name in settles or name in behind,
        )
        for name in sorted(does)
    )


def declarations(carried: Sequence[Carried], per_thread: Sequence[PerThread]) -> Iterator[str]:
    """Yield the prototypes of functions that carry.c calls and src/failover defines."""
    yield f"#define MPSD_CARRIED {len(carried) + len(per_thread)}"
    yield f"#define MPSD_PLAIN {len(_LAUNCHES)}"
    for one in carried:
        if _prefix(one) != "inner":
            yield f"CUresult {_prefix(one)}_{one.function.name}({_list(one.function)});"
        if one.does == "work":
            yield f"CUresult work_{one.function.name}({_list(one.function)});"


def source(carried: Sequence[Carried], per_thread: Sequence[PerThread]) -> Iterator[str]:
    """Yield carry.c: a wrapper for each function, and their list."""
    yield '#include "exact/exact.h"'
    yield '#include "exact/order.h"'
    yield '#include "failover/carry.h"'
    yield '#include "failover/plain.h"'
    yield '#include "failover/pools.h"'
    yield '#include "launches.h"'
    for one in carried:
        yield f"{_begin(one)}({_list(one.function)})"
        yield "{"
        yield from _body(one)
        yield "}"
        if one.function.name in ASKED_OFTEN:
            yield from _ask_first_copy(one)
        if one.function.name in _LAUNCHES:
            yield from _launch_plainly(one)
    for own in per_thread:
        yield f"static CUresult carry_{own.function.name}({_list(own.function)})"
        yield "{"
        yield from _in_own_stream(own)
        yield "}"
    yield "const struct mpsd_carried mpsd_carried[MPSD_CARRIED] = {"
    for function in (*(one.function for one in carried), *(own.function for own in per_thread)):
        yield f"\t{{ MPSD_{function.name}, (void *)carry_{function.name} }},"
    yield "};"
    yield "const struct mpsd_carried mpsd_plain[MPSD_PLAIN] = {"
    yield from (f"\t{{ MPSD_{name}, (void *)plain_{name} }}," for name in _LAUNCHES)
    yield "};"


def _in_own_stream(own: PerThread) -> Iterator[str]:
    """Yield the call with the thread's own stream in place of no stream."""
    arguments = []
    for text in own.function.parameters:
        name = _argument(text)
        is_stream = _kind(text) == "CUstream"
        arguments.append(f"{name} ? {name} : CU_STREAM_PER_THREAD" if is_stream else name)
    if _CONFIG in own.function.parameters:
        yield "\tCUlaunchConfig own;"
        yield ""
        yield "\tif (config && !config->hStream) {"
        yield "\t\town = *config;"
        yield "\t\town.hStream = CU_STREAM_PER_THREAD;"
        yield "\t\tconfig = &own;"
        yield "\t}"
    if len(own.by.function.parameters) > len(arguments):
        arguments.append("CU_STREAM_PER_THREAD")
    call = f"carry_{own.by.function.name}({', '.join(arguments)})"
    if own.waits:
        yield f"\tCUresult result = {call};"
        yield ""
        yield "\treturn result == CUDA_SUCCESS ? carry_cuStreamSynchronize(CU_STREAM_PER_THREAD) : result;"
    else:
        yield f"\treturn {call};"


def _find_own_stream(one: Carried) -> Iterator[str]:
    """Yield the translation of CU_STREAM_PER_THREAD: other instances and threads do not know that stream."""
    for text in one.function.parameters:
        if _kind(text) == "CUstream" and one.does != "end":
            yield f"\tif (__builtin_expect({_argument(text)} == CU_STREAM_PER_THREAD, 0))"
            yield f"\t\t{_argument(text)} = mpsd_own_stream();"
    if _CONFIG in one.function.parameters:
        yield "\tif (config && __builtin_expect(config->hStream == CU_STREAM_PER_THREAD, 0)) {"
        yield "\t\town = *config;"
        yield "\t\town.hStream = mpsd_own_stream();"
        yield "\t\tconfig = &own;"
        yield "\t}"


def _body(one: Carried) -> Iterator[str]:
    name, stream = one.function.name, _stream(one.function)
    if one.does == "waits_legacy":
        stream = "CU_STREAM_LEGACY"
    prefix = _prefix(one)
    call = f"{prefix}_{name}({', '.join(_arguments(one, translate=prefix == 'inner'))})"
    if one.does == "work":
        noted = f"work_{name}({', '.join(_arguments(one, translate=False))})"
        call = f"mpsd_notes() ? {noted} : mpsd_relay_flush() ? {call} : MPSD_AGAIN"
    elif one.behind:
        call = f"mpsd_relay_flush() ? {call} : MPSD_AGAIN"
    yield "\tCUresult result;"
    yield "\tuint64_t moves;"
    written = [_argument(p) for p in one.function.parameters if re.match(r"CUdeviceptr dst", p)]
    host = [_argument(p) for p in one.function.parameters if p == "const void *srcHost"]
    read = [_argument(p) for p in one.function.parameters if re.match(r"CUdeviceptr src", p)]
    read += ["mpsd_rows_source(pCopy)" for p in one.function.parameters if re.match(_ROWS, p)]
    if one.does.startswith("waits_"):
        yield "\tuint64_t work = 0;"
    if _CONFIG in one.function.parameters:
        yield "\tCUlaunchConfig own;"
    yield ""
    yield from _find_own_stream(one)
    if one.does != "ask" or one.settles:
        yield "\tif (mpsd_is_forbidden())"
        yield "\t\treturn CUDA_ERROR_NOT_PERMITTED;"
    for argument in read:
        yield f"\tif (!mpsd_read({argument}))"
        yield "\t\treturn CUDA_ERROR_LAUNCH_FAILED;"
    if one.does == "work":
        yield from (f"\tmpsd_written({argument});" for argument in written if not host)
        if one.function.name in _LAUNCHES:
            yield f"\tmpsd_launches_fetch(MPSD_{one.function.name});"
            yield "\tmpsd_params_fetch(f);"
        # Begins a launch that took the short path first.
        yield "\tif (!mpsd_thread.works)"
        yield f"\t\t{_BEGINS.get(one.function.name, 'mpsd_work')}({stream});"
    yield "\tdo {"
    yield "\t\tmoves = mpsd_carry_enter();"
    if one.does.startswith("waits_"):
        yield "\t\twork = mpsd_relay_flush() ? mpsd_work_count() : 0;"
    if one.does in _WAITS:
        yield from _waiting(one, call, "hEvent" if one.does == "waits" else stream)
    elif one.settles or host:
        if one.settles:
            yield f"\t\tresult = mpsd_exact() ? {_settling(one)} : CUDA_SUCCESS;"
        else:
            put = f"mpsd_variable_put({written[0]}, {host[0]}, ByteCount, {stream})"
            yield f"\t\tresult = mpsd_knows_variables() ? {put} : CUDA_SUCCESS;"
        yield "\t\tif (result == CUDA_SUCCESS)"
        yield f"\t\t\tresult = {call};"
    else:
        yield f"\t\tresult = {call};"
    yield from _translate_answer(one)
    yield "\t\tmpsd_carry_leave(moves);"
    yield "\t} while (__builtin_expect(result != CUDA_SUCCESS, 0) && mpsd_carry_again(result, moves));"
    if one.does == "work":
        yield "\tmpsd_work_given();"
    if one.does == "waits_all":
        yield "\tmpsd_waited_for_all(result, moves, work);"
    elif one.does in ("waits_stream", "waits_legacy"):
        yield f"\tmpsd_waited(result, moves, {stream}, work);"
    if one.does == "waits_legacy":
        yield "\tmpsd_exact_given();"
    if one.does.startswith("waits"):
        yield "\tresult = mpsd_work_told(result);"
    if one.does == "waits":
        yield "\tif (result == CUDA_SUCCESS)"
        yield "\t\tmpsd_event_reached(hEvent);"
    if one.does == "work" and name.startswith("cuEventRecord"):
        yield "\tif (result == CUDA_SUCCESS)"
        yield f"\t\tmpsd_event_recorded(hEvent, {stream}, moves);"
    if one.polls and one.does != "waits_legacy":
        yield "\tif (result == CUDA_SUCCESS)"
        yield "\t\tmpsd_pools_waited();"
    # A fail-over may have happened meanwhile.
    for argument in read:
        yield f"\tif (result == CUDA_SUCCESS && !mpsd_read({argument}))"
        yield "\t\tresult = CUDA_ERROR_LAUNCH_FAILED;"
    yield "\treturn result;"


def _begin(one: Carried) -> str:
    name = one.function.name
    if name in ASKED_OFTEN:
        return f"MPSD_SELDOM static CUresult ask_{name}"
    # Out of line, because the short path also ends here.
    place = "MPSD_OF_A_LAUNCH __attribute__((noinline)) " if name in _LAUNCHES else ""
    return f"{place}static CUresult carry_{name}"


def _ask_first_copy(one: Carried) -> Iterator[str]:
    """Yield a query of the original instance: before the first fail-over its handles are the program's
    own."""
    name, arguments = one.function.name, ", ".join(_arguments(one, translate=False))
    yield f"MPSD_OF_A_LAUNCH static CUresult carry_{name}({_list(one.function)})"
    yield "{"
    yield f"\tCUresult (*first)({_list(one.function)}) = (__typeof__(first))mpsd_inner[MPSD_{name}];"
    yield ""
    yield f"\tif (__builtin_expect(atomic_load(&mpsd_moves) == 0, 1) && first({arguments}) == CUDA_SUCCESS)"
    yield "\t\treturn CUDA_SUCCESS;"
    yield f"\treturn ask_{name}({arguments});"
    yield "}"


def _launch_plainly(one: Carried) -> Iterator[str]:
    """Yield the short path of a launch (failover/plain.h), with the general path as fallback."""
    name, arguments = one.function.name, ", ".join(_arguments(one, translate=False))
    yield f"MPSD_OF_A_LAUNCH static CUresult plain_{name}({_list(one.function)})"
    yield "{"
    yield f"\tmpsd_launches_fetch(MPSD_{name});"
    yield f"\tif (mpsd_plain_begin({_stream(one.function)})) {{"
    yield f"\t\tCUresult result = wrap_{name}({arguments});"
    yield ""
    yield "\t\tif (mpsd_plain_is_over(result))"
    yield "\t\t\treturn result;"
    yield "\t}"
    yield f"\treturn carry_{name}({arguments});"
    yield "}"


def _translate_answer(one: Carried) -> Iterator[str]:
    """Yield the handling of an answer, which is valid only while its driver instance is in use."""
    if one.does == "give":
        for text in one.function.parameters:
            kind, _, argument = text.rpartition("*")
            if kind.strip() in HANDLES:
                yield f"\t\tif (result == CUDA_SUCCESS && {argument})"
                yield f"\t\t\t*{argument} = mpsd_name(*{argument});"
    # A handle of a retired instance is not valid: the driver answers NULL for it.
    is_handle = any(_kind(text) in HANDLES for text in one.function.parameters)
    if one.does == "give" or (one.does == "ask" and is_handle):
        yield "\t\tresult = mpsd_answered(result);"


def _settling(one: Carried) -> str:
    """Return the work of mode `exact` before a destruction; a stream and an event are also forgotten."""
    handle = _argument(one.function.parameters[0]) if one.settles in SETTLES[1:] else ""
    return f"mpsd_exact_{one.settles.replace('settles', 'settle')}({handle})"


def _waiting(one: Carried, call: str, handle: str) -> Iterator[str]:
    """Yield the wait, between the work of mode `exact` before and after it."""
    given = "NULL" if one.does in ("waits_all", "waits_legacy") else handle
    look = "false" if one.polls else "true"
    yield "\t\tif (mpsd_exact()) {"
    yield "\t\t\tstruct mpsd_proof proof;"
    yield ""
    yield f"\t\t\tresult = mpsd_exact_before(&proof, MPSD_WAIT_{_WAITS[one.does]}, {given}, {look});"
    yield "\t\t\tif (result == CUDA_SUCCESS)"
    yield f"\t\t\t\tresult = {call};"
    yield "\t\t\tif (result == CUDA_SUCCESS)"
    yield f"\t\t\t\tresult = mpsd_exact_after(&proof, MPSD_WAIT_{_WAITS[one.does]});"
    yield "\t\t} else {"
    yield f"\t\t\tresult = mpsd_relay_flush() ? mpsd_answered({call}) : MPSD_AGAIN;"
    yield "\t\t}"


def _prefix(one: Carried) -> str:
    if one.does == "work" and any(kind in p for kind in _INSIDE for p in one.function.parameters):
        return "make"
    return one.does if one.does in ("make", "end") else "poll" if one.polls else "inner"


def _list(function: Function) -> str:
    return ", ".join(function.parameters) or "void"


def _arguments(one: Carried, *, translate: bool) -> Iterator[str]:
    for text in one.function.parameters:
        name, kind = _argument(text), _kind(text)
        if translate and kind in HANDLES:
            yield f"mpsd_native({name})"
        elif translate and kind == "CUdeviceptr":
            yield f"mpsd_address({name})"
        else:
            yield name


def _kind(text: str) -> str:
    return text.removesuffix(_argument(text)).strip()


def _argument(text: str) -> str:
    found = _NAME.search(text)
    if not found:
        raise CarryError(f"a parameter has no name: {text}")
    return found[1]


def _stream(function: Function) -> str:
    """Return the expression of the stream that gets the work; the legacy stream without one."""
    if _CONFIG in function.parameters:
        return "(config ? config->hStream : CU_STREAM_LEGACY)"
    for text in function.parameters:
        if text.startswith("CUstream ") and "*" not in text:
            return _argument(text)
    return "CU_STREAM_LEGACY"
