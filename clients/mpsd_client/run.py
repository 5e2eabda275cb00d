"""mpsd-run: run a program under mpsd, and say how it is protected. Standard library only.

Environment variables reach every child process. mpsd-run then executes the program in its own process, so
signals, terminal and exit status belong to the program. A program that cannot join its domain is not started,
because CUDA would run it outside MPS without a word; --allow-unprotected starts it outside mpsd.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from mpsd_client._protocol import errors
from mpsd_client.env import SHELLS, export_lines
from mpsd_client.joining import plan as joining
from mpsd_client.joining.plan import FIRM, Plan

USAGE, UNAVAILABLE, NOT_EXECUTABLE, NOT_FOUND = 2, 69, 126, 127
_SHELL, _ABSENT = "/bin/sh", (FileNotFoundError, NotADirectoryError)
_LOCALE, _COERCED = "LC_CTYPE", ("C.UTF-8", "C.utf8", "UTF-8")  # Variable and values of PEP 538.

_DESCRIPTION = "Run a CUDA program under mpsd: on the shared GPU, protected from faults of other programs."
_EPILOG = """\
mpsd-run prints one line on stderr, sets a few environment variables, and then executes the program in the
same process. Exit status, signals and terminal are the program's own. Its child processes inherit the
variables. `eval "$(mpsd-ctl env)"` sets the same variables in a shell.

The line names the protection level, the GPU and the domain; -q leaves it out:

  protected (guard + failover)
      Guard zones absorb stray accesses. Any other fault of its domain costs the program a pause.
  protected (guard; no fail-over: REASON)
      Guard zones absorb stray accesses. Any other fault of its domain ends the program's GPU work.
  not protected from faults of other programs (observe: REASON)
      Every fault of its domain ends the program's GPU work. mpsd records the fault and its offender.

mpsd-run does not start a program that cannot join: no daemon answers, the GPU is drained or lost, or the
domain cannot be entered. The exit status is then 69, and the message names the remedy. An unprotected run is
never silent: --allow-unprotected starts the program outside mpsd, with one line. --require LEVEL also refuses
a lower level than LEVEL. While mpsd restarts, its socket exists and does not answer: mpsd-run then waits for
up to 10 s. A program whose environment shows it no GPU runs without mpsd; --require refuses it.

Variables:

  CUDA_MPS_PIPE_DIRECTORY  the slot through which this user's programs reach their domain
  CUDA_VISIBLE_DEVICES     the program's GPUs in the domain. If the variable names GPUs, mpsd-run requests the
                           first one, as --gpu does, and keeps the others that belong to the domain. UUIDs
                           stay as they are. Numbers are nvidia-smi's; the program gets numbers again, but
                           those of the domain: under MPS the only GPU of a domain is number 0.
  MPSD_DEVICE_NUMBERS      the GPUs in which these numbers count, if they differ from nvidia-smi's
  LD_LIBRARY_PATH          the folder of mpsd's libcuda.so.1, before the previous value
  MPSD_REAL_LIBCUDA        the NVIDIA driver library that mpsd's libcuda.so.1 loads
  MPSD_VAULT_SOCKET        the daemon's socket for guard zones and kept memory, from level guard on
  MPSD_FAILOVER_SOCKET     the daemon's socket for fail-over, at level failover
  MPSD_PROTECTION          the level at the program's start

A program with MPSD_FAILOVER=keep or off in its environment has level guard at most.

In a container, NVIDIA_VISIBLE_DEVICES names the GPUs: by the machine's index, by UUID, by a CDI name
(nvidia.com/gpu=0), or as all, none or void. Numbers in CUDA_VISIBLE_DEVICES count the GPUs of the container
there. A name that could mean two GPUs is refused. Under Slurm with ConstrainDevices a job numbers its own
GPUs from 0, which mpsd-run cannot see: there, pass the UUID.

The program starts with the default actions of SIGPIPE and SIGXFSZ, even if the caller ignores these signals:
Python, in which mpsd-run is written, does not keep the caller's setting.

exit status: the program's own; 2 wrong command line; 69 the program cannot join as required; 126 the program
cannot be executed; 127 the program was not found
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program and not options.env:
        say("no program given: usage is mpsd-run [OPTION]... PROGRAM [ARGUMENT]... (mpsd-run --help)")
        return USAGE
    try:
        joining.check_levels(options.protect, options.require)
    except errors.UsageError as error:
        say(str(error))
        return USAGE
    if options.require and options.allow_unprotected:
        say("--require and --allow-unprotected contradict each other: leave one of them out")
        return USAGE
    try:
        plan = _plan(options)
    except Exception as error:
        say(_refusal(error, program))
        return _print(["false"], UNAVAILABLE) if options.env else UNAVAILABLE
    if not options.quiet:
        say(plan.line, "mpsd")
    for line in plan.warnings + (plan.notes if options.verbose else []):
        say(line)
    if options.env:
        return _print(export_lines(plan.variables, options.env), 0)
    return become(program, plan.applied(_own_environ()))


def _plan(options: argparse.Namespace) -> Plan:
    """Return the plan for this command line. Raise the error that keeps the program from its start."""
    try:
        return joining.make_plan(
            os.environ,
            socket_path=options.socket,
            gpu=options.gpu,
            library=options.library,
            protect=options.protect,
            require=options.require,
            tell=say,
        )
    except FIRM:
        raise
    except Exception as error:
        if not options.allow_unprotected:
            raise
        return joining.outside_plan(os.environ, error, options.gpu)


def _refusal(error: Exception, program: Sequence[str]) -> str:
    """Return why a program is not started, with the remedy. `eval` of --env then fails by itself."""
    if isinstance(error, FIRM):
        return str(error)
    if isinstance(error, errors.MpsdError):
        parts = [error.message, error.remedy]
    else:
        parts = [f"{type(error).__name__}: {error}", "report this error"]
    if program:
        name = os.path.basename(program[0])
        parts.append(f"{name} was not started (--allow-unprotected starts it outside mpsd)")
    return "; ".join(part for part in parts if part)


def _print(lines: Sequence[str], status: int) -> int:
    """Print shell commands; return the exit status. `eval "$(mpsd-run --env)"` fails by the command false."""
    try:
        print("\n".join(lines), flush=True)
    except OSError as error:
        say(f"cannot write to standard output: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return UNAVAILABLE
    return status


def say(line: str, speaker: str = "mpsd-run") -> None:
    """Print one line on stderr. A failed write does not keep the program from running."""
    if sys.stderr is None:  # Closed by the caller: descriptor 2 may now be another file.
        return
    try:
        os.write(2, f"{speaker}: {line}\n".encode(errors="backslashreplace"))
    except OSError:
        pass


def become(program: Sequence[str], environ: Mapping[str, str]) -> int:
    """Execute the program in this process. Return an exit status only if that fails."""
    _flush()
    # Python ignores these signals, and exec keeps ignored signals ignored. The caller's setting is unknown:
    # Python overwrites it at its start.
    _handle_writes_that_fail(signal.SIG_DFL)
    try:
        _execute(program, environ)
    except OSError as error:
        _handle_writes_that_fail(signal.SIG_IGN)
        say(f"{program[0]}: {error.strerror}")
        return NOT_FOUND if isinstance(error, _ABSENT) else NOT_EXECUTABLE


def _execute(program: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Execute like execvp(3): os.execvpe() fails for scripts without `#!`, which the shell must run."""
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


def _own_environ() -> dict[str, str]:
    """Return os.environ without the locale that Python sets for itself if none is set (PEP 538)."""
    environ = dict(os.environ)
    if environ.get(_LOCALE) not in _COERCED:
        return environ
    try:
        options = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return environ
    mark = os.fsencode(f"{_LOCALE}=")
    before = [os.fsdecode(entry.removeprefix(mark)) for entry in options if entry.startswith(mark)]
    del environ[_LOCALE]
    return {**environ, _LOCALE: before[0]} if before else environ


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # The stream is closed or cannot be written.
            pass


def _handle_writes_that_fail(disposition: signal.Handlers) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, disposition)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpsd-run",
        usage="mpsd-run [OPTION]... PROGRAM [ARGUMENT]...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    joining.add_options(parser)
    parser.add_argument(
        "--allow-unprotected",
        action="store_true",
        help="start the program outside mpsd, with one line, if it cannot join",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print the variables that are set")
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help="the daemon's socket; default: $MPSD_SOCKET, then the user's own, then the machine's",
    )
    parser.add_argument(
        "--env",
        nargs="?",
        const="sh",
        choices=SHELLS,
        help='print shell commands that set the variables: eval "$(mpsd-run --env)"',
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
