"""The findings of the fail-over measurements, computed from their raw rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

Row = dict[str, Any]
# The precision of the GPU's clock: a write within it of a sign is no write after the sign.
SLACK_MS = 0.05


def row(question: str, finding: str, figures: Any) -> Row:
    return {"question": question, "finding": finding, "figures": figures}


def spread(values: Iterable[float | None]) -> dict[str, Any]:
    """Return n, median and worst (largest) of the known values."""
    known = sorted(v for v in values if v is not None)
    if not known:
        return {"n": 0, "median": None, "worst": None}
    return {"n": len(known), "median": round(median(known), 3), "worst": round(known[-1], 3)}


# ---- the fence


def _first(changes: list[list[Any]], says: Callable[[Any], bool]) -> float | None:
    return next((float(at) for at, value in changes if says(value)), None)


def outside_signs(fault: Row) -> dict[str, float | None]:
    """Return sign -> ms after the fault, of the signs outside the survivor."""
    states = fault["server status"]
    killed = fault.get("server killed") or [None, None]
    return {
        "uvm event": _first(fault["uvm"], lambda _: True),
        "offender's own error": _first(fault["offender"], lambda said: said.startswith("error")),
        "first nvml xid": _first(fault["xids"], lambda _: True),
        "nvml xid 43": _first(fault["xids"], lambda xid: xid == 43),
        "first NVRM line": _first(fault["kernel log"], lambda _: True),
        "kernel log's xid 43": _first(fault["kernel log"], lambda text: "): 43," in text),
        "server not ACTIVE": _first(states, lambda state: state != "ACTIVE"),
        "server in FAULT": _first(states, lambda state: state == "FAULT"),
        "killed server gone": killed[1],
    }


def own_signs(writer: Row) -> dict[str, float | None]:
    """Return sign -> ms after the fault, of the survivor's old driver instance."""
    signs: dict[str, float | None] = {}
    if writer["means"] == "none":
        signs = {f"own error: {name}": at for name, (at, _) in writer["signs"].items()}
    elif "ended" in writer["ended"]:
        code = writer["ended"].get("code", 0)
        signs[f"{writer['means']} returned" + (f" {code}" if code else "")] = writer["ended"]["ended"]
    return signs


def last_write(writer: Row) -> float:
    """Return ms after the fault of the GPU's last write for this survivor, by the GPU's timestamp.

    Copy engines leave no timestamp; for them it is the start of a read after which they had written more.
    """
    return max(float(written) for written, _, _ in writer["words"].values())


def fences(faults: list[Row]) -> list[Row]:
    """Return for each sign how long before it the last write was, over all writers that it concerns."""
    margins: dict[str, list[tuple[float, str]]] = {}
    for fault in faults:
        for writer in fault["writers"]:
            if writer["read code"]:
                continue
            shared = {} if writer["means"] != "none" else outside_signs(fault)
            if fault["means"] == "kill server":
                shared = {"killed server gone": outside_signs(fault)["killed server gone"]}
            own = own_signs(writer) if fault["means"] != "kill server" else {}
            for sign, at in (shared | own).items():
                if at is not None:
                    margins.setdefault(sign, []).append((at - last_write(writer), fault["kind"]))
    table = []
    for sign, found in margins.items():
        values = sorted(margin for margin, _ in found)
        late = [kind for margin, kind in found if margin < -SLACK_MS]
        table.append({
            "sign": sign, "n": len(found), "written after it": len(late),
            "worst ms written after it": round(max(0.0, -values[0]), 3),
            "least ms between": round(values[0], 3), "median ms between": round(median(values), 3),
            "kinds": len({kind for _, kind in found}), "kinds written after it": sorted(set(late)),
        })  # fmt: skip
    return sorted(table, key=lambda line: (line["written after it"], -line["n"]))


def fence(faults: list[Row]) -> Row:
    table = fences(faults)
    good = [line for line in table if not line["written after it"]]
    bad = [line for line in table if line["written after it"]]
    text = "; ".join(f"{line['sign']} ({line['n']})" for line in good) or "none"
    return row(
        "After which sign did a survivor's old context never write again?",
        f"Never a write after (n): {text}. Written after: "
        + ("; ".join(f"{line['sign']} {line['written after it']}/{line['n']}" for line in bad) or "none")
        + ". Only n >= 20 over several kinds counts as shown.",
        table,
    )


def ends(faults: list[Row]) -> Row:
    """Return when writing ended, and when each means to end it had returned, by kind."""
    table = []
    for kind, means in dict.fromkeys(
        (fault["kind"], w["means"]) for fault in faults for w in fault["writers"]
    ):
        chosen = [
            (fault, writer)
            for fault in faults
            for writer in fault["writers"]
            if (fault["kind"], writer["means"]) == (kind, means) and fault["means"] != "kill server"
        ]
        if not chosen:
            continue
        last = spread(last_write(writer) for _, writer in chosen)
        table.append({
            "kind": kind, "means": means, "n": last["n"],
            "trigger ms": spread(fault["trigger"][1] for fault, _ in chosen)["median"],
            "last write ms": [last["median"], last["worst"]],
            "own error ms": [
                spread(w["signs"].get("query", [None])[0] for _, w in chosen)[k] for k in ("median", "worst")
            ],
            "means through ms": [
                spread(w["ended"].get("ended") for _, w in chosen)[k] for k in ("median", "worst")
            ],
            "codes": sorted({w["ended"].get("code", 0) for _, w in chosen}),
        })  # fmt: skip
    return row(
        "How long after a neighbour's fault does a survivor's old context still write?",
        "In ms after the fault: the trigger, the last write of kernels and copies by the GPU's own "
        "timestamp (of copies without a kernel before them: by the time of observation), the old driver "
        "instance's own error, and the return of the call that ended it.",
        table,
    )


def syncs(faults: list[Row]) -> Row:
    table = [
        {
            "kind": fault["kind"],
            **{name: fault["loop"][name] for name in ("successes", "in memory", "wrong reads", "end")},
            "false successes": max(0, fault["loop"]["successes"] - fault["loop"]["in memory"]),
        }
        for fault in faults
    ]
    false = sum(line["false successes"] + line["wrong reads"] for line in table)
    total = sum(line["successes"] for line in table)
    return row(
        "Can a synchronisation of a survivor succeed falsely between the fault and its first error?",
        f"{false} of {total} successful synchronisations in {len(table)} faults did not agree with memory "
        "(the four ways to wait in turn; a kernel in flight most of the time).",
        table,
    )


def recovery(faults: list[Row]) -> Row:
    table = []
    for kind in dict.fromkeys(fault["kind"] for fault in faults):
        chosen = [f for f in faults if f["kind"] == kind and f["means"] == "none"]
        kernels = [f["loop"]["first kernel"][0] for f in chosen if f["loop"]["first kernel"][1] == 0]
        after = [
            f["loop"]["first kernel"][0] - f["trigger"][1]
            for f in chosen
            if f["loop"]["first kernel"][1] == 0
        ]
        stalls = [f["bystander longest"] for f in chosen if isinstance(f["bystander longest"], float)]
        table.append({
            "kind": kind, "n": len(chosen), "triggers": sorted({f["trigger"][0] for f in chosen}),
            "trigger ms": list(spread(f["trigger"][1] for f in chosen).values())[1:],
            "first kernel ms": list(spread(kernels).values())[1:],
            "after the trigger ms": list(spread(after).values())[1:],
            "bystander's longest ms": list(spread(stalls).values())[1:],
        })  # fmt: skip
    return row(
        "From the fault to the first kernel in the standby context (median and worst, ms)?",
        "The trigger is the first of: UVM event, the offender's own error, NVML's Xid.",
        table,
    )


def signs(faults: list[Row]) -> Row:
    """Return one round of each kind in full, and which signs name a process."""
    table = []
    for kind in dict.fromkeys(fault["kind"] for fault in faults):
        chosen = [f for f in faults if f["kind"] == kind and f["means"] == "none"]
        if not chosen:
            continue
        named = [
            {key: _naming_signs(f[key]) for key in ("server log", "kernel log", "ps", "nvml MPS processes")}
            for f in chosen
        ]
        table.append({
            "kind": kind, "n": len(chosen),
            "offender says": chosen[0]["offender"],
            "victims' codes": sorted({f["loop"]["end"][1] or 0 for f in chosen}),
            "victim's error ms": [f["loop"]["end"][0] for f in chosen],
            "named in the server log": [n["server log"] for n in named],
            "named in the kernel log": [n["kernel log"] for n in named],
            "xids": chosen[0]["xids"], "server log": chosen[0]["server log"][:6],
            "kernel log": chosen[0]["kernel log"][:4], "ps": chosen[0]["ps"][:2],
            "nvml MPS processes": chosen[0]["nvml MPS processes"][:2],
            "changes of nvml utilisation": [f["nvml utilisation"] for f in chosen],
        })  # fmt: skip
    return row(
        "Does any stock sign name the offender?",
        "Content of each sign in one round of each kind, and the processes that it names in every round.",
        table,
    )


def _naming_signs(lines: list[list[Any]]) -> str:
    """Return which processes are named within the first 60 ms."""
    early = " ".join(str(text) for at, text in lines if at < 60)
    named = [name for name in ("OFFENDER", "SURVIVOR", "SERVER") if name in early]
    return "+".join(named) or "none"


# ---- the cases without a fault


def technique(rows: list[Row]) -> Row:
    ok = [line["how"] for line in rows if line.get("both wrote") and line.get("client of") == ["A", "B"]]
    return row(
        "How can a second driver instance be kept from the socket and environment of the first?",
        f"Both driver instances worked, in two domains, with: {', '.join(ok) or 'none'}.",
        rows,
    )


def cut(rows: list[Row]) -> list[Row]:
    """Return the findings of rounds in which UVM unmapped a survivor's memory."""
    faults = [line for line in rows if "writers" in line]
    cuts = [
        {
            "kind": fault["kind"],
            "trigger": fault["trigger"],
            **writer["ended"],
            "last write": last_write(writer),
            # Between these two.
            "last copy to the host": writer["words"].get("copies to the host", [None])[1:],
        }
        for fault in faults
        for writer in fault["writers"]
        if not writer["read code"]
    ]
    known = [line for line in cuts if "ended" in line]
    after = [line["ended"] - line["began"] for line in known]
    blocked = [line["freed"] - line["ended"] for line in known if "freed" in line]
    return [
        fence(faults),
        ends(faults),
        row(
            "How long does it take to cut a context off, and how long does the call block after that (ms)?",
            f"In {len(known)} of {len(cuts)}: {spread(after)}; blocked: {spread(blocked)}.",
            cuts,
        ),
        row("Failed measurements", "", [line for line in rows if "failed" in line]),
    ]


def failover(rows: list[Row]) -> list[Row]:
    """Return the answer to every question of the measurement, from its raw rows."""
    by: dict[str, list[Row]] = {}
    for line in rows:
        by.setdefault(line["case"], []).append({key: line[key] for key in line if key != "case"})
    found = [line for line in by.get("technique", []) if "how" in line]
    mps_domain = [technique([*by.get("file", []), *found])]
    faults = [line for line in by.get("faults", []) if "writers" in line]
    if faults:
        mps_domain += [part(faults) for part in (fence, ends, syncs, recovery, signs)]
    failed = [line for line in rows if "failed" in line]
    took = {line["case"]: line["seconds"] for line in rows if line.get("what") == "took"}
    mps_domain.append(row("Failed measurements and their duration", f"Seconds: {took}.", failed))
    return mps_domain
