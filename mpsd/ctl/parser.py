"""The command line of mpsd-ctl: verbs, options and their help pages."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

from mpsd import __version__, docs
from mpsd.wire.messages import MAX_PID, MIN_PID
from mpsd_client.joining.plan import add_options

SHELLS = ("sh", "csh", "fish")

_DESCRIPTION = """\
Show and control mpsd, the daemon that runs NVIDIA MPS on this node. MPS lets several processes share a GPU.
mpsd detects a fault, a death or a hang of one client, names that client and protects the other clients.
"""

_EPILOG = """\
first steps:
  mpsd-run python train.py                   run a job on the shared GPU, with every protection offered
  eval "$(mpsd-ctl env)" && python train.py  the same, for all jobs of a shell
  mpsd-ctl status                            clients, their protections, and problems
  mpsd-ctl faults                            fault records: offender, confidence, evidence, remedy
  mpsd-ctl kill PID                          evict a client without harm to the other clients
  mpsd-ctl doctor                            capabilities of this machine, with remedies

rights:
  Every user may look. A user may evict its own clients, and sees the faults and events that concern it.
  Root, users in the group mpsd, and the user that mpsd runs as see everything and may do everything.

exit status:
   0  done; status: healthy              4  not allowed
   1  an error                          10  status, doctor: degraded, something needs attention
   2  the command line is wrong         11  status: a domain in use is in FAULT or out of reach
   3  no daemon answers                 12  not done in time
                                        13  refused: the target could be another process
                                        69  env: a new client must not join this GPU now

environment:
  MPSD_SOCKET  the daemon's socket; otherwise your own daemon's ($XDG_RUNTIME_DIR/mpsd/mpsd.sock, or
               /tmp/mpsd-UID/mpsd.sock) if it exists, else the machine's (/run/mpsd/mpsd.sock)
  NO_COLOR     if set, no colour, even on a terminal

`mpsd-ctl COMMAND --help` explains a command. `mpsd help operate` prints the operator's page.
"""

_STATUS = """\
Below each GPU is a row for each fault domain. A fault domain is a control daemon, its MPS server and its
clients; a fault that is not absorbed ends all of it.

  STATE       see below
  CLIENTS     clients that work in the domain
  STANDBY     its standby domain, which takes over after a fault: ready, starting, or none
  LAST FAULT  record in mpsd-ctl faults, class, time, offender; also of a domain that this one replaced

States of a domain:

  starting     its control daemon and MPS server start
  serving      new clients join it
  idle         the same, and its MPS server starts with the first client
  drained      its GPU is drained: clients run on, new clients are refused
  faulted      a fault ended its clients' work; new clients join another domain; it is emptied and reused
  poisoned     the kernel of an exited client does not end in it; it takes no new clients
  unreachable  new clients cannot get to it, or its control daemon died; its clients run on
  ending       retired, or its server died; it ends with its last client
  failed       it did not start
  stopping     it ends

Below the GPUs is a row for each client. Equal clients share a row; --all lists each one.

  PROTECTED  failover, guard or observe: its protection level, with the reason if the node offers more
             no: it has no protection. lost: its GPU work is lost, restart it. -: the daemon does not say
  GPU MEM    its GPU memory
  COST       GPU memory that its protection takes; the share of time that saving adds, where it is known

--verbose adds a line for each context of a client. It names the mechanisms that protect others from it:

  lease    mpsd holds its GPU memory until its kernels have ended, so its death harms no other client
  tracker  mpsd sees a memory fault of it within a millisecond, and names it
  guard    stray accesses to these addresses are absorbed; "silent": without a record, so the client
           computes on with wrong data
  vault    it runs under mpsd-run; the daemon can keep this much of its memory (mpsd-ctl vault)
  zones    guard zones around its allocations. managed: absorb and record. sparse: absorb without a record.
           uncovered: a side of an allocation has no zone. far: managed zones that reach GiBs further
  standby  as its state: the standby context of a client that works in another domain

The last tables show exited clients with memory still held, memory in the vault of exited clients, and GPU
processes outside MPS. On a terminal a text that does not fit ends with a mark; in a pipe nothing is cut.
"""

_STATUS_EPILOG = """\
exit status: 0 healthy, 3 no daemon, 10 degraded (conditions), 11 a domain in use is in FAULT or out of reach.
--json prints the daemon's answer unchanged ("schema": 1). Keys may be added; no key changes its meaning.
"""

_POLICY = """\
Set the consequence of a guard hit of one client. A guard hit is a stray access that a guard zone absorbs.
Guard zones exist around allocations of programs under mpsd-run. Each hit leaves a record (mpsd-ctl faults),
and no other client is affected.

  evict    mpsd evicts the client at once, as mpsd-ctl kill does
  absorb   the client continues, with wrong results; at most one record per minute
  freeze   mpsd stops the client (SIGSTOP) for inspection; then use mpsd-ctl kill PID, or kill -CONT PID

The setting holds until the process ends, also over restarts of mpsd. For all other clients [guard]
zone_policy holds. Only root and users in the group mpsd may set it.
"""

_PROTECT = """\
Switch the fail-over of one running program off. Its work goes on without a pause. mpsd prepares no standby
context for it any more and does not move it: a fault of another client can end its GPU work. Its guard zones
stay. The program releases its standby context and its snapshot buffers.

This holds until the program ends, also over restarts of mpsd. To switch fail-over on again, restart the
program. The level of programs that start later is `protect` in mpsd.toml (mpsd help protection).

You may switch off your own programs; root and users in the group mpsd may switch off any.
"""

_KILL = """\
Evict one client without harm to the other clients. mpsd asks MPS to terminate the client, waits for a short
deadline, then sends SIGKILL. It holds the client's GPU memory until the client's kernels have ended.
If the client is stopped or traced, or its domain is in FAULT, mpsd sends SIGKILL at once: a request to MPS
would stall all other clients.

On a terminal mpsd-ctl shows the plan first and asks for confirmation; --yes skips the question.
mpsd refuses a pid that is not a client, and with --start-ticks a pid that was reused by another process.
Ordinary users do not learn whether another user's process is a client.
"""

_EVENTS = """\
Each event has a line: its number, its time, its kind, and its fields. Without --follow, print the events
that the daemon still keeps. With --follow, print new events, after the kept ones past --since if --since
is given. A fault and a fail-over have one line each. If a later revision of its record says more, --follow
prints a line "fault-revised" or "failover-revised". With --json, each revision has a line.
The daemon does not wait for a slow reader: an event "lost" has the number of events that were dropped.
After a restart of the daemon, numbers continue, with a gap if it was killed. If kept events after --since
are incomplete, stderr says so.
"""

_FAULTS = """\
Fault records, oldest first. Each record has:

  summary   class of the fault, domain, accessed address
  offender  the client that caused it, with a confidence (certain: the evidence admits no other client)
  lost      other clients that lost their GPU work (victims in JSON)
  moved     clients that failed over instead, with their pause since the first sign of the fault
  refused   number of new clients that met error 807
  evidence  each sign, with its time before (-) or after (+) that of the record
  do        the remedy

--explain prints the meaning of a fault class and does not ask the daemon. `--explain sources` prints which
users can forge each source of a decision.
"""

_FAILOVERS = """\
Fail-over history, oldest first. Each record has the domain that programs left, the reason and the domain
they moved to. A line for each program has its outcome: moved (with its own times, counted from mpsd's order
to move), stayed, silent or not told, with the reason. Only fail-over participants appear: programs under
mpsd-run, at the protection level failover.
"""

_CONDITIONS = """\
Every condition that can degrade protection or needs an operator: its code, its text and its remedy. Status
shows the ones that hold now. Doctor, events (kind "condition"), metrics and the daemon's log have the same
codes. Works without a daemon.
"""

_DOCTOR = """\
Show the protection level with its obstacles. Then check this machine's capabilities for mpsd: driver,
device nodes, binaries, compute mode, rights, limits, directories, sockets. Each missing capability has a
remedy. The daemon runs the checks; if no daemon answers, mpsd-ctl runs them with your rights. Nothing is
changed. Exit status 10 if something is missing.
"""

_DRAIN = """\
Stop giving out environments for a GPU, or for all GPUs. Clients that run stay, and are listed. At
the level failover, protected programs move to a new domain, and the old domain ends after them.
The drain holds until undrain, also over restarts of the daemon. For administrators.
"""

_UNDRAIN = "Give out environments for a GPU, or for all GPUs, again. For administrators."

_ENV = """\
Print the shell commands that give the programs of a shell the environment of mpsd-run: they join MPS with the
same protection. Run them before a program initialises CUDA. The path is stable: after a fault it leads to a
working domain, so a shell needs them only once. A line on stderr names the protection level, the GPU and the
domain. `mpsd-run --help` explains the variables and the names of GPUs.

  eval "$(mpsd-ctl env)"                        sh, bash, zsh
  eval `mpsd-ctl env --shell csh`               csh, tcsh
  mpsd-ctl env --shell fish | source            fish

If a program could not join, nothing is set, and eval fails. Exit status 69: the GPU is lost, or the level of
--require or --protect cannot be had.
"""

_VAULT = """\
GPU memory of programs under mpsd-run that the daemon holds too. Such memory is freed when its program ends,
unless it is kept under a name. The same owner (user and cgroup, or user and token) can attach to kept
memory. mpsd frees it by command, by age, or as the oldest of an owner that keeps too much.

  mpsd-ctl vault list                segments, with owner, age and name
  mpsd-ctl vault keep PID NAME       keep the memory of that program, now and later, after its end
  mpsd-ctl vault free ID|NAME        release one segment, or all that a name keeps

A running program keeps its own memory in any case: free releases only the daemon's hold. Users see and
change their own memory, administrators all. Each command takes --json; keep and free take --dry-run.
"""

_VERSION = "Versions of this command, of the daemon and of the driver. Works without a daemon."


class _Parser(argparse.ArgumentParser):
    """A parser whose errors name the nearest valid value, or the command that tells more."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            # The error of argparse does not say which command lacks them.
            self.error(
                f"unrecognized arguments: {' '.join(unknown)}: "
                f"`mpsd-ctl {found.verb} --help` lists the arguments of {found.verb}"
            )
        return found

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)$", message)
        if found is not None:
            valid = [name.strip(" '") for name in found[2].split(",")]
            near = difflib.get_close_matches(found[1], valid, n=1)
            if near:
                message += f": did you mean {near[0]!r}?"
            elif found[1] == "help":
                message += ": did you mean `mpsd-ctl --help`, or `mpsd help` for the pages?"
            elif found[1] in docs.names():
                message += f": did you mean `mpsd help {found[1]}`?"
        super().error(message)


def build() -> argparse.ArgumentParser:
    top: argparse.ArgumentParser = _Parser(
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
    _protect(verbs)
    _events(verbs)
    _faults(verbs)
    _failovers(verbs)
    _conditions(verbs)
    _verb(verbs, "doctor", "capabilities of this machine, with remedies", _DOCTOR)
    _drain(verbs, "drain", "stop admission of new clients", _DRAIN)
    _drain(verbs, "undrain", "resume admission of new clients", _UNDRAIN)
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
    parser.add_argument("--json", action="store_true", help="print JSON with a stable schema")
    # Accept --socket after the command too; without it there, the value before the command holds.
    parser.add_argument("--socket", metavar="PATH", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 600:
        raise argparse.ArgumentTypeError(f"{text} is out of range: give more than 0 and at most 600 seconds")
    return value


def _pid(text: str) -> int:
    value = int(text)
    if not MIN_PID <= value <= MAX_PID:
        raise argparse.ArgumentTypeError(f"{text} is out of range: a pid is {MIN_PID} to {MAX_PID}")
    return value


def _number(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0: give 0 or more")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is out of range: give 1 to 1000")
    return value


# argparse prints these names in "invalid NAME value".
_seconds.__name__ = "seconds"
_pid.__name__ = "pid"
_number.__name__ = "number"
_count.__name__ = "count"


def _status(verbs: _Verbs) -> None:
    text = "GPUs, domains, clients, protections, memory of exited clients"
    parser = _verb(verbs, "status", text, _STATUS, _STATUS_EPILOG)
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=2.0,
        metavar="SECONDS",
        help="repeat until interrupted, every SECONDS (default 2)",
    )
    parser.add_argument("--all", "-a", action="store_true", help="list each client, also equal ones")
    parser.add_argument(
        "--verbose", "-v", action="store_true", help="add processes, mechanisms, and standby domains"
    )
    parser.add_argument("--no-headers", action="store_true", help="omit headings, for scripts")


def _add_change_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print the plan, change nothing")
    parser.add_argument("--reason", default="", metavar="TEXT", help="reason for the daemon's log")
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="time to wait for completion")


def _kill(verbs: _Verbs) -> None:
    parser = _verb(verbs, "kill", "evict one client without harm to the other clients", _KILL)
    parser.add_argument("pid", type=_pid, metavar="PID")
    _add_change_options(parser)
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask for confirmation")
    parser.add_argument(
        "--start-ticks",
        type=_number,
        metavar="N",
        help="field 22 of /proc/PID/stat: refuse if the process started at another time",
    )


def _policy(verbs: _Verbs) -> None:
    text = "set the consequence of a guard hit of one client"
    parser = _verb(verbs, "policy", text, _POLICY)
    parser.add_argument("pid", type=_pid, metavar="PID")
    parser.add_argument("policy", choices=("evict", "absorb", "freeze"), metavar="evict|absorb|freeze")
    parser.add_argument("--reason", default="", metavar="TEXT", help="reason for the daemon's log")
    parser.add_argument("--start-ticks", type=_number, metavar="N", help="as for kill")


def _protect(verbs: _Verbs) -> None:
    parser = _verb(verbs, "protect", "switch the fail-over of one running program off", _PROTECT)
    parser.add_argument("pid", type=_pid, metavar="PID")
    parser.add_argument("level", choices=("guard",), metavar="guard")
    _add_change_options(parser)
    parser.add_argument("--start-ticks", type=_number, metavar="N", help="as for kill")


def _events(verbs: _Verbs) -> None:
    parser = _verb(verbs, "events", "events of clients, domains and faults", _EVENTS)
    parser.add_argument("--follow", "-f", action="store_true", help="print new events until interrupted")
    parser.add_argument("--since", type=_number, metavar="ID", help="only events with greater numbers")


def _faults(verbs: _Verbs) -> None:
    parser = _verb(verbs, "faults", "fault records: offender, confidence, evidence, remedy", _FAULTS)
    parser.add_argument("--limit", type=_count, default=20, metavar="N", help="the newest N (default 20)")
    parser.add_argument("--since", type=_number, metavar="ID", help="only records with greater numbers")
    parser.add_argument("--explain", metavar="CLASS", help="print the meaning of a fault class, and advice")


def _failovers(verbs: _Verbs) -> None:
    parser = _verb(
        verbs, "failovers", "fail-over history: programs that moved or stayed, and why", _FAILOVERS
    )
    parser.add_argument("--limit", type=_count, default=20, metavar="N", help="the newest N (default 20)")
    parser.add_argument("--since", type=_number, metavar="ID", help="only records with greater numbers")


def _conditions(verbs: _Verbs) -> None:
    parser = _verb(
        verbs, "conditions", "list of all conditions that can degrade protection, with remedies", _CONDITIONS
    )
    parser.add_argument("code", nargs="?", metavar="CODE", help="print this condition alone")


def _drain(verbs: _Verbs, name: str, text: str, description: str) -> None:
    parser = _verb(verbs, name, text, description)
    parser.add_argument("--gpu", metavar="GPU", help="index or UUID (default: every GPU)")
    _add_change_options(parser)


def _vault(verbs: _Verbs) -> None:
    parser = verbs.add_parser(
        "vault",
        help="GPU memory that outlives its program: list, keep, free",
        description=_VAULT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--socket", metavar="PATH", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    deeds = parser.add_subparsers(dest="deed", required=True, metavar="COMMAND", title="commands")
    listing = _verb(deeds, "list", "list segments", "List the memory segments that the vault holds.")
    listing.add_argument("--no-headers", action="store_true", help="omit headings, for scripts")
    keep = _verb(
        deeds, "keep", "keep a program's memory after its end", "Keep a program's memory under a name."
    )
    keep.add_argument("pid", type=_pid, metavar="PID")
    keep.add_argument("name", metavar="NAME", help="1 to 63 printable characters, not a number")
    keep.add_argument("--start-ticks", type=_number, metavar="N", help="as for kill")
    free = _verb(deeds, "free", "release segments", "Release one segment, or all that a name keeps.")
    free.add_argument("what", metavar="ID|NAME")
    for deed in (keep, free):
        _add_change_options(deed)


def _env(verbs: _Verbs) -> None:
    parser = _verb(verbs, "env", "the environment that a job sets to join", _ENV)
    add_options(parser)
    parser.add_argument("--shared", action="store_true", help="ask for the domain that all users share")
    parser.add_argument("--shell", choices=SHELLS, default="sh", help="shell that will run the commands")
