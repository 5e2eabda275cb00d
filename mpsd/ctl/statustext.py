"""The text of `mpsd-ctl status`: GPUs, domains, conditions. Pure functions; texts from processes are escaped.

A value that the daemon does not send is a dash: nothing is derived from the client's side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpsd.base.text import printable
from mpsd.ctl import clienttext, failovertext
from mpsd.ctl.style import Cell, Style, age, ago, columns, gib, segment_count, size, table

View = Mapping[str, Any]

GPU_LINE = 78
"""Column at which a GPU's line ends where the terminal is wider, or there is none."""

STATES = {"active": "serving", "warm": "ready", "headless": "unreachable", "retired": "ending"}
"""Text of a domain's `state`; any other state is shown as it is."""

_BAD = ("faulted", "unreachable", "failed")
_GOOD = ("serving", "idle", "ready", "starting")
ROLES = {"active": "in use", "spare": "standby", "second": "second standby"}
"""Text of a domain's `role`; any other role is shown as it is."""
STANDBYS = {"spare", "second"}
"""Roles without a row of their own."""


def status(
    view: View, style: Style, *, headers: bool = True, verbose: bool = False, every: bool = False
) -> list[str]:
    """Return the lines of `status`.

    `verbose`: mechanisms, processes and standby domains too. `every`: each client has its own row.
    """
    lines = _head(view, style) if headers else []
    lines += _conditions(view, style, verbose=verbose)
    lines += _isolation(view.get("kernel_isolation") or {}, style, verbose=verbose)
    for gpu in view["gpus"]:
        lines += ["", *_gpu(gpu, view, style, headers=headers, verbose=verbose)]
    if verbose:
        for line in failovertext.slots(view):
            text = line.lstrip()
            lines += style.wrap(text, " " * (len(line) - len(text)))
    lines += clienttext.living(view, style, headers=headers, verbose=verbose, every=every)
    lines += clienttext.exited(view, style, headers=headers, every=every)
    lines += _kept_memory(view.get("counters", {}), style)
    for gpu in view["gpus"]:
        lines += _processes_outside_mps(gpu, style, headers=headers)
    return lines


def _head(view: View, style: Style) -> list[str]:
    backend = "" if view["backend"] == "nvidia" else f", {view['backend']} GPU"
    return style.wrap(f"mpsd {view['version']}, pid {view['pid']}, up {age(view['uptime_s'])}{backend}")


def _conditions(view: View, style: Style, *, verbose: bool) -> list[str]:
    """Return each condition, and the problems of a daemon that sends no conditions.

    The remedy is below a condition that degrades protection; with `verbose` below each one. A silent outer
    guard is shown with `verbose` alone.
    """
    lines: list[str] = []
    found = view.get("conditions") or ()
    if view["draining"] and not any(row["code"] == "gpu-drained" for row in found):
        numbers = {gpu["uuid"]: f"GPU {gpu['index']}" for gpu in view["gpus"]}
        drained = ", ".join(numbers.get(uuid, uuid) for uuid in view["drained_gpus"])
        lines += _painted(style, f"drained: {drained or 'every GPU'}", "warn")
    for row in found:
        # Holds on every healthy node with the outer guard.
        if row["code"] == "guard-silent" and not verbose:
            continue
        kind, mark = ("bad", "degraded") if row["degrades"] else ("warn", "note")
        lines += _painted(style, f"{mark}: {printable(row['text'], 1000)}", kind)
        if row["remedy"] and (row["degrades"] or verbose):
            lines += style.wrap(f"remedy: {printable(row['remedy'], 1000)}", "  ")
    shown = {row["text"] for row in found}
    for text in view.get("problems", ()):
        if text not in shown:
            lines += _painted(style, f"note: {printable(text, 1000)}", "warn")
    return lines


def _painted(style: Style, text: str, kind: str) -> list[str]:
    return [style.paint(line, kind) for line in style.wrap(text)]


def _isolation(shown: View, style: Style, *, verbose: bool) -> list[str]:
    """Return whether a memory fault ends its own client alone; without the kernel module if `verbose`."""
    if not shown or (shown["driver"] is None and not verbose):
        return []
    if shown["mode"] is None:
        known = "off" if shown["driver"] is None else "not known"
        return style.wrap(f"kernel isolation: {known} ({printable(shown['why_not'])})")
    state = "on" if shown["mode"] == "isolate" else "off"
    text = f"kernel isolation: {state} (driver {printable(shown['driver'])}, mode {shown['mode']})"
    return style.wrap(text)


def _gpu(gpu: View, view: View, style: Style, *, headers: bool, verbose: bool) -> list[str]:
    lines = _gpu_head(gpu, view, style)
    mode = gpu["compute_mode"] or "unknown"
    if verbose:
        lines += style.wrap(f"{gpu['uuid']}, compute mode {mode}", "  ")
    elif mode.lower() != "default":
        lines += style.wrap(f"compute mode {mode}", "  ")
    for text in gpu["limits"]:
        lines += style.wrap(f"limit: {printable(text)}", "  ")
    own = [d for d in view["domains"] if gpu["uuid"] in d["gpus"]]
    if not own:
        return [*lines, *style.wrap("no domain yet: mpsd-run or mpsd-ctl env starts one", "  ")]
    lines += _domains(own, gpu, view, style, headers=headers, verbose=verbose)
    told = [row["text"] for row in view.get("conditions") or ()]
    for domain in own:
        for text in _domain_notes(domain, told, verbose=verbose):
            lines += style.wrap(f"{domain['id']}: {text}", "  ")
    return lines


def _gpu_head(gpu: View, view: View, style: Style) -> list[str]:
    """Return the GPU's line with its protection level at the right, and below it why it is not higher."""
    used, total = gpu["memory_used_bytes"], gib(gpu["memory_total_bytes"])
    memory = f"{total} GiB" if used is None else f"{gib(used)} of {total} GiB"
    plain = f"GPU {gpu['index']}  {gpu['name']}  {memory}"
    left = style.paint(style.cut(plain, style.width) if style.width else plain, "head")
    protection = gpu.get("protection") or view.get("protection")
    if not protection:
        return [left]
    right = f"protection: {protection['level']}"
    room = min(style.width or GPU_LINE, GPU_LINE) - columns(plain) - len(right)
    lines = [left + " " * room + right] if room >= 2 else [left, *style.wrap(right, "  ")]
    why = "; ".join(printable(protection[key]) for key in ("why", "remedy") if protection.get(key))
    return lines + (style.wrap(why, "  ") if why else [])


def _domains(
    own: Sequence[View], gpu: View, view: View, style: Style, *, headers: bool, verbose: bool
) -> list[str]:
    served = {d.get("slot") for d in own if d["role"] == "active"}
    faults = {slot["id"]: slot.get("fault") for slot in view.get("slots", ())}
    drained = gpu["uuid"] in view["drained_gpus"]
    cut_off = {row["subject"] for row in view.get("conditions") or () if row["code"] == "domain-unreachable"}
    rows = []
    for domain in own:
        # A standby domain is a column of the domain that it would take over.
        if domain["role"] in STANDBYS and domain.get("slot") in served and not verbose:
            continue
        state = domain_state(domain, drained=drained, unreachable=domain["id"] in cut_off)
        kind = "good" if state in _GOOD else "bad" if state in _BAD else "warn"
        active = domain["role"] == "active"
        fault = (faults.get(domain.get("slot")) if active else None) or domain.get("fault")
        user = domain["user"] or "all users"
        standby = _standby(domain, own) if active else "-"
        rows.append(
            (domain["id"], user, Cell(state, kind), str(domain["clients"]), standby, _fault(fault, domain))
        )
    heads = ("DOMAIN", "USER", "STATE", "CLIENTS", "STANDBY", "LAST FAULT")
    return table(rows, heads if headers else None, style, {5: 10, 1: 6})


def domain_state(domain: View, *, drained: bool = False, unreachable: bool = False) -> str:
    """Return the state of a domain in one word. `unreachable`: a condition says that no client gets to it."""
    state = str(domain["state"])
    if unreachable or (state == "retired" and domain.get("problem")):
        return "unreachable"
    if state == "active" and domain["role"] == "active" and drained:
        return "drained"
    if state == "active" and domain["server_pid"] is None and not domain["clients"]:
        return "idle"
    return STATES.get(state, state)


def _standby(domain: View, own: Sequence[View]) -> str:
    same = (d for d in own if d["role"] == "spare" and d.get("slot") == domain.get("slot"))
    found = next(same, None)
    return "none" if found is None else domain_state(found)


OUTCOMES = {"runs": "still runs", "absorbed": "continues", "being evicted": "is being evicted"}
"""Text of the `outcome` of a last fault; any other outcome is shown as it is."""


def _fault(fault: View | None, domain: View) -> str:
    """Return the last fault in short; only its number if the daemon sends no more."""
    if fault is None:
        return "-" if domain["last_fault"] is None else f"#{domain['last_fault']}"
    where = "" if fault["domain"] in (None, domain["id"]) else f" in {fault['domain']}"
    offender, suspects = fault["offender"], fault["suspects"]
    if offender is None:
        named = f"{suspects} suspect{'' if suspects == 1 else 's'}" if suspects else "offender not known"
    else:
        pid = "another user's client" if offender["pid"] is None else f"pid {offender['pid']}"
        likely = "" if fault["confidence"] == "certain" else f"{fault['confidence']} "
        named = f"{likely}{pid} {OUTCOMES.get(fault['outcome'], fault['outcome'])}".rstrip()
    return f"#{fault['id']} {fault['class']}{where}, {ago(fault['age_s'])}, {named}"


def _domain_notes(domain: View, told: Sequence[str], *, verbose: bool) -> list[str]:
    """Return the lines below a domain's row: unusual facts, and with `verbose` its processes and reach.

    `told`: texts of conditions, which are not repeated.
    """
    notes = []
    # A daemon of an earlier release does not say.
    if domain["user"] and domain.get("private") is False:
        notes.append("open to all users")
    if refused := domain["refused_807"]:
        notes.append(f"refused {refused} new client{'' if refused == 1 else 's'} (error 807)")
    problem = domain.get("problem")
    if problem and not any(problem in text for text in told):
        notes.append(printable(problem, 500))
    if verbose:
        role = ROLES.get(domain["role"], domain["role"])
        idle = f", standby contexts {domain['idle_contexts']}" if domain.get("idle_contexts") else ""
        notes.append(
            f"{role}, control {domain['control_pid'] or '-'}, server {domain['server_pid'] or '-'}, "
            f"up {age(domain['uptime_s'])}, clients {domain['clients']}/{domain['clients_limit']}{idle}; "
            f"{domain['reach']}"
        )
    return notes


def _kept_memory(counters: Mapping[str, int], style: Style) -> list[str]:
    """Return lines on exited clients' memory that the vault keeps, which no lease holds."""
    if not counters.get("vault_dead_held"):
        return []
    held = segment_count(counters["vault_dead_held"], counters["vault_dead_bytes"])
    return ["", *style.wrap(f"vault: {held} kept from exited clients (mpsd-ctl vault list)")]


def _processes_outside_mps(gpu: View, style: Style, *, headers: bool) -> list[str]:
    rows = [
        (clienttext.pid_of(p), p["user"], size(p["memory_bytes"]), printable(p["command"], 1000))
        for p in gpu["not_on_mps"]
    ]
    if not rows:
        return []
    heads = ("NOT ON MPS", "USER", "GPU MEM", "COMMAND")
    lines = ["", *table(rows, heads if headers else None, style, {3: 10, 1: 6})]
    # A daemon of an earlier release gives no reasons.
    reasons = {clienttext.pid_of(p): p["reason"] for p in gpu["not_on_mps"] if p.get("reason")}
    for pid, reason in reasons.items():
        lines += style.wrap(f"pid {pid} is not on MPS: {printable(reason, 1000)}", "  ")
    return lines
