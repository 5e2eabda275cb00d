/* SPDX-License-Identifier: MIT */
/*
 * Where in a window of addresses an allocation lies. Pure bookkeeping: it calls nothing of CUDA's,
 * touches no memory of the window and has no lock. What must be mapped, and what may be unmapped,
 * it tells its caller.
 *
 * Small allocations share a granule (a slab), in units of 512 bytes, which is also the alignment of
 * all; larger ones have whole granules of their own. A slab or a large allocation is a piece; before and
 * behind each lies a zone of addresses that belong to it and that nobody gets.
 *
 * A hold is a range of addresses that its owner maps piece by piece where he likes; zones lie around all of it. What is
 * mapped there is nobody's allocation. Pieces of it may be open, and open ones that touch are one run.
 *
 * What was freed is not given out again at once: a slab goes on behind its latest allocation and starts
 * over at its end, slabs that were full wait their turn, and the addresses of a whole piece come back
 * when the caller says so (arena_give).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ARENA_GRANULE ((size_t)2 << 20)
#define ARENA_UNIT ((size_t)512)
#define ARENA_SMALL ((size_t)1 << 20)	/* up to here an allocation goes into a slab */

struct arena_range {
	uint64_t base;
	size_t size;		/* 0: nothing */
};

struct arena_extent {		/* free granules */
	uint32_t first, count;
};

struct arena_slab;

struct arena_hold {
	struct arena_extent addresses, whole;	/* without and with its zones */
	struct arena_extent *runs;		/* what is open, by address, never two that touch */
	uint32_t run_count, run_room;
	uint32_t pieces;
};

struct arena {
	uint64_t base;
	uint32_t granules;
	uint32_t zone;			/* granules before each piece, and as many behind it */
	uint32_t *head;			/* per granule: 1 + the first one of the piece there; 0: no piece */
	size_t *size;			/* at a first one: bytes asked for */
	struct arena_slab **slab;	/* at a granule that is a slab */
	struct arena_slab *roomy;	/* slabs with a free unit, the last one that got one last */
	struct arena_slab **roomy_end;
	struct arena_extent *extents;	/* by address, never two that touch */
	uint32_t extent_count, extent_room;
	struct arena_hold **holds;	/* by address */
	uint32_t hold_count;
	uint32_t pieces;		/* that have their granules, given back by arena_free or not */
	uint64_t changes;		/* of what is mapped where: so often something came */
	uint32_t lowest;		/* no living piece begins below this granule */
};

/*
 * A window of `size` bytes at `base`, of which nobody gets the first `lead`, with `zone` bytes around each piece,
 * all multiples of the granule. False: out of host memory.
 */
bool arena_open(struct arena *arena, uint64_t base, size_t size, size_t lead, size_t zone);
void arena_close(struct arena *arena);

/*
 * An address for `size` (not 0) bytes, 0 if there is no room. `fresh` is what has to be mapped before the
 * address is used; a caller that cannot do so frees the address again, and gives its piece back.
 */
uint64_t arena_alloc(struct arena *arena, size_t size, struct arena_range *fresh);

/*
 * False if no allocation begins at `address`. `empty` is what may be unmapped now: a piece whose addresses
 * nobody gets before arena_give.
 */
bool arena_free(struct arena *arena, uint64_t address, struct arena_range *empty);

/* The addresses of an empty piece, and of its zones, may be given out again. */
void arena_give(struct arena *arena, struct arena_range empty);

/* The allocation that contains `address`. False if there is none. */
bool arena_find(const struct arena *arena, uint64_t address, struct arena_range *found);

/* What is mapped as one piece (a slab, or all of a large allocation) around `address`. False if nothing is. */
bool arena_piece(const struct arena *arena, uint64_t address, struct arena_range *piece);

/* The first piece at or after `address`, for whoever goes through all. False if there is none. */
bool arena_next_piece(const struct arena *arena, uint64_t address, struct arena_range *piece);

/*
 * Addresses for `size` (not 0) bytes at a multiple of `alignment`, both multiples of the granule, in which nothing is mapped
 * yet. 0: there is no room.
 */
uint64_t arena_hold(struct arena *arena, size_t size, size_t alignment);

/* False if there is no such hold, or something is mapped in it. */
bool arena_let_go(struct arena *arena, struct arena_range hold);

/* The hold around `address`. False if there is none. */
bool arena_held(const struct arena *arena, uint64_t address, struct arena_range *hold);

/* A piece in a hold, not open. False: it is not within one, something of it is mapped, or there is no memory. */
bool arena_map(struct arena *arena, struct arena_range piece);

/* A piece that is not open. False: there is no such piece. */
bool arena_unmap(struct arena *arena, struct arena_range piece);

/* Such a piece is open from now on; an open one is no more. */
void arena_open_piece(struct arena *arena, struct arena_range piece);
void arena_close_piece(struct arena *arena, struct arena_range piece);

/* What is open in a hold around `address` without a gap. False if nothing is. */
bool arena_run(const struct arena *arena, uint64_t address, struct arena_range *run);

/* From there to the window's end nobody has an address, nor a piece its zone. */
static inline uint64_t arena_tail(const struct arena *arena)
{
	const struct arena_extent *last = arena->extents + arena->extent_count - 1;
	bool is_free = arena->extent_count && last->first + last->count == arena->granules;

	return arena->base + (is_free ? last->first : arena->granules) * (uint64_t)ARENA_GRANULE;
}

/* Some allocation, for whoever wants to free all. False if there is none. */
bool arena_first(struct arena *arena, struct arena_range *found);
