/* SPDX-License-Identifier: MIT */
/*
 * A program that exceeds a budget leaves fail-over for good, between two epochs; so does one that the daemon tells to. From then
 * on its calls take the way of mode `keep` and are not recorded. Its guard zones stay. No call fails because of it.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "failoverwire.h"

struct mpsd_leaving {
	enum mpsd_failover_budget budget;
	uint64_t values[3];	/* time: ns added, ns of the rest, thousandths; memory: bytes needed, bytes of the limit */
	bool may_come_back;	/* with a list of what kernels only read */
};

/* With the lock, when all is proven and nothing is noted yet. Nothing happens during a move, or while it is validated. */
void mpsd_leave(const struct mpsd_leaving *why);

bool mpsd_leave_has(void);

/* From the thread of line.c: leave by order as soon as nothing is in flight; look again whether that is so. */
void mpsd_leave_order(void);
void mpsd_leave_follow(void);

/* With the lock, at the end of an epoch: the program may have such an order. */
void mpsd_leave_end(void);

/* Of a program that has left: why, and a sentence of it. */
const struct mpsd_leaving *mpsd_leave_why(void);
void mpsd_leave_text(char *text, size_t room);

/*
 * A thread releases snapshot buffers beyond the limit, or beyond what epochs need (chunks.h), as soon as nothing is saved in
 * them; all of them, of a program that has left. At the program's end: it is waited for, a moment. In a forked child there is no such thread.
 */
void mpsd_release_begin(void);
void mpsd_release_child(void);
void mpsd_release_at_end(void);
