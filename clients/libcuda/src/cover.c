// SPDX-License-Identifier: MIT
#include "cover.h"

#include "notes.h"
#include "uvmrange.h"

static void count(const struct mpsd_zone *zone, bool more)
{
	bool managed = zone->kind == MPSD_ZONE_MANAGED;
	uint64_t *bytes = managed ? &mpsd_ledger->managed_bytes : &mpsd_ledger->sparse_bytes;
	uint64_t *zones = managed ? &mpsd_ledger->managed_zones : &mpsd_ledger->sparse_zones;

	*bytes += more ? zone->size : -zone->size;
	*zones += more ? 1 : -1ull;
	if (zone->role == MPSD_ZONE_FAR) {
		mpsd_ledger->far_bytes += more ? zone->size : -zone->size;
		mpsd_ledger->far_zones += more ? 1 : -1ull;
	}
}

/* A zone that the daemon cannot look up would make hits that nobody understands. */
static bool note(struct mpsd_zone *zone, enum mpsd_zone_kind kind)
{
	zone->row = mpsd_ledger_zone(zone->base, zone->size, kind, zone->role);
	if (zone->row < 0) {
		mpsd_range_free(zone->base, zone->size, kind == MPSD_ZONE_MANAGED);
		return false;
	}
	zone->kind = kind;
	count(zone, true);
	return true;
}

bool mpsd_cover_managed(struct mpsd_zone *zone)
{
	bool laid = zone->role == MPSD_ZONE_NULL_PAGE ? mpsd_range_manage_null()
						      : mpsd_range_manage(zone->base, zone->size);

	return laid && note(zone, MPSD_ZONE_MANAGED);
}

bool mpsd_cover_sparse(struct mpsd_zone *zone, const uint8_t gpu[16])
{
	return mpsd_range_sparse(zone->base, zone->size, gpu) && note(zone, MPSD_ZONE_SPARSE);
}

bool mpsd_cover_take_away(struct mpsd_zone *zone)
{
	if (zone->kind == MPSD_ZONE_NONE)
		return true;
	if (!mpsd_range_free(zone->base, zone->size, zone->kind == MPSD_ZONE_MANAGED))
		return false;
	mpsd_ledger_zone_gone(zone->row);
	count(zone, false);
	zone->kind = MPSD_ZONE_NONE;
	return true;
}
