// SPDX-License-Identifier: MIT
#include "failover/spare.h"

#include <stddef.h>

#define MOST (1u << 16)

static char names[MOST];
static unsigned short given_back[MOST];		/* in a ring: the oldest first */
static unsigned int used, first, count;

bool mpsd_spare_is(const void *name)
{
	return (const char *)name >= names && (const char *)name < names + MOST;
}

void *mpsd_spare_take(void)
{
	void *name;

	if (used < MOST)
		return &names[used++];
	if (!count)
		return NULL;
	name = &names[given_back[first]];
	first = (first + 1) % MOST;
	count--;
	return name;
}

void mpsd_spare_give(const void *name)
{
	if (mpsd_spare_is(name))
		given_back[(first + count++) % MOST] = (unsigned short)((const char *)name - names);
}
