// SPDX-License-Identifier: MIT
/* In a move: what was not proven to have ended, undone and done again. */
#include <string.h>

#include "exact/chunks.h"
#include "exact/pace.h"
#include "exact/still.h"
#include "exact/submit.h"
#include "exact/undo.h"
#include "failover/autopsy.h"
#include "failover/fence.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "failover/made.h"

#define SOON_NS 1000000
#define LINE ((size_t)64)
#define FETCHED ((size_t)512)		/* an operation, and most parameters */

/* What it did to the host's memory it has done, and the program may have changed that since. */
static bool has_been_seen(const struct mpsd_op *op, uint64_t proven)
{
	if (op->kind == MPSD_OP_HOST)
		return mpsd_host_has_run(op->host);
	return op->kind == MPSD_OP_COPY && (op->copy.is_staged || (op->copy.is_for_host && op->number <= proven));
}

/* What was proven when the move came; marks of this one come later. */
static uint64_t proven_before[MPSD_LANES];

/* Up to which operation of each lane all is done again. */
static uint64_t again_to[MPSD_LANES];

/* What is before an event, and before a function of the host whatever it came after, is proven when that is reached. */
static CUresult mark_before(const struct mpsd_op *op)
{
	CUresult result = CUDA_SUCCESS;

	if (op->kind == MPSD_OP_RECORD || op->kind == MPSD_OP_HOST)
		result = mpsd_lane_mark_now(op->lane, op->number - 1);
	for (unsigned int i = 0; op->kind == MPSD_OP_HOST && i < mpsd_lanes_used && result == CUDA_SUCCESS; i++)
		result = mpsd_lane_mark_now(&mpsd_lanes[i], again_to[i]);
	return result;
}

/* The driver may keep this thread until functions of the host have run, which want the lock. */
static CUresult issue_again(struct mpsd_op *op)
{
	CUresult result;

	op->is_again = true;
	mpsd_word_give(&mpsd_exact_lock);
	result = mpsd_op_again(op);
	mpsd_word_take(&mpsd_exact_lock);
	/* While its thread is in the driver nobody knows whether that took it. */
	if (result != CUDA_SUCCESS && !mpsd_is_loss(result) && mpsd_op_skip(op))
		result = CUDA_SUCCESS;
	return result;
}

/* It was written by another processor, and the driver has a launch's parameters from there. */
static void fetch(const struct mpsd_op *op)
{
	for (size_t at = 0; op && at < FETCHED; at += LINE)
		__builtin_prefetch((const char *)op + at);
}

static CUresult do_again(struct mpsd_replayed *replayed)
{
	CUresult result = CUDA_SUCCESS;

	memset(again_to, 0, sizeof(again_to));
	for (struct mpsd_op *op = mpsd_epoch.first; op && result == CUDA_SUCCESS; op = op->next) {
		unsigned int lane = (unsigned int)(op->lane - mpsd_lanes);

		fetch(op->next);
		if (!op->is_skipped && !has_been_seen(op, proven_before[lane])) {
			result = mark_before(op);
			if (result == CUDA_SUCCESS)
				result = issue_again(op);
			replayed->operations++;
		}
		again_to[lane] = op->number;
	}
	for (unsigned int i = 0; i < mpsd_lanes_used && result == CUDA_SUCCESS; i++) {
		again_to[i] = mpsd_lanes[i].given;
		result = mpsd_lane_mark_now(&mpsd_lanes[i], again_to[i]);
	}
	return result;
}

/* With the lock: whatever was given since. */
static bool has_ended(void)
{
	for (unsigned int i = 0; i < mpsd_lanes_used; i++)
		if (mpsd_lane_look(&mpsd_lanes[i]) < again_to[i])
			return false;
	return true;
}

/* After all that was done again, in the copy after so many moves, where it ends with that. */
static CUevent done;
atomic_uint_least64_t mpsd_replay_moves;

/* NULL: there is none in this call's copy, or that was left. */
static CUevent end_in(uint64_t moves)
{
	CUevent event;

	mpsd_word_take(&mpsd_exact_lock);
	event = !mpsd_is_left() && atomic_load(&mpsd_replay_moves) == moves ? done : NULL;
	mpsd_word_give(&mpsd_exact_lock);
	return event;
}

static CUresult come_after(struct mpsd_lane *lane, CUevent event)
{
	CUresult result = real_cuStreamWaitEvent(mpsd_native(lane->stream), event, 0);

	if (result == CUDA_SUCCESS)
		__atomic_store_n(&lane->after_replay, mpsd_tables()->moves, __ATOMIC_RELAXED);
	return result;
}

CUresult mpsd_replay_come_after(struct mpsd_lane *lane)
{
	CUevent event;

	if (mpsd_replay_is_behind(lane))
		return CUDA_SUCCESS;
	event = end_in(mpsd_tables()->moves);
	return event ? come_after(lane, event) : CUDA_SUCCESS;
}

static CUresult note_end(void)
{
	CUresult result = real_cuEventCreate(&done, CU_EVENT_DISABLE_TIMING);

	mpsd_word_give(&mpsd_exact_lock);
	if (result == CUDA_SUCCESS)
		result = real_cuEventRecord(done, CU_STREAM_LEGACY);
	mpsd_word_take(&mpsd_exact_lock);
	if (result == CUDA_SUCCESS)
		atomic_store(&mpsd_replay_moves, mpsd_tables()->moves);
	for (unsigned int i = 1; i < mpsd_lanes_used && result == CUDA_SUCCESS; i++)
		if (mpsd_lanes[i].is_used && !mpsd_is_captured(mpsd_lanes[i].stream))
			result = come_after(&mpsd_lanes[i], done);
	return result;
}

/* The mode ends: streams that come later do not wait for it. */
void mpsd_replay_finish(void)
{
	uint64_t moves = mpsd_tables()->moves;
	CUevent event = moves ? end_in(moves) : NULL;

	if (event)
		real_cuEventSynchronize(event);
}

static void note_open(const struct mpsd_saved *unused, void *is)
{
	(void)unused;
	*(bool *)is = true;
}

/*
 * With the lock, before the fence has come to its end: whether all of it may be given to the next copy. What the old context
 * still does until then is undone with the rest, but for what memory was before, where that was not proven to be saved:
 * that would be saved anew behind it. Nor is anybody waited for who waits for the GPU.
 */
static bool may_be_ahead(void)
{
	bool has_open = false;

	if (mpsd_epoch.unsure || mpsd_epoch.is_given_up || mpsd_lanes_all_proven() || mpsd_hosts_are_open() ||
	    mpsd_still_is_relied() || mpsd_capturing() || !mpsd_lanes_gate())
		return false;
	mpsd_undo_each_open(note_open, &has_open);
	/* What comes to the host may be seen there, and what it came from be another thing by then. */
	for (const struct mpsd_op *op = mpsd_epoch.first; op && !has_open; op = op->next)
		has_open = mpsd_copy_is_with_host(op) && mpsd_lane_look(op->lane) < op->number;
	return !has_open;
}

/* Who only passes by gives it back by then. */
bool mpsd_exact_lock_soon(void)
{
	return mpsd_word_try_for(&mpsd_exact_lock, SOON_NS);
}

/* A function of the host that came later would run meanwhile. */
bool mpsd_exact_go_ahead(bool *may_be_told)
{
	bool is;

	if (!mpsd_exact_lock_soon())
		return false;
	is = may_be_ahead();
	*may_be_told = is && mpsd_epoch_ends_with_kernels();
	mpsd_epoch.is_closed = is;
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

/* All that is given from here on comes to the GPU behind the fence. */
static CUresult shut_gate(void)
{
	uint32_t *gate = mpsd_lanes_gate();

	__atomic_store_n(gate, 0, __ATOMIC_RELEASE);
	mpsd_fence_opens(gate);
	return real_cuStreamWaitValue32_v2(CU_STREAM_LEGACY, (CUdeviceptr)gate, MPSD_GATE_IS_OPEN,
					   CU_STREAM_WAIT_VALUE_EQ);
}

/* Whoever opens the gate does so whatever the mover is at. */
static const char *await_fence(void)
{
	bool holds;

	mpsd_word_give(&mpsd_exact_lock);
	holds = mpsd_fence_complete();
	mpsd_word_take(&mpsd_exact_lock);
	return holds ? NULL : MPSD_STILL_WRITES;
}

/* Where not all can be done again, what was begun goes on all the same, and what the program does next comes after it. */
static CUresult undo_and_do_again(struct mpsd_replayed *replayed)
{
	CUresult result = mpsd_undo_restore(&replayed->bytes), noted;

	if (result == CUDA_SUCCESS)
		result = mpsd_still_check(&replayed->unsure);
	if (result == CUDA_SUCCESS && !replayed->unsure)
		result = do_again(replayed);
	if (mpsd_is_loss(result))
		return result;
	noted = note_end();
	return result == CUDA_SUCCESS || mpsd_is_loss(noted) ? noted : result;
}

/*
 * Where something was put back that goes on until it has ended, in the mover's own lane: until then it may have to be put
 * back once more, and nothing that it uses may be taken away.
 */
static void give_up(bool has_begun)
{
	struct mpsd_lane *own = &mpsd_lanes[0];

	mpsd_still_unsure();
	mpsd_hosts_lose();
	mpsd_lanes_give_up(!has_begun);
	if (!has_begun) {
		mpsd_epoch_end();
		return;
	}
	mpsd_epoch_forget();
	mpsd_epoch.is_given_up = true;
	mpsd_lane_mark_now(own, ++own->given);
}

/* In the context of the copy in use: what is given to it next waits for the fence, or that has come to its end. */
static CUresult come_behind_fence(const char **why)
{
	CUresult result;

	if (!mpsd_fence_is_ahead())
		return CUDA_SUCCESS;
	result = shut_gate();
	if (result != CUDA_SUCCESS)
		*why = await_fence();
	return mpsd_is_loss(result) ? result : CUDA_SUCCESS;
}

static void move(const char *why_not, struct mpsd_replayed *replayed)
{
	bool has_begun = false;
	CUresult result;

	mpsd_lanes_move();
	mpsd_still_moved();
	mpsd_epoch_left();
	for (unsigned int i = 0; i < mpsd_lanes_used; i++)
		proven_before[i] = mpsd_lanes[i].proven;
	if (mpsd_lanes_all_proven()) {
		mpsd_epoch_end();
		return;
	}
	replayed->unsure = mpsd_epoch.unsure ? mpsd_epoch.unsure : why_not;
	if (!replayed->unsure) {
		result = mpsd_enter_context();
		if (result == CUDA_SUCCESS)
			result = come_behind_fence(&replayed->unsure);
		has_begun = result == CUDA_SUCCESS && !replayed->unsure;
		if (has_begun)
			result = undo_and_do_again(replayed);
		if (!replayed->unsure)
			replayed->unsure = await_fence();
		/* Of a context that is lost already: the epoch stays, for the next move. */
		if (result != CUDA_SUCCESS && !mpsd_is_loss(result) && !replayed->unsure)
			replayed->unsure = "the work cannot be replayed";
	}
	if (replayed->unsure)
		give_up(has_begun);
	real_cuCtxSetCurrent(NULL);
}

void mpsd_exact_move(bool may, struct mpsd_replayed *replayed)
{
	const char *why_not = may ? NULL : "the offender is unknown";

	*replayed = (struct mpsd_replayed){ 0 };
	mpsd_word_take(&mpsd_exact_lock);
	if (mpsd_fence_is_ahead() && (!may || !may_be_ahead())) {
		const char *why = await_fence();

		why_not = why ? why : why_not;
	}
	/* By who was at it when the fence was begun. It is saved anew in the same place. */
	if (may && !mpsd_epoch.unsure && mpsd_chunks_are_open()) {
		mpsd_word_give(&mpsd_exact_lock);
		mpsd_fence_finish();
		mpsd_word_take(&mpsd_exact_lock);
	}
	/* Whoever was about to do something finds the copy left. */
	mpsd_epoch.is_awaited = mpsd_epoch.is_closed = false;
	mpsd_autopsy_line_calls(true);
	move(why_not, replayed);
	mpsd_autopsy_line_calls(false);
	mpsd_word_give(&mpsd_exact_lock);
}

void mpsd_exact_stay(void)
{
	mpsd_word_take(&mpsd_exact_lock);
	mpsd_epoch.is_closed = false;
	mpsd_word_give(&mpsd_exact_lock);
}

bool mpsd_exact_is_due(uint64_t *operations, uint64_t *takes_ns)
{
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	is = mpsd_exact() && !mpsd_epoch.unsure && !mpsd_lanes_all_proven();
	*operations = is ? mpsd_epoch.operations : 0;
	*takes_ns = mpsd_pace_of(*operations);
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

uint64_t mpsd_exact_epoch(void)
{
	uint64_t number;

	mpsd_word_take(&mpsd_exact_lock);
	number = mpsd_epoch.number;
	mpsd_word_give(&mpsd_exact_lock);
	return number;
}

CUresult mpsd_exact_look(uint64_t epoch)
{
	CUresult result;
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	is = has_ended() || mpsd_epoch.number != epoch;
	mpsd_word_give(&mpsd_exact_lock);
	if (is)
		return CUDA_SUCCESS;
	/* To ask the legacy stream would end a capture in a stream that blocks with it. */
	if (mpsd_capturing())
		return CUDA_ERROR_NOT_READY;
	mpsd_autopsy_line_calls(true);
	result = mpsd_enter_context();
	if (result == CUDA_SUCCESS)
		result = real_cuStreamQuery(CU_STREAM_LEGACY);
	real_cuCtxSetCurrent(NULL);
	mpsd_autopsy_line_calls(false);
	return mpsd_is_loss(result) ? result : CUDA_ERROR_NOT_READY;
}

void mpsd_exact_rested(void)
{
	mpsd_word_take(&mpsd_exact_lock);
	mpsd_lanes_give_up(true);
	mpsd_epoch_end();
	mpsd_word_give(&mpsd_exact_lock);
}
