"""When an epoch ends: nothing of it is done again then."""

from __future__ import annotations

from pathlib import Path

from tests.libcuda.test_exact import EXACT, move
from tests.libcuda.test_failover import Program, ask, copies, post, stand_by
from tests.support import moving
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain, until

__all__ = ["ask", "backend", "copies", "domain", "post", "second"]

MANY = 300
MADE = "m = gpu.memory(8 << 20); one, two = (gpu.made('cuStreamCreate', 1) for _ in range(2)); \
e = gpu.made('cuEventCreate', 2)"
WORK = f"""set([gpu.run('add', m, 8, 1, stream=two) for _ in range({MANY})] + [
    gpu.code('cuEventRecord', e, two), gpu.code('cuStreamWaitEvent', one, e, 0),
    gpu.run('add', m, 8, 1, stream=one), gpu.code('cuStreamSynchronize', one)])""".replace("\n", " ")


@EXACT
def test_a_wait_for_one_stream_ends_an_epoch_of_several(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """All has ended by then, but that of the other stream it is not said by what is waited for."""
    line = post.greet(moving.EXACT)
    assert ask(MADE) == "None"
    rounds = 0

    def done_again() -> int:
        nonlocal rounds
        rounds += 1
        stand_by(line, second if rounds % 2 else domain, copies, rounds)
        assert ask(WORK) == "{0}"
        return move(line, rounds).values[4]

    # The other stream's mark may come too late for one wait.
    until(lambda: done_again() < MANY)
    assert ask("[gpu.sync(), gpu.word(m)]") == f"[0, {rounds * (MANY + 1)}]"
    assert ask.end() == ""


@EXACT
def test_what_is_captured_is_left_alone(post: Post, ask: Program) -> None:
    """The wait may be another thread's. The legacy stream's mark would end the capture in a blocking one."""
    post.greet(moving.EXACT)
    assert ask(MADE + "; s = gpu.made('cuStreamCreate', 0)") == "None"
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    assert ask("gpu.code('cuStreamBeginCapture_v2', s, 2)") == "0"
    assert ask(WORK) == "{0}"
    assert ask("gpu.run('add', m, 8, 1, stream=s)") == "0"
    assert ask("gpu.code('cuStreamEndCapture', s, ctypes.byref(ctypes.c_uint64()))") == "0"
    assert ask("gpu.sync(), gpu.word(m)") == f"(0, {MANY + 2})"
    assert ask.end() == ""
