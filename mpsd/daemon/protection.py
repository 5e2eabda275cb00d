"""The protection level of the node: from the configuration, the proven combinations, and the machine.

`level` is the whole decision, and pure. `NodeProtection` collects what it needs for each GPU and user. The
allowed level is fixed while mpsd runs: it follows from the configuration, the driver and the GPU. It decides
which sockets mpsd opens, and to which users. The level is lower than that while an obstacle holds, such as
driver files that cannot be copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from mpsd.base.conditions import Code, Condition
from mpsd.base.errors import MpsdError
from mpsd.base.model import FailoverMode, Gpu
from mpsd.base.protection import Obstacle, Protection, ProtectionLevel, ProtectSetting
from mpsd.config.protect import KEEP, user_levels
from mpsd.config.schema import BackendName, Config, ReplaySetting
from mpsd.core.failover.budgets import contexts_on
from mpsd.core.state import State
from mpsd.gpu import drivers
from mpsd.gpu.base import Backend, Check
from mpsd.os.descriptors import REMEDY, DescriptorBudget, Purpose

log = structlog.get_logger("mpsd.protection")

RAISE = 'set protect = "failover" to use it without proof'


@dataclass(frozen=True, slots=True)
class Hardware:
    """The driver version and the GPU's name, and what is proven for them."""

    driver: str
    gpu: str
    proven: drivers.Combination | None

    @property
    def title(self) -> str:
        if self.proven is not None:
            return self.proven.title
        branch = self.driver.partition(".")[0]
        return f"{f'driver {branch}' if branch else 'an unknown driver'} on {self.gpu}"


ABSENT = Hardware("", "an absent GPU", None)


def level(
    setting: ProtectSetting,
    user: ProtectionLevel | None,
    hardware: Hardware,
    obstacles: Iterable[Obstacle] = (),
) -> Protection:
    """Return the level for a user on a GPU, and why it is not higher.

    `user`: the level in [users], None without one. A proof matters to `auto` alone; obstacles always do.
    """
    limits = [Protection(setting.limit, f'protect = "{setting.value}"', 'set protect = "auto"')]
    if user is not None:
        limits.append(
            Protection(user, f'[users] sets "{user.value}" for this user', "ask for another level in [users]")
        )
    if setting is ProtectSetting.AUTO and hardware.proven is None:
        limits.append(Protection(ProtectionLevel.OBSERVE, f"{hardware.title} is not proven", RAISE))
    elif setting is ProtectSetting.AUTO and hardware.proven is not None:
        known, taken = hardware.proven.level, hardware.proven.auto
        if taken.rank < known.rank:
            why = f'protect = "auto" takes {taken.value} here, although {known.value} is proven'
            limits.append(Protection(taken, why, f'set protect = "{known.value}": mpsd help protection'))
        else:
            limits.append(Protection(known, f"{hardware.title} is proven for {known.value} alone", RAISE))
    limits += [Protection(each.limit, each.why, each.remedy) for each in obstacles]
    found = min(limits, key=lambda each: each.level.rank)
    return found if found.level is not ProtectionLevel.FAILOVER else Protection(ProtectionLevel.FAILOVER)


class NodeProtection:
    """The levels of this node's GPUs and users.

    `machine`: obstacles that hold now on the whole node. `others`: those of users other than root and mpsd's
    own. `exclusive`: GPUs that admit one server only, as last seen. `closed`: obstacles that hold until mpsd
    ends.
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        gpus: Sequence[Gpu],
        machine: Callable[[], Sequence[Obstacle]],
        others: Callable[[], Sequence[Obstacle]],
        exclusive: Callable[[], Iterable[str]],
    ) -> None:
        self.setting = config.protect
        self.closed: list[Obstacle] = []
        self.users, unknown = user_levels(config)
        self._unknown = [Condition(Code.USER_UNKNOWN, name) for name in unknown]
        self._keeps = config.failover.mode is ReplaySetting.KEEP
        self._mode = FailoverMode(config.failover.mode.value)
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._hardware = hardware_of(backend, gpus)
        self._machine = machine
        self._others = others
        self._exclusive = exclusive
        self._highest: dict[str, ProtectionLevel] = {}
        self._is_real = config.backend is not BackendName.SIMULATED

    # -- the allowed level, fixed while mpsd runs --------------------------------------------------------

    def allows(self, wanted: ProtectionLevel, gpus: Iterable[str] = (), uid: int | None = None) -> bool:
        """Return whether a level is allowed for a user on all of these GPUs; by default, on any GPU."""
        user = self.users.get(uid) if uid is not None else None
        chosen = list(gpus)
        found = [level(self.setting, user, self._on(uuid)) for uuid in chosen or self._hardware]
        reached = [each.level.rank >= wanted.rank for each in found]
        return all(reached) if chosen else any(reached)

    @property
    def failover_mode(self) -> FailoverMode:
        """Return the highest mode of a fail-over participant; OFF where no GPU has the level."""
        return self._mode if self.allows(ProtectionLevel.FAILOVER) else FailoverMode.OFF

    @property
    def reach(self) -> ProtectionLevel:
        """Return the highest level that is proven for a GPU of this node, or that the configuration names."""
        named = [] if self.setting is ProtectSetting.AUTO else [self.setting.limit]
        known = [each.proven.level for each in self._hardware.values() if each.proven is not None]
        return max([ProtectionLevel.OBSERVE, *named, *known], key=_rank)

    @property
    def users_without_failover(self) -> frozenset[int]:
        return frozenset(u for u, limit in self.users.items() if limit is not ProtectionLevel.FAILOVER)

    @property
    def gpus_without_failover(self) -> frozenset[str]:
        return frozenset(u for u in self._hardware if not self.allows(ProtectionLevel.FAILOVER, [u]))

    def _on(self, uuid: str) -> Hardware:
        """Return the hardware of a GPU; an adopted domain may have one that this machine lacks."""
        return self._hardware.get(uuid, ABSENT)

    # -- the level now -----------------------------------------------------------------------------------

    def of(self, gpus: Iterable[str] = (), uid: int | None = None) -> Protection:
        """Return the level now of a program of this user on these GPUs: the lowest; by default, of all."""
        user = self.users.get(uid) if uid is not None else None
        found = []
        mine = os.geteuid()
        others = [] if uid in (None, 0, mine) else [*_rights(mine, uid), *self._others()]
        for uuid in list(gpus) or self._hardware:
            found.append(level(self.setting, user, self._on(uuid), [*self._obstacles(uuid), *others]))
        return min(found, key=lambda each: each.level.rank)

    def _obstacles(self, uuid: str) -> list[Obstacle]:
        """Return what keeps this GPU's level down now, as far as the level is allowed at all."""
        found = [*self.closed, *self._machine(), *self._chosen(uuid)]
        most = level(self.setting, None, self._on(uuid)).level
        return [each for each in found if each.limit.rank < most.rank]

    def _chosen(self, uuid: str) -> list[Obstacle]:
        """Return the obstacles that the operator chose: mode keep, and the compute mode."""
        found = [KEEP] if self._keeps else []
        if uuid in self._exclusive() and uuid in self._gpus:
            index = self._gpus[uuid].index
            why = f"compute mode EXCLUSIVE_PROCESS of GPU {index} admits one server, so no standby domain"
            found.append(
                Obstacle(
                    ProtectionLevel.GUARD,
                    f"compute mode of GPU {index}",
                    why,
                    f"run nvidia-smi -i {index} -c 0",
                )
            )
        return found

    def conditions(self) -> list[Condition]:
        """Note the levels now. Return a condition for each unknown user in the configuration, and for each
        GPU that has less than the configuration names or less than is proven for it."""
        found = list(self._unknown)
        for uuid, gpu in self._gpus.items():
            now = self.of([uuid])
            wanted = self._wanted(uuid)
            if any(each.passing for each in self._obstacles(uuid)):
                continue
            if now.level.rank < wanted.rank:
                detail = f"{now.level.value} instead of {wanted.value}: {now.why}"
                found.append(Condition(Code.PROTECTION_LOWERED, f"GPU {gpu.index}", detail))
            elif now.level is not self._highest.get(uuid):
                # A field named level would be overwritten by the severity of the log line.
                reason = {"why": now.why, "remedy": now.remedy} if now.why else {}
                log.info("protection", gpu=gpu.index, protection=now.level.value, **reason)
            self._highest[uuid] = max(now.level, self._highest.get(uuid, now.level), key=_rank)
        return found

    def _wanted(self, uuid: str) -> ProtectionLevel:
        """Return the level below which the GPU is degraded.

        For the simulated GPU the highest level so far: it often has no driver files, which is no degradation.
        """
        if self.setting is not ProtectSetting.AUTO:
            return self.setting.limit
        if self._is_real:
            return level(self.setting, None, self._on(uuid), self._chosen(uuid)).level
        return self._highest.get(uuid, ProtectionLevel.OBSERVE)

    # -- views -------------------------------------------------------------------------------------------

    def views(self) -> dict[str, dict[str, Any]]:
        """Return the view of each GPU, for `status`."""
        return {uuid: self._view(uuid, self.of([uuid])) for uuid in self._hardware}

    def view(self) -> dict[str, Any]:
        """Return the view of the node: of the GPU with the lowest level."""
        levels = {uuid: self.of([uuid]) for uuid in self._hardware}
        lowest = min(levels, key=lambda uuid: levels[uuid].level.rank)
        return self._view(lowest, levels[lowest])

    def _view(self, uuid: str, now: Protection) -> dict[str, Any]:
        hardware = self._hardware[uuid]
        return {
            "setting": self.setting.value,
            **protection_view(now),
            "driver": hardware.driver,
            "gpu": hardware.gpu,
            "evidence": ", ".join(file for file, _ in hardware.proven.evidence)
            if hardware.proven is not None
            else "",
        }

    def checks(self) -> list[Check]:
        """Return the lines for `doctor`: the level, then each obstacle."""
        same = len({(self._hardware[uuid], self.of([uuid])) for uuid in self._hardware}) == 1
        found: dict[str, Check] = {}
        for uuid, gpu in self._gpus.items():
            name = "protection" if same else f"protection of GPU {gpu.index}"
            found.setdefault(name, self._check(name, uuid))
        for uuid in self._hardware:
            most = self.of([uuid]).level
            for each in [*self._obstacles(uuid), *(o for o in self._others() if o.limit.rank < most.rank)]:
                ok = None if self.setting is ProtectSetting.AUTO else False
                found.setdefault(each.name, Check(each.name, ok, each.why, each.remedy))
        return list(found.values())

    def stalls(self, state: State) -> dict[str, float | None]:
        """Return how long each GPU stands still at an SM exception now [ms]; None: not measured."""
        found: dict[str, float | None] = {}
        for uuid in self._gpus:
            proven = self._on(uuid).proven
            stall = proven.stall if proven is not None else None
            found[uuid] = None if stall is None else stall.of(*contexts_on(state, uuid))
        return found

    def stall_checks(self, state: State) -> list[Check]:
        """Return a line for `doctor` for each GPU: an estimate by the contexts that are there now."""
        found = []
        for uuid, stall_ms in self.stalls(state).items():
            contexts, standbys = contexts_on(state, uuid)
            now = f"{contexts} client context(s) and {standbys} standby context(s)"
            length = "not measured" if stall_ms is None else f"about {stall_ms:.0f} ms"
            remedy = "" if stall_ms is None else "fewer contexts shorten it: [failover] standby_contexts"
            name = f"stall of GPU {self._gpus[uuid].index}"
            found.append(Check(name, None, f"{length} at an SM exception, with {now}", remedy))
        return found

    def _check(self, name: str, uuid: str) -> Check:
        now, hardware = self.of([uuid]), self._hardware[uuid]
        known = hardware.proven is not None and now.level.rank <= hardware.proven.level.rank
        finding = f"{now.level.value} ({hardware.title}: {'proven' if known else 'not proven'})"
        if now.level is ProtectionLevel.FAILOVER:
            return Check(name, True, finding)
        lowered = now.level.rank < self._wanted(uuid).rank
        return Check(name, False if lowered else None, f"{finding}; no more because {now.why}", now.remedy)


def _rank(each: ProtectionLevel) -> int:
    return each.rank


def protection_view(protection: Protection) -> dict[str, str]:
    """Return a level as the replies of `env` and `status` have it."""
    return {"level": protection.level.value, "why": protection.why, "remedy": protection.remedy}


def hardware_of(backend: Backend, gpus: Iterable[Gpu]) -> Mapping[str, Hardware]:
    """Return the hardware of each GPU. May block: it asks NVML."""
    try:
        driver = backend.devices.driver_version()
    except MpsdError as error:
        log.warning(
            "cannot read the driver's version; the level is that of an unknown driver", reason=str(error)
        )
        driver = ""
    return {
        gpu.uuid: Hardware(driver, gpu.name, drivers.proven(backend.name, driver, gpu.name)) for gpu in gpus
    }


def of_descriptors(budget: DescriptorBudget) -> list[Obstacle]:
    """Return the obstacle of a daemon that can hold no further memory of programs."""
    if budget.fits(Purpose.SEGMENT):
        return []
    why = "mpsd has no descriptor left for memory of programs"
    return [Obstacle(ProtectionLevel.OBSERVE, "descriptors for the vault", why, f"raise {REMEDY}")]


def _rights(mine: int, uid: int | None) -> list[Obstacle]:
    """Return the obstacle of an mpsd that the ordinary user `mine` runs, for programs of another user."""
    if mine == 0:
        return []
    why = f"mpsd runs as uid {mine}, and may not hold descriptors of uid {uid}"
    return [Obstacle(ProtectionLevel.OBSERVE, "rights of mpsd", why, "run mpsd as root")]
