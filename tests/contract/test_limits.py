"""Limits on the stock control binary and on its stand-in, alone and under a whole mpsd."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import pytest

from faultinject.registry.history import History
from faultinject.rig.rig import Rig
from mpsd.config.schema import Limits
from mpsd.limits.book import LimitBook, Owner
from mpsd.limits.keeper import LimitKeeper, Surroundings
from mpsd.limits.questions import Question, questions
from mpsd.limits.values import Key, Kind, agrees, answer
from mpsd.os.quietperiod import QuietPeriod
from tests.support.gpunode import Domain, Machine, Node
from tests.support.waiting import DEADLINE_S, until

pytestmark = pytest.mark.timeout(300)

TWO_GIB = 2 << 30


def value(node: Node, domain: Domain, question: Question) -> str:
    return answer(question.key.kind, node.run(domain.control.command(question.read(domain.server))))


@pytest.fixture
def domain(node: Node) -> Domain:
    return node.new_domain().start()


# -- the control daemon -----------------------------------------------------------------------------------


def test_every_limit_is_answered_as_it_was_set(node: Node, domain: Domain) -> None:
    wanted = {Kind.PERCENTAGE: "50", Kind.PRIORITY: "1", Kind.MEMORY: "2048M"}
    for question in questions((node.gpu.uuid,), server=True):
        text = question.write(domain.server, wanted[question.key.kind])
        node.run(domain.control.command(text))
        answered = value(node, domain, question)
        # mpsd needs the ordinal alone: some drivers do not take a UUID.
        assert (question.by_uuid and not answered) or agrees(
            question.key.kind, wanted[question.key.kind], answered
        ), (text, answered)


def test_a_later_server_has_the_defaults(node: Node, domain: Domain) -> None:
    uuid = node.gpu.uuid
    percentage, memory = Question(Key(Kind.PERCENTAGE)), Question(Key(Kind.MEMORY, uuid), "0")
    node.run(domain.control.command(percentage.write(0, "50")))
    node.run(domain.control.command(memory.write(0, "2048M")))
    node.run(domain.control.shutdown_server(domain.server, force=False))
    until(lambda: not domain.control.server_instances(), "the end of the server")
    client = node.survivor(domain.environment).ready()
    domain.server = node.run(domain.control.wait_active(DEADLINE_S))
    of_server = (Question(percentage.key, "", True), Question(memory.key, "0", True))
    for question, wanted in zip(of_server, ("50", "2048M"), strict=True):
        assert agrees(question.key.kind, wanted, value(node, domain, question)), question
    client.unharmed()


def test_clients_run_under_the_limits(node: Node, domain: Domain) -> None:
    for question in questions((node.gpu.uuid,), server=True):
        if question.key.kind is not Kind.PRIORITY:
            wanted = "50" if question.key.kind is Kind.PERCENTAGE else "4096M"
            node.run(domain.control.command(question.write(domain.server, wanted)))
    node.survivor(domain.environment).ready().unharmed()


async def taught(domain: Domain, uuid: str, text: str) -> tuple[Mapping[Key, str], Mapping[Key, str]]:
    """Say a command to a domain that a keeper knows. Return the limits that it kept, and the answers."""
    book, owner = LimitBook(Limits(), ()), Owner((uuid,), os.getuid())
    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        tasks.add(asyncio.get_running_loop().create_task(work))

    nothing: Callable[..., None] = lambda: None  # noqa: E731
    keeper = LimitKeeper(book, Surroundings(lambda _: True, nothing, nothing, spawn), QuietPeriod())
    await keeper.give("d", owner, domain.control)
    await keeper.confirm("d")
    await domain.control.command(text)
    keeper.said("d", text)
    while tasks:
        await tasks.pop()
    return book.wanted(owner), keeper.answers("d")


@pytest.mark.parametrize("text", ["1.5G", "512m", "2048", "0.5G", "1024M", "2 G"])
def test_memory_in_any_form_is_kept_as_the_control_daemon_took_it(
    node: Node, domain: Domain, text: str
) -> None:
    command = f"set_default_device_pinned_mem_limit 0 {text}"
    wanted, answers = node.run(taught(domain, node.gpu.uuid, command))
    key = Key(Kind.MEMORY, node.gpu.uuid)
    assert (key in wanted) == (key in answers), (wanted, answers)
    assert key not in wanted or agrees(key.kind, wanted[key], answers[key])
    # The answer itself, for the table of what the binary takes.
    print(f"{command}: {answers.get(key, 'refused')}")


@pytest.mark.parametrize("text", ["50%", "33.333", "0.5", "1e1", "101", "-1", "50,5"])
def test_a_percentage_in_any_form_is_kept_as_the_control_daemon_took_it(
    node: Node, domain: Domain, text: str
) -> None:
    command = f"set_default_active_thread_percentage {text}"
    wanted, answers = node.run(taught(domain, node.gpu.uuid, command))
    key = Key(Kind.PERCENTAGE)
    assert agrees(key.kind, wanted[key], answers[key]), (wanted, answers)
    print(f"{command}: {answers[key]}")


# -- a whole mpsd -----------------------------------------------------------------------------------------


@pytest.fixture
def rig(machine: Machine) -> Iterator[Rig]:
    with History() as history, Rig(machine.harness, "mpsd", history) as opened:
        yield opened
    assert opened.leftovers == []


def say(rig: Rig, command: str) -> None:
    """Give a command on the slot's path, with the stock control binary."""
    done = subprocess.run(
        [rig.node.backend.control_binary],
        input=command + "\n",
        env=dict(rig.mpsd.client_environment()),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done


def is_capped(status: Mapping[str, Any]) -> bool:
    served = [d for d in status["domains"] if d["state"] in ("active", "warm")]
    return len(served) == 2 and all(
        d["limits"]["active_thread_percentage"] == 50.0
        and list(d["limits"]["device_memory_bytes"].values()) == [TWO_GIB]
        for d in served
    )


def capped(rig: Rig) -> str:
    """Wait until the active and the standby domain answer 50 % and 2 GiB. Return the active domain's name."""
    assert rig.mpsd.until(is_capped, DEADLINE_S) is not None, rig.mpsd.status()["domains"]
    active = rig.mpsd.active()
    assert active is not None
    environ = dict(rig.mpsd.client_environment())
    for question in questions((active["gpus"][0],), server=True):
        if question.by_uuid or question.key.kind is Kind.PRIORITY:
            continue
        done = subprocess.run(
            [rig.node.backend.control_binary],
            input=question.read(active["server_pid"]) + "\n",
            env=environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        wanted = "50" if question.key.kind is Kind.PERCENTAGE else "2048M"
        assert agrees(question.key.kind, wanted, answer(question.key.kind, done.stdout)), (question, done)
    return str(active["id"])


def taken_over(rig: Rig, before: str) -> None:
    def serves(status: Mapping[str, Any]) -> bool:
        return any(
            d["role"] == "active" and d["state"] == "active" and d["id"] != before for d in status["domains"]
        )

    assert rig.mpsd.until(serves, DEADLINE_S) is not None, rig.mpsd.status()["domains"]


def test_limits_set_by_hand_survive_a_fault_a_take_over_and_the_death_of_mpsd(rig: Rig) -> None:
    assert rig.mpsd.until_standby(DEADLINE_S) is not None
    say(rig, "set_default_active_thread_percentage 50")
    say(rig, "set_default_device_pinned_mem_limit 0 2G")
    first = capped(rig)
    # A fault.
    offender = rig.spawn(
        "offender",
        "offender",
        "trap",
        "--memory",
        str(64 << 20),
        "--busy-s",
        str(rig.node.busy_s),
        environment=rig.mpsd.client_environment(),
    )
    offender.require("ready", timeout=DEADLINE_S)
    offender.tell("go")
    taken_over(rig, first)
    offender.signal(signal.SIGKILL)
    second = capped(rig)
    # A take-over: the control daemon dies.
    control = rig.mpsd.part("control")
    assert control is not None
    os.kill(control, signal.SIGKILL)
    taken_over(rig, second)
    third = capped(rig)
    # kill -9 of mpsd, and a restart.
    rig.mpsd.kill()
    rig.mpsd.launch()
    rig.mpsd.wait_ready()
    assert capped(rig) == third
