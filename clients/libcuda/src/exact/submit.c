// SPDX-License-Identifier: MIT
/*
 * What the program submits: noted before the driver has it, in the order in which the driver gets it, and with what
 * it may write saved first. One thread at a time does that; who is overtaken by a move finds its operation done.
 */
#include "clock.h"
#include "exact/budget.h"
#include "exact/copier.h"
#include "exact/exposure.h"
#include "exact/limit.h"
#include "exact/named.h"
#include "exact/params.h"
#include "exact/readers.h"
#include "exact/relay.h"
#include "exact/shelf.h"
#include "exact/spending.h"
#include "exact/submit.h"
#include "exact/undo.h"
#include "exact/validate.h"
#include "failover/graph.h"
#include "failover/line.h"

MPSD_READ_OFTEN atomic_bool mpsd_exact_on;

#define DONE UINT64_MAX		/* it has been taken; what is left is to see that it ended */

void mpsd_exact_start(void)
{
	mpsd_named_start();
	mpsd_validate_start();
	mpsd_readers_start(mpsd_validates());
	/* What a launch looks at with no lock is set before. */
	atomic_store(&mpsd_exact_on, true);
}

void mpsd_exact_stop(const char *why)
{
	if (!atomic_exchange(&mpsd_exact_on, false))
		return;
	mpsd_validate_end(why);
	mpsd_exposure_stays(why);
	mpsd_epoch_unsure(why);
	mpsd_replay_finish();
}

void mpsd_exact_fail(const char *why)
{
	mpsd_exact_stop(why);
	mpsd_line_unsure(why);
}

/* With the lock: the epoch must not end between what is saved for an operation and the operation. */
static void prepare(bool is)
{
	if (!mpsd_is_left())
		mpsd_epoch.is_awaited = is;
}

/* End an epoch early. The program itself would not wait here. */
static CUresult out_of_the_way(CUresult (*call)(void))
{
	CUresult result;

	mpsd_thread.is_forced = true;
	mpsd_word_take(&mpsd_exact_lock);
	prepare(false);
	mpsd_word_give(&mpsd_exact_lock);
	result = call();
	mpsd_word_take(&mpsd_exact_lock);
	prepare(true);
	mpsd_word_give(&mpsd_exact_lock);
	mpsd_thread.is_forced = false;
	return result;
}

/* One operation may write more than the snapshot buffers can hold. */
static void be_unsure(const struct mpsd_op *op)
{
	uint64_t bytes, by_leads, limit = mpsd_limit();
	const char *why = mpsd_undo_why_not();

	if (limit != MPSD_NO_LIMIT && mpsd_plan_count(op, &bytes, &by_leads) == CUDA_SUCCESS && bytes > limit &&
	    mpsd_limit_missed(bytes, !mpsd_readers_any && mpsd_budget_is_by_leads(bytes, by_leads)))
		mpsd_epoch_unsure_for_now(why);
	else
		mpsd_epoch_unsure(why);
}

static CUresult save(const struct mpsd_op *op)
{
	bool is_short = false;
	CUresult result;

	if (mpsd_epoch_is_unsure() || !mpsd_exact())
		return mpsd_plan_note(op);
	result = mpsd_plan_save(op);
	if (result != CUDA_ERROR_OUT_OF_MEMORY)
		return result;
	result = out_of_the_way(mpsd_epoch_make_room);
	if (result == CUDA_SUCCESS)
		result = mpsd_exact() ? mpsd_plan_save_what_fits(op, &is_short) : mpsd_plan_note(op);
	if (is_short || result == CUDA_ERROR_OUT_OF_MEMORY)
		be_unsure(op);
	return result == CUDA_ERROR_OUT_OF_MEMORY ? mpsd_plan_note(op) : result;
}

/* With the lock: what a launch of a graph does beside kernels and copies. */
static CUresult note_part(const struct mpsd_op *op, void *unused)
{
	(void)unused;
	if (op->kind == MPSD_OP_RECORD && mpsd_op_is_event_node(op))
		mpsd_point_set_by_graph(op->event.event);
	else if (op->kind == MPSD_OP_WAIT && mpsd_op_is_event_node(op))
		mpsd_point_use(op->event.event);
	else if (op->kind == MPSD_OP_MEMORY && mpsd_memops_wait(op->memory))
		mpsd_epoch.is_waiting = true;
	return CUDA_SUCCESS;
}

/* With the lock. In an unsure epoch it is counted only. */
static void note(struct mpsd_op *op, uint64_t moves)
{
	if (mpsd_epoch.unsure || !mpsd_exact()) {
		atomic_store_explicit(&op->state, MPSD_OP_IS_FORGOTTEN, memory_order_relaxed);
		op->number = ++op->lane->given;
		mpsd_thread.noted_in = 1 + moves;
	} else {
		mpsd_note(op, moves);
	}
	if (op->kind == MPSD_OP_GRAPH && op->graph.graph)
		mpsd_graph_each_special(op->graph.graph, note_part);
	if (op->kind == MPSD_OP_RECORD)
		mpsd_point_set(op->event.event, (struct mpsd_point){ op->lane, op->number - 1 });
	else if (op->kind == MPSD_OP_WAIT)
		mpsd_point_use(op->event.event);
	else if (op->kind == MPSD_OP_HOST)
		mpsd_host_noted(op);
	else if (op->kind == MPSD_OP_MEMORY && mpsd_memops_wait(op->memory))
		mpsd_epoch.is_waiting = true;
}

/*
 * An operation that the driver has refused leaves nothing. False: the copy was left, and what is noted is done again; but
 * not this, unless that has begun: it is given to the next copy once more, for the program to hear what that says.
 */
static bool strike(struct mpsd_op *op)
{
	bool left;

	mpsd_word_take(&mpsd_exact_lock);
	left = mpsd_is_left();
	if (!left && atomic_load(&op->state) == MPSD_OP_IS_GIVEN)
		mpsd_epoch_strike(op);
	else if (left && !op->is_again)
		mpsd_op_skip(op);
	mpsd_word_give(&mpsd_exact_lock);
	return !left;
}

static MPSD_SELDOM CUresult finish_otherwise(struct mpsd_op *op, CUresult result)
{
	bool lost = mpsd_is_loss(result);
	bool left = result == CUDA_SUCCESS || lost ? mpsd_is_left() : !strike(op);

	unsigned char state = atomic_exchange(&op->state, MPSD_OP_RESTS);

	if (state & MPSD_OP_IS_FORGOTTEN)
		mpsd_op_free(op);
	if (state & MPSD_OP_IS_SKIPPED)
		mpsd_thread.noted_in = 0;
	if (left)
		return MPSD_AGAIN;
	if (!lost)
		mpsd_thread.noted_in = 0;
	return result;
}

MPSD_OF_A_LAUNCH CUresult mpsd_finish(struct mpsd_op *op, CUresult result)
{
	unsigned char given = MPSD_OP_IS_GIVEN;

	/* Nearly always the driver has taken it, and nothing has come between. */
	if (__builtin_expect(result != CUDA_SUCCESS || mpsd_is_left() ||
			     !atomic_compare_exchange_strong(&op->state, &given, MPSD_OP_RESTS), 0))
		return finish_otherwise(op, result);
	mpsd_thread.noted_in = 0;
	return CUDA_SUCCESS;
}

/* What is validated looks at the saves of the operation, whose epoch has not ended. */
static void validate(struct mpsd_op *op, CUresult result)
{
	if (result == CUDA_SUCCESS && mpsd_validates())
		mpsd_validate_after(op);
	mpsd_word_take(&mpsd_exact_lock);
	prepare(false);
	mpsd_word_give(&mpsd_exact_lock);
}

/*
 * An event that is reached proves what is before it, and a function of the host sees that: also what is in another
 * stream, where the mark comes after it.
 */
static CUresult mark_before(struct mpsd_op *op)
{
	mpsd_word_take(&mpsd_exact_lock);
	op->is_marked = !mpsd_is_left() && !mpsd_is_captured(op->stream) && mpsd_lane_is_ordered(op->lane);
	op->lane->given += op->is_marked;
	mpsd_word_give(&mpsd_exact_lock);
	/* A callback can mark nothing itself, and the epoch ends before it only if all streams are proven. */
	if (op->kind == MPSD_OP_HOST && mpsd_epoch_is_long()) {
		mpsd_epoch_hasten();
		mpsd_epoch_hastened();
	}
	return mpsd_lane_mark(op->lane);
}

/* Everything before the driver has it. */
static CUresult make_ready(struct mpsd_op *op, bool full)
{
	bool settles = full || mpsd_validates();
	CUresult result = settles ? out_of_the_way(mpsd_epoch_settle) : CUDA_SUCCESS;

	if (result == CUDA_SUCCESS && mpsd_validates())
		mpsd_validate_before(op);
	if (result == CUDA_SUCCESS)
		result = mpsd_replay_come_after(op->lane);
	if (result == CUDA_SUCCESS)
		result = save(op);
	if (result == CUDA_SUCCESS && (op->kind == MPSD_OP_RECORD || op->kind == MPSD_OP_HOST))
		result = mark_before(op);
	return result;
}

static CUresult make_ready_measured(struct mpsd_op *op, bool full)
{
	uint64_t began = mpsd_now_ns(), apart = mpsd_spending_apart_ns(), took;
	CUresult result = make_ready(op, full);

	took = mpsd_now_ns() - began;
	apart = mpsd_spending_apart_ns() - apart;
	if (took > apart)
		mpsd_spending_prepared(took - apart);
	return result;
}

/* With the order, which everybody's next operation waits for. */
static CUresult put(struct mpsd_op *op, uint64_t moves, struct mpsd_ahead *ahead)
{
	bool left, full, is_validated;
	CUresult result;

	mpsd_word_take(&mpsd_exact_lock);
	left = mpsd_is_left();
	op->lane = left ? NULL : mpsd_lane_of(op->stream);
	full = mpsd_epoch_is_full();
	prepare(op->lane != NULL);
	mpsd_word_give(&mpsd_exact_lock);
	if (!op->lane) {
		mpsd_op_free(op);
		if (!left)
			mpsd_exact_fail("more streams than per-stream logs");
		return MPSD_AGAIN;
	}
	result = make_ready_measured(op, full);
	if (result == CUDA_SUCCESS && op->kind == MPSD_OP_COPY)
		op->copy.is_by_kernel = mpsd_copier_makes(op);
	mpsd_word_take(&mpsd_exact_lock);
	left = mpsd_is_left() || mpsd_epoch.is_closed;
	is_validated = !left && result == CUDA_SUCCESS && mpsd_validates();
	prepare(is_validated);
	if (!left && result == CUDA_SUCCESS) {
		note(op, moves);
		*ahead = mpsd_look_ahead(op->lane);
	}
	mpsd_word_give(&mpsd_exact_lock);
	if (left || result != CUDA_SUCCESS) {
		mpsd_op_free(op);
		return left ? MPSD_AGAIN : result;
	}
	result = mpsd_op_issue(op);
	/* While its end is not known a move waits for all that the old copy has mapped to be unmapped there. */
	if (result == CUDA_SUCCESS && mpsd_copy_is_with_host(op) && !mpsd_epoch_is_unsure())
		mpsd_lane_mark(op->lane);
	if (is_validated)
		validate(op, result);
	return mpsd_finish_marked(op, result, ahead);
}

/* With the order: what the lane has been given by now is to be proven. */
static CUresult mark_for(CUstream stream, struct mpsd_lane **lane, uint64_t *number)
{
	mpsd_word_take(&mpsd_exact_lock);
	*lane = mpsd_lane_find(stream);
	*number = *lane ? (*lane)->given : 0;
	mpsd_word_give(&mpsd_exact_lock);
	return *lane ? mpsd_lane_mark(*lane) : CUDA_SUCCESS;
}

CUresult mpsd_submit(struct mpsd_op *op, bool proves)
{
	uint64_t moves = mpsd_tables()->moves;
	bool is_done = mpsd_thread.noted_in && mpsd_thread.noted_in != 1 + moves;
	CUstream stream = op->stream;
	CUresult result = CUDA_SUCCESS;
	struct mpsd_ahead ahead = { NULL, false, 0 };
	struct mpsd_lane *lane = NULL;
	uint64_t number = 0;

	if (is_done)
		mpsd_op_free(op);
	/* Where the mode has ended since, that has seen to its end. */
	if (is_done && (!proves || !mpsd_exact())) {
		mpsd_thread.noted_in = 0;
		return CUDA_SUCCESS;
	}
	if (!is_done && mpsd_capturing() && mpsd_capture_op(op, &result))
		return result;
	if (!mpsd_exact()) {
		result = mpsd_op_issue(op);
		mpsd_op_free(op);
		return result;
	}
	result = mpsd_lanes_ready();
	if (result == CUDA_SUCCESS && !is_done && op->kind == MPSD_OP_COPY && op->copy.is_for_host)
		result = mpsd_epoch_come_after_reads(op);
	if (result == CUDA_SUCCESS && !mpsd_order_take(moves))
		result = MPSD_AGAIN;
	if (result != CUDA_SUCCESS) {
		if (!is_done)
			mpsd_op_free(op);
		return result;
	}
	if (!is_done)
		result = put(op, moves, &ahead);
	if (result == CUDA_SUCCESS && proves) {
		mpsd_thread.noted_in = DONE;
		result = mark_for(stream, &lane, &number);
		if (mpsd_epoch_is_long())
			mpsd_epoch_hasten();
	}
	mpsd_order_give(moves);
	/* A move that comes meanwhile does the operation again. */
	if (result == CUDA_SUCCESS && !proves)
		mpsd_come_near(&ahead);
	if (result != CUDA_SUCCESS || !proves)
		return result;
	if (lane)
		result = mpsd_lane_wait(lane, number);
	if (result == CUDA_SUCCESS)
		result = mpsd_epoch_finish();
	if (result == CUDA_SUCCESS)
		mpsd_thread.noted_in = 0;
	return result;
}

void mpsd_exact_at_end(bool is_on)
{
	if (is_on)
		mpsd_validate_report();
	mpsd_relay_at_end();
}

void mpsd_exact_child(void)
{
	atomic_store(&mpsd_exact_on, false);
	mpsd_word_child(&mpsd_exact_lock);
	mpsd_orders_child();
	mpsd_relay_child();
	mpsd_stage_child();
	mpsd_shelf_child();
	mpsd_hosts_child();
	mpsd_hostnode_child();
}
