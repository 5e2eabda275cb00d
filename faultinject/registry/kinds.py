"""The names of the fault kinds, one vocabulary for the harness, the simulated GPU and the reports."""

from __future__ import annotations

MMU = ("store", "load", "atomic", "null", "use_after_unmap", "read_only")
"""A kernel accesses memory that it may not access; UVM reports it."""

SM = (
    "noncanonical",
    "misaligned",
    "shared_window",
    "local_window",
    "trap",
    "breakpoint",
    "stack_overflow",
)
"""SM exceptions; UVM does not report them."""

CALL = ("wild_call", "wild_call_low")
ENGINE = ("pbdma",)
ENGINE_DELAY_MS = 50.0
"""On a GPU the stream stays busy this long, so that the target can be unmapped before the operation."""

HARMLESS = ("assert",)
DEATH = ("sigkill_running", "exit_running", "segfault_running", "sigkill_idle", "clean_exit")
HANG = ("endless",)
PROCESS = ("sigstop", "fork_using", "exec_using")
PARTS = ("server_death", "control_death", "mpsd_death")
"""Deaths of the processes that serve the clients."""

CIRCUMSTANCE = ("full_log_disk", "two_offenders", "dies_while_evicted", "other_domain", "outside_mps")
IDENTITY = ("pid_reuse", "churn")
GUARD = ("guard_low", "guard_file", "guard_heap", "guard_stack")
"""Out-of-bounds stores into each class of address range that a guard can cover."""

ZONE = (
    "zone_past_end",
    "zone_load",
    "zone_before_start",
    "zone_use_after_free",
    "zone_far",
    "zone_distant",
    "zone_distant_before",
    "zone_atomic",
    "zone_null",
    "zone_absorb",
    "zone_freeze",
    "zone_restart",
    "zone_sparse",
    "zone_host",
)
"""A program with the libcuda proxy accesses its guard zones."""

DISTANT = ("zone_distant", "zone_distant_before")
"""Those that access the far zones, GiBs away."""

GPU_KINDS = MMU + SM + CALL + ENGINE + HARMLESS + GUARD
"""Kinds that a kernel or the host engine commits."""

ALL = GPU_KINDS + ZONE + DEATH + HANG + PROCESS + PARTS + CIRCUMSTANCE + IDENTITY

MODES = ("stock", "mpsd")

KMOD = "kmod"
"""mpsd with the patched nvidia-uvm. This mode runs only when it is named."""

AUTO = "auto"
"""mpsd without a configured protection level; survivors run under mpsd-run. It runs only when it is named."""

EVERY_MODE = (*MODES, KMOD, AUTO)
