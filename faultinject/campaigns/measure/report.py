"""Turn the raw results of a measuring run into a report: rows of question, finding, figures.

The findings are computed from the figures; conclusions are in mpsd/docs/mechanisms.md.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from faultinject.campaigns.measure.failover.findings import cut, failover
from faultinject.evidence import files, schema, tables
from faultinject.evidence.revision import UNKNOWN
from mpsd.base.errors import UsageError

Row = dict[str, Any]
HEAD = ("schema", "device", "driver", "kernel", "date", "command")
FORM: Mapping[str, tuple[type, ...]] = {
    **{name: (int,) if name == "schema" else (str,) for name in HEAD},
    "revision": (str,),  # of the code (evidence.revision)
    "questions": (list,),
    "runs": (list,),
    "rows": (list,),  # of {question, finding, figures}
}

# Signs of the end of a client, and when each of them says that the client has ended.
_SIGNS: dict[str, Callable[[Any, int], bool]] = {
    "client_list": lambda value, pid: value != [] and str(pid) not in value,
    "ps": lambda value, pid: value != [] and str(pid) not in [row[0] for row in value],
    "nvml_processes": lambda value, pid: pid not in [row[0] for row in value],
    "completion_words_late": lambda value, _pid: value == "ended",
}


def _row(question: str, finding: str, figures: Any) -> Row:
    return {"question": question, "finding": finding, "figures": figures}


def _span(values: Iterable[float | None]) -> str:
    known = sorted(v for v in values if v is not None)
    return f"{known[0]:g} to {known[-1]:g}" if known else "nothing"


def _when(case: Row, sign: str) -> float | None:
    """Return when a sign first says that the client has ended [ms after the true end]."""
    says = _SIGNS[sign]
    kill = -case["end_after_kill_ms"]
    for at, value in case["changes_ms_after_true_end"][sign]:
        if at >= kill and not isinstance(value, str) and says(value, case["client"]):
            return float(at)
        if at >= kill and isinstance(value, str) and sign.startswith("completion") and says(value, 0):
            return float(at)
    return None


def end_signal(rows: list[Row]) -> list[Row]:
    done = [row for row in rows if "failed" not in row]
    table = [
        {
            "case": row["case"],
            "end_after_kill_ms": row["end_after_kill_ms"],
            "pidfd_after_kill_ms": row["kill_to_pidfd_ms"],
            **{f"{sign}_after_end_ms": _when(row, sign) for sign in _SIGNS},
            "survivor": row["survivor_after_release"]["ev"],
            "survivor_longest_ms": row["survivor_while_leased"]["longest_ms"],
            "lease_close_ms": row["release"]["close_ms"],
            "gpu_memory_back_ms": row["release"]["gpu_back_ms"],
            "host_memory_back_ms": row["release"]["host_back_ms"],
        }
        for row in done
    ]
    words = [row["completion_words_late_after_end_ms"] for row in table]
    early = sum(1 for w in words if w is not None and w < 0)
    running = [row for row in done if row["end_after_kill_ms"] > 50]
    prompt = [_when(row, "completion_words_late") for row in running]
    lists = [_when(row, sign) for row in running for sign in ("client_list", "ps", "nvml_processes")]
    alive = sum(1 for row in table if row["survivor"] == "alive")
    return [
        _row(
            "Which sign says that the kernels of an exited client have ended?",
            f"The client's own completion words: {early} of {sum(w is not None for w in words)} times "
            "too early, "
            f"{_span(prompt)} ms after the true end where work was running. Client lists, ps and NVML "
            "drop the "
            f"client {_span(lists)} ms after the end (negative: long before it). NVML's memory figure "
            "does not "
            "move before the lease ends, per-process utilisation is empty, utilisation of the whole "
            "GPU includes "
            "every other client.",
            table,
        ),
        _row(
            "Does a lease harm another client, while it lasts or when it is closed after the end?",
            f"{alive} of {len(table)} times the survivor continued with every result right. Closing takes "
            f"{_span(row['lease_close_ms'] for row in table)} ms; GPU and host memory are free when it "
            "returns.",
            [{"case": row["case"], **row["release"]} for row in done],
        ),
        _row(
            "Failed measurements",
            f"{len(rows) - len(done)} case(s).",
            [{"case": row["case"], "failed": row["failed"]} for row in rows if "failed" in row],
        ),
    ]


def attach(rows: list[Row]) -> list[Row]:
    starts = [row for row in rows if row["what"].startswith("signs of a start")]
    names = [name for name in starts[0] if name != "what"]
    signs = {name: [row.get(name) for row in starts] for name in names}
    hammered = [row for row in rows if row["what"] in ("sequential", "at once")]
    right = sum(row["clients"] for row in hammered if row["all_right"])
    all_clients = sum(row["clients"] for row in hammered)
    opened = sum(row["opened"] for row in hammered)
    return [
        _row(
            "When does each sign of a new client appear, in ms after its context was finished?",
            f"A tracker is accepted at {_span(signs['tracker_accepted'])}, the log line comes at "
            f"{_span(signs['control.log line arrived'])}, cuInit returns at "
            f"{_span(signs['cuinit_returned'])}.",
            signs,
        ),
        _row(
            "Is it harmless to attach before the context is finished?",
            f"{right} of {all_clients} clients got only right results under {opened} attaches, one each "
            "millisecond from their first instant.",
            hammered,
        ),
    ]


def traces(rows: list[Row]) -> list[Row]:
    table = []
    for row in rows:
        states = [[t, state] for t, state in row["server_status"] if state in ("ACTIVE", "FAULT")]
        table.append(
            {
                "kind": row["kind"],
                "offender": _client_outcome(row["offender"]),
                "survivor": _client_outcome(row["survivor"]),
                "uvm_event_ms": [event[0] for event in row["uvm_events"]][:2],
                "nvml_xid": row["nvml_xids"][:3],
                "server_fault_ms": next((t for t, state in states if state == "FAULT"), None),
                "kernel_log": [[t, text.split(";", 1)[-1]] for t, text in row["kmsg"] if "Xid" in text][:4],
            }
        )
    lost = [row["kind"] for row in table if "survived" not in row["survivor"]]
    return [
        _row(
            "Which signs does each kind of fault leave under stock MPS, in ms after the fault?",
            f"The survivor is lost to {len(lost)} of {len(table)} kinds: {', '.join(lost)}.",
            table,
        )
    ]


def _client_outcome(text: list[Any]) -> str:
    for at, event in text:
        if isinstance(event, dict) and event["ev"] in ("error", "sync_ok", "survived"):
            code = f" {event['code']}" if "code" in event else ""
            return f"{event['ev']}{code} at {at} ms"
    return f"exit {text[-1][1]}"


def control(rows: list[Row]) -> list[Row]:
    mps_domain = []
    for part in rows:
        finding = part.get("failed") or f"{len(part['rows'])} observations, in order."
        mps_domain.append(_row(f"Control binary: {part['part']}", finding, part.get("rows", [])))
    return mps_domain


def standby_domain(rows: list[Row]) -> list[Row]:
    first = next(row for row in rows if row["what"] == "first standby domain")
    used = first["gpu_used_mib_before_after"]
    return [
        _row(
            "How much does a standby domain cost?",
            f"{used[1] - used[0]} MiB of GPU memory, {first['server_kib']['Rss'] >> 10} MiB RSS for "
            "the server; "
            f"socket after {first['socket_ms']} ms, ACTIVE after {first['states'][-1][0]} ms.",
            rows,
        )
    ]


def guard(rows: list[Row]) -> list[Row]:
    by = {row["what"]: row for row in rows}
    free = by["registration, no guard"]
    mapped = by["registration, all mapped classes guarded"]
    broken = [n for n in free if n != "what" and free[n]["register"] != mapped[n]["register"]]
    stale = [row for row in rows if row["what"].startswith("stale guard")]
    fails = [row["what"].split()[-1] for row in stale if "failed" in row["while_stale"]]
    heals = [row for row in stale if "failed" not in row["after_removal"]]
    return [
        _row(
            "Which guarded pages can no longer be registered (cuMemHostRegister)?",
            f"Broken by the guard: {', '.join(broken)}.",
            [
                row
                for row in rows
                if "registration" in row["what"] or row["what"].startswith(("guard:", "where"))
            ],
        ),
        _row(
            "Which calls fail in the hole that a guarded mapping leaves when it is unmapped?",
            f"Fails while the guard is stale: {', '.join(fails)}. After removal {len(heals)} of "
            f"{len(stale)} work.",
            stale + [row for row in rows if row["what"].startswith("dlclose")],
        ),
        _row(
            "Do allocations work under guards?",
            "See each call; `ok` means that a kernel wrote all of it.",
            [row for row in rows if row["what"].startswith("allocation")],
        ),
    ]


def work_memory(rows: list[Row]) -> list[Row]:
    table = []
    for row in rows:
        changes = [
            [at, [word for word in words if count < 20]]
            for at, count, words in row["changes_ms_after_end"]
            if count < 20
        ]
        table.append({"case": row["case"], "killed_ms": row["killed_ms"], "words": changes})
    return [
        _row(
            "Which words does the GPU write into the memory of an exited client? (ms after its end)",
            "A word per launch goes from 5 to 6 when it ends; one 16-byte semaphore per channel "
            "counts launches.",
            table,
        )
    ]


TIB_OF_ADDRESSES = 128


def far(rows: list[Row]) -> list[Row]:
    """Return the cost of far zones, and of sparse ones over all addresses.

    By cuMemGetInfo, which does not count memory that the driver keeps in reserve.
    """
    whole = [row for row in rows if row.get("laid") == row.get("GiB")]
    managed, sparse = ([row for row in whole if row.get("kind") == kind] for kind in ("managed", "sparse"))

    def times(of: list[Row], what: str) -> str:
        return _span(us for row in of for us in row[what])

    def memory(of: list[Row]) -> str:
        return _span(row["GPU KiB"] / row["GiB"] for row in of)

    finding = (
        f"Managed: laid in {times(managed, 'lay us')} us a GiB, removed in "
        f"{times(managed, 'take away us')} us, {memory(managed)} KiB of GPU memory a GiB until one is hit. "
        f"Sparse: {times(sparse, 'lay us')} us and {memory(sparse)} KiB of GPU memory a GiB"
    )
    if sparse:
        each = statistics.median(us for row in sparse for us in row["lay us"])
        finding += f", {each * TIB_OF_ADDRESSES * 1024 / 6e7:.0f} minutes for {TIB_OF_ADDRESSES} TiB"
    return [_row("How much do zones of several GiB cost, in chunks of one?", f"{finding}.", rows)]


def zones(rows: list[Row]) -> list[Row]:
    done = [row for row in rows if "failed" not in row]
    singles = [
        row for row in done if "first ms" in row and ("at" in row or "code" in row) and " at " in row["what"]
    ]
    storms = [row for row in done if "event to termination ms" in row]
    alive = [row for row in done if row.get("survivor", {}).get("ev") == "alive"]
    judged = [row for row in done if "survivor" in row]
    reported = [row for row in singles if any(key.startswith("serviced") for key in row["events"])]
    longest = _span(row["survivor"].get("longest_ms") for row in storms)
    return [
        _row(
            "Which accesses do zones of managed memory absorb and report, and at which cost?",
            f"{len(reported)} of {len(singles)} single accesses were serviced and reported; after "
            f"{len(alive)} of {len(judged)} steps the survivor was unharmed. Storms ended "
            f"{_span(row['event to termination ms'] for row in storms)} ms after their first event; "
            f"the survivor's longest round took {longest} ms.",
            [row for row in done if row["case"] != "windows"],
        ),
        _row(
            "Are the addresses of a window free in other libraries' programs?",
            "; ".join(
                f"{row['what'].split()[-1]}: {'yes' if row['up'] and not row['inside'] else 'no'}"
                for row in done
                if row["case"] == "windows"
            ),
            [{key: row[key] for key in ("what", "up", "inside")} for row in done if row["case"] == "windows"],
        ),
        _row(
            "Failed measurements of zones",
            f"{len(rows) - len(done)} case(s).",
            [row for row in rows if "failed" in row],
        ),
    ]


def stall(rows: list[Row]) -> list[Row]:
    """Return the cost of one more context after an SM exception."""
    alone = {row["kind"]: row["stall ms"] for row in rows if not row["contexts"] and row["kind"] != "store"}

    def each(of: Row) -> float:
        return float(round((of["stall ms"] - alone[of["kind"]]) / of["contexts"], 1))

    costs: dict[str, list[float]] = {}
    for row in rows:
        if row["contexts"] and row["kind"] in alone:
            costs.setdefault(f"{row['kind']}, {row['what']}", []).append(each(row))
    text = "; ".join(f"{what}: {_span(values)}" for what, values in costs.items())
    stores = _span(row["stall ms"] for row in rows if row["kind"] == "store")
    return [
        _row(
            "How long is the GPU stall at a fault, and what does it depend on?",
            f"With the bystander and two servers alone, {_span(alone.values())} ms. Each other context adds, "
            f"in ms, one fault of each: {text}. An out-of-bounds store: {stores} ms, with any number of "
            "contexts.",
            rows,
        )
    ]


SUMMARIES: dict[str, Callable[[list[Row]], list[Row]]] = {
    "end-signal": end_signal,
    "attach": attach,
    "traces": traces,
    "control": control,
    "standby-domain": standby_domain,
    "guard": guard,
    "work-memory": work_memory,
    "zones": zones,
    "far": far,
    "failover": failover,
    "cut": cut,
    "stall": stall,
}

# A report must not identify the machine by the path of its Python or the uuid of its GPU.
_PLACE = re.compile(r"(?:/[\w.-]+)+/bin/(?=python)")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){2,3}(?:-[0-9a-f]{12})?")


def build(source: Path) -> dict[str, Any]:
    """Return the report of all result files in `source`. Raises FileNotFoundError if there is none."""
    results = [json.loads((source / f"{name}.json").read_text()) for name in SUMMARIES if _has(source, name)]
    if not results:
        raise FileNotFoundError(f"no results in {source}")
    last = max(results, key=lambda result: str(result["date"]))
    report: dict[str, Any] = {name: last[name] for name in HEAD}
    report["revision"] = last.get("revision", UNKNOWN)
    report["questions"] = [result["question"] for result in results]
    report["runs"] = sorted({(r["date"], r["command"]) for r in results})
    report["rows"] = [row for result in results for row in SUMMARIES[result["question"]](result["rows"])]
    text = _PLACE.sub("/usr/bin/", json.dumps(report))
    return dict(json.loads(_UUID.sub("GPU-00000000-0000-0000", text)))


def _has(source: Path, name: str) -> bool:
    return (source / f"{name}.json").exists()


def name_of(report: dict[str, Any]) -> str:
    """Return `measurements`, or the question where there is only one."""
    device = str(report["device"]).replace(" ", "-")
    # Reports from before this key are of all questions.
    questions = report.get("questions", [])
    return f"{device}-{report['driver']}-{questions[0] if len(questions) == 1 else 'measurements'}"


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown: a table where the figures are one, else a list."""
    lines = [f"# Measurements: {report['device']}, driver {report['driver']}", ""]
    lines += [f"Kernel {report['kernel']}. {tables.provenance(report)}"]
    for row in report["rows"]:
        lines += ["", f"## {row['question']}", "", row["finding"], ""]
        lines += _figures(row["figures"])
    return "\n".join(lines) + "\n"


def _figures(figures: Any) -> list[str]:
    if isinstance(figures, dict):
        return [f"- {name}: {_cell(value)}" for name, value in figures.items()]
    if figures and all(row.keys() == figures[0].keys() for row in figures) and len(figures[0]) < 14:
        names = list(figures[0])
        table = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
        return table + [f"| {' | '.join(_cell(row[name]) for name in names)} |" for row in figures]
    return [f"- {'; '.join(f'{name}: {_cell(value)}' for name, value in row.items())}" for row in figures]


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = text.replace("|", "\\|").replace("\n", " / ")
    return text if len(text) < 600 else text[:600] + " ..."


def write(source: Path, target: Path) -> Path:
    """Build the report and write it as JSON and Markdown; return the path of the JSON."""
    report = build(source)
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"{name_of(report)}.json"
    raw = files.text_of(report)
    path.write_text(raw)
    path.with_suffix(".md").write_text(markdown(report) + files.digest_line(raw.encode()))
    return path


def load(data: Any, path: Path) -> dict[str, Any] | None:
    """Return the report that a file's JSON is; None for anything else. Raises UsageError."""
    if not isinstance(data, dict) or not {"kernel", "rows", "runs"} <= data.keys():
        return None
    # Older reports are of all questions, and have no revision.
    whole = {"questions": [], "revision": UNKNOWN, **data}
    if problems := schema.violations(FORM, whole, "report"):
        raise UsageError(f"{path} is no report of this program: {problems[0]}")
    return whole
