/* SPDX-License-Identifier: MIT */
/* What submit.c, launch.c and epoch.c have in common. With the order, and with the lock where it says so. */
#pragma once

#include "exact/pace.h"
#include "exact/spending.h"
#include "exact/state.h"
#include "exact/undo.h"

#define MPSD_MOST_OPERATIONS 262144u		/* in an epoch */
#define MPSD_MARK_EACH 256u			/* operations of a lane */
#define MPSD_MOST_AHEAD 768u			/* the driver keeps who is a thousand launches ahead */
#define MPSD_MOST_KEPT_BYTES ((uint64_t)256 << 20)

/* Of an operation that is noted, bits. Who forgets one that is being given leaves it to that thread to free it. */
enum mpsd_op_state {
	MPSD_OP_RESTS = 0,
	MPSD_OP_IS_GIVEN = 1,		/* to the driver, by a thread */
	MPSD_OP_IS_FORGOTTEN = 2,	/* meanwhile, by the epoch */
	MPSD_OP_IS_SKIPPED = 4,		/* meanwhile, by a move: that thread gives it once more */
};

/* With the lock: no move does it again. False: the thread that gave it has come back already. */
static inline bool mpsd_op_skip(struct mpsd_op *op)
{
	unsigned char given = MPSD_OP_IS_GIVEN;

	op->is_skipped = atomic_compare_exchange_strong(&op->state, &given, MPSD_OP_IS_GIVEN | MPSD_OP_IS_SKIPPED);
	return op->is_skipped;
}

/* With the lock */
static inline bool mpsd_epoch_is_full(void)
{
	return (mpsd_epoch.operations >= MPSD_MOST_OPERATIONS) | (mpsd_epoch.kept_bytes >= MPSD_MOST_KEPT_BYTES) |
	       mpsd_epoch.is_given_up;
}

/* With the lock: an operation in that lane has nothing to wait for, and nothing is to be said of it. */
static inline bool mpsd_lane_is_free(const struct mpsd_lane *lane)
{
	bool is_other = mpsd_epoch.is_closed | (mpsd_epoch.unsure != NULL) | mpsd_epoch_is_full() | !mpsd_undo_is_behind(lane);

	return __builtin_expect(!is_other, 1) && __builtin_expect(mpsd_replay_is_behind(lane), 1);
}

/*
 * Not so far ahead of the GPU that the driver would keep the thread: when the context is lost meanwhile, it would not
 * let it go.
 */
struct mpsd_ahead {
	struct mpsd_lane *lane;
	bool is_unmarked;
	uint64_t until;		/* this operation is to have ended before the next one; 0: none */
};

/* With the lock, once the operation is noted. */
static inline struct mpsd_ahead mpsd_look_ahead(struct mpsd_lane *lane)
{
	struct mpsd_ahead ahead = { lane, lane->given - lane->marked >= MPSD_MARK_EACH, 0 };

	if (__builtin_expect(lane->given - lane->proven >= MPSD_MOST_AHEAD, 0) &&
	    lane->given - mpsd_lane_look(lane) >= MPSD_MOST_AHEAD)
		ahead.until = lane->given - MPSD_MOST_AHEAD + MPSD_MARK_EACH;
	return ahead;
}

/* Without the order, for others may be what is waited for; and not where it may be what this thread does next. */
static inline void mpsd_come_near(const struct mpsd_ahead *ahead)
{
	if (__builtin_expect(ahead->until != 0, 0) && !mpsd_epoch_is_waiting())
		mpsd_lane_wait(ahead->lane, ahead->until);
}

/* With the lock: an operation that is about to be given to the driver comes into the epoch, which is not unsure. */
static inline void mpsd_note(struct mpsd_op *op, uint64_t moves)
{
	atomic_store_explicit(&op->state, MPSD_OP_IS_GIVEN, memory_order_relaxed);
	mpsd_thread.noted_in = 1 + moves;
	op->is_again = op->is_skipped = false;
	op->number = ++op->lane->given;
	op->next = NULL;
	*mpsd_epoch.last = op;
	mpsd_epoch.last = &op->next;
	if (__builtin_expect(!mpsd_epoch.operations++, 0)) {
		mpsd_pace_begin();
		mpsd_spending_begin();
	}
	if (__builtin_expect(op->kind == MPSD_OP_COPY, 0)) {
		mpsd_epoch.has_borrowed |= op->copy.is_borrowed;
		mpsd_epoch.kept_bytes += op->copy.kept ? op->copy.size : 0;
	}
}

/* After it was given to the driver, with what that said. */
CUresult mpsd_finish(struct mpsd_op *op, CUresult result);

/* The same, and the lane's mark where that is due. It is submitted: what goes wrong with the mark the next one finds. */
static inline CUresult mpsd_finish_marked(struct mpsd_op *op, CUresult result, const struct mpsd_ahead *ahead)
{
	result = mpsd_finish(op, result);
	if (__builtin_expect(ahead->is_unmarked, 0) && result == CUDA_SUCCESS)
		mpsd_lane_mark(ahead->lane);
	return result;
}
