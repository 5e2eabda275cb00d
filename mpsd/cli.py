"""`mpsd run` and `mpsd config`: the only place where an error of the daemon becomes text and a status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from mpsd import __version__, config_cli, config_reader, logs
from mpsd.config import BackendName, Config
from mpsd.errors import MpsdError, UnsupportedError
from mpsd.gpu.base import Backend
from mpsd.layout import Layout
from mpsd.linux import descriptors

EXIT_PATIENCE_S = 1.0
# A thread that reads a process's memory keeps the loop for that long, with each call that it makes; programs
# that are being moved wait for the loop (5 ms of Python's own were seen twice in a row).
SWITCH_S = 0.0005


class _Unjoined(ThreadPoolExecutor):
    """Threads for asyncio.to_thread, which asyncio.run would wait for, without end, when it ends."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="mpsd", description="Supervises NVIDIA MPS: every fault seen, classed and pinned on its client."
    )
    top.add_argument("--version", action="version", version=f"mpsd {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="supervise MPS on every GPU of this machine")
    run.add_argument("--config", metavar="FILE", help="configuration (default /etc/mpsd/mpsd.toml)")
    run.add_argument(
        "--backend",
        choices=[b.value for b in BackendName],
        help="nvidia, or simulated: a whole daemon without a GPU (overrides the configuration, whose "
        "[simulated] dir, if it is set, `python -m mpsd.gpu.simulated stop` needs as --dir)",
    )
    run.add_argument(
        "--stop-domains",
        action="store_true",
        help="when told to stop, evict every client and end every domain; otherwise they live on",
    )
    config = commands.add_parser("config", help="check or show the configuration")
    config_cli.add_arguments(config)
    return top


def open_backend(config: Config) -> Backend:
    """The node that the configuration names. Imports only what that one needs. Raises MpsdError."""
    if config.backend is BackendName.SIMULATED:
        from mpsd.gpu.simulated.backend import open_simulated
        from mpsd.gpu.simulated.paths import default_dir

        where = Path(config.simulated.dir) if config.simulated.dir else default_dir()
        return open_simulated(where, gpus=config.simulated.gpus, isolation=config.simulated.isolation)
    from mpsd.gpu.nvidia.backend import open_nvidia

    return open_nvidia()


def run(arguments: argparse.Namespace) -> int:
    from mpsd.daemon import Daemon

    environ = dict(os.environ)
    config = config_reader.load(arguments.config, environ, backend=arguments.backend)
    colors = False if environ.get("NO_COLOR") else None
    logs.configure(config.log.format.value, config.log.level.value, colors=colors)
    for name, remedy in config_reader.unknown_variables(environ):
        structlog.get_logger("mpsd").warning("variable without a meaning", name=name, remedy=remedy)
    sys.setswitchinterval(SWITCH_S)
    # A client takes up to ten descriptors, and a login shell's limit is often 1024.
    if 0 <= (limit := descriptors.raise_limit()) < descriptors.LEAST:
        raise UnsupportedError(
            f"mpsd may have {limit} open files, and needs {descriptors.LEAST} at least",
            remedy=f"{descriptors.REMEDY}: MPS wants {descriptors.WANTED}",
        )
    with _directories(Layout.of(config)):
        backend = open_backend(config)
        try:

            async def serve() -> None:
                asyncio.get_running_loop().set_default_executor(_Unjoined(thread_name_prefix="mpsd"))
                await Daemon(config, backend, environ).run(stop_domains=arguments.stop_domains)

            asyncio.run(serve())
        finally:
            if backend.isolation is not None:
                backend.isolation.close()
            backend.devices.close()
    return 0


@contextlib.contextmanager
def _directories(layout: Layout) -> Iterator[None]:
    """Made, and ours. A start that is refused leaves none that it made."""
    layout.prepare()
    locks: list[int] = []
    try:
        # Before a simulated GPU is started, which would stay.
        locks = layout.lock()
        yield
    except MpsdError:
        layout.undo()
        raise
    finally:
        for fd in locks:
            os.close(fd)


def _leave(status: int, before: Collection[threading.Thread]) -> int:
    """End here if threads hang that the interpreter would wait for. Everything is saved and closed by now."""
    end = time.monotonic() + EXIT_PATIENCE_S
    left = [t for t in threading.enumerate() if not t.daemon and t not in before]
    for thread in left:
        thread.join(max(0.0, end - time.monotonic()))
    hung = [t.name for t in left if t.is_alive()]
    if not hung:
        return status
    structlog.get_logger("mpsd").warning("ended although threads hang", threads=hung)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    before = threading.enumerate()
    try:
        if arguments.command == "config":
            return config_cli.main_of(arguments, os.environ)
        status = run(arguments)
    except MpsdError as error:
        print(f"mpsd: {error}", file=sys.stderr)
        status = error.exit_code
    except KeyboardInterrupt:
        status = 130
    return _leave(status, before)
