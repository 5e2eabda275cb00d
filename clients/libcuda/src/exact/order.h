/* SPDX-License-Identifier: MIT */
/* One thread at a time submits to a copy of the driver. */
#pragma once

#include "failover/carry.h"
#include "word.h"

#define MPSD_ORDERS 8		/* a thread may still be stuck in a copy that was left */

extern struct mpsd_order {
	_Alignas(64) struct mpsd_word word;
} mpsd_orders[MPSD_ORDERS];

static inline struct mpsd_word *mpsd_order_of(uint64_t moves)
{
	return &mpsd_orders[moves / 2 % MPSD_ORDERS].word;
}

/* That which is about to be taken. */
static inline const struct mpsd_word *mpsd_order_now(void)
{
	return mpsd_order_of(atomic_load_explicit(&mpsd_moves, memory_order_relaxed));
}

/* False: somebody has it. */
static inline bool mpsd_order_try(uint64_t moves)
{
	return mpsd_word_try(mpsd_order_of(moves));
}

/* False: the copy was left. */
bool mpsd_order_wait(uint64_t moves);

static inline bool mpsd_order_take(uint64_t moves)
{
	return __builtin_expect(mpsd_order_try(moves), 1) || mpsd_order_wait(moves);
}

static inline void mpsd_order_give(uint64_t moves)
{
	mpsd_word_give(mpsd_order_of(moves));
}

void mpsd_orders_child(void);

/* What is for who has the order, by this thread. */
CUresult mpsd_in_order(CUresult (*call)(void));
