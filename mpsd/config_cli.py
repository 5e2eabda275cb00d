"""`mpsd config check [FILE]` and `mpsd config show [FILE]`.

Both read what `mpsd run` would: a file with the MPSD_ variables over it. `check` accepts what that accepts,
and says the same otherwise, with nothing made; `show` prints the values in effect as TOML that can be saved
and edited.
"""

from __future__ import annotations

import io
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import TextIO

from mpsd import output
from mpsd.config import DEFAULT_FILE
from mpsd.config_reader import load, mistakes, to_toml, unknown_variables
from mpsd.errors import ConfigError, MpsdError
from mpsd.layout import Layout


def add_arguments(parser: ArgumentParser) -> None:
    """Give a parser (of `mpsd config`) its two verbs; the result goes to `run`."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="check|show")
    for name, text in (
        ("check", "say what is wrong with a configuration file and the MPSD_ variables that are set"),
        ("show", "print the configuration in effect, each key explained"),
    ):
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument(
            "file", nargs="?", help=f"the file to read; default: $MPSD_CONFIG, else {DEFAULT_FILE}"
        )


def run(arguments: Namespace, environ: Mapping[str, str], out: TextIO, notes: TextIO) -> int:
    """Perform the verb. `notes`: what is no error and still to be told. Raises ConfigError."""
    if arguments.verb == "show":
        out.write(to_toml(load(arguments.file, environ, uid=0)))
        return 0
    for name, remedy in unknown_variables(environ):
        notes.write(f"mpsd: variable without a meaning: {name} ({remedy})\n")
    wrong = mistakes(arguments.file, environ)
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        # One error for the caller, each mistake on a line of its own.
        raise ConfigError("\n      ".join(map(str, wrong)))
    Layout.of(load(arguments.file, environ)).check()
    named = arguments.file or environ.get("MPSD_CONFIG")
    if named or DEFAULT_FILE.exists():
        out.write(f"{named or DEFAULT_FILE}: ok\n")
    else:
        out.write(f"{DEFAULT_FILE} is absent: ok, every key has its default\n")
    return 0


def main_of(arguments: Namespace, environ: Mapping[str, str]) -> int:
    """`run` on standard output, which may be closed, full or a pipe that nobody reads. Raises ConfigError."""
    text, notes = io.StringIO(), io.StringIO()
    try:
        status = run(arguments, environ, text, notes)
    finally:
        if sys.stderr is not None:
            sys.stderr.write(notes.getvalue())
    return output.put(text.getvalue(), "mpsd", status)


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
