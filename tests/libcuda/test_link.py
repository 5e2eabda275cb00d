"""A program continues to link at run time in another driver instance."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_exact import move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain

__all__ = ["ask", "backend", "copies", "domain", "post", "second", "third"]

PTX, CUBIN = 1, 0
LOG_BUFFER, LOG_BYTES = 3, 4
HEAD = b"standin module\\n"


def begin(ask: Program) -> None:
    ask(f"log = ctypes.create_string_buffer(256); names = (ctypes.c_int * 2)({LOG_BUFFER}, {LOG_BYTES})")
    ask("values = (ctypes.c_void_p * 2)(ctypes.addressof(log), 256)")
    ask("l = ctypes.c_uint64(); linked, size = ctypes.c_void_p(), ctypes.c_size_t()")
    assert ask("gpu.code('cuLinkCreate_v2', 2, names, values, ctypes.byref(l))") == "0"


def add(ask: Program, text: bytes) -> None:
    ask(f"piece = ctypes.create_string_buffer(b'{HEAD.decode()}{text.decode()}\\n')")
    call = f"gpu.code('cuLinkAddData_v2', l.value, {PTX}, piece, len(piece) - 1, b'name', 0, None, None)"
    assert ask(call) == "0"
    ask("piece[:] = bytes(len(piece))")


def complete(ask: Program) -> None:
    assert ask("gpu.code('cuLinkComplete', l.value, ctypes.byref(linked), ctypes.byref(size))") == "0"


def works(ask: Program, first: int, second: int) -> None:
    ask("made = gpu.made('cuModuleLoadData', linked)")
    ask("gpu.functions['one'] = gpu.made('cuModuleGetFunction', made, b'one')")
    ask("gpu.functions['two'] = gpu.made('cuModuleGetFunction', made, b'two')")
    assert ask("gpu.run('one', m, 8, 1), gpu.run('two', m, 8, 10), gpu.sync()") == "(0, 0, 0)"
    assert ask("gpu.word(m)") == str(first + second)


@pytest.mark.parametrize("at", ["begun", "one", "two", "completed", "loaded", "twice"])
def test_a_link_goes_on(
    domain: Domain,
    second: Domain,
    third: Domain,
    post: Post,
    ask: Program,
    copies: Path,
    at: str,
    tmp_path: Path,
) -> None:
    line = post.greet(moving.KEEP)
    ask("m = gpu.memory(4 << 20); gpu.sync()")
    stand_by(line, second, copies)

    def maybe(now: str, old: Domain = domain) -> None:
        if at == now:
            break_domain(old)
            assert move(line, 1 if old is domain else 2).text == ""

    begin(ask)
    maybe("begun")
    add(ask, b"kernel one add 0")
    maybe("one")
    file = tmp_path / "two"
    file.write_text("standin module\nkernel two add 0\n")
    call = f"gpu.code('cuLinkAddFile_v2', l.value, {CUBIN}, {str(file).encode()!r}, 0, None, None)"
    assert ask(call) == "0"
    maybe("two")
    if at == "twice":
        maybe("twice")
        stand_by(line, third, copies, 2)
    complete(ask)
    maybe("completed")
    maybe("twice", second)
    works(ask, 1, 10)
    maybe("loaded")
    # The link may be completed again, in any driver instance.
    complete(ask)
    works(ask, 12, 10)
    assert ask("gpu.code('cuLinkDestroy', l.value)") == "0"
    assert line.unsure == []
    assert ask.end() == ""
