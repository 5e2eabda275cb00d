// SPDX-License-Identifier: MIT
#include "exact/relay.h"

#include "failover/line.h"
#include "failover/made.h"
#include "stats.h"

MPSD_READ_OFTEN atomic_uint_least64_t mpsd_relay_serves;
MPSD_READ_OFTEN atomic_bool mpsd_relay_on;
atomic_bool mpsd_relay_has_lost;

static atomic_uint waiting;		/* threads that have the order, and give what is left */

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

	return mpsd_relay_is_awake() && mpsd_exact() && mpsd_thread.works && !atomic_load_explicit(&waiting, memory_order_relaxed) &&
	       !atomic_load(&order_of(moves)->is_shut) && mpsd_thread.is_in_context &&
	       !mpsd_work_is_several() && lane->given - lane->marked < MPSD_MARK_EACH &&
	       lane->given - lane->proven < MPSD_MOST_AHEAD;
}

void mpsd_relay_put(struct mpsd_op *op)
{
	drop_others();
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

/* It goes from the epoch, and what comes behind it is not given: it would run without what this was to do. */
static bool strike(struct mpsd_op *op)
{
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	is = !mpsd_is_left() && atomic_load(&op->state) == MPSD_OP_IS_GIVEN;
	if (is) {
		mpsd_epoch_strike(op);
		mpsd_relay_drop();
	}
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

/* One of that shape was accepted before: memory is short, or the like. */
static void be_missing(CUresult result)
{
	mpsd_say("the driver refused a launch (error %d) after the program went on: its next wait fails", (int)result);
	mpsd_epoch_unsure("a launch that was refused late");
	mpsd_work_missing();
}

/* Whatever a copy says that was left, a move does it again; unless the next copy has refused it, too. */
static void give(struct mpsd_op *op, uint64_t moves)
{
	CUresult result = mpsd_op_launch(op);
	bool is_struck = result != CUDA_SUCCESS && !mpsd_is_loss(result) && strike(op);
	unsigned char state = atomic_exchange(&op->state, MPSD_OP_RESTS);

	if (state & MPSD_OP_IS_FORGOTTEN)
		mpsd_op_free(op);
	if (mpsd_is_loss(result)) {
		atomic_store(&mpsd_relay_has_lost, true);
		mpsd_line_error(result, moves);
	}
	if (is_struck || state & MPSD_OP_IS_SKIPPED)
		be_missing(result);
	mpsd_count(relayed);
	mpsd_work_given_late();
	atomic_store(&order_of(moves)->is_giving, false);
}

static struct mpsd_op *next(void)
{
	struct mpsd_op *op;

	mpsd_word_take(&mpsd_exact_lock);
	op = take();
	mpsd_word_give(&mpsd_exact_lock);
	return op;
}

/* By a thread that has the order, in its own context where it has launched in that, and else in the one that there is. */
static void give_all(uint64_t moves)
{
	CUcontext before = NULL;
	struct mpsd_op *op = next();
	bool is_other = op && !mpsd_thread.is_in_context;

	if (is_other) {
		real_cuCtxGetCurrent(&before);
		mpsd_enter_context();
	}
	for (; op; op = next())
		give(op, moves);
	if (is_other)
		real_cuCtxSetCurrent(before);
}

void mpsd_exact_give_left(void)
{
	uint64_t moves = mpsd_moves_done();

	if (!left() || !mpsd_word_try(mpsd_order_of(moves)))
		return;
	give_all(moves);
	mpsd_word_give(mpsd_order_of(moves));
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
	atomic_fetch_add(&waiting, 1);
	give_all(moves);
	is = mpsd_relay_shut_now(moves);
	atomic_fetch_sub(&waiting, 1);
	return is;
}

bool mpsd_relay_await(void)
{
	uint64_t moves = mpsd_tables()->moves;

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

void mpsd_relay_give_one(uint64_t moves)
{
	struct mpsd_op *op;

	if (!mpsd_word_try(mpsd_order_of(moves)))
		return;
	op = next();
	if (op)
		give(op, moves);
	mpsd_word_give(mpsd_order_of(moves));
}

void mpsd_relay_forget(void)
{
	atomic_store(&mpsd_relay_serves, 0);
	atomic_store(&mpsd_relay_on, false);
	atomic_store(&lefts.first, NULL);
}
