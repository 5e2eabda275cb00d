/* SPDX-License-Identifier: MIT */
/* One zone: laid over a range, with its row and its part of the ledger's counters. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ledger.h"

struct mpsd_zone {
	enum mpsd_zone_kind kind;	/* NONE: it is not laid */
	enum mpsd_zone_role role;
	uint64_t base;
	size_t size;
	int row;
};

/* Lay a zone of which base, size and role are set. False: it is not laid, and nothing has changed. */
bool mpsd_cover_managed(struct mpsd_zone *zone);
bool mpsd_cover_sparse(struct mpsd_zone *zone, const uint8_t gpu[16]);

/* True also where nothing was laid. False: it is still there, and so is its row. */
bool mpsd_cover_take_away(struct mpsd_zone *zone);
