"""The proxy library, and the environment of a program without it and with it.

On the simulated GPU the driver that programs load is the stand-in of clients/libcuda. Proxy and stand-in
are built here, by their own build, where none is named and there is a compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from faultinject.programs.basics.statistics import FOLDER
from faultinject.rig.worker import python_environment
from mpsd.base import debug
from mpsd.base.errors import UnsupportedError, UsageError
from mpsd_client.driver import LIBRARY_NAME, find_proxy

BUILD_S = 120.0
MPSD_RUN: Sequence[str] = (sys.executable, "-m", "mpsd_client.run")
"""The command that starts a proxied program, and becomes it (execve)."""


FAR_BYTES = 4 << 30
"""Far zones on each side of a program that has some, as with mpsd's default limits."""


@dataclass(frozen=True, slots=True)
class Libraries:
    """Folders that hold a libcuda.so.1 each: the proxy, and the stand-in driver (None: the machine's own).

    `reads`: the list of memory that kernels only read: mode validate writes it, other modes use it. Without
    `relays` the threads of the program submit their launches themselves. `looks`: the stand-in driver queries
    the cause of a lost context, as a real one does. Without that no program can tell a trap of its own from
    another's.
    """

    proxy: Path
    driver: Path | None = None
    reads: Path | None = None
    relays: bool = True
    looks: bool = False

    def plain(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a program without the proxy."""
        if self.driver is None:
            return dict(environment)
        before = environment.get("LD_LIBRARY_PATH", "")
        path = f"{self.driver}:{before}" if before else str(self.driver)
        # The stand-in notes its queries in a file, which no campaign reads.
        looks = {"MPSD_STANDIN_MANAGER": os.devnull} if self.looks else {}
        return {**environment, "LD_LIBRARY_PATH": path, "MPSD_STANDIN_GPU": "simulated", **looks}

    def proxied(
        self,
        environment: Mapping[str, str],
        socket: Path,
        *,
        vault: bool,
        far_bytes: int = 0,
        host_guard_bytes: int = 0,
    ) -> dict[str, str]:
        """Return the environment of mpsd-run; without `vault` the proxy passes every call through.

        `far_bytes`: of the far zones on each side. Few programs of a run have them, because much managed
        address space in sum slows the driver down. `host_guard_bytes`: of the guard over host memory.
        """
        named = {"MPSD_SOCKET": str(socket), "MPSD_LIBCUDA_DIR": str(self.proxy)}
        if self.reads is not None:
            named["MPSD_FAILOVER_READS"] = str(self.reads)
        fields: dict[str, object] = {"far_bytes": far_bytes, "host_guard_bytes": host_guard_bytes}
        if not self.relays:
            fields["relay"] = "off"
        if not vault:
            fields["vault"] = 0
        return {**self.plain(environment), **named, **debug.variable(**fields)}

    def joined(self, environment: Mapping[str, str], socket: Path) -> dict[str, str]:
        """Return the environment of a user's program, which names the socket and the library alone."""
        named = {"MPSD_SOCKET": str(socket), "MPSD_LIBCUDA_DIR": str(self.proxy)}
        return {**self.plain(environment), **named}

    @property
    def server_options(self) -> tuple[str, ...]:
        """Return options of programs.server that make kernels of the stand-in driver last.

        They end at once otherwise, and each server would use a whole processor.
        """
        return ("--kernel-ms", "2") if self.driver is not None else ()

    def failover_settings(self) -> dict[str, str]:
        """Return the settings of a daemon that offers fail-over to programs with these libraries."""
        return {"protect": '"failover"', **self.driver_settings()}

    def driver_settings(self) -> dict[str, str]:
        """Return the settings of a daemon that name the driver of these programs to mpsd."""
        return {"failover.driver": f'"{self.driver / LIBRARY_NAME}"'} if self.driver else {}


def find_libraries(
    backend: str,
    proxy: Path | None,
    driver: Path | None,
    base: Path,
    reads: Path | None = None,
    *,
    relays: bool = True,
) -> Libraries:
    """The proxy named, installed or built under `base`; on the simulated GPU the stand-in likewise.

    Raises UsageError for a folder without a library, UnsupportedError where none can be had.
    """
    if backend != "simulated" and driver is not None:
        raise UsageError(
            "--driver names the stand-in driver, which is for --backend simulated",
            remedy="leave it out: the machine's own driver is used",
        )
    check_folders(proxy, driver)
    if proxy is None:
        found = find_proxy(os.environ)
        proxy = Path(found) if found else _build(base / "proxy")
    if driver is None and backend == "simulated":
        driver = _build(base / "standin", "--standin")
    return Libraries(proxy.resolve(), driver.resolve() if driver else None, reads and reads.resolve(), relays)


def add_reads(parser: argparse.ArgumentParser) -> None:
    """Add the option of the subcommands that run programs under the proxy."""
    parser.add_argument(
        "--reads",
        type=Path,
        metavar="FILE",
        help="memory that kernels only read (MPSD_FAILOVER_READS): mode validate writes it, others use it",
    )


def check_folders(proxy: Path | None, driver: Path | None) -> None:
    """Raise UsageError for a named folder without a library."""
    for option, folder in (("--libcuda", proxy), ("--driver", driver)):
        if folder is not None and not (folder / LIBRARY_NAME).is_file():
            raise UsageError(f"{option} {folder}: there is no {LIBRARY_NAME} in it", remedy=_REMEDY)


def installed(proxy: Path | None) -> Path | None:
    """Return the folder of the named or installed proxy, or None; builds nothing."""
    found = find_proxy(os.environ, str(proxy) if proxy else None)
    return Path(found) if found else None


_REMEDY = "build it: cd clients/libcuda && python -m libcuda_build --out DIR [--standin]"


def _build(target: Path, *options: str) -> Path:
    what = "the stand-in driver" if options else "mpsd's libcuda"
    if shutil.which("gcc") is None or not (FOLDER / "libcuda_build").is_dir():
        raise UnsupportedError(
            f"{what} is neither named nor installed, and cannot be built here (no gcc or no sources)",
            remedy=f"{'--driver' if options else '--libcuda'} DIR; {_REMEDY}",
        )
    print(f"building {what}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "libcuda_build", "--out", str(target), *options]
    environment = python_environment() | {"PYTHONPATH": str(FOLDER)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    if done.returncode:
        raise UnsupportedError(f"the libcuda proxy does not build: {done.stderr.strip()}", remedy=_REMEDY)
    return target
