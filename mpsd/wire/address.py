"""Where the socket of mpsd is, for the one that listens and those that look for it."""

from __future__ import annotations

from collections.abc import Mapping

SOCKET_NAME = "mpsd.sock"
SYSTEM_SOCKET = f"/run/mpsd/{SOCKET_NAME}"
SOCKET_VARIABLE = "MPSD_SOCKET"

# sun_path has 108 bytes with its closing zero (unix(7)).
MAX_PATH_BYTES = 107


def candidates(environ: Mapping[str, str], uid: int) -> tuple[str, ...]:
    """The sockets that a client of this user tries, the first that exists being the one.

    $MPSD_SOCKET alone where it is set. A user's own daemon, which somebody must have started on
    purpose, comes before that of the machine. A directory under /tmp could be anybody's: whoever
    connects there checks whose it is.
    """
    if environ.get(SOCKET_VARIABLE):
        return (environ[SOCKET_VARIABLE],)
    if uid == 0:
        return (SYSTEM_SOCKET,)
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    own = f"{runtime}/mpsd" if runtime.startswith("/") else f"/tmp/mpsd-{uid}"
    return (f"{own}/{SOCKET_NAME}", SYSTEM_SOCKET)
