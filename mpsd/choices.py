"""What the operator chose, as the parts of the daemon take it."""

from __future__ import annotations

from collections.abc import Sequence

from mpsd.config import Config, GuardSetting
from mpsd.core.state import Policy
from mpsd.core.vault import Limits, Quota
from mpsd.gpu.base import Backend
from mpsd.model import FailoverMode, GuardClass
from mpsd.zones.grants import ZoneLimits

# What `auto` means. The measurements behind it: faultinject/reports/README.md.
SAFE_GUARDS = frozenset({GuardClass.LOW})


def policy_of(config: Config, backend: Backend) -> Policy:
    """The operator's choices as core takes them."""
    domains, asked_ms = config.domains, config.eviction.terminate_deadline_ms
    return Policy(
        spare=domains.spare,
        kill_victims_after_s=domains.kill_victims_after_s,
        exclusive_drain_s=domains.exclusive_drain_s,
        laggard_report_s=domains.laggard_report_s,
        linger_limit_s=config.lease.linger_limit_s,
        terminate_deadline_s=asked_ms / 1e3 if asked_ms else backend.terminate_deadline_s,
        stop_deadline_s=domains.stop_deadline_s,
        start_retry_s=domains.start_retry_s,
        start_retry_max_s=domains.start_retry_max_s,
        evidence_window_s=config.journal.evidence_window_s,
        zone_policy=config.guard.zone_policy,
        failover=config.failover.mode if config.failover.enabled else FailoverMode.OFF,
        moves_per_minute=config.failover.per_minute,
        move_wait_s=config.failover.answer_s,
        standby_linger_s=config.failover.linger_s,
        evict_offender=config.failover.evict_offender,
    )


def guard_classes(config: Config, backend: Backend, *, isolated: bool) -> frozenset[GuardClass]:
    """The classes of range that are on; none where the GPU may use host pointers: a guard breaks them.

    `isolated`: the kernel part absorbs what they would, and says who did it: only what was asked for.
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


def vault_limits(config: Config) -> Limits:
    """The operator's quotas as core takes them."""
    v = config.vault
    return Limits(
        client=Quota(v.client_bytes, v.client_descriptors),
        user=Quota(v.user_bytes, v.user_descriptors),
        kept=Quota(v.kept_bytes, v.kept_descriptors),
        descriptors=v.descriptors,
        keep_age_s=v.keep_age_s,
    )


def zone_limits(config: Config) -> ZoneLimits:
    """How much all clients, and each, may cover with guard zones of their own."""
    guard = config.guard
    return ZoneLimits(guard.zones_bytes_per_gpu, guard.zones_bytes_per_client, guard.zones_per_client)


def absent_gpus(config: Config, here: Sequence[str], largest: int) -> list[str]:
    """What the configuration says of GPUs that are not there, in words. `largest`: a domain's most GPUs."""
    found = []
    for name in (name for span in config.domains.span for name in span):
        if name not in here:
            found.append(f"domains.span names {name}, which is not on this machine: it is left out")
    for name in config.limits.pinned_device_memory:
        key = f"limits.pinned_device_memory names {name}"
        if name.isdecimal() and int(name) >= largest:
            found.append(f"{key}: ordinals count the GPUs of one domain, from 0 to {largest - 1} here")
        elif name.startswith("GPU-") and not any(uuid.startswith(name) for uuid in here):
            found.append(f"{key}, which is not on this machine: it limits nothing")
    return found
