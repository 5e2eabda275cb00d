"""Failing allocations while a fault is handled, one after the other: each case ends in an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from emulator.guest import checks, gpu
from emulator.guest.beside import innocent
from emulator.guest.check import Check, CheckError, expect
from emulator.guest.gpuchecks import STRAY, no_trouble
from emulator.guest.gpuclient import client
from emulator.guest.isolation import GUILTY, isolating
from mpsd.gpu.nvidia.kernel_abi import Action, Why

CONTROL = Path("/proc/mpsd-failing")
REPLAYABLE, NON_REPLAYABLE = "mpsd_isolate_replayable", "mpsd_isolate_non_replayable"
FAULTS = {
    REPLAYABLE: gpu.Fault(STRAY, 1, veid=3),
    NON_REPLAYABLE: gpu.Fault(STRAY, 1, engine=gpu.ENGINE_COPY, access=gpu.READ, replayable=False),
}
STOPPED = ("cancel-va", "cancel-instance", "reported")
MOST = 200


@contextmanager
def failing(function: str, number: int, *, all_of_them: bool = False) -> Iterator[None]:
    """Fail the allocation of that number inside `function` (0: none), or also all later ones."""
    CONTROL.write_text(f"{function} {number}{' all' if all_of_them else ''}")
    try:
        yield
    finally:
        CONTROL.write_text("off")


def failed() -> tuple[int, str]:
    """Return the number of allocations, and the function that failed ("nothing": none)."""
    words = CONTROL.read_text().split()
    return int(words[1]), words[3]


def once(function: str, number: int) -> tuple[str, str]:
    """Fail an allocation at a new client's first fault. Return the end of the access and the failed function.

    Raises CheckError if the record does not fit the end, or another client was touched.
    """
    opened = isolating()
    with innocent(), client(GUILTY, 1, veid=3, copies=function != REPLAYABLE):
        gpu.command("forget")
        with failing(function, number):
            gpu.command(FAULTS[function].line())
            gpu.wait_for_tally((*STOPPED, "went-on"), 1)
            what = failed()[1]
        records = opened.until("a record", lambda record: record.action in (Action.SUNK, Action.REFUSED))
        ended = [deed.name for deed in gpu.deeds() if deed.name in (*STOPPED, "went-on")]
    opened.close()
    expect("ended once", len(ended), 1)
    told = (records[-1].action, records[-1].why)
    wanted = (Action.SUNK, Why.NONE) if ended == ["went-on"] else (Action.REFUSED, Why.FAILED)
    expect(f"record of {ended[0]} as {what} failed", told, wanted)
    no_trouble()
    return ended[0], what


def sweep(function: str) -> str:
    """Fail each allocation once, until there are no more; the access continues if UVM has another way."""
    stopped: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    for number in range(1, MOST):
        ended, what = once(function, number)
        if what == "nothing":
            break
        (survived if ended == "went-on" else stopped)[what] += 1
    else:
        raise CheckError(f"more than {MOST} allocations")
    if not stopped:
        raise CheckError("no allocation failed")
    return f"{said(stopped)} stock answer, recorded; {said(survived)} absorbed anyway"


def said(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def without_owner() -> str:
    """No memory for the record of an address space's owner: the stock answer, and a log line."""
    opened = isolating()
    with innocent(), ExitStack() as made:
        with failing("mpsd_space_created", 1):
            made.enter_context(client(GUILTY, 1, veid=3))
            expect("failed", failed()[1] != "nothing", True)
        gpu.command("forget")
        gpu.command(FAULTS[REPLAYABLE].line())
        gpu.wait_for("cancel-va")
    expect("records", opened.read(), [])
    opened.close()
    expect("told in the log", any("is not isolated" in line for line in checks.read_log()), True)
    no_trouble()
    return "cancelled, no record"


def again() -> str:
    """A fault is absorbed as usual after all failures."""
    ended, what = once(REPLAYABLE, 0)
    expect("end", (ended, what), ("went-on", "nothing"))
    return ended


CHECKS = (
    Check("fail-replayable", lambda: sweep(REPLAYABLE), 600.0),
    Check("fail-non-replayable", lambda: sweep(NON_REPLAYABLE), 600.0),
    Check("fail-owner", without_owner),
    Check("sunk-after-failures", again),
)
