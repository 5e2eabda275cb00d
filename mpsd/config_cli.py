"""`mpsd config check [FILE]` and `mpsd config show [FILE]`.

`check` reads one file with nothing from the environment but $MPSD_CONFIG, and refuses MPSD_ variables
that mean nothing; `show` prints the values in effect, environment included, as TOML that can be saved
and edited.
"""

from __future__ import annotations

import io
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import TextIO

from mpsd.config import DEFAULT_FILE
from mpsd.config_reader import load, mistakes, to_toml, unknown_variables
from mpsd.errors import ConfigError, MpsdError


def add_arguments(parser: ArgumentParser) -> None:
    """Give a parser (of `mpsd config`) its two verbs; the result goes to `run`."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="check|show")
    for name, text in (
        ("check", "read a configuration file and say what is wrong with it"),
        ("show", "print the configuration in effect, each key explained"),
    ):
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument(
            "file", nargs="?", help=f"the file to read; default: $MPSD_CONFIG, else {DEFAULT_FILE}"
        )


def run(arguments: Namespace, environ: Mapping[str, str], out: TextIO) -> int:
    """Perform the verb. Raises ConfigError."""
    if arguments.verb == "show":
        out.write(to_toml(load(arguments.file, environ)))
        return 0
    plain = {
        key: value for key, value in environ.items() if not key.startswith("MPSD_") or key == "MPSD_CONFIG"
    }
    wrong = mistakes(arguments.file, plain)
    wrong += [
        ConfigError(f"no key has the variable ${name}, which is set", remedy=remedy)
        for name, remedy in unknown_variables(environ)
    ]
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        # One error for the caller, each mistake on a line of its own.
        raise ConfigError("\n      ".join(map(str, wrong)))
    named = arguments.file or environ.get("MPSD_CONFIG")
    if named or DEFAULT_FILE.exists():
        out.write(f"{named or DEFAULT_FILE}: ok\n")
    else:
        out.write(f"{DEFAULT_FILE} is absent: ok, every key has its default\n")
    return 0


def main_of(arguments: Namespace, environ: Mapping[str, str]) -> int:
    """`run` on standard output, which may be closed, full or a pipe that nobody reads. Raises ConfigError."""
    text = io.StringIO()
    status = run(arguments, environ, text)
    try:
        if sys.stdout is not None:
            sys.stdout.write(text.getvalue())
            sys.stdout.flush()
        return status
    except OSError as error:
        # What is still buffered cannot be written; Python would try once more at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return status
        print(f"mpsd: cannot write: {error.strerror or error}", file=sys.stderr)
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    """`config` as a program of its own; the exit status is that of the error, if any."""
    parser = ArgumentParser(prog="mpsd config")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        return main_of(arguments, os.environ)
    except MpsdError as error:
        print(f"mpsd: {error}", file=sys.stderr)
        return error.exit_code
