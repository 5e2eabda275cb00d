"""Ways in which programs load a driver: each leads through the proxy, or the loss shows in `doctor`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.libcuda.test_proxy import ask, one_line
from tests.support.libcudas import DEADLINE_S, MPSD_RUN, ROOT, Libraries, compile_library
from tests.support.site import OTHER_UID, Site, until

CONTEXT = """
context, memory, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t(100)
def use(library):
    return [library.cuInit(0), library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
            library.cuCtxSetCurrent(context), library.cuMemAlloc_v2(ctypes.byref(memory), size),
            library.cuMemFree_v2(memory)]
def place(function):
    return reached(ctypes.cast(function, ctypes.c_void_p).value)
"""
WORKS = [0] * 5


@pytest.mark.parametrize("vault", ["0", "1"])
def test_the_drivers_path_after_the_proxy_is_the_same_driver(
    libraries: Libraries, tmp_path: Path, vault: str
) -> None:
    """By its path or a link, the loader returns the driver that is there: both work in one context."""
    link = tmp_path / "libcuda.so.1"
    link.symlink_to(libraries.real)
    script = """
library = ctypes.CDLL("libcuda.so.1")
codes = [use(library)]
for path in sys.argv[1:]:
    codes += [use(ctypes.CDLL(path)), use(library)]
print(json.dumps([codes, stats().state.name]))
"""
    environment = libraries.environment(proxied=True, vault=vault)
    answer, said = ask(CONTEXT + script, environment, libraries.real, link)
    assert (answer, said) == ([[WORKS] * 5, "ACTIVE"], "")


def test_a_link_to_the_driver_before_the_proxy_is_the_driver(libraries: Libraries, tmp_path: Path) -> None:
    link = tmp_path / "libcuda.so.999"
    link.symlink_to(libraries.real)
    script = """
first = ctypes.CDLL(sys.argv[1])
library = ctypes.CDLL(sys.argv[2])
print(json.dumps([use(library), use(first), stats().state.name]))
"""
    paths = (link, libraries.proxy / "libcuda.so.1")
    answer, said = ask(CONTEXT + script, libraries.environment(proxied=True), *paths)
    assert answer == [WORKS, WORKS, "ASIDE"]
    assert "opened the driver by its path" in one_line(said)


def test_other_calls_of_the_loader_lead_to_the_proxy(libraries: Libraries) -> None:
    """RTLD_DEEPBIND changes nothing, and dlvsym() finds no version, as in the driver, which has none."""
    script = """
deep = ctypes.CDLL("libcuda.so.1", mode=0x8 | 0x2)
find = ctypes.CDLL(None).dlvsym
find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
versioned = find(deep._handle, b"cuMemAlloc_v2", b"GLIBC_2.2.5")
print(json.dumps([use(deep), versioned, place(deep.cuMemAlloc_v2)]))
"""
    for proxied, folder in ((False, libraries.standin), (True, libraries.proxy)):
        answer, said = ask(CONTEXT + script, libraries.environment(proxied=proxied))
        assert (answer, said) == ([WORKS, None, str(folder)], "")


@pytest.mark.parametrize("vault", ["0", "1"])
def test_a_namespace_of_its_own_has_a_proxy_of_its_own(libraries: Libraries, vault: str) -> None:
    """The second driver is refused its name by the first, with and without the proxy."""
    script = """
libc = ctypes.CDLL(None)
libc.dlmopen.restype, libc.dlmopen.argtypes = ctypes.c_void_p, [ctypes.c_long, ctypes.c_char_p, ctypes.c_int]
library = ctypes.CDLL("libcuda.so.1")
codes = [use(library)]
apart = libc.dlmopen(-1, b"libcuda.so.1", 2)
codes += [ctypes.CDLL("apart", handle=apart).cuInit(0), use(library)]
print(json.dumps(codes))
"""
    for proxied in (False, True):
        answer, said = ask(CONTEXT + script, libraries.environment(proxied=proxied, vault=vault))
        assert (answer, said) == ([WORKS, 304, WORKS], "")


# -- libraries of wheels ---------------------------------------------------------------------------------

EMPTY = "int wheel(void); int wheel(void) { return 7; }\n"


@pytest.fixture(scope="module")
def wheel(libraries: Libraries, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library as wheels have: it needs libcuda.so.1, and its DT_RPATH has a driver's folder."""
    return linked(tmp_path_factory.mktemp("wheel"), libraries, libraries.standin)


def linked(folder: Path, libraries: Libraries, rpath: Path) -> Path:
    source = folder / "wheel.c"
    source.write_text(EMPTY)
    flags = ["-Wl,--disable-new-dtags,--no-as-needed", f"-Wl,-rpath,{rpath}", str(libraries.real)]
    made = compile_library(folder / "wheel.so", source, *flags)
    said = subprocess.run(["readelf", "-d", made], check=True, capture_output=True, text=True).stdout
    assert "(RPATH)" in said and "(RUNPATH)" not in said
    return made


def test_a_wheel_whose_rpath_has_no_driver_gets_the_proxy(libraries: Libraries, tmp_path: Path) -> None:
    made = linked(tmp_path, libraries, tmp_path)
    script = """
library = ctypes.CDLL(sys.argv[1])
print(json.dumps([use(library), place(library.cuInit), stats().state.name]))
"""
    answer, said = ask(CONTEXT + script, libraries.environment(proxied=True), made)
    assert (answer, said) == ([WORKS, str(libraries.proxy), "ACTIVE"], "")


def test_a_wheel_whose_rpath_has_the_driver_runs_without_the_proxy(libraries: Libraries, wheel: Path) -> None:
    script = """
library = ctypes.CDLL(sys.argv[1])
print(json.dumps([use(library), use(ctypes.CDLL("libcuda.so.1")), stats() is None]))
"""
    answer, said = ask(CONTEXT + script, libraries.environment(proxied=True), wheel)
    assert (answer, said) == ([WORKS, WORKS, True], "")


# -- doctor ----------------------------------------------------------------------------------------------

IMPORTS = "import ctypes, json, sys\n"
CLIENT = """
way, path = sys.argv[1:]
library = ctypes.CDLL(path if way == "rpath" else "libcuda.so.1")
print(json.dumps(use(library)), flush=True)
if way == "path":
    # By its other name mpsd's library is no driver of its own.
    ctypes.CDLL(path), ctypes.CDLL("libcuda.so")
elif way == "dlmopen":
    load = ctypes.CDLL(None).dlmopen
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_long, ctypes.c_char_p, ctypes.c_int]
    assert load(-1, path.encode(), 2)
print("loaded", flush=True)
sys.stdin.read()
library.cuDevicePrimaryCtxReset_v2(0)
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site(protect='"guard"') as started:
        yield started.start()


@contextmanager
def client(site: Site, libraries: Libraries, way: str, path: Path) -> Iterator[int]:
    environment = {
        **libraries.environment(proxied=False, vault="1"),
        "PYTHONPATH": f"{ROOT / 'clients'}:{ROOT}",
        "MPSD_SOCKET": site.socket,
        "MPSD_LIBCUDA_DIR": str(libraries.proxy),
        "MPSD_STANDIN_GPU": "simulated",
    }
    command = [*MPSD_RUN, "-q", sys.executable, "-c", IMPORTS + CONTEXT + CLIENT, way, str(path)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdin is not None
            assert json.loads(process.stdout.readline()) == WORKS
            assert process.stdout.readline() == "loaded\n"
            site.until(
                lambda status: any(c["pid"] == process.pid for c in status["clients"]), "mpsd sees the client"
            )
            yield process.pid
            process.stdin.close()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def found(site: Site, uid: int | None = None) -> dict[str, tuple[object, str, str]]:
    rows = site.ask(lambda client: client.doctor(), uid)
    return {
        r["name"]: (r["ok"], r["finding"], r["remedy"]) for r in rows if r["name"].startswith("libcuda of")
    }


@pytest.mark.parametrize("way", ["inode", "dlmopen"])
def test_doctor_names_a_program_with_several_drivers(
    site: Site, libraries: Libraries, tmp_path: Path, way: str
) -> None:
    path = libraries.real
    if way == "inode":
        path = tmp_path / "libcuda.so.999"
        shutil.copy(libraries.real, path)
    with client(site, libraries, "path" if way == "inode" else way, path) as pid:
        ok, finding, remedy = found(site)[f"libcuda of {pid}"]
        assert list(found(site, OTHER_UID)) == ["libcuda of clients"]
    assert ok is None
    assert finding.startswith("several drivers are loaded: ") and "by its name" in remedy
    files = finding.partition(": ")[2].partition(";")[0].split(", ")
    assert sorted(files) == sorted([str(libraries.proxy / "libcuda.so.1"), str(libraries.real), str(path)])


def test_doctor_names_a_program_that_lost_the_proxy(site: Site, libraries: Libraries, wheel: Path) -> None:
    with client(site, libraries, "rpath", wheel) as pid:
        ok, finding, remedy = found(site)[f"libcuda of {pid}"]
    expected = f"mpsd's libcuda.so.1 is not loaded, but {libraries.real} is: the program is not protected"
    assert (ok, finding) == (None, expected)
    assert "DT_RPATH" in remedy


def test_doctor_has_nothing_against_a_program_with_one_driver(site: Site, libraries: Libraries) -> None:
    with client(site, libraries, "path", libraries.real):
        expected = {"libcuda of clients": (True, "no client has a driver past mpsd's libcuda.so.1", "")}
        until(lambda: found(site) == expected, "doctor has nothing against it")
