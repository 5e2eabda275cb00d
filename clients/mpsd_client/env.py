"""Whether this process can join at a pipe directory, and export commands for shells."""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Callable, Mapping

from mpsd_client._protocol import errors

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def obstacle(pipe_dir: str, patience_s: float = 2.0) -> str:
    """Return why this process cannot join MPS at a pipe directory, with the remedy; empty if it can.

    The kernel looks up the control socket with the rights of this process, without CUDA. libcuda itself
    reports nothing: it would run the program outside MPS. `patience_s`: seconds to wait for a
    listener, because the daemon may be replacing the domain.
    """
    path, end = os.path.join(pipe_dir, "control"), time.monotonic() + patience_s
    while (code := _knock(path)) in _NO_LISTENER and time.monotonic() < end:
        time.sleep(0.02)
    if code in _LISTENER:
        return ""
    place, code = _blocked_at(pipe_dir, code)
    name = errno.errorcode.get(code, str(code))
    if code in _NO_LISTENER and os.path.isdir(pipe_dir):
        return f"no control daemon listens on {path} ({name}); see mpsd-ctl status and try again"
    if code == errno.ENOENT:
        return f"{place} does not exist ({name}); in a container, mount mpsd's run_dir at the same path"
    if code == errno.EACCES and place != path:
        what = f"uid {os.geteuid()} may not enter {place} ({name})"
        return f"{what}; have root check its mode (mpsd-ctl doctor), or run mpsd-run as the domain's user"
    return f"uid {os.geteuid()} cannot connect to {path} ({name}); run mpsd-ctl doctor as root"


_LISTENER = (0, errno.EPROTOTYPE)
"""Results of connect(2) after it has found a bound socket: the kernel compares the types last."""
_NO_LISTENER = (errno.ENOENT, errno.ECONNREFUSED)


def _knock(path: str) -> int:
    """Return the result of connect(2) by a socket of another type, which no listener sees."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path)


def _blocked_at(pipe_dir: str, code: int) -> tuple[str, int]:
    """Return the directory that stops the look-up, or its missing part, with the error number.

    `code`: the error of the connection, for a socket that is found and refuses.
    """
    for way in (pipe_dir, os.path.realpath(f"{pipe_dir}/control")):
        parts = way.split("/")
        for count in range(2, len(parts) + 1):
            place = "/".join(parts[:count])
            try:
                os.lstat(place)
            except OSError as error:
                parent = os.path.dirname(place)
                return parent if error.errno == errno.EACCES else place, error.errno or code
    return os.path.join(pipe_dir, "control"), code


def _sh(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"


def _csh(value: str) -> str:
    # csh substitutes history even within single quotes, and does not accept a bare line break there.
    return "'" + value.replace("'", "'\\''").replace("!", "\\!").replace("\n", "\\\n") + "'"


def _fish(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


_STYLES: Mapping[str, tuple[str, str, Callable[[str], str]]] = {
    "sh": ("export {}={}", "unset {}", _sh),
    "csh": ("setenv {} {};", "unsetenv {};", _csh),
    "fish": ("set -gx {} {};", "set -e {};", _fish),
}
SHELLS = tuple(_STYLES)


def export_lines(environment: Mapping[str, str | None], shell: str = "sh") -> list[str]:
    """Return shell commands that export the variables, for `eval "$(mpsd-ctl env)"`. None unsets a variable.

    Values are quoted so that no shell expands anything in them. Raises UsageError for an unknown shell, an
    invalid variable name, and a value with a zero byte.
    """
    if shell not in _STYLES:
        raise errors.UsageError(f"unknown shell {shell!r}", remedy=f"choose one of: {', '.join(SHELLS)}")
    form, unset, quote = _STYLES[shell]
    for name, value in environment.items():
        if not _NAME.match(name) or "\0" in (value or ""):
            raise errors.UsageError(f"{name!r} cannot be an environment variable of a shell")
    rows = sorted(environment.items())
    return [unset.format(name) if value is None else form.format(name, quote(value)) for name, value in rows]
