"""Which GPUs a program sees: those of its domain, where the node has more, and the one that it asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mpsd_client.run import make_plan
from tests.support.site import DEADLINE_S, Site

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site(simulated__gpus="2") as started:
        yield started.start()


def uuids(site: Site) -> list[str]:
    return [gpu["uuid"] for gpu in site.status()["gpus"]]


def test_a_program_sees_the_gpus_of_its_domain_alone(site: Site) -> None:
    for number, uuid in enumerate(uuids(site)):
        for name in (str(number), uuid):
            environ = site.ask(lambda client, name=name: client.env(name))
            assert environ[VISIBLE] == uuid
        program = site.program(environ=site.environ() | environ)
        assert program.do("[dev.on_mps, dev.gpu_uuid]") == {"result": [True, uuid]}


def test_where_a_domain_has_all_gpus_nothing_is_hidden() -> None:
    with Site() as site:
        assert VISIBLE not in site.start().ask(lambda client: client.env())


def test_who_names_none_gets_the_first_of_those_with_the_fewest_clients() -> None:
    with Site(simulated__gpus="2") as site:
        first, second = uuids(site.start())
        environ = site.ask(lambda client: client.env())
        assert environ[VISIBLE] == first
        program = site.program(environ=site.environ() | environ)
        program.do("dev.on_mps")
        site.attached(program)
        assert site.ask(lambda client: client.env())[VISIBLE] == second


def test_what_the_environment_names_is_asked_for(site: Site) -> None:
    first, second = uuids(site)
    for named, uuid in (("1", second), (first, first), (f"{second},{first}", second), ("1,0", second)):
        plan = make_plan({VISIBLE: named}, socket_path=site.socket)
        assert plan.variables[VISIBLE] == uuid
        assert any("names 2 GPUs" in line for line in plan.aside) == ("," in named)
    # What is said on the command line goes before.
    assert make_plan({VISIBLE: "1"}, socket_path=site.socket, gpu="0").variables[VISIBLE] == first


@pytest.mark.parametrize("named", ["", "-1", "NoDevFiles"])
def test_who_is_to_see_no_gpu_sees_none(site: Site, named: str) -> None:
    assert VISIBLE not in make_plan({VISIBLE: named}, socket_path=site.socket).variables
    assert VISIBLE in make_plan({VISIBLE: named}, socket_path=site.socket, gpu="0").variables


def test_the_command_goes_by_it_too(site: Site) -> None:
    first, second = uuids(site)

    def ask(visible: str, *options: str) -> tuple[int, str, str]:
        said = subprocess.run(
            [sys.executable, "-m", "mpsd.ctl", "env", "--json", *options],
            env={**os.environ, "MPSD_SOCKET": site.socket, VISIBLE: visible},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        return said.returncode, said.stdout and json.loads(said.stdout)["env"].get(VISIBLE), said.stderr

    assert ask("1") == (0, second, "")
    assert ask("1", "--gpu", "0") == (0, first, "")
    assert ask("") == (0, None, "")
    status, seen, note = ask("1,0")
    assert (status, seen) == (0, second) and "names 2 GPUs" in note and second in note
    assert ask("1,1") == (0, second, "")
    status, _, error = ask("7")
    assert status != 0 and "there is no GPU '7'" in error and "Traceback" not in error
