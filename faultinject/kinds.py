"""The names of the fault kinds, one vocabulary for the harness, the simulated GPU and the reports."""

from __future__ import annotations

MMU = ("store", "load", "atomic", "null", "use_after_unmap", "read_only")
"""A kernel touches memory that it may not touch; UVM sees it."""

SM = (
    "noncanonical",
    "misaligned",
    "shared_window",
    "local_window",
    "trap",
    "breakpoint",
    "stack_overflow",
)
"""An exception of the streaming multiprocessor; UVM does not see it."""

CALL = ("wild_call", "wild_call_low")
ENGINE = ("pbdma",)
ENGINE_DELAY_MS = 50.0
"""On a GPU the stream is kept busy this long, so that the target of what follows can be unmapped first."""

HARMLESS = ("assert",)
DEATH = ("sigkill_running", "exit_running", "segfault_running", "sigkill_idle", "clean_exit")
HANG = ("endless",)
PROCESS = ("sigstop", "fork_using", "exec_using")
PARTS = ("server_death", "control_death", "mpsd_death")
"""Deaths of what serves the clients."""

CIRCUMSTANCE = ("full_log_disk", "two_offenders", "dies_while_evicted", "other_domain", "outside_mps")
IDENTITY = ("pid_reuse", "churn")
GUARD = ("guard_low", "guard_file", "guard_heap", "guard_stack")
"""Stray stores into the classes of range that the outer guard can cover."""

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
"""A program with the libcuda proxy touches what its guard zones cover."""

DISTANT = ("zone_distant", "zone_distant_before")
"""Those that go GiBs away, into the far zones."""

GPU_KINDS = MMU + SM + CALL + ENGINE + HARMLESS + GUARD
"""Kinds that a kernel or the host engine commits on the GPU."""

ALL = GPU_KINDS + ZONE + DEATH + HANG + PROCESS + PARTS + CIRCUMSTANCE + IDENTITY

MODES = ("stock", "mpsd")

KMOD = "kmod"
"""mpsd with the kernel part, where nvidia-uvm is the patched one: a mode that is asked for by its name."""

EVERY_MODE = (*MODES, KMOD)
