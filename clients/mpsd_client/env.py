"""The environment of a workload, as lines that a shell can evaluate."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType

from mpsd_client._protocol import errors

_VISIBLE, _GIVEN = "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def named_gpu(environ: Mapping[str, str], gpu: str | None = None) -> str | None:
    """What was asked for (`gpu`), else the first GPU that CUDA_VISIBLE_DEVICES names by index or UUID, else
    the first that a container was given by UUID (NVIDIA_VISIBLE_DEVICES); None where these name none."""
    if gpu is not None:
        return gpu
    given = [name for name in environ.get(_GIVEN, "").split(",") if name.startswith("GPU-")]
    if _VISIBLE not in environ:
        return next(iter(given), None)
    first = next(iter(named_gpus(environ)), None)
    # The only GPU of a container is number 0 there, and may be another for the daemon.
    return given[0] if first == "0" and len(given) == 1 else first


def named_gpus(environ: Mapping[str, str]) -> list[str]:
    """All that CUDA_VISIBLE_DEVICES names by index or UUID; as CUDA reads it, up to what is neither."""
    names = (name.strip() for name in environ.get(_VISIBLE, "").split(","))
    return list(takewhile(lambda name: name.isdecimal() or name.startswith("GPU-"), names))


def fitting(
    wanted: Mapping[str, str],
    environ: Mapping[str, str],
    gpu: str | None = None,
    numbers: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, str]:
    """What to set of what the daemon wants. Who asks for no GPU (`gpu`) sees none that its
    CUDA_VISIBLE_DEVICES does not name, in the order there; where that names none (nothing: none is to be
    seen) it stays. `numbers`: the index of each GPU of the domain."""
    fit = dict(wanted)
    if gpu is not None or _VISIBLE not in environ or _VISIBLE not in wanted:
        return fit
    there, names = fit.pop(_VISIBLE), named_gpus(environ)
    if names:
        mine = [uuid for name in names for uuid in there.split(",") if _is(name, uuid, numbers.get(uuid))]
        fit[_VISIBLE] = ",".join(dict.fromkeys(mine)) or there
    return fit


def fewer(environ: Mapping[str, str], fit: Mapping[str, str], domain: Sequence[str]) -> list[str]:
    """What to say to who is to see several GPUs, and will see fewer: those in `fit` (of fitting()), else all
    of the domain, by UUID."""
    wanted = dict.fromkeys(named_gpus(environ))
    gpus = fit[_VISIBLE].split(",") if _VISIBLE in fit else domain
    if not 0 < len(gpus) < len(wanted):
        return []
    few = f"CUDA_VISIBLE_DEVICES names {len(wanted)} GPUs, and programs see {', '.join(gpus)}"
    return [f"{few}: a domain is over several where mpsd is configured so ([domains] span)"]


def _is(name: str, uuid: str, number: int | None) -> bool:
    return int(name) == number if name.isdecimal() else uuid.startswith(name)


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
