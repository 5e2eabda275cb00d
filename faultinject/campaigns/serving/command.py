"""`mpsd-faultinject serving`: requests to a server beside faults. Options, run, table."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faultinject.campaigns.failover.command import main_settings
from faultinject.campaigns.failover.rounds import PARTS
from faultinject.campaigns.serving import reports
from faultinject.campaigns.serving.answers import Served
from faultinject.campaigns.serving.rounds import Answers, Serving
from faultinject.evidence import files, revision, tables
from faultinject.evidence.files import tell_stderr
from faultinject.programs.llm.batch import SLOTS
from faultinject.registry.history import History
from faultinject.registry.kinds import GPU_KINDS
from faultinject.rig.libraries import Libraries, find_libraries
from faultinject.rig.node import Node, open_node
from faultinject.rig.rig import Rig
from mpsd.base.errors import MpsdError, UsageError

KINDS = ("trap", "misaligned", "store")
KNOWN = tuple(kind for kind in (*GPU_KINDS, *PARTS) if kind != "drain")
"""A planned move does not end a program that cannot move."""


class Run:
    """All modes, each in a rig of its own."""

    def __init__(self, args: argparse.Namespace, node: Node, libraries: Libraries) -> None:
        self._args, self._node, self._libraries = args, node, libraries
        self._date = datetime.now(UTC).isoformat(timespec="seconds")
        self._leftovers: list[str] = []
        self._served: dict[str, list[dict[str, Any]]] = {}
        self._undisturbed: dict[str, Any] = {}
        self._model = ""

    @contextmanager
    def _server(self, mode: str, answers: Answers) -> Iterator[Serving]:
        """Run a server in a rig of its own. Raises MpsdError."""
        settings = main_settings(self._libraries)
        logs = self._args.out and self._args.out / mode
        with History() as history:
            rig = Rig(self._node, "mpsd", history, settings=settings, logs_to=logs)
            try:
                with rig:
                    serving = Serving(rig, self._libraries, tell_stderr, mode, self._args.seed, answers)
                    serving.start()
                    yield serving
                    if blame := serving.end():
                        raise MpsdError(blame)
            finally:
                self._leftovers += rig.leftovers

    def alone(self) -> Answers:
        """Answer every request without faults; return the right tokens. Raises MpsdError."""
        with self._server("alone", {}) as serving:
            answers = serving.undisturbed(len(self._args.kinds) * self._args.faults)
            self._model = serving.model
        self._undisturbed = reports.undisturbed(answers)
        return {answer.request.number: [blame.token for blame in answer.tokens] for answer in answers}

    def beside_faults(self, mode: str, answers: Answers) -> None:
        """Run one mode. A failure is in the report."""
        found = list[Served]()
        try:
            with self._server(mode, answers) as serving:
                for kind in self._args.kinds:
                    found += serving.serve(kind, self._args.faults, self._args.deadline)
                    if found[-1].problem:
                        break
        except MpsdError as error:
            if not found or not found[-1].problem:
                found.append(Served(self._args.kinds[0], str(error)))
        self._served[mode] = [asdict(fault) for fault in found]

    def report(self) -> dict[str, Any]:
        """Return the report of the finished modes."""
        args = self._args
        words = ["mpsd-faultinject", "serving", "--backend", args.backend, "--seed", str(args.seed)]
        words += ["--modes", ",".join(args.modes), "--kinds", ",".join(args.kinds)]
        return {
            "schema": reports.SCHEMA_VERSION,
            "kind": reports.KIND,
            "device": self._node.device,
            "driver": self._node.driver,
            "backend": args.backend,
            "revision": revision.current(),
            "date": self._date,
            "command": shlex.join([*words, "--faults", str(args.faults)]),
            "seed": args.seed,
            "model": self._model,
            "slots": SLOTS,
            "leftovers": list(self._leftovers),
            "undisturbed": self._undisturbed,
            "served": dict(self._served),
        }


def run(args: argparse.Namespace, deliver_partial: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Run all modes. `deliver_partial` gets a whole report of the finished modes after each but the last.

    Raises MpsdError if the rig cannot be set up.
    """
    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        libraries = find_libraries(args.backend, args.libcuda, args.driver, Path(base))
        node = open_node(args.backend, Path(base))
        try:
            all_modes = Run(args, node, libraries)
            answers = all_modes.alone()
            for mode in args.modes:
                all_modes.beside_faults(mode, answers)
                if mode != args.modes[-1]:
                    deliver_partial(all_modes.report())
        finally:
            node.close()
    return all_modes.report()


def _check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"there is no {what} {name!r} for serving", remedy=f"of: {', '.join(known)}")
    if len({*names}) < len(names):
        raise UsageError(f"a {what} is named twice", remedy="name each once")


def show(finished: Mapping[str, Any]) -> None:
    print(tables.aligned(reports.table(finished)))
    print(reports.without_faults(finished))


def _run_command(args: argparse.Namespace) -> int:
    _check_names("mode", args.modes, reports.MODES)
    _check_names("kind", args.kinds, KNOWN)

    def deliver(report: Mapping[str, Any]) -> None:
        files.deliver(report, reports.KIND, args.json, args.markdown, reports.markdown(report), tell_stderr)

    finished = run(args, deliver)
    print(tables.heading(finished))
    show(finished)
    deliver(finished)
    return 0 if reports.passed(finished) else 1


def add_parser(commands: Any, types: Any) -> None:
    """Add the options of the subcommand. `types`: the readers of names, numbers and seconds."""
    parser = commands.add_parser("serving", help="requests to an LLM server beside faults")
    types.fault_runs(parser, "mode")
    parser.add_argument("--kinds", type=types.names, default=list(KINDS), help=f"default: {', '.join(KINDS)}")
    modes = ",".join(reports.MODES)
    parser.add_argument("--modes", type=types.names, default=list(reports.MODES), help=f"default: {modes}")
    parser.set_defaults(go=_run_command)
