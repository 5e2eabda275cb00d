"""Search for mpsd's libcuda.so.1 and for the NVIDIA driver's."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping

LIBRARY_NAME = "libcuda.so.1"
_PACKAGE = "mpsd_libcuda"
_SYSTEM_PLACE = "/usr/lib/mpsd/libcuda"

# The same places as in clients/libcuda/src/find.c.
_USUAL_PLACES = (
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
    f"/usr/lib/{os.uname().machine}-linux-gnu",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
)
_LDCONFIG_S = 10.0
_ELF = b"\x7fELF"
_HEAD = 20
# Names of the proxy's unused entry points, near the start of its file. The driver has no such names.
_MARK, _MARK_WITHIN = b"cu__mpsd_spare_", 1 << 18
_GLIBC = re.compile(rb"\0GLIBC_(\d+\.\d+)(?=[.\0])")


def find_proxy(environ: Mapping[str, str], named: str | None = None) -> str | None:
    """Return the folder of mpsd's libcuda.so.1: `named`, $MPSD_LIBCUDA_DIR, or the installed package's."""
    wish = named or environ.get("MPSD_LIBCUDA_DIR")
    for folder in [wish] if wish else [*_packaged(), _SYSTEM_PLACE]:
        if os.path.isfile(os.path.join(folder, LIBRARY_NAME)):
            return os.path.abspath(folder)
    return None


def _packaged() -> Iterator[str]:
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        yield os.path.join(place, "lib")


def libc_obstacle(proxy: str) -> tuple[str, str]:
    """Return why programs with this process's C library cannot load the proxy in this folder, and the remedy.

    Both are empty if they can. The loader would refuse the library, and with it the program."""
    try:
        start = _start(os.path.join(proxy, LIBRARY_NAME), _MARK_WITHIN)
    except OSError:
        return "", ""
    needed = {tuple(map(int, version.split(b"."))) for version in _GLIBC.findall(start)}
    try:
        own = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    except ValueError:
        own = ""
    if not own:
        return "this system's C library is not glibc", "use a system with glibc: the driver needs it, too"
    if needed and max(needed) > tuple(map(int, own.split("."))):
        least = ".".join(map(str, max(needed)))
        why = f"mpsd's {LIBRARY_NAME} needs glibc {least}, and this system has {own}"
        return why, "build mpsd-libcuda on a system with this glibc, and name it by --library DIR"
    return "", ""


def find_driver(environ: Mapping[str, str], proxy: str | None) -> str | None:
    """Return the libcuda.so.1 that a program would load without the proxy. `proxy`: the proxy's folder."""
    named = environ.get("MPSD_REAL_LIBCUDA")
    own = os.path.join(proxy, LIBRARY_NAME) if proxy is not None else None
    for path in [*([named] if named else []), *_candidates(environ)]:
        if _is_driver(path, own):
            return os.path.abspath(path)
    return None


def _candidates(environ: Mapping[str, str]) -> Iterator[str]:
    for folder in environ.get("LD_LIBRARY_PATH", "").replace(";", ":").split(":"):
        if folder:
            yield os.path.join(folder, LIBRARY_NAME)
    yield from _cached()
    for folder in _USUAL_PLACES:
        yield os.path.join(folder, LIBRARY_NAME)


def _cached() -> Iterator[str]:
    """Yield the entries of the loader's cache, in its order."""
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    if ldconfig is None:
        return
    try:
        done = subprocess.run(
            [ldconfig, "-p"], capture_output=True, text=True, timeout=_LDCONFIG_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    for line in done.stdout.splitlines():
        name, _, path = line.partition(" => ")
        if name.split(" ", 1)[0].strip() == LIBRARY_NAME and path:
            yield path


def _is_driver(path: str, own: str | None) -> bool:
    """Return whether a file is a CUDA driver for this kind of program, and not a copy of the proxy."""
    try:
        if own is not None and os.path.samefile(path, own):
            return False
        start = _start(path, _MARK_WITHIN)
        mine = _start("/proc/self/exe", _HEAD)
    except OSError:
        return False
    # Class, byte order and machine must match this process: skip a 32-bit driver, for instance.
    fits = (start[4:6], start[18:20]) == (mine[4:6], mine[18:20])
    return start.startswith(_ELF) and fits and _MARK not in start


def _start(path: str, size: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(size)
