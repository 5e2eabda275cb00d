"""Notes of guard ranges: the next holder of the memory file finds which ranges may be laid."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from mpsd.base.model import GuardClass
from mpsd.clients.guardnotes import GuardNotes
from mpsd.clients.guardplan import GRANULE, Range

RANGES = st.builds(
    Range,
    st.integers(1, 6).map(lambda n: n * GRANULE),
    st.integers(1, 2).map(lambda n: n * GRANULE),
    st.sampled_from(GuardClass),
)


@given(st.lists(st.tuples(st.booleans(), RANGES), max_size=30))
def test_at_any_instant_the_next_holder_reads_what_is_noted(steps: list[tuple[bool, Range]]) -> None:
    notes = GuardNotes.create()
    noted: set[Range] = set()
    for adding, one in steps:
        if adding and one not in noted:
            notes.add(one)
            noted.add(one)
        elif not adding:
            notes.discard(one)
            noted.discard(one)
        later = GuardNotes.adopt(os.dup(notes.fd))
        assert later.ranges() == notes.ranges() == noted
        later.close()
    notes.close()
    notes.close()


def test_what_was_struck_out_makes_room() -> None:
    notes = GuardNotes.create()
    for n in range(1, 200):
        notes.add(Range(n * GRANULE, GRANULE, GuardClass.LOW))
        notes.discard(Range(n * GRANULE, GRANULE, GuardClass.LOW))
    assert os.fstat(notes.fd).st_size < 100
    notes.close()


def test_nonsense_is_no_range() -> None:
    notes = GuardNotes.create()
    os.write(notes.fd, b"\xff" * 100)
    later = GuardNotes.adopt(notes.fd)
    assert not later.ranges()
    later.close()
