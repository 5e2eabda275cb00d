"""Notes of the vault: the next holder of the memory file finds which segments were held."""

from __future__ import annotations

import os
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mpsd.base.model import ProcessInstance
from mpsd.core.vault import Owner, Segment
from mpsd.vault.notes import SLOT, VaultNotes, cgroup_text

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SECONDS = st.floats(0, 1e9)
OWNERS = st.builds(Owner, U32, st.text(max_size=300).map(cgroup_text), st.sampled_from(("", "a" * 64)))
HOLDINGS = st.builds(
    Segment,
    st.integers(1, 12),
    OWNERS,
    st.builds(ProcessInstance, st.integers(1, 2**22), U64),
    U64,
    st.integers(1, 2**64 - 1),
    U64,
    st.just("GPU-8f1e0c9a-0000-1111-2222-333344445555"),
    SECONDS,
    st.none() | st.sampled_from(("model", "x" * 63)),
    st.none() | SECONDS,
    st.booleans(),
    st.sampled_from(("", "a" * 32)),
).map(lambda h: replace(h, alone=h.alone and h.name is not None))


@given(st.lists(HOLDINGS | st.integers(1, 12), max_size=30))
def test_at_any_instant_the_next_holder_reads_what_is_noted(steps: list[Segment | int]) -> None:
    notes = VaultNotes.create()
    noted: dict[int, Segment] = {}
    for step in steps:
        if isinstance(step, Segment):
            notes.write(step)
            noted[step.id] = step
        else:
            notes.strike(step)
            noted.pop(step, None)
        later, found = VaultNotes.adopt(os.dup(notes.fd))
        assert found == noted
        later.close()
    assert os.fstat(notes.fd).st_size <= 12 * SLOT
    notes.close()
    notes.close()


@given(st.binary(max_size=3 * SLOT))
def test_nonsense_is_read_without_an_error(data: bytes) -> None:
    notes = VaultNotes.create()
    os.write(notes.fd, data)
    later, found = VaultNotes.adopt(notes.fd)
    for holding_id in found:
        later.strike(holding_id)
    assert VaultNotes.adopt(later.fd)[1] == {}
    later.close()


def test_a_long_cgroup_is_a_digest_of_its_own() -> None:
    long = ["/kubepods/" + letter * 400 for letter in "ab"]
    assert len({cgroup_text(name) for name in long}) == 2
    assert all(len(cgroup_text(name)) < 100 for name in long)
    assert cgroup_text("/user.slice") == "/user.slice"
