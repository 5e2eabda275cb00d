"""Around a program: its environment and rights, file systems, replaced drivers, tools beside the proxy."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd_client.driver import find_driver
from tests.libcuda.test_proxy import ask, one_line
from tests.libcuda.test_ways_in import CONTEXT, WORKS
from tests.support import namesdriver
from tests.support.libcudas import DEADLINE_S, MPSD_RUN, PATHS, Libraries, run
from tests.support.site import Site

VAULT = pytest.mark.parametrize("vault", ["0", "1"])


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site(protect='"guard"') as started:
        yield started.start()


# -- environment and rights ------------------------------------------------------------------------------


def test_mpsd_run_passes_every_byte_and_what_is_preloaded(site: Site, libraries: Libraries) -> None:
    odd, preloaded = b"caf\xe9 \xff\n=", b"/nonexistent/\xfe.so"
    environment = {os.fsencode(k): os.fsencode(v) for k, v in libraries.environment(proxied=False).items()}
    environment |= {
        b"PYTHONPATH": os.fsencode(PATHS),
        b"MPSD_SOCKET": os.fsencode(site.socket),
        b"MPSD_LIBCUDA_DIR": os.fsencode(libraries.proxy),
        b"ODD": odd,
    }
    show = b'printf "%s|%s|%s" "$ODD" "$0" "$LD_PRELOAD"; echo "|$MPSD_PROTECTION"'
    command = [
        *map(os.fsencode, MPSD_RUN),
        b"-q",
        b"env",
        b"LD_PRELOAD=" + preloaded,
        b"sh",
        b"-c",
        show,
        odd,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (0, b"|".join([odd, odd, preloaded, b"guard\n"]))
    # The interpreter of mpsd-run loads it too, and then the program does.
    environment[b"LD_PRELOAD"] = preloaded
    command = [*map(os.fsencode, MPSD_RUN), b"-q", b"sh", b"-c", show, odd]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (0, b"|".join([odd, odd, preloaded, b"guard\n"]))


@pytest.mark.skipif(os.geteuid() != 0, reason="a program of another group needs root")
def test_the_user_of_a_privileged_program_does_not_choose_its_driver(
    libraries: Libraries, tmp_path: Path
) -> None:
    """A setgid program that finds the proxy by its own DT_RPATH ignores the variables of mpsd-run."""
    if find_driver({}, str(libraries.proxy)) is not None:
        pytest.skip("this machine has a driver")
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text("int cuInit(unsigned int); int main(void) { return cuInit(0); }\n")
    rpath = f"-Wl,--disable-new-dtags,-rpath,{libraries.proxy}"
    library = str(libraries.proxy / "libcuda.so.1")
    subprocess.run(["gcc", source, "-o", program, rpath, library], check=True, timeout=DEADLINE_S)
    environment = libraries.environment(proxied=True, vault="1")
    assert run([program], environment).returncode == 0
    os.chown(program, -1, 65534)
    program.chmod(0o2755)
    done = run([program], environment)
    assert done.returncode == 100
    assert "no CUDA driver found" in one_line(done.stderr)


# -- file systems ----------------------------------------------------------------------------------------

# A container without a writable file system, shared memory, and the loader's cache and its program.
BARE = """
set -e
mount --make-rprivate /
mount -t tmpfs -o ro,size=4k none /dev/shm
for file in /etc/ld.so.cache /sbin/ldconfig; do [ ! -e $file ] || mount --bind /dev/null $file; done
mount -o remount,bind,ro / || { mount --bind / / && mount -o remount,bind,ro /; }
if touch /dev/shm/x 2>/dev/null || touch "$0" 2>/dev/null; then echo still writable; exit 99; fi
exec "$@"
"""


@VAULT
def test_nothing_is_written_and_no_cache_is_needed(libraries: Libraries, tmp_path: Path, vault: str) -> None:
    program, compat = libraries.program("sequence"), tmp_path / "compat"
    compat.mkdir()
    shutil.copy(libraries.real, compat)
    bare = ["unshare", "--mount", "sh", "-c", BARE, tmp_path / "file"]
    if run([*bare, "true"], os.environ).returncode:
        pytest.skip("no mount namespace can be made here")
    environment = libraries.environment(proxied=True, vault=vault)
    expected = run([program], environment)
    # The driver is found without mpsd-run's help, as one of a cuda-compat folder is.
    del environment["MPSD_REAL_LIBCUDA"]
    environment["LD_LIBRARY_PATH"] += f":{compat}"
    done = run([*bare, program], environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected.stdout, "")


def test_a_compat_folder_goes_before_the_loaders_cache(
    libraries: Libraries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpsd-run finds it as the loader would, also where there is no ldconfig."""
    shutil.copy(libraries.real, tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    path = f"{libraries.proxy}:{tmp_path}:{libraries.standin}"
    assert find_driver({"LD_LIBRARY_PATH": path}, str(libraries.proxy)) == str(tmp_path / "libcuda.so.1")


# -- other drivers ---------------------------------------------------------------------------------------


@VAULT
def test_the_drivers_file_is_replaced_while_the_program_runs(
    libraries: Libraries, tmp_path: Path, vault: str
) -> None:
    """The program keeps the driver that it has. The next one gets the new file."""
    own = tmp_path / "libcuda.so.1"
    shutil.copy(libraries.real, own)
    (tmp_path / "next").mkdir()
    new = namesdriver.build(tmp_path / "next", 13050, 1)
    script = """
library = ctypes.CDLL("libcuda.so.1")
codes = [use(library)]
if len(sys.argv) > 1:
    os.replace(sys.argv[1], sys.argv[2])
    codes += [use(library), library.cuMemcpyDtoD_v2(0, 0, 0), getproc(library, "cuMemAlloc")]
print(json.dumps([*codes, stats().state.name, hasattr(library, "cuOwn000")]))
"""
    environment = libraries.environment(proxied=True, vault=vault) | {"MPSD_REAL_LIBCUDA": str(own)}
    answer, said = ask(CONTEXT + script, environment, new.path, own)
    assert (answer, said) == ([WORKS, WORKS, 0, str(libraries.proxy), "ACTIVE", False], "")
    script = """
library = ctypes.CDLL("libcuda.so.1")
print(json.dumps([library.cuInit(0), library.cuOwn000(), stats().driver_version, stats().state.name]))
"""
    answer, said = ask(script, environment)
    assert (answer, said) == ([0, new.numbers["cuOwn000"], 13050, "ACTIVE"], "")


# -- tools -----------------------------------------------------------------------------------------------


@VAULT
@pytest.mark.parametrize("sanitize", ["address", "undefined", "thread"])
def test_a_program_with_a_sanitizer(libraries: Libraries, tmp_path: Path, sanitize: str, vault: str) -> None:
    """The program alone is instrumented, as a user's is."""
    sanitized = Libraries(libraries.proxy, libraries.standin, sanitize, tmp_path)
    command: list[str | Path] = [sanitized.program("sequence")]
    expected = run([libraries.program("sequence")], libraries.environment(proxied=True, vault=vault))
    done = run(command, sanitized.environment(proxied=True, vault=vault))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", expected.stdout)


def test_debuggers_and_profilers_meet_the_driver_itself(libraries: Libraries, tmp_path: Path) -> None:
    """cuda-gdb looks for data of the driver, which is in the driver's library alone. A profiler asks for
    private tables, and gets the driver's."""
    driver = namesdriver.build(tmp_path, 13050, 1)
    script = """
library, driver = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(sys.argv[1])
def data(of):
    try:
        return ctypes.c_uint.in_dll(of, "cudbgIpcFlag").value
    except ValueError:
        return None
def table(of):
    found = ctypes.c_void_p()
    return [of.cuGetExportTable(ctypes.byref(found), b"s" * 16), found.value]
print(json.dumps([data(library), data(driver), table(library) == table(driver), table(library)[0]]))
"""
    environment = libraries.environment(proxied=True)
    answer, said = ask(script, environment | {"MPSD_REAL_LIBCUDA": str(driver.path)}, driver.path)
    assert (answer, said) == ([None, 4711, True, driver.numbers["cuGetExportTable"]], "")
    answer, said = ask(script, environment, libraries.real)
    assert (answer, said) == ([None, None, True, 0], "")
