"""Paths of the daemon's socket, for the daemon and for its clients."""

from __future__ import annotations

from collections.abc import Mapping

SOCKET_NAME = "mpsd.sock"
SYSTEM_SOCKET = f"/run/mpsd/{SOCKET_NAME}"
SOCKET_VARIABLE = "MPSD_SOCKET"

# sun_path has 108 bytes with its closing zero (unix(7)).
MAX_PATH_BYTES = 107


def candidates(environ: Mapping[str, str], uid: int) -> tuple[str, ...]:
    """Return the sockets that a client of this user tries; it takes the first one that exists.

    If $MPSD_SOCKET is set, only that one. A user's own daemon comes before the machine's: the user must
    have started it on purpose. Any user could create a directory under /tmp, so a client checks the owner
    of a socket there.
    """
    if environ.get(SOCKET_VARIABLE):
        return (environ[SOCKET_VARIABLE],)
    if uid == 0:
        return (SYSTEM_SOCKET,)
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    own = f"{runtime}/mpsd" if runtime.startswith("/") else f"/tmp/mpsd-{uid}"
    return (f"{own}/{SOCKET_NAME}", SYSTEM_SOCKET)
