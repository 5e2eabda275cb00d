// SPDX-License-Identifier: MIT
#include "exact/relay.h"

#include <sched.h>

#include "clock.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "failover/made.h"
#include "stats.h"

MPSD_READ_OFTEN atomic_uint_least64_t mpsd_relay_serves;
MPSD_READ_OFTEN atomic_bool mpsd_relay_on;
atomic_uint_least64_t mpsd_relay_lost_in;

/*
 * Of the epoch's operations the first one that is left to it, and all behind that are; in the copy after so many moves. In a
 * line of its own, which the relay looks at all the time.
 */
static struct {
	_Alignas(64) _Atomic(struct mpsd_op *) first;
	uint64_t moves;		/* with the lock */
} lefts;

static struct mpsd_order *order_of(uint64_t moves)
{
	return &mpsd_orders[moves / 2 % MPSD_ORDERS];
}

static struct mpsd_op *left(void)
{
	return atomic_load(&lefts.first);
}

/* With the lock: what is of a copy that was left a move has done again, or lost. */
static void drop_others(void)
{
	if (left() && !mpsd_is_left() && lefts.moves != mpsd_tables()->moves)
		mpsd_relay_drop();
}

void mpsd_relay_drop(void)
{
	for (struct mpsd_op *op = left(); op; op = op->next)
		mpsd_work_given_late();
	atomic_store(&lefts.first, NULL);
}

bool mpsd_relay_takes(const struct mpsd_lane *lane)
{
	uint64_t moves = mpsd_tables()->moves;

	return mpsd_relay_is_awake() && mpsd_exact() && mpsd_thread.works && !atomic_load(&order_of(moves)->takers) &&
	       !atomic_load(&order_of(moves)->is_shut) && mpsd_thread.is_in_context && !mpsd_capturing() &&
	       !mpsd_work_is_several() && lane->given - lane->marked < MPSD_MARK_EACH &&
	       lane->given - lane->proven < MPSD_MOST_AHEAD;
}

void mpsd_relay_put(struct mpsd_op *op)
{
	drop_others();
	op->is_relayed = true;
	op->is_counted = false;
	atomic_store_explicit(&op->state, MPSD_OP_RESTS, memory_order_relaxed);
	lefts.moves = mpsd_tables()->moves;
	if (!left())
		atomic_store(&lefts.first, op);
	mpsd_thread.noted_in = 0;
	mpsd_thread.works = false;
}

/* With the lock, by who has the order: the next one; NULL: there is none, or the copy is about to be left. */
static struct mpsd_op *take(void)
{
	struct mpsd_op *op;

	drop_others();
	op = mpsd_is_left() || mpsd_epoch.is_closed ? NULL : left();
	if (!op)
		return NULL;
	atomic_store(&order_of(mpsd_tables()->moves)->is_giving, true);
	atomic_store(&lefts.first, op->next);
	atomic_store_explicit(&op->state, MPSD_OP_IS_GIVEN, memory_order_relaxed);
	return op;
}

#define LATE "a launch that the driver refused after the call had returned"

/* One of that shape was accepted before: memory is short, or the like. */
static void be_missing(const char *who, CUresult result)
{
	mpsd_say("%s refused a launch (error %d) after the call had returned: the program's next synchronisation fails", who, (int)result);
	mpsd_epoch_unsure(LATE);
	mpsd_work_missing();
}

enum given {
	GIVEN,
	REFUSED,	/* and what is behind it is not given: it would run without what this was to do */
	PUT_BACK,	/* the driver's word is none while a move is on: it is done again, or given once more */
};

/* With the lock: the driver has refused it. In a copy that was left a move does it again, whatever that says. */
static enum given judge(struct mpsd_op *op, uint64_t moves)
{
	if (mpsd_is_left() || atomic_load(&op->state) != MPSD_OP_IS_GIVEN)
		return GIVEN;
	if (atomic_load(&mpsd_moves) != moves) {
		atomic_store(&lefts.first, op);
		return PUT_BACK;
	}
	mpsd_epoch_strike(op);
	mpsd_relay_drop();
	if (!mpsd_epoch.unsure)
		__atomic_store_n(&mpsd_epoch.unsure, LATE, __ATOMIC_RELAXED);
	return REFUSED;
}

/* `entered`: what the driver said of the thread's context. False: it is left as it was. */
static bool give(struct mpsd_op *op, uint64_t moves, CUresult entered)
{
	CUresult result = entered == CUDA_SUCCESS ? mpsd_op_launch(op) : entered;
	bool is_lost = mpsd_is_loss(result) || entered != CUDA_SUCCESS, is_counted;
	enum given how = GIVEN;
	unsigned char state;

	mpsd_word_take(&mpsd_exact_lock);
	if (result != CUDA_SUCCESS && !is_lost)
		how = judge(op, moves);
	is_counted = op->is_counted || how == PUT_BACK;
	state = atomic_exchange(&op->state, MPSD_OP_RESTS);
	mpsd_word_give(&mpsd_exact_lock);
	if (state & MPSD_OP_IS_FORGOTTEN)
		mpsd_op_free(op);
	if (mpsd_is_loss(result)) {
		atomic_store(&mpsd_relay_lost_in, 1 + moves);
		mpsd_line_error(result, moves);
	}
	if (how == REFUSED)
		be_missing("the driver", result);
	else if (state & MPSD_OP_IS_SKIPPED)
		be_missing("the next driver instance", CUDA_ERROR_UNKNOWN);
	if (!is_counted)
		mpsd_work_given_late();
	if (how != PUT_BACK)
		mpsd_count(relayed);
	atomic_store(&order_of(moves)->is_giving, false);
	return how != PUT_BACK;
}

void mpsd_relay_left(void)
{
	for (struct mpsd_op *op = mpsd_epoch.first; op; op = op->next) {
		if (!op->is_relayed || op->is_counted || !(atomic_load(&op->state) & MPSD_OP_IS_GIVEN))
			continue;
		op->is_counted = true;
		mpsd_work_given_late();
	}
	mpsd_relay_drop();
}

static struct mpsd_op *next(void)
{
	struct mpsd_op *op;

	mpsd_word_take(&mpsd_exact_lock);
	op = take();
	mpsd_word_give(&mpsd_exact_lock);
	return op;
}

/*
 * By a thread that has the order, so many at most: in its own context where it has launched in that, and else in the one that
 * there is. Whether the last of them was given; false: there was none.
 */
static bool give_some(uint64_t moves, unsigned int most)
{
	CUresult entered = CUDA_SUCCESS;
	CUcontext before = NULL;
	struct mpsd_op *op = next();
	bool is_other = op && !mpsd_thread.is_in_context, is = op;

	if (is_other) {
		real_cuCtxGetCurrent(&before);
		entered = mpsd_enter_context();
	}
	for (; op && is; op = is && --most ? next() : NULL)
		is = give(op, moves, entered);
	if (is_other)
		real_cuCtxSetCurrent(before);
	return is;
}

bool mpsd_relay_give_one(uint64_t moves)
{
	bool is;

	if (!left() || !mpsd_word_try(mpsd_order_of(moves)))
		return false;
	is = give_some(moves, 1);
	mpsd_word_give(mpsd_order_of(moves));
	return is;
}

/* The mover has other things to do than to wait in the driver: one at a time. */
void mpsd_exact_give_left(void)
{
	mpsd_relay_give_one(mpsd_moves_done());
}

void mpsd_relay_end(uint64_t until_ns)
{
	while (left() && mpsd_now_ns() < until_ns) {
		mpsd_exact_give_left();
		sched_yield();
	}
	mpsd_word_take(&mpsd_exact_lock);
	mpsd_relay_drop();
	mpsd_word_give(&mpsd_exact_lock);
}

/* With the order. False: something is left. */
static bool shut(uint64_t moves)
{
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	drop_others();
	/* Who is in a copy that was left finds that himself. */
	is = mpsd_is_left() || !left();
	if (is)
		atomic_store(&order_of(moves)->is_shut, true);
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

bool mpsd_relay_shut_now(uint64_t moves)
{
	bool is = shut(moves);

	if (!is)
		mpsd_word_give(mpsd_order_of(moves));
	return is;
}

bool mpsd_relay_shut(uint64_t moves)
{
	bool is = shut(moves);

	if (is)
		return true;
	atomic_fetch_add(&order_of(moves)->takers, 1);
	give_some(moves, UINT32_MAX);
	is = mpsd_relay_shut_now(moves);
	atomic_fetch_sub(&order_of(moves)->takers, 1);
	return is;
}

bool mpsd_relay_await(void)
{
	uint64_t moves = mpsd_tables()->moves;

	if (mpsd_is_left())
		return false;
	/* Nothing is, where this thread has the order. */
	if (!left() && !atomic_load(&order_of(moves)->is_giving))
		return true;
	if (!mpsd_order_take(moves))
		return false;
	mpsd_order_give(moves);
	return true;
}

bool mpsd_relay_has_any(void)
{
	return left() != NULL;
}

void mpsd_relay_forget(void)
{
	atomic_store(&mpsd_relay_serves, 0);
	atomic_store(&mpsd_relay_on, false);
	atomic_store(&lefts.first, NULL);
}
