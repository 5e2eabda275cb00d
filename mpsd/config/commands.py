"""The commands `mpsd config check [FILE]` and `mpsd config show [FILE]`.

Both read the same sources as `mpsd run`: a file, overridden by MPSD_ variables. `check` reports the errors
that `mpsd run` would report, and creates nothing. `show` prints the values in effect as TOML that can be
saved and edited.
"""

from __future__ import annotations

import io
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from mpsd.base import output
from mpsd.base.errors import ConfigError, MpsdError
from mpsd.config.layout import Layout
from mpsd.config.protect import limits, unknown_user, user_levels
from mpsd.config.reader import load, mistakes, to_toml, unknown_variables
from mpsd.config.schema import DEFAULT_FILE, Config


def add_arguments(parser: ArgumentParser) -> None:
    """Add the two verbs to the parser of `mpsd config`. Pass its result to `run`."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="check|show")
    for name, text in (
        ("check", "check a configuration file and the MPSD_ variables that are set; report every mistake"),
        ("show", "print the configuration in effect: the meaning of each key, advanced ones if they are set"),
    ):
        verb = verbs.add_parser(name, help=text, description=text)
        source = verb.add_mutually_exclusive_group()
        source.add_argument(
            "file", nargs="?", help=f"the file to read; default: $MPSD_CONFIG, else {DEFAULT_FILE}"
        )
        source.add_argument("--config", metavar="FILE", help="the same, as for `mpsd run`")
        if name == "show":
            verb.add_argument("--all", action="store_true", help="print the advanced keys too")


Advice = Callable[[Config], Sequence[str]]
"""Returns warnings about values that are valid. The schema alone does not know them."""


def run(
    arguments: Namespace,
    environ: Mapping[str, str],
    out: TextIO,
    notes: TextIO,
    advice: Advice = lambda config: (),
) -> int:
    """Run the verb. `notes` receives warnings. Raise ConfigError."""
    file = arguments.file or arguments.config
    if arguments.verb == "show":
        config = load(file, environ, uid=0, warn=lambda text: _note(notes, text))
        out.write(to_toml(config, advanced=arguments.all))
        return 0
    for name, remedy in unknown_variables(environ):
        notes.write(f"mpsd: ignored the unknown variable {name} ({remedy})\n")
    wrong = mistakes(file, environ)
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        # One error for the caller, with each mistake on its own line.
        raise ConfigError("\n      ".join(map(str, wrong)))
    config = load(file, environ, warn=lambda text: _note(notes, text))
    if unknown := [str(unknown_user(name)) for name in user_levels(config)[1]]:
        raise ConfigError("\n      ".join(unknown))
    Layout.of(config).check()
    for text in advice(config):
        notes.write(f"mpsd: warning: {text}\n")
    named = file or environ.get("MPSD_CONFIG")
    if named or DEFAULT_FILE.exists():
        out.write(f"{named or DEFAULT_FILE}: ok\n")
    else:
        out.write(f"{DEFAULT_FILE} does not exist: ok, mpsd uses the defaults\n")
    out.write(f"protection: {_protection(config)}\n")
    return 0


def _note(notes: TextIO, text: str) -> None:
    notes.write(f"mpsd: {text}\n")


def _protection(config: Config) -> str:
    """Return the settings' part in the protection level; the rest is known on the node alone."""
    if found := list(limits(config)):
        return f"limited by the settings: {'; '.join(found)}"
    return "no setting limits it; mpsd-ctl doctor shows the level of this node"


def main_of(arguments: Namespace, environ: Mapping[str, str], advice: Advice = lambda config: ()) -> int:
    """Run the verb on standard output, which may be closed, full or a broken pipe. Raise ConfigError."""
    text, notes = io.StringIO(), io.StringIO()
    try:
        status = run(arguments, environ, text, notes, advice)
    finally:
        if sys.stderr is not None:
            sys.stderr.write(notes.getvalue())
    return output.put(text.getvalue(), "mpsd", status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mpsd config` as a program; return the exit status of the error, if any."""
    parser = ArgumentParser(prog="mpsd config")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        return main_of(arguments, os.environ)
    except MpsdError as error:
        print(f"mpsd: {error}", file=sys.stderr)
        return error.exit_code
