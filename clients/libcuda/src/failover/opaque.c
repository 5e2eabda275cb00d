// SPDX-License-Identifier: MIT
/* What the program uses that cannot come along. */
#include <stdatomic.h>

#include "exact/exact.h"
#include "failover/line.h"

static _Atomic(const char *) names[MPSD_MOST_OPAQUE];
static atomic_uint count;

unsigned int mpsd_opaque_count(void)
{
	return atomic_load(&count);
}

const char *mpsd_opaque_name(unsigned int number)
{
	return atomic_load(&names[number]);
}

void mpsd_line_opaque(const char *what)
{
	unsigned int number;

	for (unsigned int i = 0; i < MPSD_MOST_OPAQUE && i < atomic_load(&count); i++)
		if (atomic_load(&names[i]) == what)
			return;
	mpsd_exact_stop(what);
	number = atomic_fetch_add(&count, 1);
	if (number < MPSD_MOST_OPAQUE)
		atomic_store(&names[number], what);
	mpsd_line_wake();
}
