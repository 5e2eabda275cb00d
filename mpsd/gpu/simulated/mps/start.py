"""Start of the control daemon's stand-in: one per pipe directory, in the foreground or background.

-d returns when the socket answers and keeps nothing of its caller: no terminal, no pipes.
"""

from __future__ import annotations

import fcntl
import os
import sys

from mpsd.gpu.simulated import packets, paths
from mpsd.gpu.simulated.mps.control import BINARY_VERSION
from mpsd.gpu.simulated.mps.controldaemon import FILES, Daemon, unlink
from mpsd.gpu.simulated.mps.logbook import Logbook, open_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Modes of the stock daemon's files: every local user may write them, where the directory is open.
FIFO_MODE = 0o777
FILE_MODE = 0o666


def _lock(pipe_dir: str) -> int:
    """Lock the pipe directory. Raises BlockingIOError if a live daemon holds the lock, OSError otherwise."""
    fd = os.open(os.path.join(pipe_dir, "control_lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    os.fchmod(fd, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    return fd


def start(directory: str, *, background: bool, multiuser: bool) -> int:
    """Run the daemon in the foreground, or start it in the background and return when it answers."""
    pipe_dir, log_dir = paths.pipe_directory(os.environ), paths.log_directory(os.environ)
    try:
        os.makedirs(pipe_dir, exist_ok=True)
        _lock(pipe_dir)
    except BlockingIOError:
        sys.stderr.write("An instance of this daemon is already running\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"Cannot use pipe directory {pipe_dir}: {error.strerror}\n")
        return 1
    if background:
        return _in_background(lambda ready: _serve(directory, log_dir, ready, multiuser=multiuser))
    return _serve(directory, "", lambda: None, multiuser=multiuser)


def _in_background(serve: Callable[[Callable[[], None]], int]) -> int:
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        answered = os.read(reader, 1)
        return 0 if answered else 1
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)

    def ready() -> None:
        os.write(writer, b"!")
        os.close(writer)

    os._exit(serve(ready))


def _serve(directory: str, log_dir: str, ready: Callable[[], None], *, multiuser: bool) -> int:
    try:
        gpu = packets.connect(paths.gpu_socket(directory))
        control_fd, server_fd = (
            (open_log(log_dir, "control.log"), open_log(log_dir, "server.log")) if log_dir else (1, 1)
        )
    except OSError as error:
        sys.stderr.write(f"Cannot start the MPS control daemon: {error}\n")
        return 1
    pipe_dir = paths.pipe_directory(os.environ)
    for name in FILES:
        unlink(os.path.join(pipe_dir, name))
    logbook = Logbook(control_fd)
    fifo = os.path.join(pipe_dir, "log")
    os.mkfifo(fifo)
    os.chmod(fifo, FIFO_MODE)
    daemon = Daemon(directory, gpu, logbook, server_fd, multiuser=multiuser)
    with open(os.path.join(pipe_dir, f"{paths.CONTROL_NAME}.pid"), "w", encoding="ascii") as file:
        os.fchmod(file.fileno(), FILE_MODE)
        file.write(f"{os.getpid()}\n")
    logbook.write(
        "Control",
        f"Starting control daemon using socket {os.path.join(pipe_dir, 'control')}\n"
        f"To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={pipe_dir}\n"
        f"CUDA MPS Control binary version: {BINARY_VERSION}",
    )
    ready()
    return daemon.run()
