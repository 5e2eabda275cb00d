"""How the proxy finds the driver, which symbols it exports, and when it passes through."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpsd_client.driver import find_driver
from tests.support.libcudas import DEADLINE_S, ROOT, Libraries, run

# Common code of the scripts below. `reached` says which library an entry point lies in.
PREAMBLE = f"""
import ctypes, json, os, sys
sys.path.insert(0, {str(ROOT / "clients" / "libcuda")!r})
from mpsd_libcuda.stats import read_stats
class Info(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p),
                ("address", ctypes.c_void_p)]
def reached(address):
    info = Info()
    ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info))
    return os.path.dirname(info.file.decode())
def getproc(library, name):
    pointer = ctypes.c_void_p()
    code = library.cuGetProcAddress_v2(name.encode(), ctypes.byref(pointer), 12040, 0, None)
    return reached(pointer.value) if code == 0 else code
def stats():
    return read_stats(os.getpid())
"""


def ask(script: str, environment: dict[str, str], *given: str | Path) -> tuple[object, str]:
    """Return the script's answer, printed as JSON, and its stderr."""
    done = run([sys.executable, "-c", PREAMBLE + script, *given], environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def one_line(said: str) -> str:
    lines = said.splitlines()
    assert len(lines) == 1 and lines[0].startswith("mpsd-libcuda["), said
    return lines[0]


def test_it_exports_nothing_but_entry_points(libraries: Libraries) -> None:
    done = run(["nm", "-D", "--defined-only", libraries.proxy / "libcuda.so.1"], os.environ)
    names = [line.split()[-1] for line in done.stdout.splitlines()]
    assert len(names) > 600
    assert [name for name in names if not name.startswith("cu")] == []


def test_its_thread_locals_find_room_in_a_program_that_opens_it(libraries: Libraries) -> None:
    """Thread-local storage fits in a program that opens the proxy late.

    The loader has no room then for an alignment above the C library's thread control block: 64 on x86-64,
    and 16 on older aarch64.
    """
    done = run(["readelf", "-lW", libraries.proxy / "libcuda.so.1"], os.environ)
    (alignment,) = [
        int(line.split()[-1], 16) for line in done.stdout.splitlines() if line.split()[:1] == ["TLS"]
    ]
    assert alignment <= (64 if platform.machine() == "x86_64" else 16)


def test_its_names_are_those_of_the_driver_behind_it(libraries: Libraries) -> None:
    script = """
library = ctypes.CDLL("libcuda.so.1")
answer = ctypes.c_int()
code = library.cuStandinFromTheFuture(ctypes.byref(answer))
names = ["cuLaunchKernel", "cuCtxCreate_v4", "cuGLInit", "cu__mpsd_spare_000_".ljust(95, "x"),
         "cu__mpsd_spare_100_".ljust(95, "x"), "cuStandinFromTheFuture"]
found = stats()
print(json.dumps([[hasattr(library, name) for name in names], code, answer.value, found.added, found.lacking,
                  found.hidden > 0]))
"""
    answer, said = ask(script, libraries.environment(proxied=True))
    assert answer == [[True, False, False, False, False, True], 0, 42, 1, 0, True]
    assert said == ""


def test_every_way_to_a_function_leads_through_the_proxy(libraries: Libraries) -> None:
    script = """
library = ctypes.CDLL("libcuda.so.1")
before = [getproc(library, name) for name in ("cuMemAlloc", "cuGetProcAddress", "cuStandinFromTheFuture")]
private = [getproc(library, "cuStandinPrivate") for _ in range(2)]
missing = getproc(library, "cuNoSuchThing")
table = library.cuGetExportTable(ctypes.byref(ctypes.c_void_p()), b"0123456789abcdef")
found = stats()
print(json.dumps([before, private, missing, table, found.asked, found.mapped, found.unmapped,
                  found.export_tables, found.unknown, found.state.name, found.real_path]))
"""
    answer, said = ask(script, libraries.environment(proxied=True))
    proxy, standin = str(libraries.proxy), str(libraries.standin)
    counted = [6, 3, 2, 1, {"cuStandinPrivate": 2}, "ACTIVE", str(libraries.real)]
    assert answer == [[proxy] * 3, [standin] * 2, 500, 500, *counted]
    assert said == ""


LOAD = """
library = ctypes.CDLL(sys.argv[1] if len(sys.argv) > 1 else "libcuda.so.1")
code = library.cuInit(0)
found = stats()
print(json.dumps([code, found.state.name, found.real_path]))
"""


def test_without_a_driver_there_is_no_device_and_one_line(libraries: Libraries) -> None:
    environment = libraries.environment(proxied=True)
    del environment["MPSD_REAL_LIBCUDA"]
    if find_driver({}, str(libraries.proxy)) is not None:
        pytest.skip("this machine has a driver")
    answer, said = ask(LOAD, environment)
    assert answer == [100, "NO_DRIVER", ""]
    assert "no CUDA driver found" in one_line(said)


def test_the_driver_is_found_where_the_loader_looks(libraries: Libraries, tmp_path: Path) -> None:
    """The search skips the proxy itself, a copy of it, and a file that is no library."""
    (tmp_path / "copy").mkdir()
    shutil.copy(libraries.proxy / "libcuda.so.1", tmp_path / "copy")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "libcuda.so.1").write_text("not a library")
    folders = [libraries.proxy, tmp_path / "copy", tmp_path / "text", tmp_path / "none", libraries.standin]
    environment = libraries.environment(proxied=True, LD_LIBRARY_PATH=":".join(map(str, folders)))
    environment["MPSD_REAL_LIBCUDA"] = str(tmp_path / "text" / "libcuda.so.1")
    answer, said = ask(LOAD, environment)
    assert answer == [0, "ACTIVE", str(libraries.real)]
    assert "is not a CUDA driver" in one_line(said)
    del environment["MPSD_REAL_LIBCUDA"]
    assert ask(LOAD, environment) == ([0, "ACTIVE", str(libraries.real)], "")


def test_the_list_of_the_loader_is_read(libraries: Libraries, tmp_path: Path) -> None:
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin:/usr/bin:/bin")
    if ldconfig is None:
        pytest.skip("no ldconfig")
    cache, conf = tmp_path / "ld.so.cache", tmp_path / "ld.so.conf"
    conf.write_text(f"{libraries.proxy}\n{libraries.standin}\n")
    subprocess.run([ldconfig, "-X", "-C", cache, "-f", conf], check=True, timeout=DEADLINE_S)
    seen = run([libraries.program("cache", sources=("cache.c",)), cache], os.environ).stdout.splitlines()
    assert sorted(seen) == sorted([str(libraries.proxy / "libcuda.so.1"), str(libraries.real)])
    whole = cache.read_bytes()
    for length in (0, 10, 30, 60, len(whole) // 2):
        cache.write_bytes(whole[:length])
        assert run([libraries.program("cache", sources=("cache.c",)), cache], os.environ).returncode == 0


@pytest.mark.parametrize(
    "version, knows", [("12030", False), ("12040", True), ("13990", True), ("14000", False)]
)
def test_a_driver_of_an_unknown_generation_is_left_alone(
    libraries: Libraries, version: str, knows: bool
) -> None:
    script = """
library = ctypes.CDLL("libcuda.so.1")
codes = [library.cuInit(0), library.cuInit(0)]
found = stats()
print(json.dumps([codes, found.state.name, found.driver_version, getproc(library, "cuMemAlloc")]))
"""
    answer, said = ask(script, libraries.environment(proxied=True, MPSD_STANDIN_VERSION=version))
    state, folder = ("ACTIVE", libraries.proxy) if knows else ("ASIDE", libraries.standin)
    assert answer == [[0, 0], state, int(version), str(folder)]
    if knows:
        assert said == ""
    else:
        assert "pass-through: the driver is for CUDA" in one_line(said)


def test_it_steps_aside_for_a_program_that_opened_the_driver_by_its_path(libraries: Libraries) -> None:
    script = """
real = ctypes.CDLL(sys.argv[1])
library = ctypes.CDLL(sys.argv[2])
print(json.dumps([library.cuInit(0), stats().state.name, getproc(library, "cuMemAlloc")]))
"""
    paths = (libraries.real, libraries.proxy / "libcuda.so.1")
    answer, said = ask(script, libraries.environment(proxied=True), *paths)
    assert answer == [0, "ASIDE", str(libraries.standin)]
    assert "opened the driver by its path" in one_line(said)


def test_it_steps_aside_for_a_program_with_another_libcuda(libraries: Libraries, tmp_path: Path) -> None:
    other = tmp_path / "libcuda.so.999"
    shutil.copy(libraries.real, other)
    script = """
library = ctypes.CDLL("libcuda.so.1")
real = ctypes.CDLL(sys.argv[1])
print(json.dumps([library.cuInit(0), stats().state.name, stats().reason]))
"""
    answer, said = ask(script, libraries.environment(proxied=True), other)
    assert answer == [0, "ASIDE", f"the program has loaded another libcuda ({other})"]
    assert str(other) in one_line(said)


def test_a_program_that_opens_only_the_driver_by_its_path_meets_no_proxy(libraries: Libraries) -> None:
    """A program that opens the driver by path, and then by name, gets no proxy: the loader returns the
    loaded driver."""
    script = """
library = ctypes.CDLL(sys.argv[1])
again = ctypes.CDLL("libcuda.so.1")
print(json.dumps([library.cuInit(0), stats() is None]))
"""
    assert ask(script, libraries.environment(proxied=True), libraries.real) == ([0, True], "")


def test_both_names_lead_to_one_proxy(libraries: Libraries) -> None:
    script = """
libraries = [ctypes.CDLL(name) for name in sys.argv[1:]]
print(json.dumps([[library.cuInit(0) for library in libraries], stats().state.name,
                  len({ctypes.cast(library.cuInit, ctypes.c_void_p).value for library in libraries})]))
"""
    for names in (("libcuda.so", "libcuda.so.1"), ("libcuda.so.1", "libcuda.so")):
        assert ask(script, libraries.environment(proxied=True), *names) == ([[0, 0], "ACTIVE", 1], "")


def test_a_forked_child_counts_for_itself(libraries: Libraries) -> None:
    script = """
library = ctypes.CDLL("libcuda.so.1")
getproc(library, "cuMemAlloc")
back, there = os.pipe()
child = os.fork()
if child == 0:
    getproc(library, "cuMemFree"); getproc(library, "cuMemAlloc")
    own = stats()
    os.write(there, json.dumps([own.pid == os.getpid(), own.asked]).encode())
    os._exit(library.cuInit(0))
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps([status, json.loads(os.read(back, 100)), stats().pid == os.getpid(), stats().asked]))
"""
    assert ask(script, libraries.environment(proxied=True)) == ([0, [True, 3], True, 1], "")


def test_a_child_forked_after_cuinit_is_refused_as_without_the_proxy(libraries: Libraries) -> None:
    script = """
library = ctypes.CDLL("libcuda.so.1")
codes = [library.cuInit(0)]
child = os.fork()
if child == 0:
    os._exit(library.cuInit(0))
codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps([codes, library.cuInit(0)]))
"""
    for proxied in (False, True):
        assert ask(script, libraries.environment(proxied=proxied)) == ([[0, 3], 0], "")


def test_the_library_takes_no_descriptor_of_the_program(libraries: Libraries) -> None:
    script = """
before = len(os.listdir("/proc/self/fd"))
library = ctypes.CDLL("libcuda.so.1")
library.cuInit(0)
print(json.dumps(len(os.listdir("/proc/self/fd")) - before))
"""
    # The driver itself leaves one descriptor open.
    assert ask(script, libraries.environment(proxied=False)) == (1, "")
    assert ask(script, libraries.environment(proxied=True)) == (1, "")
