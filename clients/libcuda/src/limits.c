// SPDX-License-Identifier: MIT
#include "limits.h"

#include <stdio.h>

#include "arena.h"
#include "debug.h"
#include "ledger.h"

/*
 * An overrun by 16 MiB is met, and no more: a grid that runs wild in zones cannot be ended before its faults
 * are serviced, which took 9 to 14 ms over 16 MiB, 15 to 25 over 32 and 40 to 70 over 64
 * (faultinject/evidence/guard-zones.md).
 */
#define DEFAULT_ZONE ((uint64_t)18 << 20)
#define LARGEST_ZONE ((uint64_t)16 << 30)
#define DEFAULT_QUARANTINE ((uint64_t)1 << 30)
#define DEFAULT_QUARANTINE_S 60
#define DEFAULT_MAPS 65530

/* Each zone is a mapping of this process, and the program needs some too. */
static uint64_t read_most_zones(void)
{
	unsigned long long maps = DEFAULT_MAPS;
	FILE *file = fopen("/proc/sys/vm/max_map_count", "re");

	if (file) {
		if (fscanf(file, "%llu", &maps) != 1)
			maps = DEFAULT_MAPS;
		fclose(file);
	}
	return maps / 4 < MPSD_LEDGER_ZONES ? maps / 4 : MPSD_LEDGER_ZONES;
}

struct mpsd_limits mpsd_limits_read(bool daemon)
{
	struct mpsd_limits limits = { 0 };

	if (!daemon)
		limits.own_budget = mpsd_debug_number(MPSD_DEBUG_ZONE_BUDGET, 0, 1, 0, UINT64_MAX);
	if (!daemon && !limits.own_budget)
		return limits;
	limits.zone_bytes = mpsd_debug_number(MPSD_DEBUG_ZONE_BYTES, DEFAULT_ZONE, ARENA_GRANULE, 0, LARGEST_ZONE);
	limits.far_bytes = mpsd_debug_number(MPSD_DEBUG_FAR_BYTES, 0, ARENA_GRANULE, 0, MPSD_FAR_MOST);
	limits.quarantine_bytes = mpsd_debug_number(MPSD_DEBUG_QUARANTINE_BYTES, DEFAULT_QUARANTINE, 1, 0, UINT64_MAX);
	limits.quarantine_ns =
		1000000000ull * mpsd_debug_number(MPSD_DEBUG_QUARANTINE_S, DEFAULT_QUARANTINE_S, 1, 0, UINT32_MAX);
	limits.zones = read_most_zones();
	return limits;
}
