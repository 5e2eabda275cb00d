"""What each verb does: ask the daemon, print, choose the exit status. Raises MpsdError."""

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
from mpsd.core import taxonomy
from mpsd.ctl import failovertext, render
from mpsd.errors import DeadlineError, NotRunningError
from mpsd.text import printable
from mpsd_client import Client, connect
from mpsd_client.env import export_lines, fewer, fitting, named_gpu

KEPT_DEADLINE_S = 5.0
CLEAR = "\x1b[H\x1b[2J\x1b[3J"
SCHEMA = 1


def style_for(out: TextIO, environ: Mapping[str, str]) -> render.Style:
    """Colour on a terminal unless NO_COLOR is set; lines as long as the terminal is wide."""
    terminal = out.isatty()
    width = shutil.get_terminal_size().columns if terminal else 0
    return render.Style(colour=terminal and not environ.get("NO_COLOR"), width=width)


def _print(out: TextIO, lines: Iterable[str]) -> None:
    out.write("".join(f"{line}\n" for line in lines))


def _json(out: TextIO, value: object) -> None:
    out.write(json.dumps(value, indent=2, ensure_ascii=True) + "\n")


def status(options: Namespace, out: TextIO) -> int:
    if options.watch is None:
        return _status_once(options, out)
    while True:
        if out.isatty():
            out.write(CLEAR)
        try:
            _status_once(options, out)
        except NotRunningError as error:
            # A daemon that is being restarted is what one watches for.
            _print(out, [f"mpsd-ctl: {error}"])
        out.flush()
        time.sleep(options.watch)


def _status_once(options: Namespace, out: TextIO) -> int:
    with connect(options.socket) as client:
        view = client.status()
    if options.json:
        _json(out, view)
    else:
        _print(out, render.status(view, style_for(out, os.environ), headers=not options.no_headers))
    return render.health(view)


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
    head = f"would evict {options.pid}:" if options.dry_run else f"{result['outcome']} {options.pid}"
    if result.get("evict_ms") is not None:
        head += f" in {result['evict_ms']:.1f} ms"
    _print(out, [head, *_steps(result)])
    return 0


def _steps(result: Mapping[str, Any]) -> list[str]:
    return [f"  {printable(step)}" for step in result["steps"]]


def _start_ticks(client: Client, pid: int) -> int | None:
    """Pins the process that the question is about, so that the answer is about the same one."""
    found = (c["start_ticks"] for c in client.status()["clients"] if c["pid"] == pid)
    return next(found, None)


def _agreed(client: Client, pid: int, start_ticks: int | None) -> bool:
    plan = client.kill(pid, start_ticks=start_ticks, dry_run=True)
    sys.stderr.write("\n".join([f"this would evict {pid}:", *_steps(plan), "go on? [y/N] "]))
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    print("nothing was done", file=sys.stderr)
    return False


def policy(options: Namespace, out: TextIO) -> int:
    with connect(options.socket) as client:
        result = client.zone_policy(
            options.pid, options.policy, start_ticks=options.start_ticks, reason=options.reason
        )
    if options.json:
        _json(out, {"schema": SCHEMA, **result})
    else:
        _print(out, [f"a guard hit of {result['pid']}: {result['policy']}"])
    return 0


def events(options: Namespace, out: TextIO) -> int:
    since = 0 if options.since is None and not options.follow else options.since
    with connect(options.socket) as client:
        stream = client.subscribe(since)
        if stream.gap:
            print(f"mpsd-ctl: {render.gap(stream.gap, options.since, stream.kept)}", file=sys.stderr)
        kept_until = time.monotonic() + KEPT_DEADLINE_S
        for _ in range(stream.kept):
            _event(options, out, stream.next(kept_until))
        while options.follow:
            _event(options, out, next(stream))
    return 0


def _event(options: Namespace, out: TextIO, seen: Mapping[str, Any]) -> None:
    out.write((json.dumps(seen) if options.json else render.event(seen)) + "\n")
    out.flush()


def faults(options: Namespace, out: TextIO) -> int:
    if options.explain:
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
    _print(out, lines or ["no faults"])
    return 0


def failovers(options: Namespace, out: TextIO) -> int:
    with connect(options.socket) as client:
        records = client.failovers(limit=options.limit, since_id=options.since)
    if options.json:
        _json(out, {"schema": SCHEMA, "failovers": list(records)})
    else:
        _print(out, failovertext.records(records))
    return 0


def doctor(options: Namespace, out: TextIO) -> int:
    try:
        with connect(options.socket) as client:
            rows = [dict(row) for row in client.doctor()]
        where = "as the daemon sees it"
    except (NotRunningError, DeadlineError) as error:
        rows = _local_checks()
        where = f"as seen from here ({error.message})"
    if options.json:
        _json(out, {"schema": SCHEMA, "seen": where, "checks": rows})
    else:
        _print(out, [f"this machine, {where}:", *render.checks(rows, style_for(out, os.environ))])
    return 10 if any(row["ok"] is False for row in rows) else 0


def _local_checks() -> list[dict[str, Any]]:
    from mpsd.config import default_directories
    from mpsd.doctor import run_checks
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
    would = "would " if options.dry_run else ""
    whose = "clients that stay" if options.verb == "drain" else "its clients"
    staying = f"; {whose}: {', '.join(map(str, result['clients']))}" if result["clients"] else ""
    _print(out, [f"{would}{options.verb} {', '.join(result['gpus'])}{staying}"])
    return 0


def env(options: Namespace, out: TextIO) -> int:
    with connect(options.socket) as client:
        wanted = client.env(named_gpu(os.environ, options.gpu), shared=options.shared)
        wanted = fitting(wanted, os.environ, options.gpu, client.numbers)
        # What stdout has is for the shell.
        for line in fewer(os.environ, wanted, client.gpus):
            print(f"mpsd-ctl: {line}", file=sys.stderr)
    if options.json:
        _json(out, {"schema": SCHEMA, "env": dict(wanted)})
    else:
        _print(out, export_lines(wanted, options.shell))
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
            text = f"keep {{}} of process {options.pid} as {printable(options.name)}"
        else:
            result = client.vault_free(options.what, **asked)
            text = "free {}"
    if result.get("too_much"):
        print(
            "mpsd-ctl: that is more than is kept of one owner's dead programs: "
            "as it is, nothing of it would stay ([vault] kept_bytes, kept_descriptors)",
            file=sys.stderr,
        )
    if options.json:
        _json(out, {"schema": SCHEMA, **result})
        return 0
    pieces = result["held"] if options.deed == "keep" else result["freed"]
    count = render.pieces(len(pieces), result["bytes"])
    _print(out, [("would " if options.dry_run else "") + text.format(count)])
    return 0


def failed(options: Namespace, out: TextIO) -> None:
    """What standard output gets of a command that failed: `eval "$(mpsd-ctl env)"` must fail with it."""
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
    "events": events,
    "faults": faults,
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
