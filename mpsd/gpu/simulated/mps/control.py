"""Stand-in for nvidia-cuda-mps-control: the front end, and the start of the daemon.

Started through <dir>/bin/nvidia-cuda-mps-control. Without -d or -f it sends the words of its command line, or
each line of its standard input, to the daemon in CUDA_MPS_PIPE_DIRECTORY and prints the answers. It exits
with 0 if the daemon could be reached: only the text tells whether a command succeeded.
"""

from __future__ import annotations

# Import only the core of the socket module, and no JSON: dozens of front ends run per daemon, and imports
# would be most of their cost.
import _socket
import os
import sys

from mpsd.gpu.simulated import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

BINARY_VERSION = 13000
_LIMIT = 1 << 16
_USAGE = "usage: nvidia-cuda-mps-control [-d | -f | -v | -h] [-multiuser-server] [COMMAND...]\n"


def main(directory: str, arguments: Sequence[str]) -> int:
    """Run the command. `directory`: the simulated node's."""
    flags = {a for a in arguments if a.startswith("-")} if not _is_command(arguments) else set()
    if flags & {"-v", "--version"}:
        print(f"CUDA MPS Control (simulated). Binary version: {BINARY_VERSION}")
        return 0
    if flags & {"-h", "--help"}:
        sys.stdout.write(_USAGE)
        return 0
    if flags & {"-d", "--daemon", "-f", "--foreground"}:
        from mpsd.gpu.simulated.mps import start

        multiuser = bool(flags & {"-multiuser-server", "-M"})
        background = bool(flags & {"-d", "--daemon"})
        try:
            return start.start(directory, background=background, multiuser=multiuser)
        except OSError as error:
            sys.stderr.write(f"{error.filename or 'The control daemon'}: {error.strerror}\n")
            return 1
    if flags:
        sys.stderr.write(_USAGE)
        return 1
    return _ask([" ".join(arguments)] if arguments else sys.stdin.read().splitlines())


def _is_command(arguments: Sequence[str]) -> bool:
    return bool(arguments) and not arguments[0].startswith("-")


def _ask(commands: Sequence[str]) -> int:
    path = os.path.join(paths.pipe_directory(os.environ), "control")
    for command in commands:
        try:
            sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
            sock.connect(path)
        except OSError:
            sys.stderr.write("Cannot find MPS control daemon process\n")
            return 1
        # Some commands wait for clients; the caller sets the time limit.
        try:
            sock.send(f"ui {command}".encode())
            answer = sock.recv(_LIMIT)
        except OSError:
            answer = b""
        finally:
            sock.close()
        if not answer:
            sys.stderr.write("Cannot send command to MPS control daemon process\n")
            return 1
        if answer != b"\n":
            sys.stdout.write(answer.decode())
    sys.stdout.flush()
    return 0
