"""The plan of a program: the domain that it joins, its protection level, and its environment variables.

mpsd-run and mpsd-ctl env use the same plan, so a program gets the same environment either way.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mpsd_client._protocol import Protection, ProtectionLevel, errors
from mpsd_client.client import Client, connect
from mpsd_client.driver import LIBRARY_NAME, find_driver, find_proxy, libc_obstacle
from mpsd_client.env import obstacle
from mpsd_client.joining.devices import (
    VISIBLE,
    NodeGpu,
    Request,
    hiding,
    missing_note,
    outside,
    requested,
    visible,
)
from mpsd_client.joining.percentage import percentage_warnings
from mpsd_client.joining.present import present_gpus
from mpsd_client.joining.restart import RESTART_S, until_answered
from mpsd_client.vault import token_of

PIPE, PATH, REAL = "CUDA_MPS_PIPE_DIRECTORY", "LD_LIBRARY_PATH", "MPSD_REAL_LIBCUDA"
VAULT, FAILOVER = "MPSD_VAULT_SOCKET", "MPSD_FAILOVER_SOCKET"
WISH = "MPSD_FAILOVER"
"""The fail-over mode that the program asks for."""
_LESS = ("keep", "off")
"""Modes that protect no work in flight. mpsd's libcuda takes an unknown mode for `exact`."""
LEVEL = "MPSD_PROTECTION"
"""The level with which a program was started. `mpsd-ctl status` uses it to explain what the program has."""
_DOCTOR = "run mpsd-ctl doctor"
_INSTALL = "install mpsd-libcuda (pip install ./clients/libcuda in mpsd's tree), or pass --library DIR"
_ON_THE_SIMULATED_GPU = "mpsd help quickstart shows guards and fail-over on the simulated GPU"
LEVELS = tuple(level.value for level in ProtectionLevel)


class LevelError(errors.MpsdError):
    """The level that the command line asks for cannot be had."""

    code = "level"
    exit_code = 69


FIRM = (errors.UsageError, errors.NotFoundError, LevelError)
"""Errors about the request itself: --allow-unprotected does not override them."""


@dataclass
class Plan:
    """The environment and the protection of a program. `variables`: None unsets one. `line`: for a person.

    `warnings`: what it asked for and does not get."""

    variables: dict[str, str | None] = field(default_factory=dict)
    protection: Protection | None = None
    line: str = ""
    warnings: list[str] = field(default_factory=list)

    def applied(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with the plan's variables."""
        merged = {**environ, **self.variables}
        return {name: value for name, value in merged.items() if value is not None}

    @property
    def notes(self) -> list[str]:
        """Return the variables, one a line, for a verbose command."""
        rows = sorted(self.variables.items())
        return [f"{name} is unset" if value is None else f"{name}={value}" for name, value in rows]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that mpsd-run and mpsd-ctl env share."""
    parser.add_argument(
        "--gpu",
        metavar="GPU",
        help="index or UUID; default: the GPU in CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES, else the "
        "daemon chooses",
    )
    parser.add_argument(
        "--library",
        metavar="DIR",
        help="folder of mpsd's libcuda.so.1; default: $MPSD_LIBCUDA_DIR, then mpsd-libcuda's",
    )
    parser.add_argument(
        "--protect",
        choices=LEVELS,
        help="lower the protection level: observe runs without mpsd's libcuda, guard without fail-over",
    )
    parser.add_argument("--require", choices=LEVELS, help="refuse to start below this protection level")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not print the line on protection")


def check_levels(protect: str | None, require: str | None) -> None:
    """Raise UsageError if the limit is below the requirement."""
    if protect and require and LEVELS.index(protect) < LEVELS.index(require):
        raise errors.UsageError(
            f"--protect {protect} is below --require {require}", remedy="leave one of them out"
        )


def make_plan(
    environ: Mapping[str, str],
    *,
    socket_path: str | None = None,
    gpu: str | None = None,
    library: str | None = None,
    shared: bool = False,
    protect: str | None = None,
    require: str | None = None,
    wait_s: float = RESTART_S,
    tell: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Return what a program with this environment needs to join its domain.

    `protect`: the highest level that it gets. `require`: the lowest level that will do. `wait_s`: seconds to
    wait for a daemon that may be restarting; `tell` gets a line about a long wait. Raises MpsdError:
    LevelError for a level that cannot be had, UsageError and NotFoundError for GPUs and folders that do not
    exist, other errors if the program cannot join.
    """
    check_levels(protect, require)
    token_of(environ)
    if gpu is None and (variable := hiding(environ)):
        return _plan_without_gpu(environ, variable, require)

    def ask(path: str | None) -> tuple[Client, Sequence[NodeGpu], Request | None, Mapping[str, str]]:
        with connect(path) as daemon:
            node = daemon.node_gpus()
            request = None if gpu is not None else requested(environ, node, present_gpus())
            wanted = daemon.env(request.first if request is not None else gpu, shared=shared)
            return daemon, node, request, wanted

    daemon, node, request, wanted = until_answered(ask, socket_path, wait_s, tell)
    pipe = wanted[PIPE]
    if why := obstacle(pipe):
        what, _, remedy = why.partition("; ")
        raise errors.NotReadyError(f"cannot join MPS: {what}", remedy=remedy)
    proxy = find_proxy(environ, library)
    if proxy is None and library:
        raise errors.NotFoundError(
            f"no {LIBRARY_NAME} in {library}", remedy="--library needs the folder of mpsd's library"
        )
    real = find_driver(environ, proxy) if proxy else None
    allowed = _allowed(daemon, proxy, real, environ.get("MPSD_LIBCUDA_DIR"))
    found = _chosen(_lowest(daemon.protection or allowed, allowed, _wished(environ)), protect)
    if require is not None and found.level.rank < ProtectionLevel(require).rank:
        raise LevelError(
            f"--require {require}: the program would have {found.level}: {found.why}", remedy=found.remedy
        )
    plan = Plan({PIPE: pipe}, found)
    plan.variables |= shown_gpus(environ, request, wanted.get(VISIBLE), daemon.gpus, node)
    plan.variables |= _proxy_variables(environ, _given(allowed, protect), proxy, real, daemon)
    plan.line = _line(found, request or Request(), daemon, node)
    plan.warnings += percentage_warnings(environ, daemon.percentages)
    plan.warnings += missing_note(request or Request(), daemon.gpus)
    return plan


def outside_plan(environ: Mapping[str, str], error: Exception, gpu: str | None = None) -> Plan:
    """Return the plan of a program that runs outside mpsd because of this error. Raises UsageError.

    The variables of an outer mpsd-run are unset: with its pipe directory the program would join after all."""
    why = error.message if isinstance(error, errors.MpsdError) else f"{type(error).__name__}: {error}"
    line = f"not protected: {why}; the program runs outside mpsd (--allow-unprotected)"
    return Plan(outside(environ, gpu) | _without_outer(environ), None, line)


def _plan_without_gpu(environ: Mapping[str, str], variable: str, require: str | None) -> Plan:
    """Return the plan of a program that sees no GPU, which needs no daemon. Raises LevelError."""
    value = environ[variable].strip()
    why = f"no GPU is visible ({variable} is {value or 'empty'})"
    if require is not None:
        remedy = f"name a GPU in {variable}, pass --gpu, or leave --require out"
        raise LevelError(f"--require {require}: {why}", remedy=remedy)
    variables = visible(Request((), variable), environ, (), ()) | _without_outer(environ)
    return Plan(variables, None, f"{why}: the program runs without mpsd")


def _without_outer(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the changes that undo the variables of an outer mpsd-run, except those of the GPUs."""
    if LEVEL not in environ:
        return {}
    before = environ.get(PATH, "")
    rest = _without(find_proxy(environ), before)
    gone: dict[str, str | None] = dict.fromkeys(
        name for name in (PIPE, VAULT, FAILOVER, LEVEL) if name in environ
    )
    return gone | ({PATH: rest or None} if rest != before else {})


def shown_gpus(
    environ: Mapping[str, str],
    request: Request | None,
    offered: str | None,
    domain: Sequence[str],
    node: Sequence[NodeGpu],
) -> dict[str, str | None]:
    """Return CUDA_VISIBLE_DEVICES and the variable that belongs to it.

    `request`: what the environment names; None if the command line names a GPU instead. `offered`: the
    daemon's value, None if the domain has all GPUs of the machine."""
    if request is not None and request.gpus is not None:
        return visible(request, environ, domain, node)
    found = visible(Request(), environ, domain, node)
    if offered is not None or (request is None and VISIBLE in environ):
        found[VISIBLE] = offered or ",".join(domain)
    return found


def _allowed(daemon: Client, proxy: str | None, real: str | None, named: str | None) -> Protection:
    """Return the level that the sockets of the daemon, the proxy and the driver allow.

    `named`: the folder that the environment names for the proxy.

    The daemon gives a socket although something on the machine keeps the level down now: that can end while
    the program runs.
    """
    observe, simulated = ProtectionLevel.OBSERVE, daemon.is_simulated
    if proxy is None and named:
        why, remedy = f"no {LIBRARY_NAME} in MPSD_LIBCUDA_DIR={named}", "name the folder of mpsd's library"
        return Protection(observe, why, remedy)
    if proxy is None:
        remedy = _ON_THE_SIMULATED_GPU if simulated else _INSTALL
        return Protection(observe, "mpsd's libcuda is not installed", remedy)
    refused, remedy = libc_obstacle(proxy)
    if refused:
        return Protection(observe, refused, remedy)
    if real is None:
        remedy = _ON_THE_SIMULATED_GPU if simulated else f"set {REAL} to the driver's file"
        return Protection(observe, f"no CUDA driver ({LIBRARY_NAME}) found", remedy)
    if not daemon.vault_socket:
        return Protection(ProtectionLevel.OBSERVE, "the daemon offers no guard zones", _DOCTOR)
    if not daemon.failover_socket:
        return Protection(ProtectionLevel.GUARD, "the daemon offers no fail-over", _DOCTOR)
    return Protection(ProtectionLevel.FAILOVER)


def _wished(environ: Mapping[str, str]) -> Protection:
    """Return the level that the mode in the environment allows."""
    wish = environ.get(WISH)
    if wish not in _LESS:
        return Protection(ProtectionLevel.FAILOVER)
    return Protection(ProtectionLevel.GUARD, f"{WISH} is {wish}", f"unset {WISH}")


def _lowest(*limits: Protection) -> Protection:
    return min(limits, key=lambda limit: limit.level.rank)


def _given(allowed: Protection, protect: str | None) -> ProtectionLevel:
    """Return the level for which the program gets variables."""
    wish = ProtectionLevel.FAILOVER if protect is None else ProtectionLevel(protect)
    return min(allowed.level, wish, key=lambda level: level.rank)


def _chosen(available: Protection, protect: str | None) -> Protection:
    """Return the program's level. Raises LevelError for a level above the available one."""
    if protect is None:
        return available
    wish = ProtectionLevel(protect)
    if wish.rank > available.level.rank:
        what = f"--protect {protect}: the level offered is {available.level}: {available.why}"
        raise LevelError(what, remedy=available.remedy)
    return available if wish is available.level else Protection(wish, f"--protect {protect}")


def _proxy_variables(
    environ: Mapping[str, str], level: ProtectionLevel, proxy: str | None, real: str | None, daemon: Client
) -> dict[str, str | None]:
    """Return the variables of mpsd's libcuda. Variables that this level lacks are unset."""
    before = environ.get(PATH, "")
    found: dict[str, str | None] = {LEVEL: level.value, VAULT: None, FAILOVER: None}
    if level is ProtectionLevel.OBSERVE:
        rest = _without(proxy, before)
        found |= {PATH: rest or None} if rest != before else {}
    else:
        assert proxy is not None and real is not None
        found |= {PATH: _first(proxy, before), REAL: real, VAULT: daemon.vault_socket}
    if level is ProtectionLevel.FAILOVER:
        found[FAILOVER] = daemon.failover_socket
    return {name: value for name, value in found.items() if value is not None or name in environ}


def _first(folder: str, path: str) -> str:
    """Put `folder` in front of `path`. Keep the rest: an empty entry means the working directory."""
    if path == folder or path.startswith(folder + ":"):
        return path
    return f"{folder}:{path}" if path else folder


def _without(folder: str | None, path: str) -> str:
    """Return a search path without this folder in front."""
    if folder is None or path == folder:
        return "" if path == folder else path
    return path.removeprefix(folder + ":")


def _line(found: Protection, request: Request, daemon: Client, node: Sequence[NodeGpu]) -> str:
    match found.level:
        case ProtectionLevel.FAILOVER:
            text = "protected (guard + failover)"
        case ProtectionLevel.GUARD:
            text = f"protected (guard; no fail-over: {found.why})"
        case ProtectionLevel.OBSERVE:
            text = f"not protected from faults of other programs (observe: {found.why})"
    index = {gpu.uuid: gpu.index for gpu in node}
    seen = [uuid for uuid in request.gpus or () if uuid in daemon.gpus] or daemon.gpus
    numbers = [str(index[uuid]) for uuid in seen if uuid in index]
    gpus = f", GPU{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}" if numbers else ""
    domain = f", domain {daemon.domain}" if daemon.domain else ""
    return text + gpus + domain + (f"; {found.remedy}" if found.remedy else "")
