"""Where the proxy is, and the environment of a program without it and with it.

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
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from faultinject.worker import REPOSITORY, python_environment
from mpsd.errors import UnsupportedError, UsageError
from mpsd_client.driver import LIBRARY_NAME, find_proxy

FOLDER = REPOSITORY / "clients" / "libcuda"
BUILD_S = 120.0
MPSD_RUN: Sequence[str] = (sys.executable, "-m", "mpsd_client.run")
"""The command that stands in front of a proxied program, and becomes it."""


FAR_BYTES = 4 << 30
"""Of a program's far zones on each side, in runs where it has some: as with mpsd's own caps."""


@dataclass(frozen=True, slots=True)
class Libraries:
    """Folders that hold a libcuda.so.1 each: the proxy, and the stand-in driver (None: the machine's own).

    `reads`: the list of what kernels only read, which validated programs write and others heed. Without
    `relays` the program's threads give the driver their launches themselves.
    """

    proxy: Path
    driver: Path | None = None
    reads: Path | None = None
    relays: bool = True

    def plain(self, environment: Mapping[str, str]) -> dict[str, str]:
        """A program that meets the driver alone."""
        if self.driver is None:
            return dict(environment)
        before = environment.get("LD_LIBRARY_PATH", "")
        path = f"{self.driver}:{before}" if before else str(self.driver)
        return {**environment, "LD_LIBRARY_PATH": path, "MPSD_STANDIN_GPU": "simulated"}

    def proxied(
        self, environment: Mapping[str, str], socket: Path, *, vault: bool, far_bytes: int = 0
    ) -> dict[str, str]:
        """What mpsd-run is started with; without `vault` the proxy passes every call on.

        `far_bytes`: of the far zones on each side. Few programs of a run have them: much managed address
        space of all of them together has cost the driver of a GPU dearly.
        """
        named = {"MPSD_SOCKET": str(socket), "MPSD_LIBCUDA_DIR": str(self.proxy)}
        named["MPSD_FAR_BYTES"] = str(far_bytes)
        if self.reads is not None:
            named["MPSD_FAILOVER_READS"] = str(self.reads)
        if not self.relays:
            named["MPSD_FAILOVER_RELAY"] = "off"
        off = {} if vault else {"MPSD_VAULT": "0"}
        return {**self.plain(environment), **named, **off}

    @property
    def server_options(self) -> tuple[str, ...]:
        """Of programs.server: kernels of the stand-in driver are over at once, and each of these would take
        all of a processor."""
        return ("--kernel-ms", "2") if self.driver is not None else ()

    def failover_settings(self) -> dict[str, str]:
        """Of a daemon that offers fail-over to programs of these."""
        named = {"failover.driver": f'"{self.driver / LIBRARY_NAME}"'} if self.driver else {}
        return {"failover.enabled": "true", **named}


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
    """The option that both subcommands have which run programs under the proxy."""
    parser.add_argument(
        "--reads",
        type=Path,
        metavar="FILE",
        help="what kernels only read (MPSD_FAILOVER_READS): written by validated programs, heeded by others",
    )


def check_folders(proxy: Path | None, driver: Path | None) -> None:
    """Raises UsageError for a folder that is named and has no library in it."""
    for option, folder in (("--libcuda", proxy), ("--driver", driver)):
        if folder is not None and not (folder / LIBRARY_NAME).is_file():
            raise UsageError(f"{option} {folder}: there is no {LIBRARY_NAME} in it", remedy=_REMEDY)


def installed(proxy: Path | None) -> Path | None:
    """The folder with the proxy that is named or installed; None: nothing is built for this question."""
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


def read_stats(pid: int) -> Mapping[str, Any] | None:
    """What the proxy in this process says of itself, as plain values; None where there is none."""
    try:
        from mpsd_libcuda.stats import read_stats as read
    except ImportError:
        # In a checkout the package lies beside the others, without being installed.
        sys.path.append(str(FOLDER))
        from mpsd_libcuda.stats import read_stats as read
    stats = read(pid)
    return (
        None if stats is None else {field.name: _plain(getattr(stats, field.name)) for field in fields(stats)}
    )


def _plain(value: Any) -> Any:
    """As JSON has it: members of an enumeration by name."""
    if isinstance(value, Enum):
        return value.name.lower()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else value
