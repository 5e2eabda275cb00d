/* SPDX-License-Identifier: MIT */
/*
 * A thread of this library's that gives the driver launches which the program's threads have noted, and go on meanwhile:
 *
 *	cuLaunchKernel                      --> noted in the epoch --> (the relay, with the order) --> the driver
 *	what submits, waits, takes or sets  --> order --> gives what is left --> the driver
 *
 * A launch is left to it only where the driver has accepted one of the same shape (shapes.h): there is hardly anything for it
 * to refuse, and what it refuses all the same the next wait tells. What was noted and not given when a move comes is done
 * again with the rest.
 *
 * It spins while launches come one soon after another, and sleeps otherwise. Where the process has one processor, or
 * others want this one, threads give their launches themselves.
 */
#pragma once

#include "exact/params.h"
#include "exact/state.h"
#include "exact/submit.h"

/* A launch was given by its own thread, and the driver has taken it: the next one like it the relay may give, if it is awake. */
void mpsd_relay_accepted(const struct mpsd_launch *given);

extern atomic_uint_least64_t mpsd_relay_serves;	/* 1 + the moves before the copy whose launches it gives; 0: none */

/* Whether it may take one in the copy of this call, as far as that is known with no lock. */
static inline bool mpsd_relay_is_awake(void)
{
	return atomic_load_explicit(&mpsd_relay_serves, memory_order_relaxed) == 1 + mpsd_tables()->moves;
}

/* With the lock: whether it takes an operation in that lane. */
bool mpsd_relay_takes(const struct mpsd_lane *lane);

/* With the lock: what was noted just now is left to it. */
void mpsd_relay_put(struct mpsd_op *op);

/* With the lock: what it has not given is not its any more; in a move, what it is about to give in the copy that was left, too. */
void mpsd_relay_drop(void);
void mpsd_relay_left(void);

/* At the program's end: what is on its way is waited for; then nobody calls the driver for it any more. */
void mpsd_relay_at_end(void);
void mpsd_relay_child(void);

/* Between relay.c and relaythread.c */

extern atomic_uint_least64_t mpsd_relay_lost_in;	/* 1 + the moves before the copy whose context was lost last */
bool mpsd_relay_has_any(void);			/* that is to be given */
bool mpsd_relay_give_one(uint64_t moves);	/* in a call in that copy. False: somebody has the order, or there is none */
void mpsd_relay_end(uint64_t until_ns);		/* at the end: by this thread, and what is left then is dropped */
void mpsd_relay_forget(void);			/* in a forked child */
