"""What mpsd-ctl understands."""

from __future__ import annotations

import argparse
from typing import TypeAlias

from mpsd import __version__

EXIT_CODES = """\
exit status:
  0 done, healthy     1 error           2 usage            3 no daemon answers
  4 not allowed      10 degraded       11 a domain in FAULT
 12 too late         13 refused: ambiguous
"""


def build() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="mpsd-ctl",
        description="Look at and steer mpsd, the supervisor of NVIDIA MPS on this machine.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument(
        "--socket", metavar="PATH", help="the daemon's socket (default: $MPSD_SOCKET, then yours)"
    )
    top.add_argument("--version", action="version", version=f"mpsd-ctl {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    _status(verbs)
    _kill(verbs)
    _events(verbs)
    _faults(verbs)
    _drain(verbs)
    env = _verb(verbs, "env", "print the environment that a job must set to join", json=True)
    env.add_argument("--gpu", metavar="GPU", help="index or UUID (default: the least used)")
    env.add_argument("--shared", action="store_true", help="the domain that all users share")
    env.add_argument("--shell", choices=("sh", "csh", "fish"), default="sh", help="whose syntax to print")
    _verb(verbs, "doctor", "what this machine can and cannot do, and what to do about it", json=True)
    _verb(verbs, "version", "versions of command, daemon and driver", json=True)
    return top


_Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _verb(verbs: _Verbs, name: str, text: str, *, json: bool = False) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    if json:
        parser.add_argument("--json", action="store_true", help="machine-readable, with a stable schema")
    return parser


def _status(verbs: _Verbs) -> None:
    parser = _verb(verbs, "status", "GPUs, domains, clients, and what is held for the dead", json=True)
    parser.add_argument(
        "--watch", nargs="?", type=float, const=2.0, metavar="SECONDS", help="again and again, every 2 s"
    )
    parser.add_argument("--no-headers", action="store_true", help="leave out headings")


def _kill(verbs: _Verbs) -> None:
    parser = _verb(verbs, "kill", "evict one client without harming the others", json=True)
    parser.add_argument("pid", type=int, metavar="PID")
    parser.add_argument("--start-ticks", type=int, metavar="N", help="refuse if the pid was used again since")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, do nothing")
    parser.add_argument("--reason", default="", help="kept in the log")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="how long to wait for the end")


def _events(verbs: _Verbs) -> None:
    parser = _verb(verbs, "events", "what happens: faults, clients, domains", json=True)
    parser.add_argument("--follow", action="store_true", help="go on until interrupted")
    parser.add_argument("--since", type=int, default=0, metavar="N", help="only events after this number")


def _faults(verbs: _Verbs) -> None:
    parser = _verb(verbs, "faults", "fault records: what happened, who did it, how sure, and why", json=True)
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="the newest N (default 20)")
    parser.add_argument("--since", type=int, default=0, metavar="ID", help="only records after this one")
    parser.add_argument(
        "--explain", metavar="CLASS", help="what a class means and what to do (no daemon needed)"
    )


def _drain(verbs: _Verbs) -> None:
    for name, text in (
        ("drain", "give out no more environments; clients that are there stay"),
        ("undrain", "give out environments again"),
    ):
        parser = _verb(verbs, name, text, json=True)
        parser.add_argument("--gpu", metavar="GPU", help="index or UUID (default: every GPU)")
        parser.add_argument("--dry-run", action="store_true", help="say what would be done, do nothing")
        parser.add_argument("--reason", default="", help="kept in the log")
