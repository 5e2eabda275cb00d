// SPDX-License-Identifier: MIT
#include "arena.h"

#include <stdlib.h>
#include <string.h>

#include "granules.h"

#define UNITS (ARENA_GRANULE / ARENA_UNIT)
#define WORD_BITS 64

/* A granule in units. `units[u]` is how many an allocation that begins at u has, 0 elsewhere. */
struct arena_slab {
	struct arena_slab *next, **link;	/* among the roomy ones */
	uint32_t granule;
	uint32_t used;
	uint32_t next_unit;			/* where to look first */
	uint64_t taken[UNITS / WORD_BITS];
	uint16_t units[UNITS];
	uint32_t size[UNITS];			/* bytes asked for */
};

/* With their zones; arena->granules if there are none. */
static uint32_t take_granules(struct arena *arena, uint32_t count)
{
	uint32_t first = mpsd_granules_take(arena, count + 2 * arena->zone);

	if (first == arena->granules)
		return first;
	first += arena->zone;
	mpsd_granules_mark(arena, first, count);
	if (first < arena->lowest)
		arena->lowest = first;
	return first;
}

/* Slabs */

static void make_roomy(struct arena *arena, struct arena_slab *slab)
{
	slab->next = NULL;
	slab->link = arena->roomy_end;
	*arena->roomy_end = slab;
	arena->roomy_end = &slab->next;
}

static void make_full(struct arena *arena, struct arena_slab *slab)
{
	*slab->link = slab->next;
	if (slab->next)
		slab->next->link = slab->link;
	else
		arena->roomy_end = slab->link;
	slab->link = NULL;
}

static bool is_taken(const struct arena_slab *slab, uint32_t unit)
{
	return slab->taken[unit / WORD_BITS] >> unit % WORD_BITS & 1;
}

static void mark(struct arena_slab *slab, uint32_t first, uint32_t count, bool taken)
{
	for (uint32_t unit = first; unit < first + count; unit++) {
		uint64_t bit = (uint64_t)1 << unit % WORD_BITS;

		if (taken)
			slab->taken[unit / WORD_BITS] |= bit;
		else
			slab->taken[unit / WORD_BITS] &= ~bit;
	}
	slab->used += taken ? count : -count;
}

/*
 * The first of `count` free units in a row, from unit `from` on; UNITS if there are none. Full words are
 * stepped over whole.
 */
static uint32_t find_from(const struct arena_slab *slab, uint32_t from, uint32_t count)
{
	uint32_t run = 0;

	for (uint32_t unit = from; unit < UNITS; unit++) {
		if (unit % WORD_BITS == 0 && slab->taken[unit / WORD_BITS] == UINT64_MAX) {
			run = 0;
			unit += WORD_BITS - 1;
			continue;
		}
		run = is_taken(slab, unit) ? 0 : run + 1;
		if (run == count)
			return unit + 1 - count;
	}
	return UNITS;
}

/* Behind the latest allocation first, so that freed units are given out as late as the slab allows. */
static uint32_t find_units(const struct arena_slab *slab, uint32_t count)
{
	uint32_t unit = find_from(slab, slab->next_unit, count);

	return unit < UNITS || !slab->next_unit ? unit : find_from(slab, 0, count);
}

static struct arena_slab *new_slab(struct arena *arena)
{
	struct arena_slab *slab = calloc(1, sizeof(*slab));

	if (!slab)
		return NULL;
	slab->granule = take_granules(arena, 1);
	if (slab->granule == arena->granules) {
		free(slab);
		return NULL;
	}
	arena->slab[slab->granule] = slab;
	make_roomy(arena, slab);
	return slab;
}

static uint64_t alloc_small(struct arena *arena, size_t size, struct arena_range *fresh)
{
	uint32_t count = (uint32_t)((size + ARENA_UNIT - 1) / ARENA_UNIT), unit = UNITS;
	struct arena_slab *slab;

	for (slab = arena->roomy; slab; slab = slab->next) {
		if (UNITS - slab->used >= count)
			unit = find_units(slab, count);
		if (unit < UNITS)
			break;
	}
	if (!slab) {
		slab = new_slab(arena);
		if (!slab)
			return 0;
		*fresh = mpsd_granules_range(arena, slab->granule, 1);
		unit = 0;
	}
	mark(slab, unit, count, true);
	slab->next_unit = unit + count;
	slab->units[unit] = (uint16_t)count;
	slab->size[unit] = (uint32_t)size;
	if (slab->used == UNITS)
		make_full(arena, slab);
	return arena->base + slab->granule * ARENA_GRANULE + unit * ARENA_UNIT;
}

static bool free_small(struct arena *arena, struct arena_slab *slab, size_t offset, struct arena_range *empty)
{
	uint32_t unit = (uint32_t)(offset / ARENA_UNIT);

	if (offset % ARENA_UNIT || !slab->units[unit])
		return false;
	if (!slab->link)
		make_roomy(arena, slab);
	mark(slab, unit, slab->units[unit], false);
	slab->units[unit] = 0;
	if (slab->used)
		return true;
	make_full(arena, slab);
	*empty = mpsd_granules_range(arena, slab->granule, 1);
	arena->slab[slab->granule] = NULL;
	mpsd_granules_leave(arena, slab->granule, 1);
	free(slab);
	return true;
}

static bool find_small(const struct arena *arena, const struct arena_slab *slab, size_t offset,
		       struct arena_range *found)
{
	uint32_t unit = (uint32_t)(offset / ARENA_UNIT);

	if (!is_taken(slab, unit))
		return false;
	while (!slab->units[unit])
		unit--;
	found->base = arena->base + slab->granule * ARENA_GRANULE + unit * ARENA_UNIT;
	found->size = slab->size[unit];
	return true;
}

static bool find_large(const struct arena *arena, uint32_t granule, struct arena_range *found)
{
	uint32_t first = arena->head[granule] - 1;

	found->base = arena->base + first * ARENA_GRANULE;
	found->size = arena->size[first];
	return true;
}

/* The whole */

bool arena_open(struct arena *arena, uint64_t base, size_t size, size_t lead, size_t zone)
{
	uint32_t granules = (uint32_t)(size / ARENA_GRANULE), first = (uint32_t)(lead / ARENA_GRANULE);

	*arena = (struct arena){
		.base = base,
		.granules = granules,
		.zone = (uint32_t)(zone / ARENA_GRANULE),
		.lowest = granules,
		.head = calloc(granules, sizeof(*arena->head)),
		.size = calloc(granules, sizeof(*arena->size)),
		.slab = calloc(granules, sizeof(*arena->slab)),
	};
	arena->roomy_end = &arena->roomy;
	if (arena->head && arena->size && arena->slab && mpsd_granules_room(arena)) {
		arena->pieces = 1;
		mpsd_granules_give(arena, first, granules - first);
		return true;
	}
	arena_close(arena);
	return false;
}

void arena_close(struct arena *arena)
{
	for (uint32_t granule = 0; arena->slab && granule < arena->granules; granule++)
		free(arena->slab[granule]);
	free(arena->head);
	free(arena->size);
	free(arena->slab);
	free(arena->extents);
	mpsd_holds_close(arena);
	*arena = (struct arena){ 0 };
}

uint64_t arena_alloc(struct arena *arena, size_t size, struct arena_range *fresh)
{
	uint32_t granule;

	*fresh = (struct arena_range){ 0, 0 };
	if (size <= ARENA_SMALL)
		return alloc_small(arena, size, fresh);
	if (size > arena->granules * ARENA_GRANULE)
		return 0;
	granule = take_granules(arena, mpsd_granules_of(size));
	if (granule == arena->granules)
		return 0;
	arena->size[granule] = size;
	*fresh = mpsd_granules_range(arena, granule, mpsd_granules_of(size));
	return fresh->base;
}

bool arena_free(struct arena *arena, uint64_t address, struct arena_range *empty)
{
	uint64_t offset = address - arena->base;
	uint32_t granule = (uint32_t)(offset / ARENA_GRANULE);

	*empty = (struct arena_range){ 0, 0 };
	if (offset / ARENA_GRANULE >= arena->granules)
		return false;
	if (arena->slab[granule])
		return free_small(arena, arena->slab[granule], offset % ARENA_GRANULE, empty);
	if (offset % ARENA_GRANULE || arena->head[granule] != granule + 1 || mpsd_hold_at(arena, granule))
		return false;
	*empty = mpsd_granules_range(arena, granule, mpsd_granules_of(arena->size[granule]));
	mpsd_granules_leave(arena, granule, mpsd_granules_of(arena->size[granule]));
	return true;
}

void arena_give(struct arena *arena, struct arena_range empty)
{
	uint32_t first = (uint32_t)((empty.base - arena->base) / ARENA_GRANULE);

	if (empty.size)
		mpsd_granules_give(arena, first - arena->zone, mpsd_granules_of(empty.size) + 2 * arena->zone);
}

bool arena_find(const struct arena *arena, uint64_t address, struct arena_range *found)
{
	uint64_t offset = address - arena->base;
	uint32_t granule = (uint32_t)(offset / ARENA_GRANULE);
	bool is_used;

	*found = (struct arena_range){ 0, 0 };
	if (offset / ARENA_GRANULE >= arena->granules || !arena->head[granule] || mpsd_hold_at(arena, granule))
		return false;
	if (arena->slab[granule])
		is_used = find_small(arena, arena->slab[granule], offset % ARENA_GRANULE, found);
	else
		is_used = find_large(arena, granule, found);
	/* Not what is left of its last unit or granule. */
	return is_used && address - found->base < found->size;
}

bool arena_piece(const struct arena *arena, uint64_t address, struct arena_range *piece)
{
	uint64_t granule = (address - arena->base) / ARENA_GRANULE;
	uint32_t first = granule < arena->granules ? arena->head[granule] : 0;

	if (!first--)
		return false;
	*piece = mpsd_granules_range(arena, first, arena->slab[first] ? 1 : mpsd_granules_of(arena->size[first]));
	return true;
}

/* The next granule after one that is no piece's that may be one's: most of a window is free. */
static uint64_t behind_gap(const struct arena *arena, uint64_t granule)
{
	uint64_t next = mpsd_holds_behind(arena, granule);

	return next ? next : mpsd_granules_behind(arena, granule);
}

bool arena_next_piece(const struct arena *arena, uint64_t address, struct arena_range *piece)
{
	uint64_t granule = (address - arena->base) / ARENA_GRANULE;

	while (granule < arena->granules && !arena_piece(arena, arena->base + granule * ARENA_GRANULE, piece))
		granule = behind_gap(arena, granule);
	return granule < arena->granules;
}

bool arena_first(struct arena *arena, struct arena_range *found)
{
	const struct arena_slab *slab;

	while (arena->lowest < arena->granules &&
	       (!arena->head[arena->lowest] || mpsd_hold_at(arena, arena->lowest)))
		arena->lowest++;
	if (arena->lowest >= arena->granules)
		return false;
	slab = arena->slab[arena->lowest];
	if (!slab)
		return find_large(arena, arena->lowest, found);
	for (uint32_t unit = 0; unit < UNITS; unit++)
		if (slab->units[unit])
			return find_small(arena, slab, unit * ARENA_UNIT, found);
	return false;
}
