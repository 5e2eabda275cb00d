"""Where clients look for the socket."""

from __future__ import annotations

import pytest

from mpsd.wire.address import candidates


@pytest.mark.parametrize(
    ("environ", "uid", "expected"),
    [
        ({}, 0, ("/run/mpsd/mpsd.sock",)),
        ({"XDG_RUNTIME_DIR": "/run/user/0"}, 0, ("/run/mpsd/mpsd.sock",)),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, 7, ("/run/user/7/mpsd/mpsd.sock", "/run/mpsd/mpsd.sock")),
        ({"XDG_RUNTIME_DIR": "relative"}, 7, ("/tmp/mpsd-7/mpsd.sock", "/run/mpsd/mpsd.sock")),
        ({}, 7, ("/tmp/mpsd-7/mpsd.sock", "/run/mpsd/mpsd.sock")),
        ({"MPSD_SOCKET": "/x", "XDG_RUNTIME_DIR": "/run/user/7"}, 7, ("/x",)),
        ({"MPSD_SOCKET": ""}, 0, ("/run/mpsd/mpsd.sock",)),
    ],
)
def test_candidates(environ: dict[str, str], uid: int, expected: tuple[str, ...]) -> None:
    assert candidates(environ, uid) == expected
