/* SPDX-License-Identifier: MIT */
/*
 * MPSD_DEBUG="name=value,name=value": settings for tests and troubleshooting. Read once, in the first call; not
 * in a setuid program. An unknown name and a malformed field are reported on stderr.
 */
#pragma once

#include <stdint.h>

enum mpsd_debug {
	MPSD_DEBUG_VAULT,		/* 0: every call is passed through; 1: a window without a daemon */
	MPSD_DEBUG_WINDOW_BASE,
	MPSD_DEBUG_WINDOW_BYTES,
	MPSD_DEBUG_PLACE_BASE,		/* of the driver's own mappings, with a guard over host memory */
	MPSD_DEBUG_ZONE_BYTES,
	MPSD_DEBUG_ZONE_BUDGET,		/* bytes of zones without a daemon */
	MPSD_DEBUG_FAR_BYTES,
	MPSD_DEBUG_QUARANTINE_BYTES,
	MPSD_DEBUG_QUARANTINE_S,
	MPSD_DEBUG_HOST_GUARD_BYTES,
	MPSD_DEBUG_STANDBY,		/* eager or lazy: when the standby context is made */
	MPSD_DEBUG_RELAY,		/* auto, off or always (failover/wish.h) */
	MPSD_DEBUG_SNAPSHOT_MIB,	/* limit of the snapshot buffers */
	MPSD_DEBUG_PATIENCE_MS,
	MPSD_DEBUG_RESCUE_MS,		/* how long a dead or silent daemon is waited for (failover/rescue.h) */
	MPSD_DEBUG_SETTLE_MS,
	MPSD_DEBUG_AUTOPSY_MS,
	MPSD_DEBUG_CUTTERS,
	MPSD_DEBUG_RELEASE,		/* 0: the memory of a left context stays on the GPU */
	MPSD_DEBUG_DIE_BEFORE_EFFECT,	/* of the daemon (mpsd/base/debug.py) */
	MPSD_DEBUG_DIE_AFTER_SIGNAL,	/* likewise */
	MPSD_DEBUG_COUNT
};

/* NULL: not set. Valid for the life of the process. */
const char *mpsd_debug_text(enum mpsd_debug field);

/*
 * A multiple of `unit` from `least` to `most`, in C's notation. `otherwise` where it is not set or is another text, which
 * is reported.
 */
uint64_t mpsd_debug_number(enum mpsd_debug field, uint64_t otherwise, uint64_t unit, uint64_t least, uint64_t most);

/* The value of a variable of the previous release, NULL if it is not set. One line on stderr names its successor. */
const char *mpsd_debug_retired(const char *variable, const char *successor);
