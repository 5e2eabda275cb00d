// SPDX-License-Identifier: MIT
/* Addresses that their owner maps piece by piece (arena.h). */
#include <stdlib.h>
#include <string.h>

#include "granules.h"

struct arena_hold *mpsd_hold_at(const struct arena *arena, uint64_t granule)
{
	uint32_t low = 0, high = arena->hold_count;

	while (low < high) {
		uint32_t middle = (low + high) / 2;

		if (arena->holds[middle]->addresses.first > granule)
			high = middle;
		else
			low = middle + 1;
	}
	return low && mpsd_is_within(&arena->holds[low - 1]->addresses, granule) ? arena->holds[low - 1] : NULL;
}

static bool insert_hold(struct arena *arena, struct arena_hold hold)
{
	struct arena_hold *made = malloc(sizeof(*made));
	struct arena_hold **more = realloc(arena->holds, (arena->hold_count + 1) * sizeof(*more));
	uint32_t at = arena->hold_count;

	if (more)
		arena->holds = more;
	if (!made || !more) {
		free(made);
		return false;
	}
	*made = hold;
	for (; at && arena->holds[at - 1]->addresses.first > hold.addresses.first; at--)
		arena->holds[at] = arena->holds[at - 1];
	arena->holds[at] = made;
	arena->hold_count++;
	return true;
}

uint64_t arena_hold(struct arena *arena, size_t size, size_t alignment)
{
	uint64_t step = alignment / ARENA_GRANULE ? alignment / ARENA_GRANULE : 1, first;
	uint64_t whole = size / ARENA_GRANULE + 2 * (uint64_t)arena->zone + step - 1;
	struct arena_hold hold = { .runs = NULL };

	if (whole > arena->granules)
		return 0;
	hold.whole = (struct arena_extent){ mpsd_granules_take(arena, (uint32_t)whole), (uint32_t)whole };
	if (hold.whole.first == arena->granules)
		return 0;
	/* The window's own base need not be such a multiple. */
	first = hold.whole.first + arena->zone + arena->base / ARENA_GRANULE;
	first = (first + step - 1) / step * step - arena->base / ARENA_GRANULE;
	hold.addresses = (struct arena_extent){ (uint32_t)first, (uint32_t)(size / ARENA_GRANULE) };
	if (insert_hold(arena, hold))
		return arena->base + first * ARENA_GRANULE;
	mpsd_granules_give(arena, hold.whole.first, hold.whole.count);
	return 0;
}

bool arena_let_go(struct arena *arena, struct arena_range range)
{
	uint64_t granule = (range.base - arena->base) / ARENA_GRANULE;
	struct arena_hold *hold = mpsd_hold_at(arena, granule);
	uint32_t at = 0;

	if (!hold || hold->addresses.first != granule || hold->addresses.count * ARENA_GRANULE != range.size ||
	    hold->pieces)
		return false;
	while (arena->holds[at] != hold)
		at++;
	for (arena->hold_count--; at < arena->hold_count; at++)
		arena->holds[at] = arena->holds[at + 1];
	mpsd_granules_give(arena, hold->whole.first, hold->whole.count);
	free(hold->runs);
	free(hold);
	return true;
}

bool arena_held(const struct arena *arena, uint64_t address, struct arena_range *range)
{
	const struct arena_hold *hold = mpsd_hold_at(arena, (address - arena->base) / ARENA_GRANULE);

	if (hold)
		*range = mpsd_granules_range(arena, hold->addresses.first, hold->addresses.count);
	return hold != NULL;
}

/* How many runs begin at or before that granule. */
static uint32_t runs_before(const struct arena_hold *hold, uint64_t granule)
{
	uint32_t low = 0, high = hold->run_count;

	while (low < high) {
		uint32_t middle = (low + high) / 2;

		if (hold->runs[middle].first > granule)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

/* There are no more of them than pieces, and one while two are being joined: so room is made for a piece. */
static bool make_run_room(struct arena_hold *hold)
{
	uint32_t room = hold->run_room ? 2 * hold->run_room : 16;
	struct arena_extent *larger;

	if (hold->pieces + 2 < hold->run_room)
		return true;
	larger = realloc(hold->runs, room * sizeof(*larger));
	if (!larger)
		return false;
	hold->runs = larger;
	hold->run_room = room;
	return true;
}

static void insert_run(struct arena_hold *hold, uint32_t at, struct arena_extent run)
{
	memmove(hold->runs + at + 1, hold->runs + at, (hold->run_count - at) * sizeof(run));
	hold->runs[at] = run;
	hold->run_count++;
}

static void drop_run(struct arena_hold *hold, uint32_t at)
{
	memmove(hold->runs + at, hold->runs + at + 1, (hold->run_count - at - 1) * sizeof(*hold->runs));
	hold->run_count--;
}

static void add_run(struct arena_hold *hold, uint32_t first, uint32_t count)
{
	uint32_t at = runs_before(hold, first);

	insert_run(hold, at, (struct arena_extent){ first, count });
	if (at + 1 < hold->run_count && hold->runs[at + 1].first == first + count) {
		hold->runs[at].count += hold->runs[at + 1].count;
		drop_run(hold, at + 1);
	}
	if (at && hold->runs[at - 1].first + hold->runs[at - 1].count == first) {
		hold->runs[at - 1].count += hold->runs[at].count;
		drop_run(hold, at);
	}
}

static void remove_run(struct arena_hold *hold, uint32_t first, uint32_t count)
{
	uint32_t at = runs_before(hold, first) - 1;
	struct arena_extent run = hold->runs[at];
	uint32_t behind = run.first + run.count - first - count;

	drop_run(hold, at);
	if (behind)
		insert_run(hold, at, (struct arena_extent){ first + count, behind });
	if (first > run.first)
		insert_run(hold, at, (struct arena_extent){ run.first, first - run.first });
}

bool arena_map(struct arena *arena, struct arena_range piece)
{
	uint64_t first = (piece.base - arena->base) / ARENA_GRANULE, count = piece.size / ARENA_GRANULE;
	struct arena_hold *hold = mpsd_hold_at(arena, first);

	if (!hold || !count || piece.base % ARENA_GRANULE || piece.size % ARENA_GRANULE ||
	    !mpsd_is_within(&hold->addresses, first + count - 1))
		return false;
	for (uint64_t g = first; g < first + count; g++)
		if (arena->head[g])
			return false;
	if (!mpsd_granules_room(arena) || !make_run_room(hold))
		return false;
	mpsd_granules_mark(arena, (uint32_t)first, (uint32_t)count);
	arena->size[first] = piece.size;
	arena->pieces++;
	hold->pieces++;
	return true;
}

bool arena_unmap(struct arena *arena, struct arena_range piece)
{
	uint64_t first = (piece.base - arena->base) / ARENA_GRANULE;
	struct arena_hold *hold = mpsd_hold_at(arena, first);

	if (!hold || piece.base % ARENA_GRANULE || arena->head[first] != first + 1 ||
	    arena->size[first] != piece.size)
		return false;
	mpsd_granules_leave(arena, (uint32_t)first, mpsd_granules_of(piece.size));
	arena->pieces--;
	hold->pieces--;
	return true;
}

void arena_open_piece(struct arena *arena, struct arena_range piece)
{
	uint64_t first = (piece.base - arena->base) / ARENA_GRANULE;

	add_run(mpsd_hold_at(arena, first), (uint32_t)first, mpsd_granules_of(piece.size));
	arena->changes++;
}

void arena_close_piece(struct arena *arena, struct arena_range piece)
{
	uint64_t first = (piece.base - arena->base) / ARENA_GRANULE;

	remove_run(mpsd_hold_at(arena, first), (uint32_t)first, mpsd_granules_of(piece.size));
}

bool arena_run(const struct arena *arena, uint64_t address, struct arena_range *run)
{
	uint64_t granule = (address - arena->base) / ARENA_GRANULE;
	const struct arena_hold *hold = mpsd_hold_at(arena, granule);
	uint32_t before = hold ? runs_before(hold, granule) : 0;

	if (!before || !mpsd_is_within(&hold->runs[before - 1], granule))
		return false;
	*run = mpsd_granules_range(arena, hold->runs[before - 1].first, hold->runs[before - 1].count);
	return true;
}

uint64_t mpsd_holds_behind(const struct arena *arena, uint64_t granule)
{
	const struct arena_hold *hold = mpsd_hold_at(arena, granule);

	if (!hold)
		return 0;
	do
		granule++;
	while (mpsd_is_within(&hold->addresses, granule) && !arena->head[granule]);
	return granule;
}

void mpsd_holds_close(struct arena *arena)
{
	for (uint32_t i = 0; i < arena->hold_count; i++) {
		free(arena->holds[i]->runs);
		free(arena->holds[i]);
	}
	free(arena->holds);
}
