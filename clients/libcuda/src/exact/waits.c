// SPDX-License-Identifier: MIT
/*
 * Where the program is told that work has ended. What it is told then has to be so: the driver's word is taken when
 * the GPU's own is there, which the driver's comes after.
 */
#include "clock.h"
#include "exact/spending.h"
#include "exact/state.h"
#include "failover/line.h"
#include "failover/made.h"

static void want(struct mpsd_proof *proof, const struct mpsd_lane *lane, uint64_t number)
{
	proof->wanted[proof->count].lane = (unsigned int)(lane - mpsd_lanes);
	proof->wanted[proof->count++].number = number;
}

/* With the lock, before the marks: what they are to prove. */
static void want_all(struct mpsd_proof *proof, bool legacy)
{
	for (unsigned int i = 0; i < mpsd_lanes_used; i++)
		if (mpsd_lanes[i].is_used && !(legacy && mpsd_lanes[i].is_apart) && mpsd_lane_look(&mpsd_lanes[i]) < mpsd_lanes[i].given)
			want(proof, &mpsd_lanes[i], mpsd_lanes[i].given);
}

static void want_one(struct mpsd_proof *proof, enum mpsd_wait wait, const void *handle)
{
	if (wait == MPSD_WAIT_EVENT) {
		struct mpsd_point point = mpsd_point_of((CUevent)handle);

		proof->is_by_graph = mpsd_point_is_by_graph((CUevent)handle);
		if (point.lane)
			want(proof, point.lane, point.number);
	} else {
		struct mpsd_lane *lane = mpsd_lane_find((CUstream)handle);

		if (lane)
			want(proof, lane, lane->given);
	}
}

/* The legacy stream waits for the others that block with it. */
static bool is_for_all(enum mpsd_wait wait, const void *handle)
{
	return wait == MPSD_WAIT_ALL || wait == MPSD_WAIT_COPY ||
	       (wait == MPSD_WAIT_STREAM && (!handle || handle == CU_STREAM_LEGACY));
}

CUresult mpsd_lanes_mark(void)
{
	CUresult result = CUDA_SUCCESS;
	unsigned int count;

	mpsd_word_take(&mpsd_exact_lock);
	count = mpsd_lanes_used;
	mpsd_word_give(&mpsd_exact_lock);
	for (unsigned int i = 0; i < count && result == CUDA_SUCCESS; i++)
		result = mpsd_lane_mark(&mpsd_lanes[i]);
	return result;
}

static CUresult mark(const struct mpsd_proof *proof)
{
	uint64_t moves = mpsd_tables()->moves;
	CUresult result = CUDA_SUCCESS;
	uint64_t began;

	if (!proof->count)
		return CUDA_SUCCESS;
	if (!mpsd_order_take(moves))
		return MPSD_AGAIN;
	began = mpsd_now_ns();
	for (unsigned int i = 0; i < proof->count && result == CUDA_SUCCESS; i++)
		result = mpsd_lane_mark(&mpsd_lanes[proof->wanted[i].lane]);
	mpsd_spending_prepared(mpsd_now_ns() - began);
	mpsd_order_give(moves);
	return result;
}

/* Without the driver: one whose context is lost keeps whoever asks it. */
static CUresult come(const struct mpsd_proof *proof, bool is_look)
{
	CUresult result = CUDA_SUCCESS;

	for (unsigned int i = 0; i < proof->count && result == CUDA_SUCCESS; i++) {
		struct mpsd_lane *lane = &mpsd_lanes[proof->wanted[i].lane];
		uint64_t number = proof->wanted[i].number;

		result = is_look ? mpsd_lane_seen(lane, number) : mpsd_lane_wait(lane, number);
	}
	return result;
}

/* The GPU is not known to have come so far. */
static bool is_open(const struct mpsd_proof *proof)
{
	bool is = false;

	if (!proof->count)
		return false;
	mpsd_word_take(&mpsd_exact_lock);
	for (unsigned int i = 0; i < proof->count && !mpsd_is_left(); i++)
		is |= mpsd_lane_look(&mpsd_lanes[proof->wanted[i].lane]) < proof->wanted[i].number;
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

bool mpsd_exact_is_reached(const struct mpsd_proof *proof)
{
	return !is_open(proof);
}

CUresult mpsd_exact_mark(struct mpsd_proof *proof, enum mpsd_wait wait, const void *handle)
{
	bool left;

	proof->count = 0;
	proof->is_by_graph = false;
	mpsd_word_take(&mpsd_exact_lock);
	left = mpsd_is_left();
	if (!left && is_for_all(wait, handle))
		want_all(proof, wait != MPSD_WAIT_ALL);
	else if (!left)
		want_one(proof, wait, handle);
	mpsd_word_give(&mpsd_exact_lock);
	if (left)
		return MPSD_AGAIN;
	return wait == MPSD_WAIT_EVENT ? CUDA_SUCCESS : mark(proof);
}

CUresult mpsd_exact_before(struct mpsd_proof *proof, enum mpsd_wait wait, const void *handle, bool is_look)
{
	CUresult result = mpsd_exact_mark(proof, wait, handle);
	uint64_t moves = mpsd_tables()->moves;

	/* Who has the order may wait for a function of the host that waits for this thread. */
	if (result == CUDA_SUCCESS && !is_look && proof->count && mpsd_epoch_is_long() && mpsd_order_try(moves)) {
		mpsd_epoch_hasten();
		mpsd_order_give(moves);
	}
	proof->began_ns = 0;
	if (is_look && is_open(proof))
		mpsd_spending_looked();
	/* A copy that the call makes comes behind what it waits for, and is waited for itself. */
	if (result == CUDA_SUCCESS && wait != MPSD_WAIT_COPY && mpsd_line_ready())
		result = come(proof, is_look);
	else if (result == CUDA_SUCCESS && !is_look && is_open(proof))
		proof->began_ns = mpsd_now_ns();
	return result;
}

/* A copy that the call made itself has ended if something after it has. */
static CUresult come_behind(struct mpsd_proof *proof)
{
	uint64_t moves = mpsd_tables()->moves;
	struct mpsd_lane *lane = NULL;
	CUresult result;

	result = mpsd_lanes_ready();
	if (result != CUDA_SUCCESS)
		return result;
	if (!mpsd_order_take(moves))
		return MPSD_AGAIN;
	proof->count = 0;
	mpsd_word_take(&mpsd_exact_lock);
	if (!mpsd_is_left())
		lane = mpsd_lane_of(CU_STREAM_LEGACY);
	if (lane)
		want(proof, lane, ++lane->given);
	mpsd_word_give(&mpsd_exact_lock);
	result = lane ? mpsd_lane_mark(lane) : MPSD_AGAIN;
	mpsd_order_give(moves);
	return result;
}

/* The program knows of it what is not proven, and may go by that: it cannot be done again. */
static void see_by_graph(void)
{
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	is = mpsd_is_left() || mpsd_lanes_all_proven();
	mpsd_word_give(&mpsd_exact_lock);
	if (!is)
		mpsd_epoch_unsure("an event that a graph records");
}

CUresult mpsd_exact_after(struct mpsd_proof *proof, enum mpsd_wait wait)
{
	CUresult result;

	if (proof->is_by_graph)
		see_by_graph();

	if (proof->began_ns)
		mpsd_spending_waited(mpsd_now_ns() - proof->began_ns);
	result = wait == MPSD_WAIT_COPY ? come_behind(proof) : CUDA_SUCCESS;
	for (unsigned int i = 0; i < proof->count && result == CUDA_SUCCESS; i++)
		result = mpsd_lane_wait(&mpsd_lanes[proof->wanted[i].lane], proof->wanted[i].number);
	if (result == CUDA_SUCCESS)
		result = mpsd_epoch_finish();
	return result;
}

bool mpsd_exact_has_ended(CUstream stream)
{
	bool is = false;

	if (!mpsd_exact())
		return false;
	mpsd_word_take(&mpsd_exact_lock);
	if (!mpsd_is_left() && !mpsd_epoch.is_given_up) {
		struct mpsd_lane *lane = mpsd_lane_find(stream);

		is = is_for_all(MPSD_WAIT_STREAM, stream) ? mpsd_lanes_all_proven()
							  : lane && mpsd_lane_look(lane) == lane->given;
	}
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

CUresult mpsd_exact_prove(void)
{
	uint64_t moves = mpsd_moves_done();
	CUresult result;
	bool is;

	if (!mpsd_exact())
		return CUDA_SUCCESS;
	if (!mpsd_order_try(moves))
		return CUDA_ERROR_NOT_READY;
	result = mpsd_enter_context();
	if (result == CUDA_SUCCESS)
		result = mpsd_lanes_mark();
	real_cuCtxSetCurrent(NULL);
	mpsd_order_give(moves);
	if (result != CUDA_SUCCESS)
		return mpsd_is_loss(result) ? result : CUDA_ERROR_NOT_READY;
	mpsd_word_take(&mpsd_exact_lock);
	is = mpsd_lanes_all_proven();
	mpsd_word_give(&mpsd_exact_lock);
	return is ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult mpsd_exact_settle(void)
{
	return mpsd_in_order(mpsd_epoch_settle);
}

/* The handle may be somebody else's next. */
CUresult mpsd_exact_settle_stream(CUstream stream)
{
	CUresult result = mpsd_exact_settle();
	struct mpsd_lane *lane;

	if (result != CUDA_SUCCESS)
		return result;
	mpsd_word_take(&mpsd_exact_lock);
	lane = mpsd_lane_find(stream);
	if (lane) {
		lane->is_used = false;
		/* Its mark may still come, and the driver is asked by a stream that is there. */
		lane->stream = CU_STREAM_LEGACY;
		mpsd_points_forget_lane(lane);
	}
	mpsd_word_give(&mpsd_exact_lock);
	return CUDA_SUCCESS;
}

CUresult mpsd_exact_settle_event(CUevent event)
{
	CUresult result = CUDA_SUCCESS;
	bool is_used;

	mpsd_word_take(&mpsd_exact_lock);
	is_used = mpsd_point_is_used(event);
	mpsd_word_give(&mpsd_exact_lock);
	if (is_used)
		result = mpsd_exact_settle();
	if (result != CUDA_SUCCESS)
		return result;
	mpsd_word_take(&mpsd_exact_lock);
	mpsd_point_forget(event);
	mpsd_word_give(&mpsd_exact_lock);
	return CUDA_SUCCESS;
}
