// SPDX-License-Identifier: MIT
/*
 * How long it may take to do work again. Its epoch lasted as long as the program took to give it, mostly; the GPU was
 * behind for as long as the program waited for it at the end. Where it did not wait, and only looked, that is not known.
 */
#include "exact/pace.h"

#include <stdatomic.h>

#include "clock.h"

#define GIVE_NS 15000		/* an operation, that the GPU is not behind with */
#define OF_BEFORE 7		/* of eight parts */

static uint64_t began_ns;	/* this epoch; 0: nothing of it, or a move has come into it */
static atomic_uint_least64_t waited_ns;
static uint64_t each_ns;	/* an operation, in the epochs before; 0: unknown */

void mpsd_pace_begin(void)
{
	began_ns = mpsd_now_ns();
	atomic_store_explicit(&waited_ns, 0, memory_order_relaxed);
}

void mpsd_pace_waited(uint64_t ns)
{
	atomic_fetch_add_explicit(&waited_ns, ns, memory_order_relaxed);
}

void mpsd_pace_leave(void)
{
	began_ns = 0;
}

void mpsd_pace_end(uint64_t operations)
{
	uint64_t waited = atomic_load_explicit(&waited_ns, memory_order_relaxed), each;

	if (!began_ns || !operations)
		return;
	each = waited ? waited / operations + GIVE_NS : (mpsd_now_ns() - began_ns) / operations + 1;
	/* One that the GPU stood still in says little of the others: it has a neighbour's fault behind it. */
	if (each_ns && each > 2 * each_ns)
		each = 2 * each_ns;
	each_ns = each_ns ? (each_ns * OF_BEFORE + each) / (OF_BEFORE + 1) : each;
	began_ns = 0;
}

uint64_t mpsd_pace_of(uint64_t operations)
{
	return each_ns * operations;
}
