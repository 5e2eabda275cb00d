// SPDX-License-Identifier: MIT
#include "arena.h"
#include "pieces.h"

struct piece *mpsd_living[MPSD_LIVING_BUCKETS];

static struct piece **bucket_of(uint64_t base)
{
	return &mpsd_living[(base / ARENA_GRANULE * 0x9e3779b97f4a7c15ull) >> 52];
}

_Static_assert(MPSD_LIVING_BUCKETS == 1 << 12, "the hash above has 12 bits");

void mpsd_living_add(struct piece *piece)
{
	struct piece **bucket = bucket_of(piece->base);

	piece->next = *bucket;
	*bucket = piece;
}

struct piece *mpsd_living_take(uint64_t base)
{
	struct piece **link = bucket_of(base), *piece;

	while (*link && (*link)->base != base)
		link = &(*link)->next;
	piece = *link;
	if (piece)
		*link = piece->next;
	return piece;
}

bool mpsd_living_is_any(void)
{
	for (unsigned int i = 0; i < MPSD_LIVING_BUCKETS; i++)
		if (mpsd_living[i])
			return true;
	return false;
}
