"""The driver's reset of a domain's channels is the fence, which core passes to moving participants.

Behind it, work that still runs in an old context faults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mpsd.base.model import FailoverMode, ServerState
from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.failover import reports as mev
from mpsd.core.state import DomainState
from tests.support.core import UID, World, process, server_of
from tests.unit.test_core_failover import Site, exact, site

EXACT = FailoverMode.EXACT


def reset(world: Site, domain: str, pid: int | None = None) -> None:
    world.kernel(43, "channel 0x1", pid or server_of(domain).pid, "nvidia-cuda-mps")


def test_the_drivers_reset_of_a_lost_domain_is_the_fence_of_those_who_leave_it() -> None:
    world = exact(10, 11, 12)
    for pid in (10, 11):
        world.do(mev.MemberCame(process(pid), UID, EXACT, 0, True))
        world.is_ready(pid, 2)
    world.do(ev.ServerFatalLogged("d1", "Server is handling a fatal GPU error."))
    assert world.told() == [10, 11, 12] and not world.made(fx.Fenced)
    # A reset by another process, another Xid, and one of a healthy domain.
    reset(world, "d1", 12)
    world.kernel(13, "Graphics SM Warp Exception", server_of("d1").pid, "nvidia-cuda-mps")
    assert not world.ever(fx.Fenced)
    world.do(mev.MemberMoved(process(11), 2, 1, 2, 3))
    reset(world, "d1")
    # A participant that has moved needs no fence, and one without the fence feature is not told.
    assert world.made(fx.Fenced) == [fx.Fenced(process(10), 2)]


def test_a_reset_that_is_the_first_sign_is_no_fence() -> None:
    """The line may be an old one, and so may the next line."""
    world = exact(10)
    world.do(mev.MemberCame(process(10), UID, EXACT, 0, True))
    world.is_ready(10, 2)
    reset(world, "d1")
    assert world.told() == [10] and not world.ever(fx.Fenced)
    world.kernel(43, "channel 0x2", server_of("d1").pid, "nvidia-cuda-mps")
    assert not world.ever(fx.Fenced)
    world.do(ev.ServerFatalLogged("d1", "Server is handling a fatal GPU error."))
    reset(world, "d1")
    assert world.made(fx.Fenced) == [fx.Fenced(process(10), 2)]


def test_a_reset_on_one_gpu_is_no_fence_for_another() -> None:
    world = exact(10)
    world.do(mev.MemberCame(process(10), UID, EXACT, 0, True))
    world.is_ready(10, 2)
    world.do(ev.ServerFatalLogged("d1", "Server is handling a fatal GPU error."))
    assert world.told() == [10]
    world.kernel(43, "channel 0x1", server_of("d1").pid, "nvidia-cuda-mps", gpu=None)
    assert not world.ever(fx.Fenced), "of which GPU it is, is not known"
    alone = world.state.domains["d1"]
    two = replace(alone, gpus=(*alone.gpus, "GPU-two"))
    world.state = replace(world.state, domains={**world.state.domains, "d1": two})
    reset(world, "d1")
    assert not world.ever(fx.Fenced)
    world.state = replace(world.state, domains={**world.state.domains, "d1": alone})
    reset(world, "d1")
    assert world.made(fx.Fenced) == [fx.Fenced(process(10), 2)]


def test_a_reset_is_no_fence_for_who_was_leaving_by_plan() -> None:
    world = exact(10, 11)
    world.do(mev.MemberCame(process(10), UID, EXACT, 0, True))
    world.is_ready(10, 2)
    world.do(ev.DrainRequested((), True))
    world.do(ev.ServerFatalLogged("d1", "Server is handling a fatal GPU error."))
    reset(world, "d1")
    assert world.state.domains["d1"].state is DomainState.FAULTED
    assert not world.ever(fx.Fenced)


def left_with_shared_spaces() -> Site:
    """Clients 10 and 11 were told to leave d1. Their faults in d1 and d2 cannot be told apart."""
    world = site(10, 11)
    shared = {name: replace(client, apart=False) for name, client in world.state.clients.items()}
    world.state = replace(world.state, clients=shared)
    world.do(ev.ServerFatalLogged("d1", "fatal GPU error"))
    return world


@pytest.mark.parametrize("is_over", [World.stopped, lambda world, _: world.wait(3.0)], ids=["end", "time"])
def test_a_fault_that_may_be_of_the_old_context_names_no_program(
    is_over: Callable[[Site, str], None],
) -> None:
    """The tracker of the new context reports it too, and the vault does not hold that memory."""
    world = left_with_shared_spaces()
    assert world.told() == [10, 11]
    for pid in (10, 11):
        world.moved(pid, 2)
        world.fault(pid, domain="d2")
    assert [record.domain for record in world.state.open_faults] == ["d1"]
    assert world.record().offender is None and not world.made(fx.Kill)
    assert world.domain("d2").state is DomainState.ACTIVE
    assert fx.AskServer("d2") in world.ever(fx.AskServer)
    # With the old context gone, or some time after it was left, the fault is certainly of the new one.
    is_over(world, "d1")
    world.fault(10, domain="d2")
    record = world.record()
    assert record.domain == "d2" and record.offender is not None and record.offender.id.process.pid == 10


def test_a_fault_of_the_context_in_use_shows_on_its_server() -> None:
    world = left_with_shared_spaces()
    world.moved(10, 2)
    world.moved(11, 2)
    world.fault(10, domain="d2")
    world.server_state("d2", ServerState.FAULT)
    assert world.record().domain == "d2" and world.domain("d2").state is DomainState.FAULTED
