"""`mpsd-faultinject defaults`: options, run, table."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from faultinject.campaigns.defaults import reports
from faultinject.campaigns.defaults.rounds import DefaultRounds
from faultinject.evidence import files, schema, tables
from faultinject.evidence.files import tell_stderr
from faultinject.programs.workloads import HIDDEN, NAMES, ON_SIMULATED
from faultinject.registry import kinds
from faultinject.registry.history import History
from faultinject.registry.kinds import AUTO
from faultinject.rig.libraries import find_libraries
from faultinject.rig.node import open_node, without_settings
from faultinject.rig.rig import Rig
from mpsd.base.errors import MpsdError, UsageError
from mpsd.base.protection import ProtectSetting

PROGRAMS = {
    "nvidia": ("compiled", "generate_llama", "mixed", "cupy_arrays", "bindings_weights"),
    "simulated": ("bindings", "calls"),
}
CONFIGURED = ("zone_absorb", "zone_freeze", "zone_restart", "zone_sparse", "zone_host")
"""Zone kinds that need a configuration, or a death of mpsd."""
KINDS = (
    *(kind for kind in reports.ABSORBED if kind not in CONFIGURED),
    *kinds.MMU,
    *kinds.SM,
    "wild_call",
    *kinds.ENGINE,
    "server_death",
    *kinds.DISTANT,
)
"""Kinds that zones absorb come first: programs without fail-over live through them."""
ENDED_EARLY = "the run ended before all faults"
OFTEN = {"failover.per_minute": "1000"}
"""The faults of a run come more often than a program may move by default. Every other key has its default."""


class Run:
    """One run in one rig. `deliver_partial` gets a whole report of the finished faults after each."""

    def __init__(self, args: argparse.Namespace, deliver_partial: Callable[[dict[str, Any]], None]) -> None:
        self._args, self._deliver_partial = args, deliver_partial
        self._date = datetime.now(UTC).isoformat(timespec="seconds")
        self._found: dict[str, Any] = {"level": "", "why": "", "settings": [], "faults": [], "problem": ""}
        self._leftovers: list[str] = []

    def run(self) -> dict[str, Any]:
        """Raises MpsdError if the rig cannot be set up."""
        args = self._args
        with tempfile.TemporaryDirectory(prefix="mpsd-fi-") as base:
            libraries = find_libraries(args.backend, args.libcuda, args.driver, Path(base))
            self._node = open_node(args.backend, Path(base))
            try:
                history, node = History(), without_settings(self._node)
                rig = Rig(
                    node, AUTO, history, settings=self._settings(), logs_to=args.out, libraries=libraries
                )
                with history, rig:
                    self._found["settings"] = rig.mpsd.setting_names()
                    try:
                        self._faults(DefaultRounds(rig, libraries, tell_stderr, args.programs))
                    except MpsdError as error:
                        self._found["problem"] = f"{error}; mpsd: {rig.mpsd.tail()[-300:]}"
                self._leftovers += rig.leftovers
            finally:
                self._node.close()
        return self.report()

    def _settings(self) -> dict[str, str]:
        wanted = self._args.protect
        return OFTEN | ({} if wanted is ProtectSetting.AUTO else {"protect": f'"{wanted.value}"'})

    def _faults(self, rounds: DefaultRounds) -> None:
        kinds = [kind for kind in self._args.kinds for _ in range(self._args.faults)]
        rounds.record_reference(len(kinds))
        rounds.start()
        self._found["level"], self._found["why"] = rounds.node_level()
        for kind in kinds:
            fault = rounds.inject(kind, self._args.deadline)
            self._found["faults"].append(asdict(fault))
            self._deliver_partial({**self.report(), "problem": ENDED_EARLY})
        self._found["problem"] = rounds.end()

    def report(self) -> dict[str, Any]:
        """Return the report of the finished faults."""
        args, device = self._args, (self._node.device, self._node.driver)
        words = ["mpsd-faultinject", "defaults", "--backend", args.backend]
        words += ["--programs", ",".join(args.programs), "--kinds", ",".join(args.kinds)]
        words += ["--faults", str(args.faults)] if args.faults > 1 else []
        words += [] if args.protect is ProtectSetting.AUTO else ["--protect", args.protect.value]
        return {
            **schema.envelope(reports.KIND, reports.SCHEMA_VERSION, device, args.backend, self._date, words),
            "leftovers": list(self._leftovers),
            "programs": DefaultRounds.joins(args.programs),
            **self._found,
            "faults": list(self._found["faults"]),
        }


def check_names(args: argparse.Namespace) -> None:
    """Raise UsageError for an unknown kind or program, or one that this backend cannot run."""
    known = NAMES if args.backend != "simulated" else ON_SIMULATED
    programs = [name for name in known if name not in HIDDEN]
    for what, names, known_names in (("kind", args.kinds, KINDS), ("program", args.programs, programs)):
        for name in names:
            if name not in known_names:
                raise UsageError(f"there is no {what} {name!r} here", remedy=f"of: {', '.join(known_names)}")
        if len({*names}) < len(names):
            raise UsageError(f"a {what} is named twice", remedy="name each once")


def _run_command(args: argparse.Namespace) -> int:
    args.programs = args.programs or list(PROGRAMS[args.backend])
    check_names(args)

    def deliver(report: dict[str, Any]) -> None:
        files.deliver(report, reports.KIND, args.json, args.markdown, reports.markdown(report))

    finished = Run(args, deliver).run()
    print(tables.heading(finished))
    print(tables.aligned(reports.table(finished)) + "\n")
    print(tables.aligned(reports.program_table(finished)) + "\n")
    print(reports.summary(finished))
    for name, verdict in reports.verdicts(finished):
        if verdict != "valid":
            print(f"{name}: {verdict}")
    deliver(finished)
    return 0 if reports.passed(finished) else 1


def add_parser(commands: Any, types: Any) -> None:
    """Add the options of the subcommand. `types`: the readers of names, numbers and seconds."""
    parser = commands.add_parser(
        "defaults", help="one fault of each kind beside programs, mpsd not configured"
    )
    types.proxied_runs(parser, "run", deadline=20.0, limited="the programs after each fault")
    parser.add_argument("--kinds", type=types.names, default=list(KINDS), help=f"of: {', '.join(KINDS)}")
    help_text = "started by mpsd-run and by mpsd-ctl env in turn (default: by the backend)"
    parser.add_argument("--programs", type=types.names, default=[], help=help_text)
    parser.add_argument("--faults", type=types.number(1, 100), default=1, help="of each kind (default: 1)")
    parser.add_argument(
        "--protect",
        type=ProtectSetting,
        choices=list(ProtectSetting),
        default=ProtectSetting.AUTO,
        help="the setting of the node (default: auto, without a line in the configuration)",
    )
    parser.set_defaults(go=_run_command)
