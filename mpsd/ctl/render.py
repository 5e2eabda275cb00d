"""Faults, the vault and checks as text. Pure functions; names from processes are escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpsd.base.text import printable
from mpsd.ctl.clienttext import pid_of
from mpsd.ctl.style import Style, age, size, table


def party(client: Mapping[str, Any]) -> str:
    """Return a client of a fault record."""
    if client["pid"] is None:
        return "another user's client"
    if client["user"] is None:
        return f"pid {client['pid']} ({printable(client['command'], 60)}, as the kernel log names it)"
    return f"pid {client['pid']} ({client['user']}, {printable(client['command'], 60)})"


def fault(record: Mapping[str, Any], style: Style) -> list[str]:
    where = f"domain {record['domain']}" if record["domain"] else "the device"
    lines = [style.paint(f"#{record['id']} {record['time']} {record['class']}", "head") + f" in {where}"]
    lines.append(f"  summary   {printable(record.get('summary') or record['title'], 500)}")
    if record["address"] is not None:
        lies = record["lies_there"]
        there = f", {'unknown mapping' if lies == 'unknown' else lies}" if lies else ""
        lines.append(f"  access    {record['access']} at {record['address']} ({record['fault_type']}{there})")
    if record["offender"]:
        lines.append(f"  offender  {party(record['offender'])}, {record['confidence']}")
    elif record["suspects"]:
        lines.append(f"  offender  unknown; suspects: {'; '.join(party(p) for p in record['suspects'])}")
    else:
        lines.append("  offender  not known")
    hidden = record.get("victims_hidden", 0)
    victims = [*map(str, record["victims"]), *([f"{hidden} clients of other users"] if hidden else [])]
    if victims:
        lines.append(f"  lost      {', '.join(victims)}")
    # Records of an earlier release do not say.
    lines += [f"  moved     {_moved(row)}" for row in record.get("moved", ())]
    if record["refused_807"]:
        lines.append(f"  refused   {record['refused_807']} new clients got error 807")
    lines += [
        f"  evidence  {e['at_ms']:+.1f} ms {e['source']}: {printable(e['text'])}" for e in record["evidence"]
    ]
    return [*lines, f"  do        {record['action']}"]


def _moved(client: Mapping[str, Any]) -> str:
    pause = (
        "it has not reported its pause"
        if client["pause_ms"] is None
        else f"paused {client['pause_ms']:.0f} ms"
    )
    missing = f"; {printable(client['why'], 200)}" if client["why"] else ""
    return f"{party(client)}, {pause}{missing}"


def vault(rows: Sequence[Mapping[str, Any]], style: Style, *, headers: bool = True) -> list[str]:
    """Return the table of the vault's segments."""
    cells = [
        (
            str(r["id"]),
            r["user"],
            pid_of(r) + ("" if r["died_s"] is None else " (exited)"),
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
        return ["the vault holds no segment that you may see"]
    return table(cells, heads if headers else None, style)


def checks(rows: Sequence[Mapping[str, Any]], style: Style) -> list[str]:
    """Return a line for each check of `doctor`, with its remedy below."""
    lines = []
    for row in rows:
        mark, kind = {True: ("ok", "good"), False: ("NO", "bad"), None: ("--", "warn")}[row["ok"]]
        lines.append(f"{style.paint(mark, kind)}  {row['name']}: {printable(row['finding'])}")
        if row["ok"] is not True and row["remedy"]:
            lines.append(f"      remedy: {row['remedy']}")
    return lines
