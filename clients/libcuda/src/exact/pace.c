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

/* Of the epochs before, the last ones most: how many operations, eight times, and what they took. */
static uint64_t done, took_ns;

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

uint64_t mpsd_pace_of(uint64_t operations)
{
	return done ? took_ns * operations / done : 0;
}

void mpsd_pace_end(uint64_t operations)
{
	uint64_t waited = atomic_load_explicit(&waited_ns, memory_order_relaxed), took, most;

	if (!began_ns || !operations)
		return;
	took = waited ? waited + operations * GIVE_NS : mpsd_now_ns() - began_ns + 1;
	/* One that the GPU stood still in says little of the others: it has a neighbour's fault behind it. */
	most = 2 * mpsd_pace_of(operations > done / (OF_BEFORE + 1) ? operations : done / (OF_BEFORE + 1));
	took_ns = took_ns - took_ns / (OF_BEFORE + 1) + (most && took > most ? most : took);
	done = done - done / (OF_BEFORE + 1) + operations;
	began_ns = 0;
}
