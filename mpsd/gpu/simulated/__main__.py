"""python -m mpsd.gpu.simulated gpu|stop|inject --dir DIR: run or stop the GPU process, inject faults."""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
from dataclasses import replace

from mpsd.base.errors import MpsdError
from mpsd.gpu.simulated import node, packets, paths, service
from mpsd.gpu.simulated.machine import semantics
from mpsd.gpu.simulated.mps import launchers

_NO_DEVICE = 100
_REASONS = {
    _NO_DEVICE: "there is no such GPU",
    semantics.NOT_PERMITTED: "only root and the user who started the node may do this",
}
_DIR = (
    "directory of the node, [simulated] dir in mpsd's configuration; "
    "default: $MPSD_SIM_DIR, else $XDG_RUNTIME_DIR/mpsd-sim or /tmp/mpsd-sim-UID (%(default)s)"
)


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m mpsd.gpu.simulated", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    gpu = commands.add_parser("gpu", help="run the GPU process of the node until it is stopped")
    gpu.add_argument("--gpus", type=int, default=None, help="number of GPUs (default: as before, else 1)")
    gpu.add_argument("--detach", action="store_true", help="run in the background, and return once it serves")
    gpu.add_argument("--isolation", action="store_true", help="simulate a driver with mpsd's kernel module")
    stop = commands.add_parser("stop", help="stop the GPU process; its programs fail at their next call")
    inject = commands.add_parser("inject", help="inject a fault of the device")
    inject.add_argument("xid", type=int, metavar="XID", help="Xid for the kernel log, such as 79")
    inject.add_argument("--gpu", default=None, help="UUID or ordinal of the GPU")
    for command in (gpu, stop, inject):
        command.add_argument("--dir", default=paths.run_directory(os.environ), help=_DIR)
    return top


def _gpu(directory: str, gpus: int | None, *, detach: bool, isolation: bool) -> int:
    # Programs of every user read the files of the node.
    os.umask(0o022)
    os.makedirs(directory, mode=0o755, exist_ok=True)
    lock = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"a simulated GPU already serves {directory}", file=sys.stderr)
        return 1
    config = node.NodeConfig.load(directory)
    config = replace(
        config, gpus=config.gpus if gpus is None else gpus, isolation=isolation or config.isolation
    )
    config.save(directory)
    launchers.write_launchers(directory)
    try:
        os.unlink(paths.gpu_socket(directory))
    except FileNotFoundError:
        pass
    served = service.serve(directory, config)
    if detach and os.fork():
        os._exit(0)
    if detach:
        _leave(directory)
    signal.signal(signal.SIGTERM, lambda *_: setattr(served, "running", False))
    served.run()
    return 0


def _leave(directory: str) -> None:
    """Become a daemon: own session, no terminal, errors to a file."""
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(
        os.path.join(directory, "gpu.err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
    )
    for fd, target in ((null, 0), (null, 1), (errors, 2)):
        os.dup2(fd, target)


def _ask(directory: str, message: packets.Message) -> int:
    try:
        with packets.connect(paths.gpu_socket(directory)) as sock:
            answer, _ = packets.call(sock, message)
    except packets.Gone:
        remedy = "--dir DIR where mpsd's configuration sets [simulated] dir"
        print(f"no simulated GPU serves {directory} ({remedy})", file=sys.stderr)
        return 3
    if answer.get("error"):
        error = answer["error"]
        print(f"refused: {answer.get('why') or _REASONS.get(error, f'CUDA error {error}')}", file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    directory = os.path.abspath(parsed.dir)
    try:
        match parsed.command:
            case "gpu":
                return _gpu(directory, parsed.gpus, detach=parsed.detach, isolation=parsed.isolation)
            case "stop":
                return _ask(directory, {"op": "stop"})
            case _:
                return _ask(
                    directory, {"op": "inject", "fault": "xid", "number": parsed.xid, "gpu": parsed.gpu}
                )
    except (MpsdError, OSError) as error:
        print(f"cannot use {directory}: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, MpsdError) else 1


if __name__ == "__main__":
    sys.exit(main())
