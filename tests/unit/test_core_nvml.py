"""NVML reports an Xid after the kernel log, without a name: the log line decides its owner."""

from __future__ import annotations

import pytest

from mpsd.base.model import ServerState
from mpsd.core import events as ev
from mpsd.core.faults.records import Source
from tests.support.core import mmu_text
from tests.unit.test_core_faults import ADDRESS, three_clients


def test_what_nvml_tells_of_a_foreign_line_never_joins_the_fault_of_a_domain() -> None:
    world = three_clients()
    world.do(ev.ServerFatalLogged("d1", "fatal GPU error"))
    world.kernel(43, "Ch 00000008", pid=4242, name="outside")
    world.wait(0.04).nvml(43)
    assert world.record().fault_class == "sm-exception"
    assert [s.foreign for s in world.state.strays] == [True, True]
    # That fault had no such line: NVML reports each Xid once.
    world.wait(0.2).nvml(43)
    assert world.record().fault_class == "sm-trap" and len(world.state.strays) == 2


@pytest.mark.parametrize("ours_first", [True, False])
def test_nvml_tells_of_xids_in_the_order_of_their_lines(ours_first: bool) -> None:
    world = three_clients()

    def ours() -> None:
        world.wait(0.01).kernel(31, mmu_text(ADDRESS), pid=10)

    def theirs() -> None:
        world.wait(0.01).kernel(31, mmu_text(ADDRESS), pid=4242, name="outside")

    for line in (ours, theirs) if ours_first else (theirs, ours):
        line()
    of_ours = []
    for _ in range(2):
        world.wait(0.04).nvml(31)
        (record,) = world.state.open_faults
        of_ours.append(Source.NVML in {e.source for e in record.evidence})
    assert of_ours == [ours_first, True]
    assert [s.evidence.source for s in world.state.strays] == [Source.KERNEL_LOG, Source.NVML]


def test_what_nvml_tells_of_a_line_belongs_to_the_fault_of_that_line() -> None:
    """Two domains of a GPU have just faulted; a third faults in a moment."""
    world = three_clients()
    world.want("gpu0.uid2000", uid=2000)
    world.started("d3")
    world.join(20, domain="d3")
    world.server_state("d3", ServerState.FAULT)
    world.server_state("d1", ServerState.FAULT)
    world.wait(0.1).kernel(31, mmu_text(ADDRESS), pid=10)
    world.wait(0.04).nvml(31)
    assert not world.state.strays
    of_d3, of_d1 = world.state.open_faults
    assert [e.source for e in of_d1.evidence] == [Source.SERVER_STATE, Source.KERNEL_LOG, Source.NVML]
    assert [e.source for e in of_d3.evidence] == [Source.SERVER_STATE]
    # The owner of a further Xid is unknown.
    world.wait(0.04).nvml(31)
    assert [s.foreign for s in world.state.strays] == [False]
