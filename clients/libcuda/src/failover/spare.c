// SPDX-License-Identifier: MIT
#include "failover/spare.h"

#include <stddef.h>

static char names[1 << 16];
static unsigned short given_back[sizeof(names)];
static unsigned int used, count;

bool mpsd_spare_is(const void *name)
{
	return (const char *)name >= names && (const char *)name < names + sizeof(names);
}

void *mpsd_spare_take(void)
{
	if (used < sizeof(names))
		return &names[used++];
	return count ? &names[given_back[--count]] : NULL;
}

void mpsd_spare_give(const void *name)
{
	if (mpsd_spare_is(name))
		given_back[count++] = (unsigned short)((const char *)name - names);
}
