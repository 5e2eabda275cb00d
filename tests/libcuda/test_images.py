"""Code is loaded into another driver instance as it was first loaded, whatever happened to its source
since."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.libcuda.test_exact import move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, offer, post, stand_by
from tests.support import moving
from tests.support.libcudas import DEADLINE_S, standalone
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain
from tests.support.waiting import BUILD_S

__all__ = ["ask", "backend", "copies", "domain", "post", "second"]

TEXT = "standin module\nkernel one {} 0\n"
ONE = "gpu.functions.update(one=gpu.made('cuModuleGetFunction', k, b'one'))"


@pytest.mark.parametrize("change", ["unlink", "rewrite"])
def test_a_file_is_what_it_was_when_it_was_loaded(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path, tmp_path: Path, change: str
) -> None:
    line = post.greet()
    file = tmp_path / "k.cubin"
    file.write_text(TEXT.format("add"))
    ask(f"k = gpu.made('cuModuleLoad', {bytes(file)!r}); {ONE}; m = gpu.memory(4 << 20)")
    assert ask("gpu.run('one', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
    if change == "unlink":
        file.unlink()
    else:
        file.write_text(TEXT.format("fill"))
    stand_by(line, second, copies)
    break_domain(domain)
    assert move(line).text == ""
    assert ask("gpu.run('one', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 2)"
    assert ask.end() == ""


def test_code_in_a_library_that_was_closed_is_not_read(
    second: Domain, post: Post, ask: Program, copies: Path, tmp_path: Path
) -> None:
    """Code from a closed library cannot be read again, so the program gets no standby and says which code."""
    line = post.greet()
    source, library = tmp_path / "code.c", tmp_path / "libcode.so"
    text = TEXT.format("add").replace("\n", "\\n")
    source.write_text(f'const char image[] = "{text}";\n')
    command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=BUILD_S)
    ask(f"lib = ctypes.CDLL({str(library)!r}); at = ctypes.addressof(ctypes.c_char.in_dll(lib, 'image'))")
    ask(f"k = gpu.made('cuModuleLoadData', at); {ONE}; m = gpu.memory(4 << 20)")
    assert ask("ctypes.CDLL(None).dlclose(ctypes.c_void_p(lib._handle))") == "0"
    offer(line, second, copies)
    said = line.hear(moving.UNREADY)
    assert "code" in said.text or "Module" in said.text, said.text
    assert ask("gpu.run('one', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 1)"
    assert ask.end() == ""


def test_names_that_were_given_back_are_given_again(tmp_path: Path) -> None:
    program = standalone(tmp_path, "spare", ["failover/spare.c"])
    done = subprocess.run([program], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
