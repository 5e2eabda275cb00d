"""The registry covers the vocabulary and the taxonomy, and each of its faults can be run."""

from __future__ import annotations

import pytest

from faultinject.programs.injection.inject import action_of
from faultinject.registry import kinds
from faultinject.registry.faults import (
    REGISTRY,
    Fault,
    Naming,
    Recording,
    Story,
    by_name,
    select,
)
from faultinject.rig.scenarios import STORIES
from mpsd.base.errors import UsageError
from mpsd.core.faults import taxonomy


def test_every_kind_of_the_vocabulary_is_registered_and_no_other() -> None:
    assert {f.kind for f in REGISTRY} == set(kinds.ALL)
    assert len({f.name for f in REGISTRY}) == len(REGISTRY)


def test_expected_classes_exist_in_the_taxonomy() -> None:
    assert {c for f in REGISTRY for c in f.classes} <= set(taxonomy.CLASSES)


def test_every_class_that_software_can_cause_is_caused_by_some_fault() -> None:
    hardware = {n for n in taxonomy.CLASSES if n.startswith("device-") and n != "device-assert"}
    # sm-exception is what remains when no sign says which exception it was.
    caused = {c for f in REGISTRY for c in f.classes} | hardware | {"sm-exception"}
    assert caused == set(taxonomy.CLASSES)


@pytest.mark.parametrize("fault", REGISTRY, ids=lambda f: f.name)
def test_every_fault_can_be_played(fault: Fault) -> None:
    assert fault.story in STORIES
    assert set(fault.modes) <= set(kinds.MODES)
    assert set(fault.survive) == set(kinds.MODES)
    acts = fault.story not in (Story.PART_DIES, Story.CHURN)
    assert (action_of(fault.kind) is not None) == acts


@pytest.mark.parametrize("fault", REGISTRY, ids=lambda f: f.name)
def test_every_mmu_fault_that_takes_the_domain_names_its_offender_for_certain(fault: Fault) -> None:
    if fault.takes_domain and fault.classes & taxonomy.MMU_CLASSES:
        assert (fault.naming, fault.recording) == (Naming.CERTAIN, Recording.REQUIRED)


def test_selection_by_kind_variant_and_all() -> None:
    assert [f.name for f in select(["endless"])] == ["endless@free", "endless@fill"]
    assert [f.name for f in select(["endless@fill", "store"])] == ["store", "endless@fill"]
    assert tuple(select(["all"])) == REGISTRY


def test_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'store'"):
        by_name("stroe")
    with pytest.raises(UsageError, match="there is no fault kind"):
        list(select(["store", "nothing_like_it"]))
