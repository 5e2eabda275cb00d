"""Status, faults and events as text. Pure: values in, lines out. Names from processes are escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpsd.ctl import failovertext
from mpsd.text import degrading, printable

_STYLES = {"bad": "\x1b[31m", "warn": "\x1b[33m", "good": "\x1b[32m", "head": "\x1b[1m"}
_RESET = "\x1b[0m"
_GOOD_STATES = ("active", "warm", "attached", "starting", "noticed")
_BAD_STATES = ("faulted", "failed", "headless", "killing")


class Style:
    """Colour or none; `width` bounds the lines (0: no bound)."""

    def __init__(self, *, colour: bool = False, width: int = 0) -> None:
        self.colour = colour
        self.width = width

    def paint(self, text: str, kind: str) -> str:
        return f"{_STYLES[kind]}{text}{_RESET}" if self.colour and kind in _STYLES else text

    def state(self, text: str) -> str:
        kind = "good" if text in _GOOD_STATES else "bad" if text in _BAD_STATES else "warn"
        return self.paint(text, kind)


def size(value: int | None) -> str:
    """Bytes with a binary unit; a dash where nothing is known."""
    if value is None:
        return "-"
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            return f"{amount:.0f} {unit}" if unit in ("B", "KiB", "MiB") else f"{amount:.1f} {unit}"
        amount /= 1024
    return "-"


def pieces(many: int, total: int) -> str:
    """Of the vault, with their bytes."""
    return f"{many} piece{'' if many == 1 else 's'}, {size(total)}"


def age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def table(rows: Sequence[Sequence[str]], heads: Sequence[str] | None, style: Style) -> list[str]:
    """Columns as wide as their widest cell; the last one takes what is left of the line."""
    shown = [list(heads), *map(list, rows)] if heads else list(map(list, rows))
    if not shown:
        return []
    widths = [max(len(row[i]) for row in shown) for i in range(len(shown[0]))]
    lines = []
    for number, row in enumerate(shown):
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        line = "  ".join([*cells, row[-1]]).rstrip()
        line = line[: style.width] if style.width else line
        lines.append(style.paint(line, "head") if heads and number == 0 else line)
    return lines


def status(view: Mapping[str, Any], style: Style, *, headers: bool = True) -> list[str]:
    backend = "" if view["backend"] == "nvidia" else f", {view['backend']} GPU"
    lines = (
        [f"mpsd {view['version']}, pid {view['pid']}, up {age(view['uptime_s'])}{backend}"] if headers else []
    )
    if view["draining"]:
        lines.append(style.paint(f"draining: {', '.join(view['drained_gpus'])}", "warn"))
    lines += [style.paint(f"note: {printable(text)}", "warn") for text in view.get("problems", ())]
    lines += _isolation(view.get("kernel_isolation") or {})
    for gpu in view["gpus"]:
        lines += ["", *_gpu(gpu, view, style)]
    lines += failovertext.slots(view)
    lines += _clients(view, style, headers=headers)
    lines += _dead(view, style, headers=headers)
    lines += _kept(view.get("counters", {}))
    for gpu in view["gpus"]:
        lines += _strangers(gpu, style, headers=headers)
    return lines


def _isolation(shown: Mapping[str, Any]) -> list[str]:
    """One line, also where it is off: whether a memory fault ends everybody is what people want to know."""
    if not shown:
        return []
    if shown["mode"] is None:
        known = "off" if shown["driver"] is None else "not known"
        return [f"kernel isolation: {known} ({printable(shown['why_not'])})"]
    state = "on" if shown["mode"] == "isolate" else "off"
    return [f"kernel isolation: {state} (driver {printable(shown['driver'])}, mode {shown['mode']})"]


def _gpu(gpu: Mapping[str, Any], view: Mapping[str, Any], style: Style) -> list[str]:
    used, total = size(gpu["memory_used_bytes"]), size(gpu["memory_total_bytes"])
    mode = gpu["compute_mode"] or "unknown"
    lines = [style.paint(f"GPU {gpu['index']} {gpu['name']} {gpu['uuid']}", "head")]
    lines[0] += f"  {used} of {total}, compute mode {mode}"
    lines += [f"  limit: {printable(text)}" for text in gpu["limits"]]
    own = [d for d in view["domains"] if gpu["uuid"] in d["gpus"]]
    lines += [_domain(domain, style) for domain in own]
    return lines if own else [*lines, "  no domain yet: mpsd-ctl env starts one"]


def _domain(domain: Mapping[str, Any], style: Style) -> str:
    pids = f"control {domain['control_pid'] or '-'}, server {domain['server_pid'] or '-'}"
    fault = f", last fault #{domain['last_fault']}" if domain["last_fault"] is not None else ""
    refused = f", {domain['refused_807']} refused (807)" if domain["refused_807"] else ""
    problem = f", {printable(domain['problem'])}" if domain.get("problem") else ""
    whose = domain["user"] or "all users"
    idle = f", {domain['idle_contexts']} in waiting" if domain.get("idle_contexts") else ""
    return (
        f"  {domain['id']} {domain['role']} {style.state(domain['state'])}, {whose}, {pids}, "
        f"up {age(domain['uptime_s'])}, clients {domain['clients']}/{domain['clients_limit']}{idle}"
        f"{fault}{refused}{problem}; {domain['reach']}"
    )


def _clients(view: Mapping[str, Any], style: Style, *, headers: bool) -> list[str]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for number, c in enumerate(view["clients"], -len(view["clients"])):
        # A program that was moved has several contexts in one domain for a while.
        key = (c["pid"] or number, c["domain"], _state(c), c.get("problem"))
        groups.setdefault(key, []).append(c)
    rows = [
        (
            _pid(c),
            c["user"],
            c["domain"],
            _state(c),
            size(c["memory_bytes"]),
            age(c["age_s"]),
            _protected(group),
            printable(c["command"], 80),
        )
        for group in groups.values()
        for c in group[:1]
    ]
    heads = ("PID", "USER", "DOMAIN", "STATE", "MEMORY", "AGE", "PROTECTIONS", "COMMAND")
    lines = ["", *table(rows, heads if headers else None, style)] if rows else []
    frozen = sorted({str(c["pid"]) for c in view["clients"] if c.get("frozen") and c["pid"] is not None})
    return lines + [
        f"  {pid} is stopped after a guard hit: look at it, then mpsd-ctl kill {pid}, or kill -CONT {pid}"
        for pid in frozen
    ]


def _protected(group: Sequence[Mapping[str, Any]]) -> str:
    """What any of its contexts is protected by."""
    found = ", ".join(dict.fromkeys(text for client in group for text in _protections(client))) or "none"
    problem = group[0].get("problem")
    return f"{found}: {problem}" if problem else found


def _state(client: Mapping[str, Any]) -> str:
    if client.get("frozen"):
        return "frozen"
    # The second context of a program whose work runs elsewhere.
    waits = client.get("failover") and not client["failover"]["here"]
    return "in waiting" if waits else str(client["state"])


def _protections(client: Mapping[str, Any]) -> list[str]:
    vault = [f"vault {size(client['vault_bytes'])}"] if client.get("proxied") else []
    return [*client["protections"], *vault, *_zones(client)]


def _zones(client: Mapping[str, Any]) -> list[str]:
    """Guard zones that the client laid itself, and what is not usual with them."""
    zones, found = client.get("guard_zones"), []
    if zones:
        parts = [f"{zones['managed']} managed"]
        parts += [f"{zones[kind]} {kind}" for kind in ("sparse", "uncovered") if zones[kind]]
        parts += [f"{size(zones['far_bytes'])} far"] if zones["far_bytes"] else []
        found.append(f"zones {'/'.join(parts)}")
    if client.get("guard_hits"):
        found.append(f"{client['guard_hits']} guard hits")
    if client.get("zone_policy_set"):
        found.append(f"policy {client['zone_policy']}")
    return found


def _kept(counters: Mapping[str, int]) -> list[str]:
    """Memory of the dead that is nobody's lease."""
    if not counters.get("vault_dead_held"):
        return []
    held = pieces(counters["vault_dead_held"], counters["vault_dead_bytes"])
    return ["", f"the vault keeps {held}, of the dead: mpsd-ctl vault list"]


def _dead(view: Mapping[str, Any], style: Style, *, headers: bool) -> list[str]:
    rows = [
        (
            _pid(c),
            c["user"],
            c["domain"],
            c["state"],
            size(c["held_gpu_bytes"]),
            size(c["held_host_bytes"]),
            age(c["since_s"]),
            printable(c.get("pending") or c["command"], 80),
        )
        for c in view["dead"]
    ]
    if not rows:
        return []
    heads = ("DEAD", "USER", "DOMAIN", "STATE", "GPU HELD", "HOST HELD", "SINCE", "STILL RUNS")
    return ["", *table(rows, heads if headers else None, style)]


def _strangers(gpu: Mapping[str, Any], style: Style, *, headers: bool) -> list[str]:
    rows = [
        (_pid(p), p["user"], size(p["memory_bytes"]), printable(p["command"], 80)) for p in gpu["not_on_mps"]
    ]
    if not rows:
        return []
    heads = ("NOT ON MPS", "USER", "MEMORY", "COMMAND")
    return ["", *table(rows, heads if headers else None, style)]


def health(view: Mapping[str, Any]) -> int:
    """The exit status that a status deserves: 0 healthy, 10 degraded, 11 an active domain in FAULT."""
    states = {d["state"] for d in view["domains"] if d["role"] == "active"}
    if "faulted" in states:
        return 11
    lost = states - {"active", "starting"}
    unprotected = any(c["state"] == "unprotected" for c in view["clients"])
    return 10 if lost or degrading(view.get("problems", ())) or unprotected else 0


def _pid(row: Mapping[str, Any]) -> str:
    """A dash for a process of another user, whose number is not told."""
    return "-" if row["pid"] is None else str(row["pid"])


def _party(party: Mapping[str, Any]) -> str:
    if party["pid"] is None:
        return "another user's client"
    return f"pid {party['pid']} ({party['user']}, {printable(party['command'], 60)})"


def fault(record: Mapping[str, Any], style: Style) -> list[str]:
    where = f"domain {record['domain']}" if record["domain"] else "the device"
    lines = [style.paint(f"#{record['id']} {record['time']} {record['class']}", "head") + f" in {where}"]
    lines.append(f"  what      {printable(record.get('summary') or record['title'], 500)}")
    if record["address"] is not None:
        lies = record["lies_there"]
        there = f", {'what lies there is unknown' if lies == 'unknown' else lies}" if lies else ""
        lines.append(f"  access    {record['access']} at {record['address']} ({record['fault_type']}{there})")
    if record["offender"]:
        lines.append(f"  offender  {_party(record['offender'])}, {record['confidence']}")
    elif record["suspects"]:
        lines.append(f"  offender  unknown; suspects: {'; '.join(_party(p) for p in record['suspects'])}")
    else:
        lines.append("  offender  none named")
    hidden = record.get("victims_hidden", 0)
    victims = [*map(str, record["victims"]), *([f"{hidden} of other users"] if hidden else [])]
    if victims:
        lines.append(f"  victims   {', '.join(victims)}")
    if record["refused_807"]:
        lines.append(f"  refused   {record['refused_807']} newcomers saw error 807")
    lines += [
        f"  evidence  {e['at_ms']:+.1f} ms {e['source']}: {printable(e['text'])}" for e in record["evidence"]
    ]
    return [*lines, f"  do        {record['action']}"]


def vault(rows: Sequence[Mapping[str, Any]], style: Style, *, headers: bool = True) -> list[str]:
    """What the vault holds: one line a piece."""
    cells = [
        (
            str(r["id"]),
            r["user"],
            _pid(r) + ("" if r["died_s"] is None else " (dead)"),
            size(r["bytes"]),
            age(r["age_s"]),
            printable(r["name"]) if r["name"] else "-",
            "-" if r["expires_s"] is None else age(r["expires_s"]),
            printable(r["gpu"]),
        )
        for r in rows
    ]
    heads = ("ID", "USER", "PID", "SIZE", "AGE", "KEPT AS", "FREED IN", "GPU")
    if not cells:
        return ["the vault holds nothing that you may see"]
    return table(cells, heads if headers else None, style)


def event(seen: Mapping[str, Any]) -> str:
    """One event on one line."""
    rest = {k: v for k, v in seen.items() if k not in ("kind", "at", "seq")}
    if seen.get("kind") == "fault":
        named = rest.get("offender")
        who = _party(named) if named else f"{len(rest.get('suspects', ()))} suspects"
        text = (
            f"#{rest['id']} {rest['class']} in {rest['domain'] or 'the device'}: {who}, {rest['confidence']}"
        )
    else:
        text = " ".join(f"{k}={_value(v)}" for k, v in rest.items() if v not in ("", None, []))
    return f"{seen.get('seq', '-')} {seen.get('kind', 'lost')} {text}"


def gap(why: str, since: int, kept: int) -> str:
    """Why what follows is not all that happened since that event."""
    shown = f"shown are the {kept} events" if kept != 1 else "shown is the one event"
    match why:
        case "earlier":
            text = f"event {since} was in an earlier life of the daemon; {shown} that this one remembers"
        case "never":
            text = f"there has been no event {since} yet; {shown} that the daemon remembers"
        case _:
            text = f"not all events since {since} are remembered; {shown} that are"
    return text


def _value(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return printable(text)


def checks(rows: Sequence[Mapping[str, Any]], style: Style) -> list[str]:
    """`doctor`: one line a check, its remedy below it."""
    lines = []
    for row in rows:
        mark, kind = {True: ("ok", "good"), False: ("NO", "bad"), None: ("--", "warn")}[row["ok"]]
        lines.append(f"{style.paint(mark, kind)}  {row['name']}: {printable(row['finding'])}")
        if row["ok"] is not True and row["remedy"]:
            lines.append(f"      remedy: {row['remedy']}")
    return lines
