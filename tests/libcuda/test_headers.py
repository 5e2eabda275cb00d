"""The proxy builds with cuda.h of older CUDA versions, and passes on the functions that the header lacks."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from libcuda_build.compile import FOLDER, build_proxy
from libcuda_build.header import find_include, read_functions, version_of
from tests.libcuda.test_failover import Program, copies, post, stand_by, started
from tests.support import moving
from tests.support.libcudas import Libraries, quick_compiler, run
from tests.support.long import of
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second
from tests.support.simnode import Domain
from tests.support.waiting import BUILD_S
from tests.support.wheels import unpacked

__all__ = ["backend", "copies", "domain", "post", "second"]

pytestmark = pytest.mark.timeout(BUILD_S)

OLDEST, NEWEST = 12040, 13050
WHEELS = {
    12040: ("nvidia-cuda-runtime-cu12", "12.4.127"),
    12050: ("nvidia-cuda-runtime-cu12", "12.5.82"),
    12080: ("nvidia-cuda-runtime-cu12", "12.8.90"),
    12090: ("nvidia-cuda-runtime-cu12", "12.9.79"),
    13000: ("nvidia-cuda-runtime", "13.0.96"),
    13020: ("nvidia-cuda-runtime", "13.2.86"),
    NEWEST: ("nvidia-cuda-runtime", "13.5.37"),
}


def include(version: int) -> Path:
    """Return the folder of that version's cuda.h; skip the test without a network."""
    (header,) = unpacked(*WHEELS[version]).glob("nvidia/*/include/cuda.h")
    assert version_of(header) == version
    return header.parent


@pytest.fixture(scope="module", params=of(list(WHEELS), [OLDEST]))
def built(
    request: pytest.FixtureRequest, libraries: Libraries, tmp_path_factory: pytest.TempPathFactory
) -> Libraries:
    """Return the proxy that this header builds, before the stand-in of the installed header."""
    folder = tmp_path_factory.mktemp("built")
    header = include(request.param)
    # The header decides what is generated, not how it is optimised.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", quick_compiler(folder))
        build_proxy(folder, include=header)
    return Libraries(folder, libraries.standin, "", libraries.programs)


@pytest.mark.parametrize("vault", ["0", "1"])
@pytest.mark.parametrize("how", ["dlsym", "getproc"])
def test_a_proxy_of_another_header_is_the_same(
    built: Libraries, libraries: Libraries, how: str, vault: str
) -> None:
    command: list[str | Path] = [libraries.program("sequence"), how]
    expected = run(command, libraries.environment(proxied=True, vault=vault))
    done = run(command, built.environment(proxied=True, vault=vault))
    assert (done.returncode, done.stdout, done.stderr) == (0, expected.stdout, "")


@pytest.fixture
def ask(built: Libraries, domain: Domain, post: Post) -> Iterator[Program]:
    with started(built, domain, post) as program:
        yield program


def test_a_function_that_the_header_lacks_is_passed_on_and_named(
    built: Libraries, second: Domain, post: Post, ask: Program, copies: Path, request: pytest.FixtureRequest
) -> None:
    line = post.greet()
    stand_by(line, second, copies)
    assert ask("gpu.code('cuCtxSynchronize_v2', 0)") == "0"
    if request.node.callspec.params["built"] < 13000:
        assert line.hear(moving.OPAQUE).text == "cuCtxSynchronize_v2"
    else:
        line.say(moving.MOVE, 1, planned=True)
        line.hear(moving.MOVED)


def test_the_newest_header_declares_everything_and_the_oldest_lacks_what_is_listed() -> None:
    newer = set(tomllib.loads((FOLDER / "functions.toml").read_text())["newer"])
    assert version_of(find_include() / "cuda.h") >= 13000
    assert newer <= set(read_functions(include(NEWEST)))
    assert not newer & set(read_functions(include(OLDEST)))
