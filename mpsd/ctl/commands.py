"""The verbs of mpsd-ctl: each asks the daemon, prints, and returns the exit status. Raise MpsdError."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from mpsd import __version__
from mpsd.base.errors import DeadlineError, NotRunningError, ProtocolError, UsageError
from mpsd.base.text import printable
from mpsd.ctl import conditiontext, eventtext, failovertext, render, statustext, watch
from mpsd.ctl.health import health
from mpsd.ctl.style import Style, segment_count
from mpsd_client import Client, connect
from mpsd_client.env import export_lines
from mpsd_client.joining.plan import make_plan
from mpsd_client.run import say

KEPT_DEADLINE_S = 5.0
SCHEMA = 1


def style_for(out: TextIO, environ: Mapping[str, str]) -> Style:
    """Return the style for `out`: on a terminal colour (without NO_COLOR) and its width."""
    terminal = out.isatty()
    width = shutil.get_terminal_size().columns if terminal else 0
    try:
        "…".encode(out.encoding or "ascii")
        ascii_only = False
    except UnicodeEncodeError:
        ascii_only = True
    return Style(colour=terminal and not environ.get("NO_COLOR"), width=width, ascii_only=ascii_only)


def _print(out: TextIO, lines: Iterable[str]) -> None:
    out.write("".join(f"{line}\n" for line in lines))


def _json(out: TextIO, value: object) -> None:
    out.write(json.dumps(value, indent=2, ensure_ascii=True) + "\n")


def status(options: Namespace, out: TextIO) -> int:
    if options.watch is None:
        code, lines = _status_once(options, out)
        _print(out, lines)
        return code
    return watch.repeat(out, options.watch, lambda: _watched(options, out))


def _status_once(options: Namespace, out: TextIO) -> tuple[int, list[str]]:
    """Return the exit status and the lines of one status."""
    with connect(options.socket) as client:
        view = client.status()
    if options.json:
        return health(view), json.dumps(view, indent=2, ensure_ascii=True).splitlines()
    lines = statustext.status(
        view,
        style_for(out, os.environ),
        headers=not options.no_headers,
        verbose=options.verbose,
        every=options.all,
    )
    return health(view), lines


def _watched(options: Namespace, out: TextIO) -> list[str]:
    """Return the lines of one status; an error that the start of a daemon can end is a line too."""
    try:
        return _status_once(options, out)[1]
    except (NotRunningError, DeadlineError) as error:
        return style_for(out, os.environ).wrap(f"mpsd-ctl: {error}")


def kill(options: Namespace, out: TextIO) -> int:
    with connect(options.socket) as client:
        start_ticks = options.start_ticks
        if not options.dry_run and not options.yes and sys.stdin.isatty() and sys.stderr.isatty():
            start_ticks = start_ticks or _start_ticks(client, options.pid)
            if not _agreed(client, options.pid, start_ticks):
                return 1
        result = client.kill(
            options.pid,
            start_ticks=start_ticks,
            dry_run=options.dry_run,
            reason=options.reason,
            timeout=options.timeout,
        )
    if options.json:
        _json(out, {"schema": SCHEMA, "pid": options.pid, **result})
        return 0
    head = (
        f"would evict process {options.pid}:"
        if options.dry_run
        else f"{result['outcome']} process {options.pid}"
    )
    if result.get("evict_ms") is not None:
        head += f" in {result['evict_ms']:.1f} ms"
    _print(out, [head, *_steps(result)])
    return 0


def _steps(result: Mapping[str, Any]) -> list[str]:
    return [f"  {printable(step)}" for step in result["steps"]]


def _start_ticks(client: Client, pid: int) -> int | None:
    """Return the start time that pins the process, so that the confirmed pid cannot be another process."""
    found = (c["start_ticks"] for c in client.status()["clients"] if c["pid"] == pid)
    return next(found, None)


def _agreed(client: Client, pid: int, start_ticks: int | None) -> bool:
    plan = client.kill(pid, start_ticks=start_ticks, dry_run=True)
    sys.stderr.write("\n".join([f"this would evict process {pid}:", *_steps(plan), "continue? [y/N] "]))
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    print("mpsd-ctl: not confirmed; nothing was changed", file=sys.stderr)
    return False


def policy(options: Namespace, out: TextIO) -> int:
    with connect(options.socket) as client:
        result = client.zone_policy(
            options.pid, options.policy, start_ticks=options.start_ticks, reason=options.reason
        )
    if options.json:
        _json(out, {"schema": SCHEMA, **result})
    else:
        _print(out, [f"guard hits of process {result['pid']}: {result['policy']}"])
    return 0


def protect(options: Namespace, out: TextIO) -> int:
    try:
        with connect(options.socket) as client:
            result = client.protect(
                options.pid,
                options.level,
                start_ticks=options.start_ticks,
                dry_run=options.dry_run,
                reason=options.reason,
                timeout=options.timeout,
            )
    except ProtocolError as error:
        if "unknown operation" not in error.message:
            raise
        remedy = "restart mpsd with the present release: running clients live on"
        raise UsageError("the daemon is of an earlier release without this command", remedy=remedy) from error
    if options.json:
        _json(out, {"schema": SCHEMA, **result})
        return 0
    verb = "would switch off" if options.dry_run else "switched off"
    _print(out, [f"{verb} the fail-over of process {result['pid']}: it stays at guard", *_steps(result)])
    return 0


def events(options: Namespace, out: TextIO) -> int:
    since = 0 if options.since is None and not options.follow else options.since
    known = eventtext.Records()
    with connect(options.socket) as client:
        stream = client.subscribe(since)
        if stream.gap:
            print(f"mpsd-ctl: {eventtext.gap(stream.gap, options.since, stream.kept)}", file=sys.stderr)
        kept_until = time.monotonic() + KEPT_DEADLINE_S
        kept = [stream.next(kept_until) for _ in range(stream.kept)]
        for seen in kept if options.json else eventtext.newest(kept):
            _event(options, out, seen, known)
        if not (kept or options.follow or options.json):
            where = "" if options.since is None else f" after {options.since}"
            _print(out, [f"no events{where}"])
        while options.follow:
            _event(options, out, next(stream), known)
    return 0


def _event(options: Namespace, out: TextIO, seen: Mapping[str, Any], known: eventtext.Records) -> None:
    line = json.dumps(seen) if options.json else known.line(seen)
    if line is not None:
        out.write(line + "\n")
        out.flush()


def faults(options: Namespace, out: TextIO) -> int:
    if options.explain:
        # No other command needs the model of the daemon, and its import delays every start.
        from mpsd.core.faults import taxonomy

        text = taxonomy.explain(options.explain)
        if options.json:
            _json(out, {"schema": SCHEMA, "class": options.explain, "text": text})
        else:
            _print(out, [text])
        return 0
    with connect(options.socket) as client:
        records = client.faults(limit=options.limit, since_id=options.since)
    if options.json:
        _json(out, {"schema": SCHEMA, "faults": list(records)})
        return 0
    lines: list[str] = []
    for record in records:
        lines += [*render.fault(record, style_for(out, os.environ)), ""]
    _print(out, lines or [f"no faults recorded{_limit_of_view()}"])
    return 0


def _limit_of_view() -> str:
    """Return the words that keep an ordinary user from taking an empty list for that of the node."""
    return "" if os.geteuid() == 0 else " that you may see"


def conditions(options: Namespace, out: TextIO) -> int:
    found = conditiontext.kinds(options.code)
    if options.json:
        _json(out, {"schema": SCHEMA, "conditions": conditiontext.rows(found)})
    else:
        _print(out, conditiontext.lines(found))
    return 0


def failovers(options: Namespace, out: TextIO) -> int:
    with connect(options.socket) as client:
        records = client.failovers(limit=options.limit, since_id=options.since)
    if options.json:
        _json(out, {"schema": SCHEMA, "failovers": list(records)})
    else:
        _print(out, failovertext.records(records) if records else [f"no fail-overs{_limit_of_view()}"])
    return 0


def doctor(options: Namespace, out: TextIO) -> int:
    try:
        with connect(options.socket) as client:
            rows = [dict(row) for row in client.doctor()]
        where = "checked by the daemon"
    except (NotRunningError, DeadlineError) as error:
        rows = _local_checks()
        where = f"checked by mpsd-ctl with your rights ({error.message})"
    if options.json:
        _json(out, {"schema": SCHEMA, "seen": where, "checks": rows})
    else:
        _print(out, [f"this machine, {where}:", *render.checks(rows, style_for(out, os.environ))])
    return 10 if any(row["ok"] is False for row in rows) else 0


def _local_checks() -> list[dict[str, Any]]:
    from mpsd.api.doctor import run_checks
    from mpsd.config.schema import default_directories
    from mpsd.gpu.nvidia.backend import checks

    places = default_directories(os.getuid(), os.environ)
    found = run_checks(checks(), places["run_dir"], places["log_dir"])
    return [{"name": c.name, "ok": c.ok, "finding": c.finding, "remedy": c.remedy} for c in found]


def drain(options: Namespace, out: TextIO) -> int:
    with connect(options.socket) as client:
        ask = client.drain if options.verb == "drain" else client.undrain
        result = ask(options.gpu, dry_run=options.dry_run, reason=options.reason, timeout=options.timeout)
    if options.json:
        _json(out, {"schema": SCHEMA, **result})
        return 0
    names = ", ".join(result["gpus"])
    # A daemon of an earlier release does not say.
    if not result.get("changed", True):
        state = "already drained" if options.verb == "drain" else "not drained"
        _print(out, [f"{state}: {names}; nothing was changed"])
        return 0
    done = f"would {options.verb}" if options.dry_run else f"{options.verb}ed"
    effect = "; new clients are refused until mpsd-ctl undrain" if done == "drained" else ""
    label = "clients that stay" if options.verb == "drain" else "clients"
    staying = f"; {label}: {', '.join(map(str, result['clients']))}" if result["clients"] else ""
    _print(out, [f"{done} {names}{effect}{staying}"])
    return 0


def env(options: Namespace, out: TextIO) -> int:
    plan = make_plan(
        os.environ,
        socket_path=options.socket,
        gpu=options.gpu,
        library=options.library,
        shared=options.shared,
        protect=options.protect,
        require=options.require,
        tell=lambda line: say(line, "mpsd-ctl"),
    )
    # The shell evaluates standard output, so lines for a person go to standard error.
    if not options.quiet:
        say(plan.line, "mpsd")
    for line in plan.warnings:
        say(line, "mpsd-ctl")
    if not options.json:
        _print(out, export_lines(plan.variables, options.shell))
        return 0
    level = plan.protection
    _json(
        out,
        {
            "schema": SCHEMA,
            "env": {name: value for name, value in plan.variables.items() if value is not None},
            "unset": sorted(name for name, value in plan.variables.items() if value is None),
            "protection": level and {"level": level.level, "why": level.why, "remedy": level.remedy},
        },
    )
    return 0


def vault(options: Namespace, out: TextIO) -> int:
    with connect(options.socket) as client:
        if options.deed == "list":
            rows = client.vault_list()
            if options.json:
                _json(out, {"schema": SCHEMA, "holdings": list(rows)})
            else:
                style = style_for(out, os.environ)
                _print(out, render.vault(rows, style, headers=not options.no_headers))
            return 0
        asked = {"dry_run": options.dry_run, "reason": options.reason, "timeout": options.timeout}
        if options.deed == "keep":
            ticks = options.start_ticks
            result = client.vault_keep(options.pid, options.name, start_ticks=ticks, **asked)
            text = f"{{}} {{}} of process {options.pid} under the name {printable(options.name)}"
        else:
            result = client.vault_free(options.what, **asked)
            text = "{} {}"
    if result.get("too_much"):
        print(
            "mpsd-ctl: the memory of this program exceeds its owner's quota for exited programs and would be "
            "freed at its end; raise [vault] kept_bytes or kept_descriptors",
            file=sys.stderr,
        )
    if options.json:
        _json(out, {"schema": SCHEMA, **result})
        return 0
    segments = result["held"] if options.deed == "keep" else result["freed"]
    count = segment_count(len(segments), result["bytes"])
    done = "keeping" if options.deed == "keep" else "freed"
    _print(out, [text.format(f"would {options.deed}" if options.dry_run else done, count)])
    return 0


def failed(options: Namespace, out: TextIO) -> None:
    """Print `false` for a failed env, so that `eval "$(mpsd-ctl env)"` fails too."""
    if options.verb == "env" and not options.json:
        _print(out, ["false"])


def version(options: Namespace, out: TextIO) -> int:
    try:
        with connect(options.socket) as client:
            daemon: dict[str, Any] | None = dict(client.version())
        answer = ""
    except NotRunningError:
        daemon, answer = None, "mpsd is not running"
    except DeadlineError as error:
        daemon, answer = None, error.message
    if options.json:
        _json(out, {"schema": SCHEMA, "ctl": __version__, "daemon": daemon})
        return 0
    lines = [f"mpsd-ctl {__version__}"]
    if daemon:
        lines.append(f"mpsd {daemon['version']}, {daemon['backend']}, driver {daemon['driver']}")
    _print(out, lines if daemon else [*lines, answer])
    return 0


VERBS: Mapping[str, Callable[[Namespace, TextIO], int]] = {
    "status": status,
    "kill": kill,
    "policy": policy,
    "protect": protect,
    "events": events,
    "faults": faults,
    "conditions": conditions,
    "failovers": failovers,
    "doctor": doctor,
    "drain": drain,
    "undrain": drain,
    "env": env,
    "vault": vault,
    "version": version,
}


def run(options: Namespace, out: TextIO = sys.stdout) -> int:
    return VERBS[options.verb](options, out)
