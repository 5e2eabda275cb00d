"""Clients in `mpsd-ctl status`: one row per program, equal programs in one row. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpsd.base.text import printable
from mpsd.ctl.style import Cell, Style, age, size, table

Row = Mapping[str, Any]

GROUP_FROM = 4
"""The least number of equal programs that share one row."""
PIDS_SHOWN = 6
LONGEST = 1000
"""Greatest length of a command in characters where the terminal does not limit it."""


def living(view: Row, style: Style, *, headers: bool, verbose: bool, every: bool) -> list[str]:
    """Return the table of running clients, with notes below it."""
    programs = _programs(view["clients"])
    if not programs:
        return ["", "no clients"] if headers else []
    homes = [contexts[0] for contexts in programs]
    several = len({home["domain"] for home in homes}) > 1
    groups = _grouped(homes, _key, every=every)
    rows = [_row(group, several=several) for group in groups]
    heads = ["PID", "USER", *(["DOMAIN"] if several else []), "PROTECTED", "GPU MEM", "COST", "COMMAND"]
    command, protected = len(heads) - 1, heads.index("PROTECTED")
    lines = ["", *table(rows, heads if headers else None, style, {command: 10, protected: 9, 1: 6})]
    if any(len(group) > 1 for group in groups):
        lines += style.wrap("equal clients share a row; mpsd-ctl status --all lists each one", "  ")
    for text in _notes(homes):
        lines += style.wrap(text, "  ")
    if verbose:
        lines.append("")
        for context in (c for contexts in programs for c in contexts):
            lines += style.wrap(_detail(context))
    return lines


def exited(view: Row, style: Style, *, headers: bool, every: bool) -> list[str]:
    """Return the table of exited clients that hold memory: one row per process."""
    processes: dict[tuple[Any, ...], list[Row]] = {}
    for number, c in enumerate(view["dead"], -len(view["dead"])):
        processes.setdefault((c["pid"] or number, c.get("start_ticks")), []).append(c)
    found = [_exited(contexts) for contexts in processes.values()]
    keys = ("user", "domain", "state", "pending")
    groups = _grouped(found, lambda c: tuple(c[key] for key in keys), every=every)
    if not groups:
        return []
    rows = [
        (
            _pids(group),
            group[0]["user"],
            group[0]["domain"],
            group[0]["state"],
            size(_sum(c["held_gpu_bytes"] for c in group)),
            size(_sum(c["held_host_bytes"] for c in group)),
            age(max(c["since_s"] for c in group)),
            group[0]["pending"],
        )
        for group in groups
    ]
    heads = ("EXITED", "USER", "DOMAIN", "STATE", "GPU HELD", "HOST HELD", "SINCE", "STILL RUNS")
    return ["", *table(rows, heads if headers else None, style, {7: 10, 1: 6})]


def _exited(contexts: Sequence[Row]) -> dict[str, Any]:
    """Return one row for all contexts of an exited process. Its memory is that of the process."""
    pending = dict.fromkeys(c.get("pending") or c["command"] for c in contexts)
    return {
        **contexts[0],
        "domain": ",".join(dict.fromkeys(c["domain"] for c in contexts)),
        "since_s": max(c["since_s"] for c in contexts),
        "pending": printable("; ".join(pending), LONGEST),
    }


def pid_of(row: Row) -> str:
    """Return the pid; a dash for another user's process, for which the daemon hides it."""
    return "-" if row["pid"] is None else str(row["pid"])


def _programs(clients: Iterable[Row]) -> list[list[Row]]:
    """Return the contexts of each program, that in its home domain first.

    Contexts of another user's programs cannot be told apart, so each one is a program. Those outside their
    home domain are left out.
    """
    found: dict[tuple[Any, ...], list[Row]] = {}
    for number, c in enumerate(clients):
        if c["pid"] is not None:
            found.setdefault((c["pid"], c.get("start_ticks")), []).append(c)
        elif not _is_standby(c):
            found[None, number] = [c]
    return [sorted(contexts, key=_is_standby) for contexts in found.values()]


def _is_standby(client: Row) -> bool:
    return bool(client.get("failover")) and not client["failover"]["here"]


def _key(client: Row) -> tuple[Any, ...]:
    return client["user"], client["domain"], protected(client).text, client["command"]


def _grouped(rows: Iterable[Row], key: Callable[[Row], object], *, every: bool) -> list[list[Row]]:
    """Return groups of equal rows in the order of their first; rows that are few, or every one, alone."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    found = []
    for group in groups.values():
        found += [[row] for row in group] if every or len(group) < GROUP_FROM else [group]
    return found


def _row(group: Sequence[Row], *, several: bool) -> list[str | Cell]:
    first = group[0]
    return [
        _pids(group),
        first["user"],
        *([first["domain"]] if several else []),
        protected(first),
        size(_sum(c["memory_bytes"] for c in group)),
        _cost(group),
        printable(first["command"], LONGEST),
    ]


def _cost(group: Sequence[Row]) -> str:
    """Return the GPU memory that protection costs, and the most time that it adds to a client of the group.

    A daemon of an earlier release does not say the time.
    """
    shown = [c.get("protected") or {} for c in group]
    shares = [view["cost_share"] for view in shown if view.get("cost_share") is not None]
    memory = size(_sum(view.get("cost_bytes") for view in shown))
    return f"{memory}, {max(shares) * 100:.1f} %" if shares else memory


def _pids(group: Sequence[Row]) -> str:
    return pid_of(group[0]) if len(group) == 1 else f"{len(group)} clients"


def _sum(values: Iterable[int | None]) -> int | None:
    """Return the sum of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def protected(client: Row) -> Cell:
    """Return the cell PROTECTED: the level, with the reason if it is not the node's."""
    shown = client.get("protected")
    why = printable(shown["why"], 300) if shown and shown["why"] else ""
    reason = f" ({why})" if why else ""
    if client.get("lost"):
        return Cell("lost (restart it)", "bad")
    if client["state"] in ("terminating", "killing"):
        return Cell("being evicted", "bad")
    if not shown:
        return Cell("-")
    level = shown["level"]
    if level == "none" or (level == "observe" and why):
        return Cell(f"no{reason}", "bad" if level == "none" else "warn")
    return Cell(f"{level}{reason}", "warn" if why else "good")


def _notes(clients: Iterable[Row]) -> list[str]:
    """Return what an operator must know of some clients, equal texts once."""
    found: dict[str, list[str]] = {}
    notes = []
    for c in clients:
        if c.get("problem"):
            found.setdefault(printable(c["problem"], 500), []).append(pid_of(c))
        if c.get("frozen") and c["pid"] is not None:
            pid = c["pid"]
            notes.append(
                f"pid {pid} is stopped after a guard hit: inspect it, then mpsd-ctl kill {pid}, "
                f"or kill -CONT {pid}"
            )
    for problem, pids in found.items():
        more = f" and {len(pids) - PIDS_SHOWN} more" if len(pids) > PIDS_SHOWN else ""
        notes.append(f"pid {', '.join(pids[:PIDS_SHOWN])}{more}: {problem}")
    return notes


def _detail(client: Row) -> str:
    """Return a context's domain, state, age, protection and mechanisms."""
    standby = _is_standby(client)
    state = "frozen" if client.get("frozen") else "standby" if standby else client["state"]
    level = protected(client).text
    parts = [client["domain"], state, age(client["age_s"])]
    parts += [f"protected: {level}"] if level != "-" and not standby else []
    parts += _mechanisms(client) + ([] if standby else _saving(client))
    return f"pid {pid_of(client)}: {', '.join(parts)}"


def _mechanisms(client: Row) -> list[str]:
    vault = [f"vault {size(client['vault_bytes'])}"] if client.get("proxied") else []
    return [*client["protections"], *vault, *_zones(client)]


def _saving(client: Row) -> list[str]:
    """Return the client's snapshot buffers, and what would bring it back under a budget."""
    # A daemon of an earlier release does not send these keys.
    failover = client.get("failover") or {}
    held, limit = failover.get("snapshot_bytes"), failover.get("snapshot_limit_bytes")
    found = [] if limit is None else [f"snapshots {size(held)} of {size(limit)}"]
    remedy = (client.get("protected") or {}).get("remedy")
    return found + ([printable(remedy)] if remedy else [])


def _zones(client: Row) -> list[str]:
    """Return the client's guard zones, guard hits and own policy; usual values are omitted."""
    zones, found = client.get("guard_zones"), []
    if zones:
        parts = [f"{zones['managed']} managed"]
        parts += [f"{zones[kind]} {kind}" for kind in ("sparse", "uncovered") if zones[kind]]
        parts += [f"{size(zones['far_bytes'])} far"] if zones["far_bytes"] else []
        found.append(f"zones {'/'.join(parts)}")
    if hits := client.get("guard_hits"):
        found.append(f"{hits} guard hit{'' if hits == 1 else 's'}")
    if client.get("zone_policy_set"):
        found.append(f"zone policy {client['zone_policy']}")
    return found
