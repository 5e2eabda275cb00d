"""GPUs by every name: which GPUs a program requests, and its CUDA_VISIBLE_DEVICES. Pure functions.

Three numberings meet here:
  - the machine's: nvidia-smi's index, which the daemon and container runtimes use;
  - a container's: CUDA counts the GPUs of the container from 0, in the order of the machine's indices;
  - a domain's: under MPS, CUDA counts the GPUs of the control daemon from 0, in the daemon's order.

A name that could mean two GPUs is refused. MPSD_DEVICE_NUMBERS lists the GPUs in which numbers that mpsd has
set count, so that an mpsd-run inside such an environment does not take them for the machine's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from mpsd_client._protocol import errors

VISIBLE, GIVEN = "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"
NUMBERS = "MPSD_DEVICE_NUMBERS"
ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
_CDI = re.compile(r"(?:runtime\.)?nvidia\.com/gpu=(?:gpu(?=\d))?")
_BY_UUID = "pass --gpu, or name the GPU by its UUID in CUDA_VISIBLE_DEVICES (nvidia-smi -L)"


@dataclass(frozen=True, slots=True)
class NodeGpu:
    """A GPU of the machine, as the daemon shows it. `index`: nvidia-smi's."""

    index: int
    uuid: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """The GPUs that a program may see, in its order. `gpus`: UUIDs; None: any; empty: none.

    `variable`: the environment variable that names them. `by_number`: it names all of them by number."""

    gpus: tuple[str, ...] | None = None
    variable: str = ""
    by_number: bool = False

    @property
    def first(self) -> str | None:
        return next(iter(self.gpus or ()), None)


@dataclass(frozen=True, slots=True)
class _Scope:
    """The GPUs of this container, in the order of its variable; outside containers those of the machine."""

    gpus: tuple[str, ...]
    whole: bool
    known: bool = True


def requested(environ: Mapping[str, str], gpus: Sequence[NodeGpu], present: Collection[str] = ()) -> Request:
    """Return the GPUs that the environment of a program names.

    `gpus`: those of the machine. `present`: UUIDs of the GPUs with device files here, empty if unknown.
    Raises NotFoundError and UsageError; each names the variable and the remedy.
    """
    if variable := hiding(environ):
        return Request((), variable)
    node = sorted(gpus, key=lambda gpu: gpu.index)
    if VISIBLE not in environ:
        scope = _scope(environ, node, present)
        if not scope.known:
            raise _refusal(environ, GIVEN, "does not say which GPU of the machine this container has")
        return Request() if scope.whole else Request(scope.gpus, GIVEN)
    entries = _entries(environ[VISIBLE])
    numbers = all(name.isdecimal() for name in entries)
    # The list of another machine, in an environment that was copied from there, says nothing here.
    if numbers and NUMBERS in environ and {*environ[NUMBERS].split(",")} <= {gpu.uuid for gpu in node}:
        return Request(_in_domain(environ, entries), VISIBLE, by_number=True)
    return Request(_named(environ, entries, node, _scope(environ, node, present)), VISIBLE, numbers)


def hiding(environ: Mapping[str, str]) -> str:
    """Return the variable that hides all GPUs from a program with this environment, or an empty text."""
    if VISIBLE in environ:
        return "" if _entries(environ[VISIBLE]) else VISIBLE
    return GIVEN if [_CDI.sub("", name) for name in _listed(environ)] == ["none"] else ""


def visible(
    request: Request, environ: Mapping[str, str], domain: Sequence[str], gpus: Sequence[NodeGpu]
) -> dict[str, str | None]:
    """Return the variables to set (None: to unset) so that the program sees the requested GPUs.

    `domain`: UUIDs of the domain's GPUs in its order; a request for any GPU gets all of them. Numbers stay
    numbers, and count in the domain. A value that already means these GPUs stays as it is.
    """
    stale: dict[str, str | None] = {NUMBERS: None} if NUMBERS in environ else {}
    has_others = bool({gpu.uuid for gpu in gpus} - {*domain})
    if request.gpus == ():
        return stale if VISIBLE in environ else {VISIBLE: "", **stale}
    if request.gpus is None:
        return {VISIBLE: ",".join(domain), **stale} if has_others else stale
    own = [uuid for uuid in request.gpus if uuid in domain] or list(domain)
    if request.by_number and domain:
        return stale | _numbers(own, environ, domain, gpus)
    if request.variable == VISIBLE:
        entries = _entries(environ[VISIBLE])
        same = len(entries) == len(own) and not any(name.isdecimal() for name in entries)
        return stale if same else {VISIBLE: ",".join(own), **stale}
    return {VISIBLE: ",".join(own), **stale} if has_others else stale


def _numbers(
    own: Sequence[str], environ: Mapping[str, str], domain: Sequence[str], gpus: Sequence[NodeGpu]
) -> dict[str, str | None]:
    """Return the numbers of these GPUs in the domain, and the list in which they count if it is not plain."""
    index = {gpu.uuid: gpu.index for gpu in gpus}
    numbers = [list(domain).index(uuid) for uuid in own]
    found: dict[str, str | None] = {VISIBLE: ",".join(map(str, numbers))}
    if environ.get(GIVEN) or numbers != [index.get(uuid) for uuid in own]:
        found[NUMBERS] = ",".join(domain)
    return found


def missing_note(request: Request, domain: Collection[str]) -> list[str]:
    """Return a note for a program that names several GPUs and will see fewer: those of the domain."""
    named = request.gpus or ()
    own = [uuid for uuid in named if uuid in domain]
    if not 0 < len(own) < len(named):
        return []
    few = f"{request.variable} names {len(named)} GPUs, but the program will see only {', '.join(own)}"
    return [f"{few}; to span GPUs, an administrator sets [domains] span in mpsd.toml"]


def outside(environ: Mapping[str, str], gpu: str | None = None) -> dict[str, str | None]:
    """Return the variables with which a program sees the same GPUs outside MPS, where numbers differ.

    `gpu`: index or UUID that the command line names. Raises UsageError as `requested` does."""
    if gpu is not None:
        return {VISIBLE: gpu, ORDER: BY_BUS}
    entries = _entries(environ.get(VISIBLE, ""))
    if environ.get(NUMBERS) and entries and all(name.isdecimal() for name in entries):
        return {VISIBLE: ",".join(_in_domain(environ, entries)), NUMBERS: None}
    return {}


def _entries(value: str) -> list[str]:
    """Return the entries up to the first one that is neither index nor UUID: CUDA ignores the rest."""
    names = (name.strip() for name in value.split(","))
    return list(takewhile(lambda name: name.isdecimal() or name.startswith(("GPU-", "MIG-")), names))


def _listed(environ: Mapping[str, str]) -> list[str]:
    """Return the entries of the container's variable."""
    return [name.strip() for name in environ.get(GIVEN, "").split(",") if name.strip()]


def _scope(environ: Mapping[str, str], node: Sequence[NodeGpu], present: Collection[str]) -> _Scope:
    everything = tuple(gpu.uuid for gpu in node)
    here = tuple(uuid for uuid in everything if uuid in present) or everything
    names = [_CDI.sub("", name) for name in _listed(environ)]
    if names == ["none"]:
        return _Scope((), whole=False)
    if names in ([], ["all"], ["void"]):
        known = names != ["void"] or len(node) == 1 or bool({*present} & {*everything})
        return _Scope(here, here == everything, known)
    found = [_find(environ, GIVEN, name, node) for name in names]
    if absent := [names[n] for n, uuid in enumerate(found) if uuid not in here]:
        raise _refusal(environ, GIVEN, f"names GPU {absent[0]}, whose device file does not exist here")
    return _Scope(tuple(dict.fromkeys(found)), {*found} == {*everything})


def _named(
    environ: Mapping[str, str], entries: Sequence[str], node: Sequence[NodeGpu], scope: _Scope
) -> tuple[str, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names. CUDA ends its list at the first unknown GPU."""
    own = [gpu for gpu in node if gpu.uuid in scope.gpus]
    if any(name.isdecimal() for name in entries):
        if not scope.known:
            raise _refusal(environ, GIVEN, f"does not say which GPU number {entries[0]} of this container is")
        if len({gpu.name for gpu in own}) > 1 and environ.get(ORDER) != BY_BUS:
            why = "counts in CUDA's own order, which is not known because the GPUs differ"
            raise _refusal(environ, VISIBLE, why, f"set {ORDER}={BY_BUS}, or {_BY_UUID}")
    numbered = node if scope.whole else [NodeGpu(n, gpu.uuid) for n, gpu in enumerate(own)]
    found: list[str] = []
    for name in entries:
        try:
            uuid = _find(environ, VISIBLE, name, numbered)
        except errors.MpsdError:
            if not found:
                raise
            break
        found.append(uuid)
    return tuple(dict.fromkeys(found))


def _find(environ: Mapping[str, str], variable: str, name: str, gpus: Sequence[NodeGpu]) -> str:
    """Return the UUID of a GPU by number or by a prefix of its UUID."""
    found = [
        gpu.uuid
        for gpu in gpus
        if (
            int(name) == gpu.index
            if name.isdecimal()
            else name.startswith("GPU-") and gpu.uuid.startswith(name)
        )
    ]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{gpu.index}: {gpu.uuid}" for gpu in gpus)
    where = "this machine" if variable == GIVEN or not environ.get(GIVEN) else f"{GIVEN}={environ[GIVEN]}"
    if not name.isdecimal() and not name.startswith("GPU-"):
        why = "names a MIG instance, which mpsd does not serve" if _is_mig(name) else "has an unknown form"
        raise _refusal(environ, variable, why)
    raise errors.NotFoundError(
        f"{variable}={environ[variable]}: there is no GPU {name!r}", remedy=f"GPUs of {where}: {known}"
    )


def _is_mig(name: str) -> bool:
    return name.startswith(("MIG-", "mig")) or re.fullmatch(r"\d+:\d+", name) is not None


def _in_domain(environ: Mapping[str, str], entries: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs of numbers that count in MPSD_DEVICE_NUMBERS."""
    own = environ[NUMBERS].split(",")
    numbers = list(takewhile(lambda n: n < len(own), map(int, entries)))
    if not numbers:
        why = f"counts in the {len(own)} GPU(s) of this environment's domain"
        raise _refusal(environ, VISIBLE, why, f"unset {NUMBERS} to use the machine's numbers, or {_BY_UUID}")
    return tuple(dict.fromkeys(own[n] for n in numbers))


def _refusal(
    environ: Mapping[str, str], variable: str, why: str, remedy: str = _BY_UUID
) -> errors.UsageError:
    return errors.UsageError(f"{variable}={environ[variable]} {why}", remedy=remedy)
