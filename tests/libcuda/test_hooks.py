"""Tools that hook the driver's functions work with the proxy as with the driver: preloaded or patched in."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from libcuda_build.emit import write_sources
from libcuda_build.header import Function
from libcuda_build.table import Plan
from tests.libcuda.test_failover import Program, break_domain, copies, move, post, stand_by, started
from tests.support.libcudas import PROGRAMS, Libraries, compile_library, run
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain
from tests.support.wheels import unpacked

__all__ = ["backend", "copies", "domain", "post", "second"]

UCX = ("libucx-cu12", "1.22.0")
VAULT = pytest.mark.parametrize("vault", ["0", "1"])
X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the stubs of x86-64 alone can be patched")
PRELOADED = "preloaded: "


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("preloaded") / "preloaded.so", PROGRAMS / "preloaded.c")


def split(said: str) -> tuple[list[str], str]:
    """Return the program's lines, and the one of the preloaded library: its calls."""
    *lines, last = said.splitlines()
    assert last.startswith(PRELOADED), said
    return lines, last


@VAULT
@pytest.mark.parametrize("how", ["dlsym", "getproc"])
def test_a_preloaded_dlsym_sees_each_call_once(
    libraries: Libraries, preloaded: Path, how: str, vault: str
) -> None:
    """The proxy takes the driver's functions from the driver's own symbol table. By dlsym() it would get
    those of the preloaded library, which lead back to the proxy."""
    command: list[str | Path] = [libraries.program("sequence"), how]
    plain = run(command, libraries.environment(proxied=True, vault=vault))
    alone = run(command, libraries.environment(proxied=False, LD_PRELOAD=str(preloaded)))
    done = run(command, libraries.environment(proxied=True, vault=vault, LD_PRELOAD=str(preloaded)))
    assert (done.returncode, done.stderr, alone.returncode, alone.stderr) == (0, "", 0, "")
    lines, calls = split(done.stdout)
    assert lines == plain.stdout.splitlines()
    assert calls == split(alone.stdout)[1]
    assert "cuMemAlloc_v2 8 " in calls


@pytest.fixture
def hooked(libraries: Libraries, domain: Domain, post: Post, preloaded: Path) -> Iterator[Program]:
    with started(libraries, domain, post, LD_PRELOAD=str(preloaded)) as program:
        yield program


def test_a_preloaded_dlsym_does_not_reach_into_the_next_driver_instance(
    second: Domain, domain: Domain, post: Post, hooked: Program, copies: Path
) -> None:
    line = post.greet()
    hooked("m = gpu.memory(8 << 20); gpu.run('add', m, 4, 7); gpu.sync()")
    stand_by(line, second, copies)
    break_domain(domain)
    move(line)
    assert hooked("gpu.run('add', m, 4, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 8)"
    assert hooked.end() == ""


@X86
@VAULT
def test_a_function_can_be_patched_in_place(libraries: Libraries, vault: str) -> None:
    """The program overwrites the first bytes of cuMemAlloc. The hook sees both ways to the function."""
    done = run([libraries.program("patched")], libraries.environment(proxied=True, vault=vault))
    assert (done.returncode, done.stdout, done.stderr) == (0, "200\n300\n", "")


@X86
@VAULT
def test_ucx_installs_its_memory_hooks(libraries: Libraries, vault: str) -> None:
    folder = unpacked(*UCX) / "libucx" / "lib"
    environment = libraries.environment(proxied=True, vault=vault, UCX_MEM_LOG_LEVEL="diag")
    environment["LD_LIBRARY_PATH"] += f":{folder}"
    done = run([sys.executable, PROGRAMS / "ucx.py", folder], environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[0, 0, 0, 0, 0] 0 ['allocated', 'freed']\n"


@X86
def test_the_stubs_ask_for_no_check_of_branch_targets(tmp_path: Path) -> None:
    """The mark of the stubs' object promises what they keep to: a shadow stack, and no endbr64."""
    function = Function("cuInit", ("unsigned int Flags",))
    write_sources(Plan(("cuInit",), ("cuInit",), {"cuInit": "always"}, {"cuInit": function}), tmp_path)
    compile_library(tmp_path / "stubs.o", tmp_path / "stubs.S", "-c", "-fcf-protection=full")
    said = run(["readelf", "-n", tmp_path / "stubs.o"], {"PATH": "/usr/bin:/bin"}).stdout
    assert "SHSTK" in said and "IBT" not in said
