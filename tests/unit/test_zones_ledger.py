"""The ledger of a client: the compiler's layout, what is read of it, and what a hostile ledger can do."""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpsd.base.errors import GpuError
from mpsd.base.model import Relation, ZoneRole
from mpsd.zones import layout
from mpsd.zones.ledger import Ledger
from tests.support.descriptors import open_descriptors
from tests.support.guardzones import LedgerWriter

HEADER = Path(__file__).resolve().parents[2] / "clients" / "libcuda" / "src" / "ledger.h"
BASE = 0x1000_0000_0000
MIB = 1 << 20
NOW = 10_000_000_000


@pytest.fixture
def writer() -> Iterator[LedgerWriter]:
    made = LedgerWriter()
    yield made
    made.close()


@pytest.fixture
def ledger(writer: LedgerWriter) -> Iterator[Ledger]:
    before = set(open_descriptors())
    made = Ledger(os.dup(writer.fd))
    yield made
    made.close()
    assert set(open_descriptors()) == before


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_the_compiler_lays_it_out_the_same(tmp_path: Path) -> None:
    parts = {
        "mpsd_ledger": (layout.HEAD, layout.HEAD_FIELDS),
        "mpsd_zone_row": (layout.ZONE, layout.ZONE_FIELDS),
        "mpsd_note_row": (layout.NOTE, layout.NOTE_FIELDS),
        "mpsd_launch_row": (layout.LAUNCH, layout.LAUNCH_FIELDS),
        "mpsd_name_row": (layout.NAME, layout.NAME_FIELDS),
    }
    tables = ("zones", "notes", "launches", "names")
    body = "".join(
        f'printf("%zu %zu\\n", offsetof(struct {name}, {f}), sizeof(((struct {name} *)0)->{f}));'
        for name, (_, fields) in parts.items()
        for f in fields
    ) + "".join(f'printf("%zu 0\\n", offsetof(struct mpsd_ledger, {t}));' for t in tables)
    source = tmp_path / "layout.c"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\n'
        f"int main(void) {{ {body} return sizeof(struct mpsd_ledger) != {layout.SIZE}; }}"
    )
    program = tmp_path / "layout"
    subprocess.run(["gcc", "-o", program, source], check=True, timeout=90)
    said = subprocess.run([program], check=True, capture_output=True, text=True, timeout=90).stdout
    found = [tuple(map(int, line.split())) for line in said.splitlines()]
    wanted = [pair for part, _ in parts.values() for pair in offsets(part)]
    starts = (layout.ZONES_AT, layout.NOTES_AT, layout.LAUNCHES_AT, layout.NAMES_AT)
    assert found == wanted + [(start, 0) for start in starts]


def offsets(part: struct.Struct) -> list[tuple[int, int]]:
    """Return where each field is and its size; a field that repeats (15Q) is an array, and so one field."""
    sizes = []
    for count, letter in re.findall(r"(\d*)([A-Za-z])", part.format[1:]):
        sizes.append(int(count or 1) * {"I": 4, "H": 2, "Q": 8, "s": 1}[letter])
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def test_the_header_s_constants_are_these() -> None:
    text = HEADER.read_text()
    defined = {k: int(v.rstrip("ul"), 0) for k, v in re.findall(r"#define MPSD_LEDGER_(\w+) (\w+)", text)}
    assert defined == {
        "MAGIC": layout.MAGIC,
        "VERSION": layout.VERSION,
        "ZONES": layout.ZONES,
        "NOTES": layout.NOTES,
        "LAUNCHES": layout.LAUNCHES,
        "NAMES": layout.NAMES,
        "NAME_ROOM": layout.NAME_ROOM,
    }
    zones = dict(re.findall(r"MPSD_ZONE_(\w+) = (\d+)", text))
    kinds = {k: int(v) for k, v in zones.items() if k in layout.Kind.__members__}
    roles = {k: int(v) for k, v in zones.items() if k in layout.Role.__members__}
    assert kinds == dict(layout.Kind.__members__) and roles == dict(layout.Role.__members__)


def test_a_ledger_of_another_version_is_refused() -> None:
    for version in (1, layout.VERSION + 1):
        fd = shared()
        os.pwrite(fd, struct.pack("=I", version), layout.HEAD_VERSION_AT)
        with pytest.raises(GpuError, match="version"):
            Ledger(fd)
        os.close(fd)
    # As large as ledgers of the first version; their zones had no time of birth.
    fd = shared(layout.SIZE - 8 * layout.ZONES)
    with pytest.raises(GpuError):
        Ledger(fd)
    os.close(fd)


# -- hostile input ----------------------------------------------------------------------------------------


def shared(size: int = layout.SIZE, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> int:
    fd = os.memfd_create("mpsd-ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, struct.pack("=QIIQ", layout.MAGIC, layout.VERSION, 1, layout.SIZE)[:size], 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def on_disk() -> int:
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    os.ftruncate(fd, layout.SIZE)
    return fd


def pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def altered(at: int) -> int:
    fd = shared()
    os.pwrite(fd, b"\xff", at)
    return fd


@pytest.mark.parametrize(
    "make",
    [
        lambda: shared(layout.SIZE - 1),
        lambda: shared(layout.SIZE + 4096),
        lambda: shared(0),
        lambda: shared(seals=fcntl.F_SEAL_GROW),
        lambda: shared(seals=fcntl.F_SEAL_SHRINK),
        on_disk,
        pipe,
        lambda: os.open("/dev/null", os.O_RDONLY),
        lambda: os.open("/proc/self/mem", os.O_RDONLY),
        lambda: altered(0),
        lambda: altered(9),
        lambda: altered(17),
    ],
)
def test_what_is_no_ledger_is_refused_and_left_to_the_caller(make: object) -> None:
    fd = make()  # type: ignore[operator]
    with pytest.raises(GpuError):
        Ledger(fd)
    os.close(fd)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 400))
def test_any_bytes_can_be_read(seed: int, pieces: int) -> None:
    fd = shared()
    dice = random.Random(seed)
    for _ in range(pieces):
        os.pwrite(fd, dice.randbytes(dice.randrange(1, 300)), dice.randrange(32, layout.SIZE - 300))
    ledger = Ledger(fd)
    head = ledger.head()
    assert head.names_used <= layout.NAMES and head.managed_zones <= layout.ZONES
    zones = ledger.zones(ledger.zone_bytes())
    assert len(zones) <= layout.ZONES
    found = zones.at(dice.randrange(1 << 64))
    assert found is None or found.start < found.end
    ledger.nearest(dice.randrange(1 << 47), dice.choice(list(ZoneRole)), NOW)
    name = ledger.kernel(head)
    assert name is None or name.isprintable()
    ledger.close()


# -- zones -----------------------------------------------------------------------------------------------


def test_only_zones_that_report_and_are_whole_are_zones(writer: LedgerWriter, ledger: Ledger) -> None:
    writer.zone(0, layout.Kind.MANAGED, layout.Role.QUARANTINE, BASE, BASE + MIB)
    writer.zone(1, layout.Kind.SPARSE, layout.Role.GUARD, BASE + 2 * MIB, BASE + 3 * MIB)
    writer.zone(8191, layout.Kind.MANAGED, layout.Role.NULL_PAGE, 0, 65536)
    writer.zone(2, layout.Kind.MANAGED, layout.Role.GUARD, BASE + 5 * MIB, BASE + 4 * MIB)
    writer.zone(5, layout.Kind.MANAGED, layout.Role.FAR, BASE + 64 * MIB, BASE + 96 * MIB)
    writer.zone(3, layout.Kind.MANAGED, 9, BASE + 6 * MIB, BASE + 7 * MIB)
    writer.zone(4, layout.Kind.MANAGED, layout.Role.GUARD, BASE + 8 * MIB, BASE + 9 * MIB)
    # The writer is updating this zone.
    layout.SEQUENCE.pack_into(writer.memory, layout.ZONES_AT + 4 * layout.ZONE.size, 7)
    zones = ledger.zones(ledger.zone_bytes())
    assert len(zones) == 3
    far = zones.at(BASE + 70 * MIB)
    assert far is not None and far.role is ZoneRole.FAR
    roles = [
        getattr(zones.at(a), "role", None) for a in (BASE - 1, BASE, BASE + MIB - 1, BASE + MIB, 0, 65536)
    ]
    assert roles == [None, ZoneRole.QUARANTINE, ZoneRole.QUARANTINE, None, ZoneRole.NULL_PAGE, None]
    assert zones.at(BASE + 2 * MIB) is None
    assert zones.at(BASE + 8 * MIB) is None


def test_a_row_that_changed_meanwhile_is_not_believed(writer: LedgerWriter, ledger: Ledger) -> None:
    writer.zone(0, layout.Kind.MANAGED, layout.Role.GUARD, BASE, BASE + MIB)
    writer.zone(1, layout.Kind.MANAGED, layout.Role.GUARD, BASE + 2 * MIB, BASE + 3 * MIB)
    rows = ledger.zone_bytes()
    writer.zone(0, layout.Kind.NONE, layout.Role.GUARD, 0, 0)
    zones = ledger.zones(rows)
    assert zones.at(BASE) is None and zones.at(BASE + 2 * MIB) is not None


def test_no_row_is_ever_read_torn(writer: LedgerWriter, ledger: Ledger) -> None:
    """Each row has its own number in every field; a writer updates rows in a loop."""
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            start = BASE + number * MIB
            writer.zone(0, layout.Kind.MANAGED, layout.Role.GUARD, start, start + MIB, born=number)
            writer.note(0, start, number, order=number, born=number)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(40):
            zones = ledger.zones(ledger.zone_bytes())
            assert all(zone.end - zone.start == MIB for zone in zones)
            assert all(zone.start == BASE + zone.born_ns * MIB for zone in zones)
            found = ledger.nearest(BASE - 1, ZoneRole.GUARD, NOW)
            assert found is None or found.address == BASE + found.size * MIB == BASE + found.order * MIB
    finally:
        stop.set()
        thread.join(20)


# -- allocations near an address --------------------------------------------------------------------------


def test_the_nearest_allocation_with_its_distance(writer: LedgerWriter, ledger: Ledger) -> None:
    writer.note(0, BASE, MIB, order=1, born=NOW - 3_000_000_000)
    writer.note(65535, BASE + 8 * MIB, 5000, order=2, born=NOW - 1_000_000_000)
    past = ledger.nearest(BASE + MIB + 4096, ZoneRole.GUARD, NOW)
    assert past is not None
    assert (past.relation, past.distance, past.page, past.order) == (Relation.PAST, 4096, True, 1)
    assert (past.size, past.age_s, past.freed_s) == (MIB, 3.0, None)
    before = ledger.nearest(BASE + 8 * MIB - 8, ZoneRole.GUARD, NOW)
    assert before is not None
    assert (before.relation, before.distance, before.page, before.order) == (Relation.BEFORE, 8, False, 2)


def test_far_from_all_the_nearest_of_them_is_named(writer: LedgerWriter, ledger: Ledger) -> None:
    writer.note(0, BASE, MIB, order=1, born=NOW - 3_000_000_000)
    writer.note(1, BASE + 40 * MIB, 20 * MIB, order=2, born=NOW - 1_000_000_000)
    gib = 1 << 30
    past = ledger.nearest(BASE + 60 * MIB + 6 * gib, ZoneRole.FAR, NOW)
    assert past is not None
    assert (past.relation, past.distance, past.size) == (Relation.PAST, 6 * gib, 20 * MIB)
    before = ledger.nearest(BASE - 3 * gib, ZoneRole.FAR, NOW)
    assert before is not None and (before.relation, before.size) == (Relation.BEFORE, MIB)


def test_far_from_all_what_was_freed_counts_only_where_it_was(writer: LedgerWriter, ledger: Ledger) -> None:
    gib = 1 << 30
    writer.note(0, BASE, 20 * MIB, order=1, born=NOW - 3_000_000_000)
    writer.note(1, BASE + gib, gib, order=2, born=NOW - 2_000_000_000, freed=NOW - 1_000_000_000)
    past = ledger.nearest(BASE + 3 * gib, ZoneRole.FAR, NOW)
    assert past is not None and (past.order, past.distance) == (1, 3 * gib - 20 * MIB)
    inside = ledger.nearest(BASE + gib + 4096, ZoneRole.FAR, NOW)
    assert inside is not None and (inside.order, inside.relation) == (2, Relation.INSIDE)


def test_a_library_that_knows_of_no_far_zones_has_none(writer: LedgerWriter, ledger: Ledger) -> None:
    """The fields of far zones were reserved in its layout, and so are zero."""
    writer.head("managed_bytes", 5 * MIB)
    assert (ledger.head().far_bytes, ledger.head().far_zones) == (0, 0)
    writer.head("far_bytes", 1 << 60)
    writer.head("far_zones", 1 << 60)
    assert (ledger.head().far_bytes, ledger.head().far_zones) == (1 << 57, layout.ZONES)


def test_inside_a_freed_one_only_where_the_zone_is_its_quarantine(
    writer: LedgerWriter, ledger: Ledger
) -> None:
    writer.note(0, BASE, 4 * MIB, order=1, born=NOW - 9, freed=NOW - 2_000_000_000)
    writer.note(1, BASE, MIB, order=2, born=NOW - 1_000_000_000)
    inside = ledger.nearest(BASE + 2 * MIB, ZoneRole.QUARANTINE, NOW)
    assert inside is not None
    assert (inside.relation, inside.distance, inside.order, inside.freed_s) == (
        Relation.INSIDE,
        2 * MIB,
        1,
        2.0,
    )
    # The addresses are used again: the zone belongs to the current allocation there.
    past = ledger.nearest(BASE + 2 * MIB, ZoneRole.GUARD, NOW)
    assert past is not None and (past.relation, past.distance, past.order) == (Relation.PAST, MIB, 2)


def test_of_several_lives_of_one_address_the_latest_is_meant(writer: LedgerWriter, ledger: Ledger) -> None:
    for row in range(5):
        writer.note(row, BASE, MIB, order=10 - row, born=1, freed=2)
    found = ledger.nearest(BASE + 4096, ZoneRole.QUARANTINE, NOW)
    assert found is not None and found.order == 10
    assert ledger.nearest(BASE, ZoneRole.GUARD, NOW) is None


def test_a_full_ledger_is_read_whole(writer: LedgerWriter, ledger: Ledger) -> None:
    row = layout.NOTE.pack(2, 0, BASE, 4096, 1, 1, 0)
    end = layout.NOTES_AT + layout.NOTES * layout.NOTE.size
    writer.memory[layout.NOTES_AT : end] = row * layout.NOTES
    writer.note(40000, BASE + 64 * MIB, 4096, order=9, born=1)
    found = ledger.nearest(BASE + 65 * MIB, ZoneRole.GUARD, NOW)
    assert found is not None and found.order == 9


def test_the_kernel_is_named_if_it_was_the_only_one(writer: LedgerWriter, ledger: Ledger) -> None:
    assert ledger.kernel(ledger.head()) is None
    writer.launched("first")
    writer.head("settled", 1)
    writer.launched("sec\nond")
    assert ledger.kernel(ledger.head()) == "sec?ond"
    writer.launched("first")
    assert ledger.kernel(ledger.head()) is None
    writer.head("settled", 2)
    head = ledger.head()
    assert ledger.kernel(head) == "first"
    for _ in range(layout.LAUNCHES):
        writer.launched("later")
    assert ledger.kernel(head) is None, "its row is another launch's by now"
