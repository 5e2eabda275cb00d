"""Commands of `mpsd`. Only this module turns an error of the daemon into text and an exit status."""

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

from mpsd import __version__, docs
from mpsd.base import logs, output
from mpsd.base.errors import MpsdError, UnsupportedError
from mpsd.config import commands as config_cli
from mpsd.config import reader
from mpsd.config.layout import Layout
from mpsd.config.schema import BackendName, Config
from mpsd.gpu.base import Backend
from mpsd.os import descriptors

EXIT_PATIENCE_S = 1.0
# Each call of a thread that reads a process's memory can hold up the loop for this long, and moving programs
# wait for the loop. (Python's default of 5 ms was seen twice in a row.)
SWITCH_S = 0.0005


class _Unjoined(ThreadPoolExecutor):
    """Threads for asyncio.to_thread that do not delay the exit: asyncio.run would wait for them without
    limit."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="mpsd",
        description="Supervise NVIDIA MPS: detect each fault, classify it and name its client.",
    )
    top.add_argument("--version", action="version", version=f"mpsd {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="supervise MPS on every GPU of this machine")
    run.add_argument("--config", metavar="FILE", help="configuration (default /etc/mpsd/mpsd.toml)")
    run.add_argument(
        "--backend",
        choices=[b.value for b in BackendName],
        help="nvidia, or simulated: a complete daemon without a GPU. Overrides the configuration. If "
        "[simulated] dir is set, pass it to `python -m mpsd.gpu.simulated stop` as --dir.",
    )
    run.add_argument(
        "--stop-domains",
        action="store_true",
        help="evict all clients and stop all domains when mpsd stops; by default they keep running",
    )
    config = commands.add_parser("config", help="check or show the configuration")
    config_cli.add_arguments(config)
    pages = commands.add_parser("help", help="list the documentation pages, or print one")
    pages.add_argument("topic", nargs="?", metavar="TOPIC", help="name of a page; default: list the pages")
    return top


def open_backend(config: Config) -> Backend:
    """Return the backend that the configuration names. Imports only what that backend needs. Raises
    MpsdError."""
    if config.backend is BackendName.SIMULATED:
        from mpsd.gpu.simulated.backend import open_simulated
        from mpsd.gpu.simulated.paths import default_dir

        where = Path(config.simulated.dir) if config.simulated.dir else default_dir()
        return open_simulated(where, gpus=config.simulated.gpus, isolation=config.simulated.isolation)
    from mpsd.gpu.nvidia.backend import open_nvidia

    return open_nvidia()


def run(arguments: argparse.Namespace) -> int:
    from mpsd.daemon.assembly import Daemon

    environ = dict(os.environ)
    earlier: list[str] = []
    config = reader.load(arguments.config, environ, backend=arguments.backend, warn=earlier.append)
    colors = False if environ.get("NO_COLOR") else None
    logs.configure(config.log.format.value, config.log.level.value, colors=colors)
    for text in earlier:
        structlog.get_logger("mpsd").warning("key of an earlier release", what=text)
    for name, remedy in reader.unknown_variables(environ):
        structlog.get_logger("mpsd").warning("variable without a meaning", name=name, remedy=remedy)
    sys.setswitchinterval(SWITCH_S)
    # A client takes up to ten descriptors, and a login shell's limit is often 1024.
    if 0 <= (limit := descriptors.raise_limit()) < descriptors.LEAST:
        raise UnsupportedError(
            f"mpsd may open only {limit} files; it needs at least {descriptors.LEAST}",
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
    """Make and lock the daemon's directories. A start that is refused removes those that it made."""
    layout.prepare()
    locks: list[int] = []
    try:
        # Before a simulated GPU is started, because it would stay.
        locks = layout.lock()
        yield
    except MpsdError:
        layout.undo()
        raise
    finally:
        for fd in locks:
            os.close(fd)


def _leave(status: int, before: Collection[threading.Thread]) -> int:
    """Return the exit status, or exit here if threads hang that the interpreter would wait for.

    All data is saved and closed by now.
    """
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
            from mpsd.api.percentages import configuration_notes

            return config_cli.main_of(arguments, os.environ, configuration_notes)
        if arguments.command == "help":
            page = docs.contents() if arguments.topic is None else docs.text(arguments.topic)
            return output.put(page, "mpsd")
        status = run(arguments)
    except MpsdError as error:
        print(f"mpsd: {error}", file=sys.stderr)
        status = error.exit_code
    except KeyboardInterrupt:
        status = 130
    return _leave(status, before)
