// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Reads page tables as Turing's memory management unit does (version 2: four levels of directories,
 * the last of which points to a table of big pages and to one of small pages, or is a 2 MiB page).
 */
#include "gpu.h"

#define APERTURE 2 : 1
#define APERTURE_VIDMEM 1
#define ADDRESS_VIDMEM 32 : 8
#define ADDRESS_SYSMEM 53 : 8
#define BIG_VIDMEM 32 : 4
#define BIG_SYSMEM 53 : 4
#define IS_PTE 0 : 0

/* Level of an entry, which is 2 more than the distance of its table from the last directory. */
#define LAST_DIRECTORY 3
#define TOP_DIRECTORY 6

static const struct {
	u32 shift, bits;
} directories[] = { { 21, 8 }, { 29, 9 }, { 38, 9 }, { 47, 2 } };

static int entry(u64 table, bool sysmem, u32 index, u32 words, u64 *value)
{
	u64 *found = gpu_physical(table + (u64)index * words * sizeof(u64), sysmem, words * sizeof(u64));

	if (!found)
		return -EFAULT;
	memcpy(value, found, words * sizeof(u64));
	return 0;
}

static int leaf(const u64 *pair, u64 address, bool big, struct gpu_walk *found)
{
	u64 pointer = pair[big ? 0 : 1];
	bool sysmem = FIELD_OF(pointer, APERTURE) != APERTURE_VIDMEM;
	u64 table = big ? (sysmem ? FIELD_OF(pointer, BIG_SYSMEM) : FIELD_OF(pointer, BIG_VIDMEM)) << 8 :
			  (sysmem ? FIELD_OF(pointer, ADDRESS_SYSMEM) : FIELD_OF(pointer, ADDRESS_VIDMEM)) << 12;

	found->pte = pointer;
	found->level = 2;
	if (FIELD_OF(pair[0], IS_PTE)) {
		found->pte = pair[0];
		return 0;
	}
	if (!FIELD_OF(pointer, APERTURE)) {
		found->level = LAST_DIRECTORY;
		return 0;
	}
	found->level = big;
	return entry(table, sysmem, (address & (GPU_CHUNK - 1)) >> (big ? 16 : 12), 1, &found->pte);
}

int gpu_walk(const struct gpu_space *space, u64 address, bool big, struct gpu_walk *found)
{
	u64 table = space->directory, pair[2];
	bool sysmem = space->sysmem;
	int depth, error;

	for (depth = TOP_DIRECTORY - LAST_DIRECTORY; depth > 0; depth--) {
		error = entry(table, sysmem, address >> directories[depth].shift &
			      ((1u << directories[depth].bits) - 1), 1, pair);
		if (error)
			return error;
		found->pte = pair[0];
		found->level = LAST_DIRECTORY + depth;
		if (!FIELD_OF(pair[0], APERTURE))
			return 0;
		sysmem = FIELD_OF(pair[0], APERTURE) != APERTURE_VIDMEM;
		table = (sysmem ? FIELD_OF(pair[0], ADDRESS_SYSMEM) : FIELD_OF(pair[0], ADDRESS_VIDMEM)) << 12;
	}
	error = entry(table, sysmem, address >> directories[0].shift & ((1u << directories[0].bits) - 1), 2, pair);
	return error ? error : leaf(pair, address, big, found);
}

/* Adds what an entry says, and where it is; 0 and "ignore the small pages" say nothing. */
static bool says(u64 value, u64 place, u64 *number, u32 *count)
{
	if (!(value & ~(1ull << 5)))
		return false;
	*number = (*number ^ place ^ value) * 0x9e3779b97f4a7c15ull;
	*number ^= *number >> 29;
	++*count;
	return true;
}

static int digest_leaves(u64 pointer, bool big, u64 base, u64 *number, u32 *count)
{
	bool sysmem = FIELD_OF(pointer, APERTURE) != APERTURE_VIDMEM;
	u64 table = big ? (sysmem ? FIELD_OF(pointer, BIG_SYSMEM) : FIELD_OF(pointer, BIG_VIDMEM)) << 8 :
			  (sysmem ? FIELD_OF(pointer, ADDRESS_SYSMEM) : FIELD_OF(pointer, ADDRESS_VIDMEM)) << 12;
	u32 pages = GPU_CHUNK / (big ? GPU_BIG_PAGE : PAGE_SIZE), index;
	u64 value;
	int error;

	for (index = 0; index < pages; index++) {
		error = entry(table, sysmem, index, 1, &value);
		if (error)
			return error;
		says(value, base + index * (GPU_CHUNK / pages), number, count);
	}
	return 0;
}

/* The last directory: a page of 2 MiB, or a table of big pages and one of small ones. */
static int digest_pair(const u64 *pair, u64 base, u64 *number, u32 *count)
{
	int big, error;

	says(pair[0], base, number, count);
	says(pair[1], base, number, count);
	if (FIELD_OF(pair[0], IS_PTE))
		return 0;
	for (big = 0; big < 2; big++) {
		if (!FIELD_OF(pair[big ? 0 : 1], APERTURE))
			continue;
		error = digest_leaves(pair[big ? 0 : 1], big, base, number, count);
		if (error)
			return error;
	}
	return 0;
}

static int digest_table(u64 table, bool sysmem, int depth, u64 base, u64 *number, u32 *count)
{
	u64 pair[2], below;
	u32 index;
	int error;

	for (index = 0; index < 1u << directories[depth].bits; index++) {
		error = entry(table, sysmem, index, depth ? 1 : 2, pair);
		if (error)
			return error;
		below = base + ((u64)index << directories[depth].shift);
		if (!depth) {
			error = digest_pair(pair, below, number, count);
		} else if (says(pair[0], below, number, count) && FIELD_OF(pair[0], APERTURE)) {
			bool next = FIELD_OF(pair[0], APERTURE) != APERTURE_VIDMEM;

			error = digest_table((next ? FIELD_OF(pair[0], ADDRESS_SYSMEM) :
						     FIELD_OF(pair[0], ADDRESS_VIDMEM)) << 12,
					     next, depth - 1, below, number, count);
		}
		if (error)
			return error;
	}
	return 0;
}

int gpu_digest(const struct gpu_space *space, u64 *number, u32 *count)
{
	*number = 0;
	*count = 0;
	return digest_table(space->directory, space->sysmem, TOP_DIRECTORY - LAST_DIRECTORY, 0, number, count);
}

/* Of an entry that is valid: the page it gives, by its level. */
bool gpu_translate(const struct gpu_space *space, u64 address, u64 *physical, bool *sysmem)
{
	static const u64 sizes[] = { 4096, GPU_BIG_PAGE, GPU_CHUNK };
	struct gpu_walk found;
	int big;

	for (big = 0; big < 2; big++) {
		if (gpu_walk(space, address, big, &found) || found.level > 2 || !FIELD_OF(found.pte, IS_PTE))
			continue;
		/* Aperture 0 of a page is video memory, where that of a directory is 1. */
		*sysmem = FIELD_OF(found.pte, APERTURE) != 0;
		*physical = ((*sysmem ? FIELD_OF(found.pte, ADDRESS_SYSMEM) :
					FIELD_OF(found.pte, ADDRESS_VIDMEM)) << 12) |
			    (address & (sizes[found.level] - 1));
		return true;
	}
	return false;
}
