"""What mpsd-ctl understands, and the pages that explain it."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from mpsd import __version__
from mpsd.wire.messages import MAX_PID, MIN_PID

SHELLS = ("sh", "csh", "fish")

_DESCRIPTION = """\
Look at and steer mpsd, which supervises NVIDIA MPS: many processes share a GPU, and a fault, a death or
a hang of one of them is seen, named and kept away from the others as far as that can be done.
"""

_EPILOG = """\
first steps:
  eval "$(mpsd-ctl env)" && python train.py  run a job on the shared GPU
  mpsd-ctl status                            who is there, how they are protected, what is wrong
  mpsd-ctl faults                            what happened, who did it, how sure that is, what to do
  mpsd-ctl kill PID                          put a job out without harming its neighbours
  mpsd-ctl doctor                            why something does not work on this machine

who may do what:
  Anybody may look. A user may evict its own clients and sees the faults and events that concern it.
  Root, members of the group mpsd, and the user that mpsd runs as see and may do everything.

exit status:
   0  done; status: healthy              4  not allowed
   1  an error                          10  status, doctor: degraded, something needs attention
   2  the command line is wrong         11  status: a domain that is in use is in FAULT
   3  no daemon answers                 12  not done in time
                                        13  refused: the target could be something else

environment:
  MPSD_SOCKET  the daemon's socket; otherwise your own daemon's ($XDG_RUNTIME_DIR/mpsd/mpsd.sock, or
               /tmp/mpsd-UID/mpsd.sock) if it is there, else the machine's (/run/mpsd/mpsd.sock)
  NO_COLOR     when set, no colour, even on a terminal

`mpsd-ctl COMMAND --help` says more about each command.
"""

_STATUS = """\
One line for each GPU; below it one for each fault domain (what dies together): its role (active: programs
that join come here; spare: the next one; old) and state, whose it is, its processes, clients of the number
it is made for, its last fault, and how far a fault reaches. What the state means:

  starting, warm, active   it comes up; is ready and nobody's yet; is in use
  faulted    a fault has ended its clients' work; newcomers go elsewhere, it is emptied and used again
  poisoned   a dead client's kernel runs on in it: it is emptied
  retired    left in a planned way, or its server has died: it ends when its last client has
  headless   its control daemon has died: its clients run on and nobody can join; it ends when they have
  failed, stopping         it did not come up; it is being ended

Then the clients with what protects each of them:

  lease    its GPU memory outlives it until its kernels have ended: its death harms nobody
  tracker  a memory fault of it is seen within a millisecond and named
  guard    stray accesses there are absorbed; "silent": nobody is told, its results may be wrong
  vault    it runs under mpsd-run, and so much of its memory could outlive it (mpsd-ctl vault)
  zones    guard zones that it laid around its memory: managed ones absorb and report, sparse ones absorb
           in silence, uncovered pieces have a side with none; far: managed ones, GiBs from all memory

Then the dead whose memory is still held, what the vault keeps of the dead, and processes on the GPU that
are not on MPS.
"""

_STATUS_EPILOG = """\
exit status: 0 healthy, 3 no daemon, 10 degraded, 11 a domain in use is in FAULT.
--json prints the daemon's answer as it is ("schema": 1); unknown keys may be added, none changes meaning.
"""

_POLICY = """\
What mpsd does with one client when a guard zone, which it laid itself around its memory under mpsd-run,
absorbs a stray access of it. In any case there is a record (mpsd-ctl faults), and nobody else notices.

  evict    it is put out at once, as by mpsd-ctl kill
  absorb   it goes on, with results that are wrong; one record a minute at most
  freeze   it is stopped (SIGSTOP) to be looked at; then mpsd-ctl kill PID, or kill -CONT PID

Holds until that process ends, also when mpsd is restarted. [guard] zone_policy is for all others. For
root and members of the group mpsd.
"""

_KILL = """\
Evict one client so that no other is harmed: it is asked to leave through MPS, with a short deadline,
then killed; its GPU memory is held until its kernels have ended. Not asked, only killed, is one that is
stopped or traced, or whose domain is in FAULT, because asking would stall everybody else.

On a terminal the plan is shown first and you are asked, unless --yes is given. A pid that is not a
client is refused, and so is one that became another process since you looked (--start-ticks). Whether
another user's process is a client, ordinary users are not told.
"""

_EVENTS = """\
One line for each thing that happened: its number, its kind, what it is about. Without --follow the events
that the daemon still remembers; with it those to come, after those past --since, if given. A reader that
is too slow is told how many events it lost, and nobody waits for it. Numbers go on where an earlier life
of the daemon ended, with a gap. Where not all events after --since are remembered, stderr says so.
"""

_FAULTS = """\
Records of faults, oldest first: what happened and where, who did it and how sure that is (certain: the
evidence admits no other client), the evidence itself, with its time before (-) or after (+) that of the
record, who was hurt, and what to do about it.
--explain tells about a class of fault without asking the daemon.
"""

_FAILOVERS = """\
Records of fail-overs, oldest first: the domain that was left and why, where its programs went, and what
became of each: moved (with its own times since it was told), stayed, silent, or not told, and why. Only
programs under mpsd-run that said they can go on elsewhere are in it ([failover] enabled).
"""

_DOCTOR = """\
What this machine can do for mpsd and what it cannot, each with a remedy: driver, device nodes, binaries,
compute mode, rights, limits, directories, sockets. Asked of the daemon; where none answers, found out
here, with the rights of the one who asks. Nothing is changed. Exit status 10 if something is missing.
"""

_DRAIN = """\
Give out no more environments for a GPU, or for all of them; clients that are there stay and are listed.
With [failover] enabled, programs that are ready go on in a fresh domain, and the old one ends after them.
It lasts over restarts of the daemon, until undrain. For administrators.
"""

_UNDRAIN = "Give out environments for a GPU, or for all of them, again. For administrators."

_ENV = """\
Print the commands that make a shell's jobs join: set it before a program initialises CUDA. The path is
stable: it leads to a working domain also after a fault, so it need not be asked for again. Without --gpu the
first GPU that CUDA_VISIBLE_DEVICES names is asked for, by UUID or by nvidia-smi's index: where a job's GPUs
are numbered from 0 for it alone (a container, Slurm with ConstrainDevices), say which by UUID.

  eval "$(mpsd-ctl env)"                        sh, bash, zsh
  eval `mpsd-ctl env --shell csh`               csh, tcsh
  mpsd-ctl env --shell fish | source            fish
"""

_VAULT = """\
GPU memory of programs under mpsd-run that the daemon holds too. It goes when its program ends, unless it
was kept under a name: then the same owner (user and cgroup, or user and token) can come back to it until
it is freed, too old, or the oldest of too much.

  mpsd-ctl vault list                what is held, of whom, as what it is kept
  mpsd-ctl vault keep PID NAME       keep what that program has, and what it will allocate
  mpsd-ctl vault free ID|NAME        let go of one piece, or of all that is kept under a name

A program that lives keeps its own memory in any case: only what the vault holds is let go. Users see and
change what is their own, administrators everything. Each takes --json, keep and free take --dry-run.
"""

_VERSION = "Versions of this command, of the daemon and of the driver; a daemon need not run."


def build() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="mpsd-ctl",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--socket", metavar="PATH", help="the daemon's socket (see MPSD_SOCKET below)")
    top.add_argument("--version", action="version", version=f"mpsd-ctl {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="COMMAND", title="commands")
    _status(verbs)
    _kill(verbs)
    _policy(verbs)
    _events(verbs)
    _faults(verbs)
    _failovers(verbs)
    _verb(verbs, "doctor", "what this machine can and cannot do, and what to do about it", _DOCTOR)
    _drain(verbs, "drain", "take no new clients", _DRAIN)
    _drain(verbs, "undrain", "take new clients again", _UNDRAIN)
    _env(verbs)
    _vault(verbs)
    _verb(verbs, "version", "versions of command, daemon and driver", _VERSION)
    return top


_Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _verb(verbs: _Verbs, name: str, text: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name,
        help=text,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="for programs, with a stable schema")
    # Also after the command, where most people look for it; what stands before it remains otherwise.
    parser.add_argument("--socket", metavar="PATH", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 600:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 and at most 600 seconds")
    return value


def _pid(text: str) -> int:
    value = int(text)
    if not MIN_PID <= value <= MAX_PID:
        raise argparse.ArgumentTypeError(f"{text} is not {MIN_PID} to {MAX_PID}")
    return value


def _number(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not 1 to 1000")
    return value


# argparse names these in "invalid NAME value".
_seconds.__name__ = "seconds"
_pid.__name__ = "pid"
_number.__name__ = "number"
_count.__name__ = "count"


def _status(verbs: _Verbs) -> None:
    text = "GPUs, domains, clients, and what is held for the dead"
    parser = _verb(verbs, "status", text, _STATUS, _STATUS_EPILOG)
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=2.0,
        metavar="SECONDS",
        help="again and again until interrupted, every 2 seconds or as given",
    )
    parser.add_argument("--no-headers", action="store_true", help="leave out headings, for scripts")


def _deed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, do nothing")
    parser.add_argument("--reason", default="", metavar="TEXT", help="kept in the daemon's log")
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="how long to wait for the end")


def _kill(verbs: _Verbs) -> None:
    parser = _verb(verbs, "kill", "evict one client without harming the others", _KILL)
    parser.add_argument("pid", type=_pid, metavar="PID")
    _deed(parser)
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask, even on a terminal")
    parser.add_argument(
        "--start-ticks",
        type=_number,
        metavar="N",
        help="field 22 of /proc/PID/stat: refuse a process that started at another time",
    )


def _policy(verbs: _Verbs) -> None:
    text = "what a guard hit of one client leads to"
    parser = _verb(verbs, "policy", text, _POLICY)
    parser.add_argument("pid", type=_pid, metavar="PID")
    parser.add_argument("policy", choices=("evict", "absorb", "freeze"), metavar="evict|absorb|freeze")
    parser.add_argument("--reason", default="", metavar="TEXT", help="kept in the daemon's log")
    parser.add_argument("--start-ticks", type=_number, metavar="N", help="as for kill")


def _events(verbs: _Verbs) -> None:
    parser = _verb(verbs, "events", "what happens: faults, clients, domains", _EVENTS)
    parser.add_argument("--follow", "-f", action="store_true", help="go on until interrupted")
    parser.add_argument("--since", type=_number, metavar="ID", help="only events with greater numbers")


def _faults(verbs: _Verbs) -> None:
    parser = _verb(verbs, "faults", "what went wrong: who did it, how sure, and why", _FAULTS)
    parser.add_argument("--limit", type=_count, default=20, metavar="N", help="the newest N (default 20)")
    parser.add_argument("--since", type=_number, metavar="ID", help="only records with greater numbers")
    parser.add_argument("--explain", metavar="CLASS", help="what a class of fault means and what to do")


def _failovers(verbs: _Verbs) -> None:
    parser = _verb(verbs, "failovers", "programs whose domain was left: moved, stayed, and why", _FAILOVERS)
    parser.add_argument("--limit", type=_count, default=20, metavar="N", help="the newest N (default 20)")
    parser.add_argument("--since", type=_number, metavar="ID", help="only records with greater numbers")


def _drain(verbs: _Verbs, name: str, text: str, description: str) -> None:
    parser = _verb(verbs, name, text, description)
    parser.add_argument("--gpu", metavar="GPU", help="index or UUID (default: every GPU)")
    _deed(parser)


def _vault(verbs: _Verbs) -> None:
    parser = verbs.add_parser(
        "vault",
        help="memory that outlives its program: list, keep, free",
        description=_VAULT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--socket", metavar="PATH", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    deeds = parser.add_subparsers(dest="deed", required=True, metavar="COMMAND", title="commands")
    listing = _verb(deeds, "list", "what is held", "One line for each piece of memory that is held.")
    listing.add_argument("--no-headers", action="store_true", help="leave out headings, for scripts")
    keep = _verb(deeds, "keep", "keep a program's memory after its end", "Keep a program's memory by name.")
    keep.add_argument("pid", type=_pid, metavar="PID")
    keep.add_argument("name", metavar="NAME", help="1 to 63 printable characters, not a number")
    keep.add_argument("--start-ticks", type=_number, metavar="N", help="as for kill")
    free = _verb(deeds, "free", "let go of what is held", "Let go of one piece, or of all under a name.")
    free.add_argument("what", metavar="ID|NAME")
    for deed in (keep, free):
        _deed(deed)


def _env(verbs: _Verbs) -> None:
    parser = _verb(verbs, "env", "the environment that a job must set to join", _ENV)
    parser.add_argument(
        "--gpu", metavar="GPU", help="index or UUID (default: CUDA_VISIBLE_DEVICES, or the daemon chooses)"
    )
    parser.add_argument("--shared", action="store_true", help="the domain that all users share")
    parser.add_argument("--shell", choices=SHELLS, default="sh", help="whose commands to print")
