"""mpsd-run: a program with the environment that mpsd wants for it. The standard library alone.

Everything is passed on by environment variables, so children of every kind have it too; then this process
becomes the program, so that signals, terminal and exit status are the program's own. What is missing is
said in one line, and the program runs all the same: without the proxy, or as if there were no mpsd. What was
asked for on the command line (a GPU, a daemon, a library) and cannot be had is an error: nothing runs.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from mpsd_client._protocol import errors
from mpsd_client.client import connect
from mpsd_client.driver import LIBRARY_NAME, find_driver, find_proxy
from mpsd_client.env import SHELLS, export_lines, fewer, fitting, named_gpu
from mpsd_client.vault import token_of

USAGE, UNAVAILABLE, NOT_EXECUTABLE, NOT_FOUND = 2, 69, 126, 127
_SHELL, _ABSENT = "/bin/sh", (FileNotFoundError, NotADirectoryError)
_PATH, _REAL, _VAULT = "LD_LIBRARY_PATH", "MPSD_REAL_LIBCUDA", "MPSD_VAULT_SOCKET"
_FAILOVER = "MPSD_FAILOVER_SOCKET"
_LOCALE, _COERCED = "LC_CTYPE", ("C.UTF-8", "C.utf8", "UTF-8")  # What PEP 538 sets, and to what.

_DESCRIPTION = (
    "Run a CUDA program under mpsd: on the shared GPU, and through mpsd's libcuda where that is installed."
)
_EPILOG = """\
mpsd-run sets a few variables and then becomes the program. So exit status, signals and terminal are the
program's own, and its children, whatever starts them, have the variables too.

  CUDA_MPS_PIPE_DIRECTORY  where programs of this user join, as the daemon says
  CUDA_VISIBLE_DEVICES     only where there are GPUs besides that domain's: the domain's, by UUID. If it was
                           set, the first GPU that it named is asked for, as by --gpu, and others that it
                           named are seen where they are that domain's. An index is nvidia-smi's: where a
                           job's GPUs are numbered from 0 for it alone, name them by UUID. Where it
                           was not set, NVIDIA_VISIBLE_DEVICES of a container, where that has UUIDs
  LD_LIBRARY_PATH          first the folder with mpsd's libcuda.so.1, then what was there
  MPSD_REAL_LIBCUDA        the real driver, for mpsd's libcuda.so.1 to load
  MPSD_VAULT_SOCKET        only where the daemon offers the vault: GPU memory that can outlive the program
  MPSD_FAILOVER_SOCKET     only where the daemon offers it: the program goes on where its domain is lost

Without a daemon, or where it takes no new clients (drained), nothing is set; without mpsd's library
(clients/libcuda in its sources) or the real driver the first alone is. One line says so, and the program runs
in any case. But what --gpu, --socket or --library asks for must be there, and --env needs a daemon: else
nothing runs, and `eval "$(mpsd-run --env)"` fails.

The program begins with SIGPIPE and SIGXFSZ at their defaults even where the caller ignores them: Python,
which runs mpsd-run, does not keep what it was given.

exit status: the program's; 2 the command line is wrong, 69 what it asks for cannot be had, 126 the program
cannot be executed, 127 it is not found
"""


@dataclass
class Plan:
    """What to set, and what to say: `aside` always, `notes` with -v. `unmet`: what was asked for in vain."""

    variables: dict[str, str] = field(default_factory=dict)
    unmet: list[str] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    program = given.program[1:] if given.program[:1] == ["--"] else given.program
    if not program and not given.env:
        say("which program? (mpsd-run --help)")
        return USAGE
    plan = _plan(given)
    for line in plan.unmet or plan.aside + (plan.notes if given.verbose else []):
        say(line)
    if given.env:
        # In `eval "$(mpsd-run --env)"` nobody sees the exit status of this.
        return _print(["false"] if plan.unmet else export_lines(plan.variables, given.env), plan)
    if plan.unmet:
        return UNAVAILABLE
    return become(program, {**_own_environ(), **plan.variables})


def _print(lines: Sequence[str], plan: Plan) -> int:
    try:
        print("\n".join(lines), flush=True)
    except OSError as error:
        say(f"cannot write: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return UNAVAILABLE
    return UNAVAILABLE if plan.unmet else 0


def say(line: str) -> None:
    """One line on stderr. Where that cannot be had the program runs all the same."""
    if sys.stderr is None:  # Closed when this process began; what is number 2 now is something else.
        return
    try:
        os.write(2, f"mpsd-run: {line}\n".encode(errors="backslashreplace"))
    except OSError:
        pass


def make_plan(
    environ: Mapping[str, str],
    *,
    socket_path: str | None = None,
    gpu: str | None = None,
    library: str | None = None,
    required: bool = False,
) -> Plan:
    """What a program needs besides `environ`. `required`: a daemon, as where one or a GPU is named."""
    plan = Plan()
    try:
        token_of(environ)
    except errors.UsageError as error:
        plan.unmet.append(str(error))
        return plan
    try:
        with connect(socket_path) as daemon:
            wanted = daemon.env(named_gpu(environ, gpu))
            plan.variables = fitting(wanted, environ, gpu, daemon.numbers)
            plan.aside += fewer(environ, plan.variables, daemon.gpus)
            vault, failover = daemon.vault_socket, daemon.failover_socket
    except errors.MpsdError as error:
        if required or gpu or socket_path:
            plan.unmet.append(str(error))
        else:
            plan.aside.append(f"stepping aside: {error.message}; the program runs without mpsd")
        return plan
    proxy = find_proxy(environ, library)
    real = find_driver(environ, proxy) if proxy else None
    if proxy is None and library:
        plan.unmet.append(f"there is no {LIBRARY_NAME} in {library} (--library: the folder with mpsd's)")
    elif proxy is None:
        plan.aside.append(
            "no libcuda of mpsd's (pip install ./clients/libcuda in its sources, or --library DIR):"
            " the program runs without it"
        )
    elif real is None:
        plan.aside.append(f"no CUDA driver ({LIBRARY_NAME}) found: the program runs without mpsd's libcuda")
    else:
        plan.variables[_REAL] = real
        plan.variables[_PATH] = _first(proxy, environ.get(_PATH, ""))
        if vault:
            plan.variables[_VAULT] = vault
        if failover:
            plan.variables[_FAILOVER] = failover
    plan.notes += [f"{name}={value}" for name, value in sorted(plan.variables.items())]
    return plan


def become(program: Sequence[str], environ: Mapping[str, str]) -> int:
    """Replace this process; returns an exit status only if that fails."""
    _flush()
    # Python ignores these two, and a program that is executed keeps what is ignored. What they were before
    # is lost when Python starts.
    _handle_writes_that_fail(signal.SIG_DFL)
    try:
        _execute(program, environ)
    except OSError as error:
        _handle_writes_that_fail(signal.SIG_IGN)
        say(f"{program[0]}: {error.strerror}")
        return NOT_FOUND if isinstance(error, _ABSENT) else NOT_EXECUTABLE


def _execute(program: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """execvp(3): os.execvpe() gives up on scripts without `#!`, which are the shell's."""
    name = program[0]
    folders = [""] if os.path.dirname(name) else os.get_exec_path(environ) if name else []
    refused: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for path in (os.path.join(folder, name) for folder in folders):
        try:
            os.execve(path, list(program), environ)
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                os.execve(_SHELL, [_SHELL, path, *program[1:]], environ)
            if isinstance(refused, _ABSENT):
                refused = error
    raise refused


def _plan(given: argparse.Namespace) -> Plan:
    """make_plan() for this command line; what it does not expect is a reason to step aside too."""
    needs = {"socket_path": given.socket, "gpu": given.gpu, "library": given.library}
    required = given.env is not None or any(value is not None for value in needs.values())
    try:
        return make_plan(os.environ, **needs, required=required)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if required:
            return Plan(unmet=[why])
        return Plan(aside=[f"stepping aside: {why}; the program runs without mpsd"])


def _own_environ() -> dict[str, str]:
    """os.environ less the locale that Python sets for itself where it is started with none."""
    environ = dict(os.environ)
    if environ.get(_LOCALE) not in _COERCED:
        return environ
    try:
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return environ
    mark = os.fsencode(f"{_LOCALE}=")
    before = [os.fsdecode(entry.removeprefix(mark)) for entry in given if entry.startswith(mark)]
    del environ[_LOCALE]
    return {**environ, _LOCALE: before[0]} if before else environ


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # It cannot be written, or is closed.
            pass


def _handle_writes_that_fail(how: signal.Handlers) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, how)


def _first(folder: str, path: str) -> str:
    """`path` with `folder` in front. The rest stays as it is: an empty part means the working directory."""
    if path == folder or path.startswith(folder + ":"):
        return path
    return f"{folder}:{path}" if path else folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpsd-run",
        usage="mpsd-run [-v] [--gpu GPU] PROGRAM [ARGUMENT]...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="say what is set")
    parser.add_argument(
        "--gpu", help="index or UUID of the GPU, where there are several; nothing runs where it is not there"
    )
    parser.add_argument(
        "--socket", help="the daemon's socket; default: $MPSD_SOCKET, your own's, the machine's"
    )
    parser.add_argument(
        "--library", help="the folder with mpsd's libcuda.so.1; default: $MPSD_LIBCUDA_DIR, the package's"
    )
    parser.add_argument(
        "--env", nargs="?", const="sh", choices=SHELLS, help='print it instead: eval "$(mpsd-run --env)"'
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="and its arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
