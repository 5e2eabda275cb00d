// SPDX-License-Identifier: MIT
/*
 * Random reservations in an arena, and random segments mapped in them, beside ordinary allocations; each step is
 * checked against a model that records the owner of each granule of the window. Prints "ok".
 */
#include "arena.h"

#include <stdio.h>
#include <stdlib.h>

#include "checking.h"

#define GRANULES 96
#define BASE ((uint64_t)0x200000600000)	/* no multiple of larger alignments */
#define HOLDS 6
#define PIECES 200
#define LARGE 8

static size_t zone;
static uint64_t state;
static struct arena_range holds[HOLDS], pieces[PIECES], large[LARGE];
static int owner[GRANULES];		/* 1 + the reservation, or -1 - the large allocation */
static int mapped[GRANULES];		/* 1 + the segment */
static bool open[PIECES];

static size_t granule_of(uint64_t address)
{
	return (address - BASE) / ARENA_GRANULE;
}

static void own(struct arena_range range, int from, int to)
{
	for (uint64_t at = range.base; at < range.base + range.size; at += ARENA_GRANULE) {
		CHECK(granule_of(at) < GRANULES && owner[granule_of(at)] == from);
		owner[granule_of(at)] = to;
	}
}

/* No other owner is within `zone` of the range. */
static void check_zones(struct arena_range range, int who)
{
	size_t first = granule_of(range.base), end = granule_of(range.base + range.size);

	for (size_t granule = first >= zone ? first - zone : 0; granule < end + zone && granule < GRANULES; granule++)
		CHECK(!owner[granule] || owner[granule] == who);
}

static void change_hold(struct arena *arena, int slot)
{
	size_t alignment = ARENA_GRANULE << random_below(&state, 4), size = (1 + random_below(&state, 20)) * ARENA_GRANULE;
	struct arena_range *hold = &holds[slot];
	bool is_empty = true;

	if (!hold->size) {
		hold->base = arena_hold(arena, size, alignment);
		if (!hold->base)
			return;
		hold->size = size;
		CHECK(hold->base % alignment == 0);
		own(*hold, 0, slot + 1);
		check_zones(*hold, slot + 1);
		return;
	}
	for (int i = 0; i < PIECES; i++)
		is_empty = is_empty && !(pieces[i].size && pieces[i].base - hold->base < hold->size);
	CHECK(!arena_let_go(arena, (struct arena_range){ hold->base, hold->size + ARENA_GRANULE }));
	CHECK(arena_let_go(arena, *hold) == is_empty);
	if (!is_empty)
		return;
	own(*hold, slot + 1, 0);
	hold->size = 0;
}

static void change_large(struct arena *arena, int slot)
{
	struct arena_range fresh, empty;

	if (large[slot].size) {
		CHECK(arena_free(arena, large[slot].base, &empty) && empty.size == large[slot].size);
		arena_give(arena, empty);
		own(large[slot], -1 - slot, 0);
		large[slot].size = 0;
		return;
	}
	if (!arena_alloc(arena, (1 + random_below(&state, 3)) * ARENA_GRANULE, &fresh) || !fresh.size)
		return;
	if (fresh.size < ARENA_SMALL)
		return;
	large[slot] = fresh;
	own(fresh, 0, -1 - slot);
	check_zones(fresh, -1 - slot);
}

static bool may_map(struct arena_range piece, int slot)
{
	bool may = piece.base - holds[slot].base + piece.size <= holds[slot].size;

	for (uint64_t at = piece.base; may && at < piece.base + piece.size; at += ARENA_GRANULE)
		may = !mapped[granule_of(at)];
	return may;
}

static void map_one(struct arena *arena, int slot)
{
	struct arena_range hold = holds[random_below(&state, HOLDS)], *piece = &pieces[slot];
	uint64_t most;
	int its;

	if (!hold.size)
		return;
	its = owner[granule_of(hold.base)] - 1;
	most = hold.size / ARENA_GRANULE;
	piece->base = hold.base + random_below(&state, most) * ARENA_GRANULE;
	piece->size = (1 + random_below(&state, 4)) * ARENA_GRANULE;
	if (!may_map(*piece, its)) {
		CHECK(!arena_map(arena, *piece));
		piece->size = 0;
		return;
	}
	CHECK(arena_map(arena, *piece));
	open[slot] = false;
	for (uint64_t at = piece->base; at < piece->base + piece->size; at += ARENA_GRANULE)
		mapped[granule_of(at)] = slot + 1;
}

static void unmap_one(struct arena *arena, int slot)
{
	struct arena_range *piece = &pieces[slot];

	CHECK(!arena_unmap(arena, (struct arena_range){ piece->base, piece->size + ARENA_GRANULE }));
	if (open[slot])
		arena_close_piece(arena, *piece);
	CHECK(arena_unmap(arena, *piece));
	for (uint64_t at = piece->base; at < piece->base + piece->size; at += ARENA_GRANULE)
		mapped[granule_of(at)] = 0;
	piece->size = 0;
}

static void change_access(struct arena *arena, int slot)
{
	if (open[slot])
		arena_close_piece(arena, pieces[slot]);
	else
		arena_open_piece(arena, pieces[slot]);
	open[slot] = !open[slot];
}

static bool is_open(size_t granule)
{
	return mapped[granule] && open[mapped[granule] - 1];
}

static void check_run(struct arena *arena, size_t granule)
{
	uint64_t address = BASE + granule * ARENA_GRANULE + random_below(&state, ARENA_GRANULE);
	size_t first = granule, end = granule;
	struct arena_range run, found;

	CHECK(arena_held(arena, address, &found) == (owner[granule] > 0));
	CHECK(owner[granule] <= 0 || found.base == holds[owner[granule] - 1].base);
	CHECK(arena_find(arena, address, &found) == (owner[granule] < 0));
	CHECK(arena_run(arena, address, &run) == is_open(granule));
	if (!is_open(granule))
		return;
	while (first && is_open(first - 1) && owner[first - 1] == owner[granule])
		first--;
	while (end < GRANULES && is_open(end) && owner[end] == owner[granule])
		end++;
	CHECK(granule_of(run.base) == first && granule_of(run.base + run.size) == end);
}

/* All segments and large allocations, in order, and nothing else. */
static void check_pieces(struct arena *arena)
{
	struct arena_range piece = { BASE, 0 };
	size_t granule = 0;

	while (arena_next_piece(arena, piece.base + piece.size, &piece)) {
		while (granule < GRANULES && !mapped[granule] && owner[granule] >= 0)
			granule++;
		CHECK(granule < GRANULES && piece.base == BASE + granule * ARENA_GRANULE);
		if (mapped[granule])
			CHECK(piece.size == pieces[mapped[granule] - 1].size);
		else
			CHECK(piece.size == large[-1 - owner[granule]].size);
		granule += piece.size / ARENA_GRANULE;
	}
	while (granule < GRANULES && !mapped[granule] && owner[granule] >= 0)
		granule++;
	CHECK(granule == GRANULES);
}

int main(int count, char **given)
{
	struct arena_range found;
	struct arena arena;

	state = count > 1 ? strtoull(given[1], NULL, 0) : 1;
	zone = count > 2 ? strtoull(given[2], NULL, 0) : 0;
	CHECK(arena_open(&arena, BASE, GRANULES * ARENA_GRANULE, 0, zone * ARENA_GRANULE));
	for (int step = 0; step < 20000; step++) {
		int slot = (int)random_below(&state, PIECES);

		if (random_below(&state, 20) == 0)
			change_hold(&arena, (int)random_below(&state, HOLDS));
		else if (random_below(&state, 20) == 0)
			change_large(&arena, (int)random_below(&state, LARGE));
		else if (pieces[slot].size && random_below(&state, 2))
			change_access(&arena, slot);
		else if (pieces[slot].size)
			unmap_one(&arena, slot);
		else
			map_one(&arena, slot);
		check_run(&arena, random_below(&state, GRANULES));
		if (step % 50 == 0)
			check_pieces(&arena);
	}
	/* A reservation is no allocation. */
	while (arena_first(&arena, &found))
		for (int i = 0; i < LARGE; i++)
			if (large[i].size && large[i].base == found.base)
				change_large(&arena, i);
	for (int i = 0; i < PIECES; i++)
		if (pieces[i].size)
			unmap_one(&arena, i);
	for (int i = 0; i < HOLDS; i++)
		if (holds[i].size)
			change_hold(&arena, i);
	CHECK(arena_tail(&arena) == BASE);
	CHECK(!arena_hold(&arena, (GRANULES + 1) * ARENA_GRANULE, ARENA_GRANULE));
	CHECK(arena_hold(&arena, (GRANULES - 2 * zone) * ARENA_GRANULE, 0) == BASE + zone * ARENA_GRANULE);
	arena_close(&arena);
	puts("ok");
	return 0;
}
