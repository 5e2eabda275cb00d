"""Environment of a standby context, and release of the GPU resources of the original driver instance."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libcuda.test_failover import break_domain, copies, offer, post, stand_by, started
from tests.support import moving
from tests.support.libcudas import Libraries
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain, until

__all__ = ["backend", "copies", "domain", "post", "second", "third"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, ["usual", "1"]),
        ({"CUDA_DEVICE_MAX_COPY_CONNECTIONS": "8"}, ["8", "8"]),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, ["usual", "usual"]),
    ],
    ids=["usual", "copies", "all"],
)
def test_a_standby_has_one_connection_for_copies_where_the_program_asks_for_no_number(
    libraries: Libraries,
    domain: Domain,
    second: Domain,
    post: Post,
    copies: Path,
    tmp_path: Path,
    given: dict[str, str],
    told: list[str],
) -> None:
    """A standby context uses one copy connection unless the program sets a number: more channels lengthen
    the stall of a kernel exception."""
    log, name = tmp_path / "notes", "CUDA_DEVICE_MAX_COPY_CONNECTIONS"
    with started(libraries, domain, post, MPSD_STANDIN_NOTES=str(log), **given) as program:
        line = post.greet()
        assert program("m = gpu.memory(8 << 20)") == "None"
        stand_by(line, second, copies)
        assert program(f"os.environ.get({name!r})") == repr(given.get(name))
        assert program.end() == ""
    homes = [home.environment["CUDA_MPS_PIPE_DIRECTORY"] for home in (domain, second)]
    assert log.read_text().splitlines() == [f"{home} {said}" for home, said in zip(homes, told, strict=True)]


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_what_the_first_copy_has_on_the_gpu_is_given_back_once_it_is_left(
    libraries: Libraries,
    domain: Domain,
    second: Domain,
    third: Domain,
    post: Post,
    copies: Path,
    tmp_path: Path,
    planned: bool,
    keeps: bool,
) -> None:
    """GPU resources of the original instance are released after the move: its contexts are dead and
    nothing needs them."""
    log = tmp_path / "notes"
    extra = {"MPSD_STANDIN_NOTES": str(log), "release": "0" if keeps else "1"}

    def gave_back() -> list[str]:
        return [line for line in log.read_text().splitlines() if line.endswith("gave back")]

    with started(libraries, domain, post, **extra) as program:
        line = post.greet(moving.EXACT)
        assert program("m = gpu.memory(8 << 20); s = gpu.stream(); pinned = gpu.pinned()") == "None"
        assert program("[gpu.run('add', m, 8, 1, stream=s), gpu.sync()]") == "[0, 0]"
        stand_by(line, second, copies)
        if not planned:
            break_domain(domain)
        said = line.move(1, planned=planned)
        assert said.kind == moving.MOVED, said
        if not keeps:
            until(lambda: bool(gave_back()))
        # In a second move, the program leaves another instance than the original one.
        stand_by(line, third, copies, 2)
        assert line.move(2, planned=True).kind == moving.MOVED
        assert program("[gpu.run('add', m, 8, 1, stream=s), gpu.sync(), gpu.word(m)]") == "[0, 0, 2]"
        assert program("[gpu.code('cuMemFree_v2', m), gpu.code('cuStreamDestroy_v2', s)]") == "[0, 0]"
        assert program.end() == ""
    first = f"{domain.environment['CUDA_MPS_PIPE_DIRECTORY']} gave back"
    assert gave_back() == ([] if keeps else [first])


def test_a_standby_that_cannot_be_made_is_told_before_the_first_copy_is_due(
    libraries: Libraries,
    domain: Domain,
    second: Domain,
    third: Domain,
    post: Post,
    copies: Path,
    tmp_path: Path,
) -> None:
    """A failed standby is reported at once, without waiting for the original instance, which stays loaded
    past the test's deadline."""
    empty = tmp_path / "empty"
    empty.mkdir()
    log = tmp_path / "notes"
    extra = {
        "settle_ms": "60000",
        "MPSD_STANDIN_NOTES": str(log),
        "release": "1",
    }
    with started(libraries, domain, post, **extra) as program:
        line = post.greet(moving.EXACT)
        assert program("m = gpu.memory(8 << 20)") == "None"
        stand_by(line, second, copies)
        assert line.move(1, planned=True).kind == moving.MOVED
        offer(line, third, empty, 2)
        assert line.hear(moving.READY, moving.UNREADY).kind == moving.UNREADY
        assert program.end() == ""
    # Nothing was released by then either.
    assert "gave back" not in log.read_text()


def test_who_stays_where_it_is_gives_nothing_back(
    libraries: Libraries, domain: Domain, second: Domain, post: Post, copies: Path, tmp_path: Path
) -> None:
    log = tmp_path / "notes"
    extra = {"MPSD_STANDIN_NOTES": str(log), "release": "1"}
    with started(libraries, domain, post, **extra) as program:
        line = post.greet(moving.EXACT)
        assert program("m = gpu.memory(8 << 20)") == "None"
        stand_by(line, second, copies)
        # The program was never told of this generation.
        line.say(moving.MOVE, 7, planned=True)
        assert line.hear(moving.MOVED, moving.STAYED).kind == moving.STAYED
        assert program("[gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)]") == "[0, 0, 1]"
        assert program.end() == ""
    assert "gave back" not in log.read_text()
