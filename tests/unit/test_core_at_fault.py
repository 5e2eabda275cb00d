"""An SM exception in the kernel log is attributed to a domain by what the domain's server does."""

from __future__ import annotations

import pytest

from mpsd.core import effects as fx
from mpsd.core import events as ev
from mpsd.core.faults.records import Source
from tests.support.core import GPU, MISALIGNED, OUT_OF_RANGE, REGISTER, server_of
from tests.unit.test_core_failover import site


def test_an_exception_that_names_nobody_is_that_of_the_server_at_a_fault() -> None:
    world = site(10)
    world.kernel(13, OUT_OF_RANGE)
    (watch,) = world.made(fx.WatchServers)
    assert (watch.gpu, dict(watch.servers)) == (GPU, {d: server_of(d) for d in ("d1", "d2")})
    # The second line of the exception, and its NVML event, start no second look.
    world.kernel(13, REGISTER)
    assert not world.made(fx.WatchServers)
    world.nvml(13)
    assert not world.made(fx.WatchServers) and not world.ever(fx.Move)
    world.wait(0.01).do(ev.ServerAtFault("d1", server_of("d1"), GPU))
    assert world.told() == [10] and world.failover().fault == world.record().id
    record = world.record()
    assert (record.fault_class, record.domain) == ("sm-out-of-range", "d1")
    assert Source.KERNEL_LOG in {e.source for e in record.evidence} and not world.state.strays
    # The server's own message belongs to the same fault.
    world.wait(0.2).do(ev.ServerFatalLogged("d1", "fatal GPU error"))
    assert not world.ever(fx.Move)[1:] and len(world.records()) == 1


@pytest.mark.parametrize("why", ["word", "stranger", "another", "server", "left", "alone"])
def test_who_is_at_a_fault_says_nothing_where_it_may_be_another_one(why: str) -> None:
    world = site(10)
    world.kernel(13, OUT_OF_RANGE)
    assert world.made(fx.WatchServers)
    told = 0
    server = server_of("d1")
    match why:
        case "word":
            world.do(ev.ServerFatalLogged("d1", "fatal GPU error"))
            told = 1
        case "stranger":
            world.kernel(43, "channel 0x1", 999, "python")
        case "another":
            world.want("gpu0.uid2000", uid=2000)
            world.started("d3")
            world.join(20, domain="d3")
            world.do(ev.ServerFatalLogged("d3", "fatal GPU error"))
            world.kernel(13, MISALIGNED)
        case "server":
            server = server_of("d9")
        case "left":
            world.do(ev.ServerDied("d1", server))
            told = 1
        case "alone":
            world.wait(2).timer("strays", GPU)
    world.do(ev.ServerAtFault("d1", server, GPU))
    assert not world.made(fx.Move) and len(world.ever(fx.Move)) == told


@pytest.mark.parametrize("domain", ["d2", "d3"])
def test_a_domain_in_which_nobody_could_go_on_elsewhere_is_not_hurried(domain: str) -> None:
    """The standby domain, or another user's: its server may be held up by a fault of another domain."""
    world = site(10)
    world.want("gpu0.uid2000", uid=2000)
    world.started("d3")
    world.join(20, domain="d3")
    world.kernel(13, OUT_OF_RANGE)
    world.do(ev.ServerAtFault(domain, server_of(domain), GPU))
    assert not world.records() and world.state.strays
    # The domain at fault reports itself, and no state has changed until then.
    world.wait(0.02).do(ev.ServerFatalLogged("d1", "fatal GPU error"))
    assert world.told() == [10] and world.record().fault_class == "sm-out-of-range"


@pytest.mark.parametrize("sign", ["stranger", "mmu", "nvml", "nobody ready"])
def test_servers_are_looked_at_for_exceptions_that_somebody_may_have_to_move_for(sign: str) -> None:
    world = site(*([] if sign == "nobody ready" else [10]))
    match sign:
        case "stranger":
            world.kernel(13, OUT_OF_RANGE, 999, "python")
        case "mmu":
            world.kernel(31, OUT_OF_RANGE)
        case "nvml":
            world.nvml(13)
        case _:
            world.kernel(13, OUT_OF_RANGE)
    assert not world.ever(fx.WatchServers) and world.state.strays
