// SPDX-License-Identifier: MIT
#include "poolblocks.h"

#include <stdlib.h>

#include "arena.h"

#define BUCKETS 16384
#define STEPS_LOG 3			/* eight sizes of bins between two powers of 2 */
#define STEPS (1u << STEPS_LOG)
#define LEAST_LOG 9			/* log2 of ARENA_UNIT */
#define BINS ((64 - LEAST_LOG) * STEPS)
#define MOST_LOOKS 256			/* at blocks of one bin: most of them may be another stream's */

_Static_assert(ARENA_UNIT == (size_t)1 << LEAST_LOG, "the smallest block is a unit of a slab");

static struct mpsd_poolblock *buckets[BUCKETS];
static struct mpsd_poolblock *bins[BINS];	/* the newest one of each */
static uint64_t filled[(BINS + 63) / 64];	/* a bit for each bin that has one */

static unsigned int log_of(size_t size)
{
	return 63u - (unsigned int)__builtin_clzll(size);
}

/* The distance between two sizes of about that size. */
static size_t step_of(size_t size)
{
	unsigned int log = log_of(size);

	return log < LEAST_LOG + STEPS_LOG ? ARENA_UNIT : (size_t)1 << (log - STEPS_LOG);
}

/* That of the largest size up to this one. */
static unsigned int bin_of(size_t size)
{
	unsigned int log = log_of(size);

	if (log < LEAST_LOG + STEPS_LOG)
		return (unsigned int)(size / ARENA_UNIT);
	return (log - LEAST_LOG - STEPS_LOG + 1) * STEPS + (unsigned int)((size >> (log - STEPS_LOG)) & (STEPS - 1));
}

/* Small sizes are rounded for the sake of reuse, large ones to whole granules, which are mapped in any case. */
size_t mpsd_poolblocks_capacity(size_t size)
{
	size_t step = ARENA_GRANULE;

	if (size <= ARENA_SMALL)
		step = size < ARENA_UNIT ? ARENA_UNIT : step_of(size);
	return size + step - 1 < size ? 0 : (size + step - 1) / step * step;
}

static struct mpsd_poolblock **place_of(CUdeviceptr address)
{
	struct mpsd_poolblock **link = &buckets[address * 0x9e3779b97f4a7c15ull >> 50];

	while (*link && (*link)->address != address)
		link = &(*link)->next;
	return link;
}

static void put_into_bin(struct mpsd_poolblock *block)
{
	unsigned int bin = bin_of(block->capacity);

	block->newer = NULL;
	block->older = bins[bin];
	if (block->older)
		block->older->newer = block;
	bins[bin] = block;
	filled[bin / 64] |= (uint64_t)1 << bin % 64;
}

static void take_out_of_bin(struct mpsd_poolblock *block)
{
	unsigned int bin = bin_of(block->capacity);

	if (block->newer)
		block->newer->older = block->older;
	else
		bins[bin] = block->older;
	if (block->older)
		block->older->newer = block->newer;
	if (!bins[bin])
		filled[bin / 64] &= ~((uint64_t)1 << bin % 64);
	block->newer = block->older = NULL;
}

struct mpsd_poolblock *mpsd_poolblocks_add(struct mpsd_pool *pool, CUdeviceptr address, size_t capacity, size_t size)
{
	struct mpsd_poolblock *block = calloc(1, sizeof(*block));

	if (!block)
		return NULL;
	block->pool = pool;
	block->address = address;
	block->capacity = capacity;
	block->size = size;
	mpsd_poolblocks_put_back(block);
	return block;
}

struct mpsd_poolblock *mpsd_poolblocks_find(CUdeviceptr address)
{
	return *place_of(address);
}

void mpsd_poolblocks_remove(struct mpsd_poolblock *block)
{
	struct mpsd_poolblock **link = place_of(block->address);

	*link = block->next;
	if (block->is_free)
		take_out_of_bin(block);
}

void mpsd_poolblocks_put_back(struct mpsd_poolblock *block)
{
	struct mpsd_poolblock **bucket = &buckets[block->address * 0x9e3779b97f4a7c15ull >> 50];

	block->next = *bucket;
	*bucket = block;
	if (block->is_free)
		put_into_bin(block);
}

void mpsd_poolblocks_keep(struct mpsd_poolblock *block)
{
	block->is_free = true;
	put_into_bin(block);
}

void mpsd_poolblocks_take(struct mpsd_poolblock *block)
{
	block->is_free = false;
	take_out_of_bin(block);
}

/* Where there is none, BINS. */
static unsigned int next_filled(unsigned int bin)
{
	while (bin < BINS) {
		uint64_t word = filled[bin / 64] >> bin % 64;

		if (word)
			return bin + (unsigned int)__builtin_ctzll(word);
		bin = (bin / 64 + 1) * 64;
	}
	return BINS;
}

struct mpsd_poolblock *mpsd_poolblocks_fit(const struct mpsd_pool *pool, size_t size,
					   bool (*may)(struct mpsd_poolblock *block, void *with), void *with)
{
	size_t least = mpsd_poolblocks_capacity(size), most;
	struct mpsd_poolblock *best = NULL;

	if (!least)
		return NULL;
	most = least + least / STEPS < least ? SIZE_MAX : least + least / STEPS;
	for (unsigned int bin = next_filled(bin_of(least)); !best && bin < BINS && bin <= bin_of(most);
	     bin = next_filled(bin + 1)) {
		struct mpsd_poolblock *block = bins[bin];

		for (unsigned int looks = 0; block && looks < MOST_LOOKS; block = block->older, looks++)
			if (block->pool == pool && block->capacity >= least && block->capacity <= most &&
			    (!best || block->capacity < best->capacity) && may(block, with))
				best = block;
	}
	return best;
}

void mpsd_poolblocks_each(bool (*call)(struct mpsd_poolblock *block, void *with), void *with)
{
	for (unsigned int bin = next_filled(0); bin < BINS; bin = next_filled(bin + 1))
		for (struct mpsd_poolblock *block = bins[bin], *older; block; block = older) {
			older = block->older;
			if (!call(block, with))
				return;
		}
}
