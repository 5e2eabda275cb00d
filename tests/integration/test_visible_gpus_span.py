"""Which of a domain's GPUs a program sees, where the domain is over several and the node has more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpsd_client.run import make_plan
from tests.support.site import Site

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(scope="module")
def uuids() -> list[str]:
    """They are the same on each simulated node."""
    with Site(simulated__gpus="4") as started:
        return [gpu["uuid"] for gpu in started.start().status()["gpus"]]


@pytest.fixture(scope="module")
def site(uuids: list[str]) -> Iterator[Site]:
    over = ", ".join(f'"{uuid}"' for uuid in uuids[:3])
    with Site(simulated__gpus="4", domains__span=f"[[{over}]]") as started:
        yield started.start()


@pytest.mark.parametrize(
    ("named", "numbers", "fewer"),
    [
        ("1", [1], False),
        ("2,0", [2, 0], False),
        ("0,3", [0], True),
        ("0,-1,1", [0], False),
        ("3", [3], False),
    ],
)
def test_those_that_it_named_in_its_order(
    site: Site, uuids: list[str], named: str, numbers: list[int], fewer: bool
) -> None:
    by_uuid = ",".join(uuids[int(name)] if name.isdecimal() else name for name in named.split(","))
    for visible in (named, by_uuid):
        plan = make_plan({VISIBLE: visible}, socket_path=site.socket)
        assert plan.variables[VISIBLE].split(",") == [uuids[number] for number in numbers]
        assert any("GPUs, and programs see" in line for line in plan.aside) == fewer
        program = site.program(environ=site.environ() | plan.variables)
        assert program.do("[dev.on_mps, dev.gpu_uuid]") == {"result": [True, uuids[numbers[0]]]}


def test_the_one_that_was_asked_for_comes_first(site: Site, uuids: list[str]) -> None:
    plan = make_plan({}, socket_path=site.socket, gpu="1")
    assert plan.variables[VISIBLE].split(",") == [uuids[1], uuids[0], uuids[2]]
    assert site.ask(lambda client: client.env())[VISIBLE] in (",".join(uuids[:3]), uuids[3])
