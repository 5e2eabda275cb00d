"""The configuration, converted for the parts of the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import structlog

from mpsd.base.conditions import Code, Condition
from mpsd.base.model import Gpu, GuardClass
from mpsd.base.protection import ProtectSetting
from mpsd.clients import attach
from mpsd.config.schema import Config, GuardSetting, StartSetting, VaultSettings
from mpsd.core.state import TIME_BUDGET, Policy
from mpsd.core.vault import Limits, Quota
from mpsd.daemon.protection import NodeProtection
from mpsd.gpu.base import Backend
from mpsd.zones.grants import ZoneLimits

log = structlog.get_logger("mpsd.options")

# The classes that `auto` enables. Measurements: mpsd/docs/mechanisms.md, "The outer guard".
SAFE_GUARDS = frozenset({GuardClass.LOW})


def policy_of(config: Config, backend: Backend, protection: NodeProtection, gpus: Sequence[Gpu]) -> Policy:
    """Return the operator's choices as core takes them."""
    domains, asked_ms = config.domains, config.eviction.terminate_deadline_ms
    return Policy(
        spare=domains.spare,
        on_demand=domains.start is StartSetting.FIRST_CLIENT,
        idle_s=domains.idle_s,
        kill_victims_after_s=domains.kill_victims_after_s,
        exclusive_drain_s=domains.exclusive_drain_s,
        laggard_report_s=domains.laggard_report_s,
        linger_limit_s=config.lease.linger_limit_s,
        terminate_deadline_s=asked_ms / 1e3 if asked_ms else backend.terminate_deadline_s,
        stop_deadline_s=domains.stop_deadline_s,
        start_retry_s=domains.start_retry_s,
        start_retry_max_s=domains.start_retry_max_s,
        zone_policy=config.guard.zone_policy,
        failover=protection.failover_mode,
        reach=protection.reach,
        users_without_failover=protection.users_without_failover,
        gpus_without_failover=protection.gpus_without_failover,
        gpu_memory=MappingProxyType({gpu.uuid: gpu.memory_bytes for gpu in gpus}),
        standby_contexts=config.failover.standby_contexts,
        # The operator who asks for fail-over by name wants it at its price.
        time_budget=0 if config.protect is ProtectSetting.FAILOVER else TIME_BUDGET,
        moves_per_minute=config.failover.per_minute,
        move_wait_s=config.failover.answer_s,
        standby_linger_s=config.failover.linger_s,
        evict_offender=config.failover.evict_offender,
        attach_deadline_s=attach.ATTACH_DEADLINE_S,
        clients_per_domain=config.limits.clients,
    )


def guard_classes(config: Config, backend: Backend, *, isolated: bool) -> frozenset[GuardClass]:
    """Return the enabled guard classes; none if the GPU may use host pointers, because a guard breaks those.

    `isolated`: the kernel module absorbs the same accesses and names the client, so only classes set to "on"
    are used.
    """
    if backend.host_pointers_work:
        return frozenset()
    chosen = {kind: getattr(config.guard, kind.value) for kind in GuardClass}
    return frozenset(
        kind
        for kind, setting in chosen.items()
        if setting is GuardSetting.ON
        or (setting is GuardSetting.AUTO and kind in SAFE_GUARDS and not isolated)
    )


def vault_descriptors(config: Config) -> int:
    """Return the limit of segments in all. The default leaves leases half of a smaller store."""
    chosen, share = config.vault.descriptors, config.store.max_descriptors // 2
    return min(chosen, share) if chosen == VaultSettings().descriptors else chosen


def vault_limits(config: Config) -> Limits:
    """Return the operator's quotas as core takes them."""
    v = config.vault
    return Limits(
        client=Quota(v.client_bytes, v.client_descriptors),
        user=Quota(v.user_bytes, v.user_descriptors),
        kept=Quota(v.kept_bytes, v.kept_descriptors),
        descriptors=vault_descriptors(config),
        keep_age_s=v.keep_age_s,
    )


def zone_limits(config: Config) -> ZoneLimits:
    """Return how many bytes all clients, and each client, may cover with guard zones of their own."""
    guard = config.guard
    return ZoneLimits(guard.zones_bytes_per_gpu, guard.zones_bytes_per_client, guard.zones_per_client)


def absent_gpus(config: Config, gpus: Sequence[Gpu]) -> list[Condition]:
    """Return a condition for each absent GPU that the configuration names."""
    here = [gpu.uuid for gpu in gpus]
    found = []
    for name in (name for span in config.domains.span for name in span):
        if name not in here:
            found.append(Condition(Code.GPU_ABSENT, name, "mpsd leaves it out of domains.span"))
    for name in config.limits.pinned_device_memory:
        key = "limits.pinned_device_memory"
        if name.isdecimal() and int(name) not in {gpu.index for gpu in gpus}:
            text = f"nvidia-smi shows no GPU of this index, so its limit in {key} has no effect"
            found.append(Condition(Code.GPU_ABSENT, name, text))
        elif name.startswith("GPU-") and not any(uuid.startswith(name) for uuid in here):
            found.append(Condition(Code.GPU_ABSENT, name, f"its limit in {key} has no effect"))
    return found


def tell_indices(config: Config, gpus: Sequence[Gpu]) -> None:
    """Log the memory limits by index of a machine of several GPUs: in earlier versions they meant others."""
    indices = [name for name in config.limits.pinned_device_memory if name.isdecimal()]
    if indices and len(gpus) > 1:
        log.warning(
            "an index in limits.pinned_device_memory is that of nvidia-smi; in earlier versions it was the "
            "GPU's place in its domain",
            indices=indices,
            remedy="name each GPU by its UUID (nvidia-smi -L)",
        )
