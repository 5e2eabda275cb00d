"""`mpsd-faultinject serving`: requests to a server beside faults. The options, the run, the table."""

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

from faultinject import report
from faultinject.failover.command import main_settings
from faultinject.failover.rounds import PARTS
from faultinject.history import History
from faultinject.kinds import GPU_KINDS
from faultinject.matrix import tell_stderr
from faultinject.node import Node, open_node
from faultinject.proxy.library import Libraries, find_libraries
from faultinject.rig import Rig
from faultinject.serving import reports
from faultinject.serving.batch import SLOTS
from faultinject.serving.measure import Served
from faultinject.serving.rounds import Answers, Serving
from mpsd.errors import MpsdError, UsageError

KINDS = ("trap", "misaligned", "store")
KNOWN = tuple(kind for kind in (*GPU_KINDS, *PARTS) if kind != "drain")
"""A planned move ends no program that is not moved."""


class Run:
    """All modes, each in a rig of its own."""

    def __init__(self, args: argparse.Namespace, node: Node, libraries: Libraries) -> None:
        self._args, self._node, self._libraries = args, node, libraries
        self._date = datetime.now(UTC).isoformat(timespec="seconds")
        self._left: list[str] = []
        self._served: dict[str, list[dict[str, Any]]] = {}
        self._undisturbed: dict[str, Any] = {}
        self._model = ""

    @contextmanager
    def _server(self, mode: str, answers: Answers) -> Iterator[Serving]:
        """A server in a rig of its own, which is over afterwards. Raises MpsdError."""
        settings = main_settings(self._libraries)
        logs = self._args.out and self._args.out / mode
        with History() as history:
            rig = Rig(self._node, "mpsd", history, settings=settings, logs_to=logs)
            try:
                with rig:
                    serving = Serving(rig, self._libraries, tell_stderr, mode, self._args.seed, answers)
                    serving.start()
                    yield serving
                    if said := serving.end():
                        raise MpsdError(said)
            finally:
                self._left += rig.left

    def alone(self) -> Answers:
        """Every request that there will be, without faults: the right tokens. Raises MpsdError."""
        with self._server("alone", {}) as serving:
            heard = serving.undisturbed(len(self._args.kinds) * self._args.faults)
            self._model = serving.model
        self._undisturbed = reports.undisturbed(heard)
        return {each.request.number: [said.token for said in each.tokens] for each in heard}

    def beside_faults(self, mode: str, answers: Answers) -> None:
        """What goes wrong is in the report."""
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
        """Of what is done so far."""
        args = self._args
        words = ["mpsd-faultinject", "serving", "--backend", args.backend, "--seed", str(args.seed)]
        words += ["--modes", ",".join(args.modes), "--kinds", ",".join(args.kinds)]
        return {
            "schema": reports.SCHEMA_VERSION,
            "kind": reports.KIND,
            "device": self._node.device,
            "driver": self._node.driver,
            "backend": args.backend,
            "date": self._date,
            "command": shlex.join([*words, "--faults", str(args.faults)]),
            "seed": args.seed,
            "model": self._model,
            "slots": SLOTS,
            "leftovers": list(self._left),
            "undisturbed": self._undisturbed,
            "served": dict(self._served),
        }


def run(args: argparse.Namespace, so_far: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """`so_far` is given a whole report of the modes that are done, after each but the last. Raises MpsdError
    where the rig itself cannot be had."""
    with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
        libraries = find_libraries(args.backend, args.libcuda, args.driver, Path(base))
        node = open_node(args.backend, Path(base))
        try:
            every = Run(args, node, libraries)
            answers = every.alone()
            for mode in args.modes:
                every.beside_faults(mode, answers)
                if mode != args.modes[-1]:
                    so_far(every.report())
        finally:
            node.close()
    return every.report()


def _known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"there is no {what} {name!r} for serving", remedy=f"of: {', '.join(known)}")
    if len({*names}) < len(names):
        raise UsageError(f"a {what} is named twice", remedy="name each once")


def show(finished: Mapping[str, Any]) -> None:
    print(report.aligned(reports.table(finished)))
    print(reports.without_faults(finished))


def _go(args: argparse.Namespace) -> int:
    _known("mode", args.modes, reports.MODES)
    _known("kind", args.kinds, KNOWN)

    def deliver(made: Mapping[str, Any]) -> None:
        report.deliver(made, reports.KIND, args.json, args.markdown, reports.markdown(made), tell_stderr)

    finished = run(args, deliver)
    print(report.heading(finished))
    show(finished)
    deliver(finished)
    return 0 if reports.passed(finished) else 1


def add_parser(commands: Any, types: Any) -> None:
    """The subcommand's options. `types` has the harness's readers of names, numbers and seconds."""
    parser = commands.add_parser("serving", help="requests to an LLM server beside faults")
    types.fault_runs(parser, "mode")
    parser.add_argument("--kinds", type=types.names, default=list(KINDS), help=f"default: {', '.join(KINDS)}")
    modes = ",".join(reports.MODES)
    parser.add_argument("--modes", type=types.names, default=list(reports.MODES), help=f"default: {modes}")
    parser.set_defaults(go=_go)
