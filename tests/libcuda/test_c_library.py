"""The program's C library: the proxy needs some version of glibc, and mpsd-run names an older one."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd_client.driver import libc_obstacle
from tests.support import debs
from tests.support.libcudas import MPSD_RUN, Libraries, run
from tests.support.site import Site

# Versions of glibc, as Debian 11 and 13 have them.
OLD, NEW = "glibc/libc6_2.31-13+deb11u11_amd64.deb", "glibc/libc6_2.41-12_amd64.deb"
X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="these packages are for x86-64")


def needed(libraries: Libraries) -> tuple[int, int]:
    said = run(["readelf", "-VW", libraries.proxy / "libcuda.so.1"], os.environ).stdout
    return max((int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", said))


def loader(package: str) -> tuple[Path, Path]:
    """Return the loader of a package, and the folder of its libraries."""
    (found,) = debs.unpacked(f"g/{package}").glob("**/x86_64-linux-gnu/ld-linux*.so.2")
    return found, found.parent


def test_a_program_with_an_older_glibc_is_told(libraries: Libraries, monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor = needed(libraries)
    assert libc_obstacle(str(libraries.proxy)) == ("", "")
    answers = {f"glibc {major}.{minor}": "", f"glibc {major}.{minor - 1}": f"needs glibc {major}.{minor}"}
    for answer, expected in answers.items():
        monkeypatch.setattr(os, "confstr", lambda name, answer=answer: answer)
        why, remedy = libc_obstacle(str(libraries.proxy))
        assert expected in why and bool(why) == bool(remedy) == bool(expected)

    def musl(name: str) -> str:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "confstr", musl)
    why, remedy = libc_obstacle(str(libraries.proxy))
    assert why == "this system's C library is not glibc" and "driver needs it" in remedy


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site(protect='"guard"') as started:
        yield started.start()


def test_mpsd_run_leaves_a_proxy_out_that_the_loader_would_refuse(
    site: Site, libraries: Libraries, tmp_path: Path
) -> None:
    """The program runs at level observe. With the proxy in LD_LIBRARY_PATH it would not start."""
    (tmp_path / "libcuda.so.1").write_bytes(b"\x7fELF\0GLIBC_2.2.5\0GLIBC_9.99\0cu__mpsd_spare_")
    environment = {
        **libraries.environment(proxied=False),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "MPSD_SOCKET": site.socket,
        "MPSD_LIBCUDA_DIR": str(tmp_path),
    }
    done = run([*MPSD_RUN, "sh", "-c", "echo $LD_LIBRARY_PATH"], environment)
    assert done.returncode == 0 and done.stdout == f"{libraries.standin}\n"
    assert "mpsd's libcuda.so.1 needs glibc 9.99, and this system has " in done.stderr


@X86
def test_the_loader_of_an_older_glibc_refuses_the_proxy(libraries: Libraries) -> None:
    program, folder = loader(OLD)
    done = run([program, "--library-path", folder, libraries.proxy / "libcuda.so.1"], {})
    major, minor = needed(libraries)
    assert (major, minor) > (2, 31) and f"version `GLIBC_{major}.{minor}' not found" in done.stderr


@X86
@pytest.mark.parametrize("vault", ["0", "1"])
def test_the_proxy_runs_with_a_newer_glibc(libraries: Libraries, vault: str) -> None:
    program, folder = loader(NEW)
    command = [libraries.program("sequence")]
    expected = run(command, libraries.environment(proxied=True, vault=vault))
    environment = libraries.environment(proxied=True, vault=vault)
    path = f"{environment.pop('LD_LIBRARY_PATH')}:{folder}"
    done = run([program, "--library-path", path, *command], environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected.stdout, "")
