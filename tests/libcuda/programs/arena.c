// SPDX-License-Identifier: MIT
/*
 * Random operations on an arena, each checked against a simple model: an array with the allocation that owns each
 * unit of the window, and an array that says for each granule whether a segment or a zone occupies it. Empty segments
 * are kept for a while and released oldest first.
 */
#include "arena.h"

#include <stdio.h>
#include <stdlib.h>

#include "checking.h"

#define GRANULES 24
#define UNITS (GRANULES * (ARENA_GRANULE / ARENA_UNIT))
#define BASE ((uint64_t)0x200000000000)
#define LIVE 400
#define KEPT 3

static struct {
	uint64_t base;
	size_t size;
} live[LIVE];
static int owner[UNITS];	/* index into live, plus 1 */
static bool mapped[GRANULES], reserved[GRANULES];
static struct arena_range kept[GRANULES];
static size_t kept_count, zone, lead;
static struct arena_range piece_of[GRANULES];
static uint64_t state;

/* Mostly small sizes, some of several granules, with boundary values more often than by chance. */
static size_t random_size(void)
{
	static const size_t borders[] = {
		1, ARENA_UNIT - 1, ARENA_UNIT, ARENA_UNIT + 1, ARENA_SMALL, ARENA_SMALL + 1,
		ARENA_GRANULE, ARENA_GRANULE + 1, 3 * ARENA_GRANULE, GRANULES * ARENA_GRANULE,
	};

	switch (random_below(&state, 8)) {
	case 0:
		return borders[random_below(&state, sizeof(borders) / sizeof(*borders))];
	case 1:
		return 1 + random_below(&state, 5 * ARENA_GRANULE);
	case 2:
	case 3:
		return 1 + random_below(&state, ARENA_SMALL);
	default:
		return 1 + random_below(&state, 20 * ARENA_UNIT);
	}
}

static void map(struct arena_range range, bool to)
{
	CHECK(range.base % ARENA_GRANULE == 0 && range.size % ARENA_GRANULE == 0);
	for (uint64_t at = range.base; at < range.base + range.size; at += ARENA_GRANULE) {
		size_t granule = (at - BASE) / ARENA_GRANULE;

		CHECK(granule < GRANULES && mapped[granule] != to);
		mapped[granule] = to;
		piece_of[granule] = range;
		for (size_t unit = 0; !to && unit < ARENA_GRANULE / ARENA_UNIT; unit++)
			CHECK(!owner[granule * (ARENA_GRANULE / ARENA_UNIT) + unit]);
	}
}

/* The segment with its zones. */
static void reserve(struct arena_range range, bool to)
{
	size_t first = (range.base - BASE) / ARENA_GRANULE - zone;
	size_t end = (range.base + range.size - BASE) / ARENA_GRANULE + zone;

	CHECK(first < GRANULES && end <= GRANULES);
	for (size_t granule = first; range.size && granule < end; granule++) {
		CHECK(reserved[granule] != to);
		reserved[granule] = to;
	}
}

static void give_oldest(struct arena *arena)
{
	arena_give(arena, kept[0]);
	reserve(kept[0], false);
	kept_count--;
	for (size_t i = 0; i < kept_count; i++)
		kept[i] = kept[i + 1];
}

static size_t longest_free_run(void)
{
	size_t run = 0, longest = 0;

	for (size_t granule = 0; granule < GRANULES; granule++) {
		run = reserved[granule] ? 0 : run + 1;
		longest = run > longest ? run : longest;
	}
	return longest;
}

static uint64_t end_of_reserved(void)
{
	size_t granule = GRANULES;

	while (granule && !reserved[granule - 1])
		granule--;
	return BASE + granule * ARENA_GRANULE;
}

static void allocate(struct arena *arena, int slot)
{
	size_t size = random_size(), need = (size + ARENA_GRANULE - 1) / ARENA_GRANULE + 2 * zone;
	struct arena_range fresh;
	uint64_t address = arena_alloc(arena, size, &fresh);

	if (!address) {
		CHECK(longest_free_run() < need && !fresh.size);
		return;
	}
	CHECK(address % ARENA_UNIT == 0 && address >= BASE);
	map(fresh, true);
	if (fresh.size)
		reserve(fresh, true);
	live[slot].base = address;
	live[slot].size = size;
	for (uint64_t at = address; at < address + size; at += ARENA_UNIT) {
		size_t unit = (at - BASE) / ARENA_UNIT;

		CHECK(unit < UNITS && !owner[unit]);
		CHECK(mapped[(at - BASE) / ARENA_GRANULE]);
		owner[unit] = slot + 1;
	}
}

static void release(struct arena *arena, int slot)
{
	struct arena_range empty;

	CHECK(!arena_free(arena, live[slot].base + 1, &empty) && !empty.size);
	if (live[slot].size > ARENA_UNIT)
		CHECK(!arena_free(arena, live[slot].base + ARENA_UNIT, &empty));
	CHECK(arena_free(arena, live[slot].base, &empty));
	for (size_t unit = 0; unit < UNITS; unit++)
		if (owner[unit] == slot + 1)
			owner[unit] = 0;
	map(empty, false);
	if (empty.size)
		kept[kept_count++] = empty;
	while (kept_count > KEPT)
		give_oldest(arena);
	CHECK(!arena_free(arena, live[slot].base, &empty));
	live[slot].size = 0;
}

/* The segment that is mapped as a whole, and the next segment. */
static void look_at_pieces(struct arena *arena, uint64_t address)
{
	size_t granule = (address - BASE) / ARENA_GRANULE;
	struct arena_range piece;

	CHECK(arena_piece(arena, address, &piece) == mapped[granule]);
	CHECK(!mapped[granule] || (piece.base == piece_of[granule].base && piece.size == piece_of[granule].size));
	while (granule < GRANULES && !mapped[granule])
		granule++;
	CHECK(arena_next_piece(arena, address, &piece) == (granule < GRANULES));
	CHECK(granule == GRANULES || piece.base == piece_of[granule].base);
	CHECK(!arena_piece(arena, BASE - 1, &piece) && !arena_piece(arena, BASE + GRANULES * ARENA_GRANULE, &piece));
}

static void look(struct arena *arena)
{
	uint64_t address = BASE + random_below(&state, GRANULES * ARENA_GRANULE);
	int slot = owner[(address - BASE) / ARENA_UNIT];
	struct arena_range found;

	/* The rest of the last unit belongs to no allocation. */
	if (slot && address >= live[slot - 1].base + live[slot - 1].size)
		slot = 0;
	CHECK(arena_find(arena, address, &found) == (slot != 0));
	if (slot)
		CHECK(found.base == live[slot - 1].base && found.size == live[slot - 1].size);
	look_at_pieces(arena, address);
	CHECK(arena_tail(arena) == end_of_reserved());
	CHECK(!arena_find(arena, BASE - 1, &found));
	CHECK(!arena_find(arena, BASE + GRANULES * ARENA_GRANULE, &found));
}

/* A slab reuses freed units only after it has reached its end. */
static void reuse(void)
{
	uint64_t first, second, third;
	struct arena_range range;
	struct arena arena;

	CHECK(arena_open(&arena, BASE, 2 * ARENA_GRANULE, 0, 0));
	first = arena_alloc(&arena, ARENA_UNIT, &range);
	second = arena_alloc(&arena, ARENA_UNIT, &range);
	CHECK(first == BASE && second == BASE + ARENA_UNIT);
	CHECK(arena_free(&arena, first, &range));
	for (third = second + ARENA_UNIT; third < BASE + ARENA_GRANULE; third += ARENA_UNIT)
		CHECK(arena_alloc(&arena, ARENA_UNIT, &range) == third && !range.size);
	CHECK(arena_alloc(&arena, ARENA_UNIT, &range) == first && !range.size);
	CHECK(arena_alloc(&arena, ARENA_UNIT, &range) == BASE + ARENA_GRANULE && range.size);
	arena_close(&arena);
}

int main(int count, char **given)
{
	struct arena_range range, empty;
	struct arena arena;
	uint64_t address;
	size_t most;

	state = count > 1 ? strtoull(given[1], NULL, 0) : 1;
	zone = count > 2 ? strtoull(given[2], NULL, 0) : 0;
	lead = count > 3 ? strtoull(given[3], NULL, 0) : 0;
	CHECK(arena_open(&arena, BASE, GRANULES * ARENA_GRANULE, lead * ARENA_GRANULE, zone * ARENA_GRANULE));
	for (size_t granule = 0; granule < lead; granule++)
		reserved[granule] = true;
	for (int step = 0; step < 4000; step++) {
		int slot = (int)random_below(&state, step % 1000 < 500 ? LIVE : LIVE / 8);

		if (live[slot].size)
			release(&arena, slot);
		else
			allocate(&arena, slot);
		look(&arena);
	}
	while (arena_first(&arena, &range))
		release(&arena, owner[(range.base - BASE) / ARENA_UNIT] - 1);
	while (kept_count)
		give_oldest(&arena);
	CHECK(longest_free_run() == GRANULES - lead);
	most = (GRANULES - lead - 2 * zone) * ARENA_GRANULE;
	address = arena_alloc(&arena, most, &range);
	CHECK(address == BASE + (lead + zone) * ARENA_GRANULE && range.size == most);
	CHECK(arena_tail(&arena) == BASE + GRANULES * ARENA_GRANULE);
	CHECK(!arena_find(&arena, address - 1, &empty));
	CHECK(!arena_find(&arena, address + range.size, &empty));
	CHECK(!arena_alloc(&arena, 1, &range));
	CHECK(!arena_alloc(&arena, SIZE_MAX, &range));
	arena_close(&arena);
	reuse();
	puts("ok");
	return 0;
}
