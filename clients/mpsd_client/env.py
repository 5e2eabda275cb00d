"""The environment of a workload, as lines that a shell can evaluate."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from mpsd_client._protocol import errors

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def named_gpu(environ: Mapping[str, str], gpu: str | None = None) -> str | None:
    """What was asked for (`gpu`), else the first GPU that CUDA_VISIBLE_DEVICES names by index or UUID; None
    where it names none."""
    if gpu is not None:
        return gpu
    first = environ.get(_VISIBLE, "").split(",")[0].strip()
    return first if first.isdecimal() or first.startswith("GPU-") else None


def fitting(wanted: Mapping[str, str], environ: Mapping[str, str], gpu: str | None = None) -> dict[str, str]:
    """What to set of what the daemon wants. Who has a CUDA_VISIBLE_DEVICES that names no GPU (nothing: none
    is to be seen), and asks for none (`gpu`), keeps it."""
    keeps = gpu is None and _VISIBLE in environ and named_gpu(environ) is None
    return {name: value for name, value in wanted.items() if not (keeps and name == _VISIBLE)}


def _sh(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"


def _csh(value: str) -> str:
    # csh substitutes history even within single quotes, and takes no bare line break there.
    return "'" + value.replace("'", "'\\''").replace("!", "\\!").replace("\n", "\\\n") + "'"


def _fish(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


_STYLES: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "sh": ("export {}={}", _sh),
    "csh": ("setenv {} {};", _csh),
    "fish": ("set -gx {} {};", _fish),
}
SHELLS = tuple(_STYLES)


def export_lines(environment: Mapping[str, str], shell: str = "sh") -> list[str]:
    """Commands that export the variables: `eval "$(mpsd-ctl env)"`.

    Values are quoted so that no shell finds anything to expand in them. Raises UsageError for an
    unknown shell, a name that no shell takes and a value with a zero byte.
    """
    if shell not in _STYLES:
        raise errors.UsageError(f"unknown shell {shell!r}", remedy=f"one of: {', '.join(SHELLS)}")
    form, quote = _STYLES[shell]
    for name, value in environment.items():
        if not _NAME.match(name) or "\0" in value:
            raise errors.UsageError(f"{name!r} cannot be an environment variable of a shell")
    return [form.format(name, quote(value)) for name, value in sorted(environment.items())]
