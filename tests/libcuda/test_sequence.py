"""A recorded sequence of calls gives the same codes and outputs with and without the proxy."""

from __future__ import annotations

import pytest

from tests.support.libcudas import Libraries, run


@pytest.fixture(scope="module")
def without(libraries: Libraries) -> list[str]:
    """Return the output of the sequence on the stand-in alone."""
    done = run([libraries.program("sequence")], libraries.environment(proxied=False))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_stand_in_does_what_a_driver_does(without: list[str]) -> None:
    expected = {
        "cuMemcpyDtoH 0 xxxxabcdabcdxxxx": "memsets of both widths",
        "cuMemcpyDtoH 0 3072": "a sum that waited for another stream's fill",
        "cuMemcpyDtoH 0 101376": "a sum in the default stream after a fill in a blocking one",
        "cuStreamSynchronize 0 1": "a host function ran once",
        "cuStreamSynchronize 0 1 1 0 800": "a callback, which may not call the driver",
        "told 1 1 700 0": "behind a fault a callback is told, and a function does not run",
        "cuMemcpyDtoH 0 21": "a graph of two kernels, launched twice",
        "cuMemcpyDtoH 0 mapped": "bytes that came back through an exported descriptor",
        "cuCtxSynchronize 700": "a stray store",
        "cuMemFree_v2 700": "which stays",
    }
    missing = {line: meaning for line, meaning in expected.items() if line not in without}
    assert not missing, "\n".join(without)


@pytest.mark.parametrize("how", ["dlsym", "getproc"])
def test_the_proxy_changes_nothing(libraries: Libraries, without: list[str], how: str) -> None:
    done = run([libraries.program("sequence"), how], libraries.environment(proxied=True))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == without


def test_the_proxy_changes_nothing_for_a_program_linked_with_libcuda(
    libraries: Libraries, without: list[str]
) -> None:
    program = libraries.program("sequence", direct=True)
    done = run([program], libraries.environment(proxied=True))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == without
    assert run([program], libraries.environment(proxied=False)).stdout.splitlines() == without
