"""The libcuda proxy, its stand-in driver and small C programs, built once per test session.

Test processes of one session share the libraries; each compiles its own programs.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from faultinject.rig import libraries
from libcuda_build.compile import FOLDER, build_proxy, build_standin
from libcuda_build.header import find_include
from mpsd.base import debug
from tests.support.waiting import BUILD_S

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "libcuda" / "programs"
PATHS = f"{ROOT}:{ROOT / 'clients'}:{ROOT / 'clients' / 'libcuda'}"
"""PYTHONPATH of a program that imports packages of this tree."""
MPSD_RUN = [sys.executable, "-m", "mpsd_client.run"]
DEADLINE_S = 60.0
_QUICK_COMPILER = """#!/bin/sh
exec gcc "$@" -O0 -g0 -fno-lto
"""


def quick_compiler(folder: Path) -> str:
    """Write a compiler for $CC that does not optimise, and return its path.

    It is for tests about a build itself: the session's libraries are optimised and run in all other tests.
    """
    path = folder / "gcc-quick"
    path.write_text(_QUICK_COMPILER)
    path.chmod(0o755)
    return str(path)


def standalone(folder: Path, name: str, sources: Iterable[str], *flags: str, sanitize: str = "") -> Path:
    """Compile programs/NAME.c in `folder` with these files of the proxy, and nothing else of it."""
    # The files need only the existence of what the generator writes.
    sizes = "".join(f"#define MPSD_{number} 1\n" for number in ("NAMES", "SPARE", "WRAPPERS"))
    (folder / "functions.h").write_text(f"#include <cuda.h>\n{sizes}")
    program = folder / "program"
    command = ["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Werror", f"-I{folder}"]
    command += [f"-I{FOLDER / 'src'}", "-isystem", str(find_include()), "-o", str(program)]
    command += [f"-fsanitize={sanitize}"] if sanitize else []
    command += [str(PROGRAMS / f"{name}.c"), *(str(FOLDER / "src" / source) for source in sources)]
    subprocess.run([*command, *flags, "-lpthread", "-ldl"], check=True, timeout=BUILD_S)
    return program


def compile_library(target: Path, source: Path, *flags: str) -> Path:
    """Compile a source as a shared library that a test loads, and return it."""
    command = ["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    command += ["-isystem", str(find_include()), "-o", str(target), str(source), *flags, "-ldl"]
    subprocess.run(command, check=True, timeout=BUILD_S)
    return target


@dataclass(frozen=True)
class Libraries:
    """Both libraries, each in a folder of its own, built with one choice of sanitizers."""

    proxy: Path
    standin: Path
    sanitize: str
    programs: Path
    _built: dict[str, Path] = field(default_factory=dict)

    def for_harness(self) -> libraries.Libraries:
        return libraries.Libraries(self.proxy, self.standin)

    @property
    def real(self) -> Path:
        return self.standin / "libcuda.so.1"

    def program(self, name: str, *, direct: bool = False, sources: tuple[str, ...] = ()) -> Path:
        """Compile programs/NAME.c with `sources` of the proxy; `direct` links it with libcuda.so.1."""
        key = f"{name}-direct" if direct else name
        if key not in self._built:
            target = self.programs / key
            made = [FOLDER / "src" / source for source in sources]
            command = ["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Werror"]
            command += ["-isystem", str(find_include()), "-o", str(target), str(PROGRAMS / f"{name}.c")]
            command += [f"-fsanitize={self.sanitize}"] if self.sanitize else []
            command += [f"-I{source.parent}" for source in made] + [str(source) for source in made]
            command += ["-DDIRECT", str(self.real)] if direct else []
            subprocess.run([*command, "-ldl", "-lpthread"], check=True, timeout=BUILD_S)
            self._built[key] = target
        return self._built[key]

    def environment(self, *, proxied: bool, **extra: str) -> dict[str, str]:
        """Return the environment of a program that uses the stand-in, alone or behind the proxy.

        No variable of the caller leaks in. A name in lower case is a field of MPSD_DEBUG.
        """
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        folder = self.proxy if proxied else self.standin
        named = {"MPSD_REAL_LIBCUDA": str(self.real)} if proxied else {}
        # Tests count the driver's calls one by one, so each thread makes its own.
        fields = {"relay": os.environ.get("MPSD_TEST_RELAY", "off")}
        fields |= {name: value for name, value in extra.items() if name.islower()}
        variables = {name: value for name, value in extra.items() if not name.islower()}
        options = {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
        options |= debug.variable(**fields)
        return {**kept, **options, "LD_LIBRARY_PATH": str(folder), **named, **variables}


def build_libraries(folder: Path, sanitize: str = "") -> Libraries:
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(build_proxy, folder / "proxy", sanitize=sanitize, strict=True),
            pool.submit(build_standin, folder / "standin", sanitize=sanitize, strict=True),
        ]
        for one in made:
            one.result()
    programs = folder / "programs"
    programs.mkdir()
    return Libraries(folder / "proxy", folder / "standin", sanitize, programs)


def session_libraries(factory: pytest.TempPathFactory) -> Libraries:
    """The libraries without sanitizers, built once for all tests of this session."""
    own = factory.getbasetemp()
    # pytest-xdist gives each of its processes a folder inside the session's.
    return _built(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own, own)


@cache
def _built(shared: Path, own: Path) -> Libraries:
    folder, programs = shared / "libcudas", own / "programs"
    with (shared / "libcudas.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "programs").exists():
            build_libraries(folder)
    programs.mkdir()
    return Libraries(folder / "proxy", folder / "standin", "", programs)


def run(
    command: list[str | Path],
    environment: Mapping[str, str],
    cwd: Path | None = None,
    deadline_s: float = DEADLINE_S,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env=dict(environment),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
