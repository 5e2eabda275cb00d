"""The GPUs that a program sees on a node with several: those of its domain, and the one that it requested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mpsd_client.joining.devices import GIVEN, NUMBERS
from mpsd_client.joining.plan import make_plan
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
    for named, seen in (("1", "0"), (first, first), (f"{second},{first}", second), ("1,0", "0")):
        plan = make_plan({VISIBLE: named}, socket_path=site.socket)
        assert plan.applied({VISIBLE: named})[VISIBLE] == seen
        assert any("names 2 GPUs" in line for line in plan.warnings) == ("," in named)
        assert f"GPU {0 if named == first else 1}, domain d" in plan.line
    # The command line takes precedence.
    assert make_plan({VISIBLE: "1"}, socket_path=site.socket, gpu="0").variables[VISIBLE] == first


@pytest.mark.parametrize("named", ["", "-1", "NoDevFiles"])
def test_who_is_to_see_no_gpu_sees_none(site: Site, named: str) -> None:
    assert VISIBLE not in make_plan({VISIBLE: named}, socket_path=site.socket).variables
    assert VISIBLE in make_plan({VISIBLE: named}, socket_path=site.socket, gpu="0").variables


def test_the_command_goes_by_it_too(site: Site) -> None:
    first, second = uuids(site)

    def ask(visible: str, *options: str) -> tuple[int, str, str]:
        said = subprocess.run(
            [sys.executable, "-m", "mpsd.ctl", "env", "-q", "--json", *options],
            env={**os.environ, "MPSD_SOCKET": site.socket, VISIBLE: visible},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        return said.returncode, said.stdout and json.loads(said.stdout)["env"].get(VISIBLE), said.stderr

    assert ask("1") == (0, "0", "")
    assert ask("1", "--gpu", "0") == (0, first, "")
    assert ask("") == (0, None, "")
    status, seen, note = ask("1,0")
    assert (status, seen) == (0, "0") and "names 2 GPUs" in note and second in note
    assert ask("1,1") == (0, "0", "")
    status, _, error = ask("7")
    assert status != 0 and "there is no GPU '7'" in error and "Traceback" not in error


def mpsd_run(site: Site, program: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mpsd_client.run", "--socket", site.socket, *program],
        env=site.environ() | environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


SEEN = """
import os
from mpsd.gpu.simulated.client import SimulatedDevice
device = SimulatedDevice.open(os.environ)
print(device.on_mps, device.gpu_uuid)
"""


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({GIVEN: "1"}, 1),
        ({GIVEN: "0"}, 0),
        ({GIVEN: "nvidia.com/gpu=1"}, 1),
        ({GIVEN: "1", VISIBLE: "0"}, 1),
        ({VISIBLE: "1"}, 1),
        ({VISIBLE: "0"}, 0),
        ({VISIBLE: "1", GIVEN: "all"}, 1),
    ],
)
def test_a_program_is_on_the_gpu_that_its_environment_names(
    site: Site, environ: dict[str, str], number: int
) -> None:
    """Case 07, and numbers: twice, because a second mpsd-run inside the first one must not count anew."""
    again = [sys.executable, "-m", "mpsd_client.run", "--socket", site.socket]
    for program in ([sys.executable], [*again, sys.executable]):
        done = mpsd_run(site, [*program, "-c", SEEN], **environ)
        assert done.stdout.split() == ["True", uuids(site)[number]], done.stderr
        assert f"GPU {number}, domain d" in done.stderr


@pytest.mark.parametrize("given", ["void", "MIG-4711", "nvidia.com/gpu=0:1", "2", "/var/run/devices"])
def test_a_name_that_could_mean_another_gpu_is_refused(site: Site, given: str) -> None:
    """Case 07: one line that names the variable and the remedy, and no program on another GPU."""
    done = mpsd_run(site, ["echo", "ran"], **{GIVEN: given})
    assert (done.returncode, done.stdout) == (69, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"mpsd-run: {GIVEN}={given}") and ("pass --gpu" in line or "GPUs of" in line)


def test_a_program_that_reads_numbers_gets_numbers(site: Site) -> None:
    """Case 08: int() of each entry works with mpsd-run where it works without."""
    script = f"import os; print([int(n) for n in os.environ['{VISIBLE}'].split(',')])"
    done = mpsd_run(site, [sys.executable, "-c", script], **{VISIBLE: "1"})
    assert (done.returncode, done.stdout) == (0, "[0]\n"), done.stderr
    show = ["sh", "-c", f"echo ${VISIBLE} ${NUMBERS}"]
    assert mpsd_run(site, show, **{VISIBLE: "1"}).stdout.split() == ["0", uuids(site)[1]]
    assert mpsd_run(site, show, **{VISIBLE: uuids(site)[1][:12]}).stdout.split() == [uuids(site)[1][:12]]
