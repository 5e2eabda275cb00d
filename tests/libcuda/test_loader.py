"""A move completes while another thread holds the loader's lock and waits for the move."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.libcuda.test_exact import EXACT, gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import moving
from tests.support.gate import Gate
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until
from tests.support.waiting import BUILD_S

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]

SOURCE = """
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>
int said = -1;
void call(void)
{
	int (*sync)(void) = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuCtxSynchronize");

	close(open(MARK, O_CREAT | O_WRONLY, 0600));
	said = sync();
}
#ifdef FIRST
__attribute__((constructor)) static void first(void) { call(); }
#endif
"""


@EXACT
@pytest.mark.parametrize("first", ["-DFIRST", "-DLATER"])
def test_a_library_may_call_the_driver_while_it_is_loaded(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path, tmp_path: Path,
    first: str,
) -> None:  # fmt: skip
    (tmp_path / "a.c").write_text(SOURCE)
    library, mark = tmp_path / "a.so", tmp_path / "mark"
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        first,
        f'-DMARK="{mark}"',
        "-o",
        str(library),
        str(tmp_path / "a.c"),
    ]
    subprocess.run(command, check=True, timeout=BUILD_S)
    line = post.greet(moving.EXACT)
    ask("import ctypes; m = gpu.memory(2 << 20); gpu.sync(); later = Later(gpu)")
    stand_by(line, second, copies)
    gate.let(0)
    assert ask("gpu.run('add', m, 8, 1)") == "0"
    call = "" if first == "-DFIRST" else ".call()"
    ask(f"later.start(\"ctypes.CDLL('{library}'){call} and 0\")")
    until(mark.exists)
    break_domain(domain)
    assert move(line).text == ""
    ask("later.result()")
    # A call held for too long would enter the lost driver instance.
    assert ask(f"ctypes.c_int.in_dll(ctypes.CDLL('{library}'), 'said').value, gpu.word(m)") == "(0, 1)"
    assert ask.end() == ""
