/* SPDX-License-Identifier: MIT */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define MPSD_FAR_MOST ((uint64_t)16 << 30)

/* Sizes of guard zones and of the quarantine: the defaults, or those of MPSD_DEBUG (debug.h). */
struct mpsd_limits {
	uint64_t zone_bytes;		/* on each side of a piece; 0: none, and nothing else counts */
	uint64_t far_bytes;		/* below all pieces of a window, and behind them; 0: none */
	uint64_t own_budget;		/* bytes of managed zones where no daemon is to be asked */
	uint64_t quarantine_bytes, quarantine_ns;
	uint64_t zones;			/* of any kind, at a time */
};

struct mpsd_limits mpsd_limits_read(bool daemon);
