// SPDX-License-Identifier: MIT
/* How long work took from an epoch's first operation until all was proven: about as long as it takes to do it again. */
#include "clock.h"
#include "exact/state.h"

#define OF_BEFORE 7		/* of eight parts */

static uint64_t began_ns;	/* this epoch; 0: nothing of it, or a move has come into it */
static uint64_t each_ns;	/* an operation, in the epochs before; 0: unknown */

void mpsd_pace_begin(void)
{
	began_ns = mpsd_now_ns();
}

void mpsd_pace_leave(void)
{
	began_ns = 0;
}

void mpsd_pace_end(uint64_t operations)
{
	uint64_t each;

	if (!began_ns || !operations)
		return;
	each = (mpsd_now_ns() - began_ns) / operations + 1;
	each_ns = each_ns ? (each_ns * OF_BEFORE + each) / (OF_BEFORE + 1) : each;
	began_ns = 0;
}

uint64_t mpsd_pace_of(uint64_t operations)
{
	return each_ns * operations;
}
