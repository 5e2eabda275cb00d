/* SPDX-License-Identifier: MIT */
/* One thread at a time submits to a copy of the driver. */
#pragma once

#include "failover/carry.h"
#include "word.h"

#define MPSD_ORDERS 8		/* a thread may still be stuck in a copy that was left */

extern struct mpsd_order {
	_Alignas(64) struct mpsd_word word;
	atomic_bool is_shut;		/* who has it is not the relay, and nothing is left to that meanwhile (relay.h); */
	atomic_bool is_giving;		/* and gives what was; */
	atomic_uint takers;		/* and those who do so before they shut it */
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

/* False: the copy was left. */
bool mpsd_order_wait(uint64_t moves);

/*
 * relay.c, where there is a relay, by who has just taken the order: what was left to that is given, and nothing is left to it
 * until the order is given back. Not shut(): the copy is about to be left; not shut_now(): something was left. Then the order
 * is given back.
 */
extern atomic_bool mpsd_relay_on;
bool mpsd_relay_shut(uint64_t moves);
bool mpsd_relay_shut_now(uint64_t moves);

/* In a call, for what comes behind all that was left to the relay, and need not have the order. False: as above. */
bool mpsd_relay_await(void);

/* It comes on while somebody has the order: who takes it next sees it. */
static inline bool mpsd_relay_is_on(void)
{
	return atomic_load_explicit(&mpsd_relay_on, memory_order_relaxed);
}

static inline bool mpsd_relay_flush(void)
{
	return __builtin_expect(!mpsd_relay_is_on(), 1) || mpsd_relay_await();
}

/* False: somebody has it. */
static inline bool mpsd_order_try(uint64_t moves)
{
	return mpsd_word_try(mpsd_order_of(moves)) && (!mpsd_relay_is_on() || mpsd_relay_shut_now(moves));
}

/* False: the copy was left, or is about to be. */
static inline bool mpsd_order_take(uint64_t moves)
{
	if (__builtin_expect(!mpsd_word_try(mpsd_order_of(moves)), 0) && !mpsd_order_wait(moves))
		return false;
	return __builtin_expect(!mpsd_relay_is_on(), 1) || mpsd_relay_shut(moves);
}

static inline void mpsd_order_give(uint64_t moves)
{
	atomic_store_explicit(&mpsd_orders[moves / 2 % MPSD_ORDERS].is_shut, false, memory_order_release);
	mpsd_word_give(mpsd_order_of(moves));
}

void mpsd_orders_child(void);

/* What is for who has the order, by this thread. */
CUresult mpsd_in_order(CUresult (*call)(void));
