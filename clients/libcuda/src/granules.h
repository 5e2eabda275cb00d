/* SPDX-License-Identifier: MIT */
/* What the files of an arena share: its granules, by their numbers. */
#pragma once

#include "arena.h"

uint32_t mpsd_granules_of(size_t size);
struct arena_range mpsd_granules_range(const struct arena *arena, uint32_t granule, uint32_t count);

static inline bool mpsd_is_within(const struct arena_extent *extent, uint64_t granule)
{
	return granule - extent->first < extent->count;
}

/*
 * A free must not fail. Between n pieces in use there are at most n + 1 holes, and one more while two are being joined:
 * so room is made when a piece is taken. False: no memory.
 */
bool mpsd_granules_room(struct arena *arena);

/* The lowest that are enough; arena->granules if there are none. And back. */
uint32_t mpsd_granules_take(struct arena *arena, uint32_t count);
void mpsd_granules_give(struct arena *arena, uint32_t first, uint32_t count);

/* They are one piece's; nobody's. */
void mpsd_granules_mark(struct arena *arena, uint32_t first, uint32_t count);
void mpsd_granules_leave(struct arena *arena, uint32_t first, uint32_t count);

/* The next one that is not free, after one that is; after another the next one. */
uint64_t mpsd_granules_behind(const struct arena *arena, uint64_t granule);

/* NULL: it is in no hold. */
struct arena_hold *mpsd_hold_at(const struct arena *arena, uint64_t granule);

/* In a hold, the next one that is a piece's, or the end of it; 0: it is in none. */
uint64_t mpsd_holds_behind(const struct arena *arena, uint64_t granule);
void mpsd_holds_close(struct arena *arena);
