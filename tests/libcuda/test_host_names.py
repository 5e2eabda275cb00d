"""Host memory at the address of a handle of an earlier driver instance: the two are distinct."""

from __future__ import annotations

from pathlib import Path

from tests.libcuda.test_exact import EXACT, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain

__all__ = ["ask", "backend", "copies", "domain", "post", "second", "third"]

WORKS = "gpu.run('add', m, 8, 1, stream=s), gpu.sync()"


@EXACT
def test_its_registration_and_its_end_are_not_the_handles(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(8 << 20); s = gpu.stream()")
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    # The stream's driver handle is gone; its address is ordinary memory to the simulated GPU.
    assert ask("gpu.code('cuMemHostRegister_v2', s, ctypes.c_size_t(64), 0)") == "0"
    assert ask(WORKS) == "(0, 0)"
    stand_by(line, third, copies, 2)
    break_domain(second)
    move(line, 2)
    assert ask(WORKS) == "(0, 0)"
    # The registration has moved to the third instance, where it is unregistered.
    assert ask("[gpu.code('cuMemHostUnregister', s) for _ in range(2)]") == "[0, 713]"
    assert ask(WORKS) == "(0, 0)"
    assert ask("gpu.code('cuStreamDestroy_v2', s), gpu.word(m) > 0") == "(0, True)"
    assert ask.end() == ""
