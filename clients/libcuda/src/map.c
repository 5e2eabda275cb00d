// SPDX-License-Identifier: MIT
/*
 * From an address in the real driver to the stub in front of it. Filled by the constructor, read
 * without a lock ever after. Several names may share one address: the first one stays, which is
 * right because they are the same function; one with a wrapper is added before all others.
 */
#include <stdint.h>

#include "proxy.h"

#define BITS 12
#define PLACES (1u << BITS)

_Static_assert(PLACES >= 4 * MPSD_SLOTS, "so that a search ends after a step or two");

static struct {
	void *real;
	unsigned int index;
} places[PLACES];

static unsigned int place_of(void *real)
{
	return (unsigned int)(((uintptr_t)real >> 2) * 0x9e3779b97f4a7c15ull >> (64 - BITS));
}

void mpsd_map_add(void *real, unsigned int index)
{
	unsigned int at = place_of(real);

	while (places[at].real && places[at].real != real)
		at = (at + 1) % PLACES;
	if (places[at].real)
		return;
	places[at].real = real;
	places[at].index = index;
}

void *mpsd_map_find(void *real)
{
	for (unsigned int at = place_of(real); places[at].real; at = (at + 1) % PLACES)
		if (places[at].real == real)
			return mpsd_stub(places[at].index);
	return NULL;
}
