// SPDX-License-Identifier: MIT
#include "granules.h"

#include <stdlib.h>
#include <string.h>

uint32_t mpsd_granules_of(size_t size)
{
	return (uint32_t)((size + ARENA_GRANULE - 1) / ARENA_GRANULE);
}

struct arena_range mpsd_granules_range(const struct arena *arena, uint32_t granule, uint32_t count)
{
	return (struct arena_range){ arena->base + granule * ARENA_GRANULE, count * ARENA_GRANULE };
}

bool mpsd_granules_room(struct arena *arena)
{
	uint32_t room = arena->extent_room ? 2 * arena->extent_room : 64;
	struct arena_extent *larger;

	if (arena->pieces + 2 < arena->extent_room)
		return true;
	larger = realloc(arena->extents, room * sizeof(*larger));
	if (!larger)
		return false;
	arena->extents = larger;
	arena->extent_room = room;
	return true;
}

static void drop_extent(struct arena *arena, uint32_t at)
{
	memmove(arena->extents + at, arena->extents + at + 1,
		(arena->extent_count - at - 1) * sizeof(*arena->extents));
	arena->extent_count--;
}

uint32_t mpsd_granules_take(struct arena *arena, uint32_t count)
{
	if (!mpsd_granules_room(arena))
		return arena->granules;
	for (uint32_t i = 0; i < arena->extent_count; i++) {
		struct arena_extent *extent = &arena->extents[i];
		uint32_t first = extent->first;

		if (extent->count < count)
			continue;
		extent->first += count;
		extent->count -= count;
		if (!extent->count)
			drop_extent(arena, i);
		arena->pieces++;
		arena->changes++;
		return first;
	}
	return arena->granules;
}

void mpsd_granules_mark(struct arena *arena, uint32_t first, uint32_t count)
{
	for (uint32_t g = first; g < first + count; g++)
		arena->head[g] = first + 1;
}

void mpsd_granules_leave(struct arena *arena, uint32_t first, uint32_t count)
{
	memset(arena->head + first, 0, count * sizeof(*arena->head));
}

void mpsd_granules_give(struct arena *arena, uint32_t first, uint32_t count)
{
	uint32_t low = 0, high = arena->extent_count;
	struct arena_extent *at;

	arena->pieces--;
	while (low < high) {
		uint32_t middle = (low + high) / 2;

		if (arena->extents[middle].first > first)
			high = middle;
		else
			low = middle + 1;
	}
	at = arena->extents + low;
	memmove(at + 1, at, (arena->extent_count - low) * sizeof(*at));
	*at = (struct arena_extent){ first, count };
	arena->extent_count++;
	if (low + 1 < arena->extent_count && at[1].first == first + count) {
		at->count += at[1].count;
		drop_extent(arena, low + 1);
	}
	if (low && at[-1].first + at[-1].count == first) {
		at[-1].count += at->count;
		drop_extent(arena, low);
	}
}

uint64_t mpsd_granules_behind(const struct arena *arena, uint64_t granule)
{
	uint32_t low = 0, high = arena->extent_count;

	while (low < high) {
		uint32_t middle = (low + high) / 2;

		if (arena->extents[middle].first > granule)
			high = middle;
		else
			low = middle + 1;
	}
	if (low && mpsd_is_within(&arena->extents[low - 1], granule))
		return (uint64_t)arena->extents[low - 1].first + arena->extents[low - 1].count;
	return granule + 1;
}
