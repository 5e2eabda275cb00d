// SPDX-License-Identifier: MIT
/* When a program has launched something for the first time: nobody else is as likely to have faulted. */
#include "clock.h"
#include "exact/params.h"

static uint64_t newest_ns;		/* with no lock, by the mover */
static uint64_t seen[MPSD_PLACES / 64];	/* bits of where functions are looked for; of what is forgotten, too */

/* What comes when calls are about to be held has not faulted. */
void mpsd_newest_note(uint32_t place, bool launched)
{
	uint64_t bit = (uint64_t)1 << place % 64;

	if (!(seen[place / 64] & bit) && launched && !(atomic_load(&mpsd_moves) & 1))
		__atomic_store_n(&newest_ns, mpsd_now_ns(), __ATOMIC_RELAXED);
	seen[place / 64] |= bit;
}

uint64_t mpsd_exact_newest_ns(void)
{
	return __atomic_load_n(&newest_ns, __ATOMIC_RELAXED);
}
