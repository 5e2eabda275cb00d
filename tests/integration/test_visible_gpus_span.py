"""The GPUs of a domain that a program sees, where the domain spans several and the node has more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpsd_client.joining.plan import make_plan
from tests.support.site import Site

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(scope="module")
def uuids() -> list[str]:
    """The UUIDs of a simulated node; they are the same on each."""
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
    # GPUs 0 to 2 are the domain that spans, in this order. GPU 3 has its own, where it is number 0.
    own = [0] if numbers == [3] else numbers
    for visible in (named, by_uuid):
        plan = make_plan({VISIBLE: visible}, socket_path=site.socket)
        seen = plan.applied({VISIBLE: visible})[VISIBLE].split(",")
        seen = seen[: len(numbers)] if "-1" in visible else seen
        assert seen == [str(n) for n in own] if visible == named else [uuids[n] for n in numbers]
        assert any("GPUs, but the program will see" in line for line in plan.warnings) == fewer
        program = site.program(environ=plan.applied(site.environ() | {VISIBLE: visible}))
        assert program.do("[dev.on_mps, dev.gpu_uuid]") == {"result": [True, uuids[numbers[0]]]}


def test_the_one_that_was_asked_for_comes_first(site: Site, uuids: list[str]) -> None:
    plan = make_plan({}, socket_path=site.socket, gpu="1")
    assert plan.variables[VISIBLE].split(",") == [uuids[1], uuids[0], uuids[2]]
    assert site.ask(lambda client: client.env())[VISIBLE] in (",".join(uuids[:3]), uuids[3])
