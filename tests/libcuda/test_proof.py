"""Which work counts as completed, and what the program knows by then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, IN_VAIN, gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.gate import Gate
from tests.support.moving import Line, Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]

START = "import ctypes; m = gpu.memory(8 << 20); n = gpu.memory(2 << 20); "
START += "p = gpu.made('cuMemHostAlloc', 4096, 0); P = (ctypes.c_uint32 * 16).from_address(p)"
MORE = "image = b'standin module\\nkernel before before 0\\nkernel await await 0\\n'; "
MORE += "more = gpu.made('cuModuleLoadData', image); "
MORE += "gpu.functions['before'] = gpu.made('cuModuleGetFunction', more, b'before'); "
MORE += "gpu.functions['await'] = gpu.made('cuModuleGetFunction', more, b'await')"


@pytest.fixture
def begin(post: Post, ask: Program, second: Domain, copies: Path) -> Callable[..., Line]:
    """Return a function that runs its arguments first and then starts: mode exact, a standby, no work
    open."""

    def begun(*does: str) -> Line:
        line = post.greet(moving.EXACT)
        for each in does:
            ask(each)
        stand_by(line, second, copies)
        assert ask("gpu.sync()") == "0"
        return line

    return begun


@EXACT
@pytest.mark.parametrize(
    "nothing",
    [
        "gpu.code('cuMemcpyDtoDAsync_v2', n, m, 0, 0)",
        "gpu.code('cuMemsetD8Async', n, 0, 0, 0)",
        "gpu.code('cuStreamWaitEvent', 0, e, 0)",
    ],
    ids=["copy", "memset", "event"],
)
def test_what_does_nothing_is_no_barrier(
    domain: Domain, begin: Callable[..., Line], ask: Program, nothing: str
) -> None:
    """A call in the legacy stream that does nothing is no barrier between a busy blocking stream and
    another stream that ends."""
    line = begin(
        START + "; a = gpu.made('cuStreamCreate', 0); b = gpu.made('cuStreamCreate', 0)",
        "e = gpu.made('cuEventCreate', 2); s = gpu.stream(); x = gpu.memory(2 << 20)",
        "more = gpu.made('cuModuleLoadData', b'standin module\\nkernel slow add 3000000\\n')",
        "gpu.functions['slow'] = gpu.made('cuModuleGetFunction', more, b'slow')",
    )
    # The epoch is open with all buffers saved, so the legacy stream waits for nothing later.
    assert ask("gpu.run('late', x, 8, 1, stream=s)") == "0"
    for stream, at in (("a", "m"), ("b", "n")):
        assert ask(f"gpu.run('add', {at}, 8, 1, stream={stream})") == "0"
        assert ask(f"gpu.code('cuStreamSynchronize', {stream})") == "0"
    assert ask(f"gpu.run('slow', m, 8, 7, stream=a), {nothing}") == "(0, 0)"
    assert ask("gpu.run('add', n, 8, 1, stream=b), gpu.code('cuStreamSynchronize', s)") == "(0, 0)"
    assert ask("gpu.code('cuStreamSynchronize', b)") == "0"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(m), gpu.word(n)") == "(0, 8, 2)"
    assert ask.end() == ""


@EXACT
@pytest.mark.parametrize(
    "tells",
    [
        "gpu.put(n, 1)",
        "exec(\"while gpu.code('cuEventElapsedTime', ctypes.byref(ms), e, f): pass\")",
    ],
    ids=["pageable", "elapsed"],
)
def test_who_is_told_that_it_has_ended_may_use_the_memory_again(
    domain: Domain, begin: Callable[..., Line], ask: Program, tells: str
) -> None:
    line = begin(
        START + "; s = gpu.stream(); x = gpu.memory(2 << 20); ms = ctypes.c_float()",
        "e = gpu.made('cuEventCreate', 0); f = gpu.made('cuEventCreate', 0)",
    )
    ask("P[0] = 5")
    # This work in another stream does not end.
    assert ask("gpu.run('late', x, 8, 1, stream=s)") == "0"
    assert ask("gpu.code('cuMemcpyHtoDAsync_v2', m, p, 4, 0)") == "0"
    assert ask("gpu.code('cuEventRecord', e, 0), gpu.code('cuEventRecord', f, 0)") == "(0, 0)"
    ask(tells)
    ask("P[0] = 9")
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.code('cuStreamSynchronize', 0), gpu.word(m)") == "(0, 5)"


@pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "exact", "snapshot_mib": "7"}], indirect=True)
@pytest.mark.parametrize("lets", range(3, 7))
def test_pages_are_saved_whole_where_the_room_is_no_multiple_of_them(
    domain: Domain, gate: Gate, begin: Callable[..., Line], ask: Program, lets: int
) -> None:
    """Buffers that are usually written are saved in whole pages, as far as the snapshot buffer reaches."""
    line = begin(
        "x = gpu.memory(2 << 20); u = gpu.memory(4 << 20); v = gpu.memory(2 << 20)",
        "at = u + (3 << 20) + 64",
    )
    assert ask("gpu.run('add', x, 8, 1), gpu.run('add', at, 8, 1), gpu.sync()") == "(0, 0, 0)"
    gate.let(0)
    assert ask("gpu.code('cuMemsetD32Async', v, 1, 1, 0)") == "0"
    assert ask("gpu.run('add', x, 8, 1), gpu.run('add', at, 8, 1)") == "(0, 0)"
    gate.let(lets)
    until(lambda: gate.left() == 0)
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(x), gpu.word(at)") == "(0, 2, 2)"


@EXACT
def test_what_the_driver_refuses_to_save_keeps_no_epoch_open(
    domain: Domain, begin: Callable[..., Line], ask: Program
) -> None:
    """A memset past the end is refused, as is its snapshot, and neither keeps the epoch open."""
    line = begin(START + "; s = gpu.made('cuStreamCreate', 1); t = gpu.made('cuStreamCreate', 1)")
    # A memset that is not the first operation of its epoch is saved in a stream of its own.
    assert ask("gpu.run('slow', m, 8, 1, stream=s)") == "0"
    assert ask("gpu.code('cuMemsetD8Async', n, 1, 512 << 20, t)") == "1"
    assert ask("[gpu.code('cuStreamSynchronize', one) for one in (s, t)]") == "[0, 0]"
    break_domain(domain)
    said = move(line)
    assert (said.text, said.values[3], said.values[4]) == ("", 0, 0)
    assert ask("gpu.sync(), gpu.word(m)") == "(0, 1)"


@EXACT
def test_what_makes_an_epoch_unsure_is_not_forgotten_before_it_is_noted(
    domain: Domain, begin: Callable[..., Line], ask: Program
) -> None:
    line = begin(START + "; s = gpu.stream(); big = (ctypes.c_char * (1 << 20))()")
    # The epoch's log is full, so the epoch ends before the next operation is recorded.
    full = "{gpu.code('cuMemcpyHtoDAsync_v2', m, big, 1 << 20, 0) for _ in range(256)}"
    assert ask(full) == "{0}"
    set_outside = "gpu.code('cuMemsetD32Async', p, 0, 1, 0)"
    assert ask(f"{set_outside}, gpu.run('late', n, 8, 1, stream=s)") == "(0, 0)"
    assert ask("gpu.code('cuStreamSynchronize', 0), P[0]") == "(0, 0)"
    break_domain(domain)
    assert move(line).text == "a memset of memory outside the window"


@EXACT
def test_a_pointer_to_the_end_of_memory_leads_there(
    domain: Domain, begin: Callable[..., Line], ask: Program
) -> None:
    line = begin(
        START + "; s = gpu.stream(); a = gpu.memory(4 << 20); end = a + (4 << 20)",
        MORE,
    )
    assert ask("gpu.run('before', end, 0, 1), gpu.run('late', n, 8, 1, stream=s)") == "(0, 0)"
    assert ask("gpu.code('cuStreamSynchronize', 0)") == "0"
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.sync(), gpu.word(end - 4), gpu.word(n)") == "(0, 1, 1)"


@IN_VAIN
@pytest.mark.parametrize(
    "call", ["gpu.code('cuStreamDestroy_v2', t)", "gpu.code('cuEventDestroy_v2', e)"], ids=["stream", "event"]
)
def test_nobody_waits_for_ever_for_a_kernel_that_waits_for_him(
    begin: Callable[..., Line], ask: Program, call: str
) -> None:
    begin(
        START + "; s, t, u = gpu.stream(), gpu.stream(), gpu.stream(); e = gpu.made('cuEventCreate', 2)",
        MORE,
    )
    assert ask("gpu.code('cuEventRecord', e, t), gpu.run('await', n, 0, 1, stream=s)") == "(0, 0)"
    assert ask(f"{call}, gpu.code('cuMemsetD32Async', n, 1, 1, u), gpu.sync()") == "(0, 0, 0)"
