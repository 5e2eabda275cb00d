// SPDX-License-Identifier: MIT
/* How the GPU is made to say how far it has come in a stream: by a memset of the lane's word, or by a kernel of this library's. */
#include "exact/state.h"
#include "failover/graph.h"
#include "failover/made.h"

/* False: this call's copy was left. */
static bool set_marked(struct mpsd_lane *lane, uint64_t number)
{
	bool left;

	mpsd_word_take(&mpsd_exact_lock);
	left = mpsd_is_left();
	if (!left)
		lane->marked = number;
	mpsd_word_give(&mpsd_exact_lock);
	return !left;
}

/* `native`: its stream. What is captured now does not go on before the capture has ended. */
static CUresult write_mark(struct mpsd_lane *lane, CUstream native, uint64_t number, uint64_t before)
{
	bool held = false;
	CUresult result = MPSD_AGAIN;

	if (mpsd_capturing() && !mpsd_captures_hold(native, &held))
		return CUDA_SUCCESS;
	/* Before the GPU can have written it. */
	if (set_marked(lane, number))
		result = real_cuMemsetD32Async((CUdeviceptr)mpsd_lane_word(lane), (uint32_t)number, 1, native);
	if (result != CUDA_SUCCESS)
		set_marked(lane, before);
	if (held)
		mpsd_captures_let();
	return result;
}

/* It has ended without a word here, for the mode has: who is on the way waits for nothing of it. */
static CUresult has_no_stream(struct mpsd_lane *lane, uint64_t number)
{
	bool left;

	mpsd_word_take(&mpsd_exact_lock);
	left = mpsd_is_left();
	if (!left) {
		lane->marked = number;
		mpsd_lane_conclude(lane, number);
	}
	mpsd_word_give(&mpsd_exact_lock);
	return left ? MPSD_AGAIN : CUDA_SUCCESS;
}

/* Another thread's stream too, which that may end as soon as nothing of it is open. */
CUresult mpsd_lane_mark(struct mpsd_lane *lane)
{
	struct mpsd_asked asked;
	uint64_t number, before;
	CUresult result;
	CUstream stream;
	bool left;

	mpsd_word_take(&mpsd_exact_lock);
	left = mpsd_is_left();
	number = lane->given;
	before = lane->marked;
	stream = lane->stream;
	mpsd_word_give(&mpsd_exact_lock);
	if (left)
		return MPSD_AGAIN;
	if (number == before)
		return CUDA_SUCCESS;
	if (!mpsd_ask_begin(&asked, stream))
		return has_no_stream(lane, number);
	result = write_mark(lane, asked.native, number, before);
	mpsd_ask_end(&asked);
	return result;
}

uint32_t *mpsd_lane_mark_ahead(struct mpsd_lane *lane, uint64_t *number, uint64_t *before)
{
	bool left;

	mpsd_word_take(&mpsd_exact_lock);
	left = mpsd_is_left();
	if (!left) {
		*before = lane->marked;
		/* Both at once: a move that came between would take what the GPU has written for what is given next. */
		lane->marked = *number = ++lane->given;
	}
	mpsd_word_give(&mpsd_exact_lock);
	return left ? NULL : mpsd_lane_word(lane);
}

void mpsd_lane_unmark(struct mpsd_lane *lane, uint64_t before)
{
	set_marked(lane, before);
}

CUresult mpsd_lane_mark_now(struct mpsd_lane *lane, uint64_t number)
{
	CUresult result;

	if (number <= lane->marked)
		return CUDA_SUCCESS;
	lane->marked = number;
	/* The driver may keep this thread until functions of the host have run, which want the lock. */
	mpsd_word_give(&mpsd_exact_lock);
	result = real_cuMemsetD32Async((CUdeviceptr)mpsd_lane_word(lane), (uint32_t)number, 1, CU_STREAM_LEGACY);
	mpsd_word_take(&mpsd_exact_lock);
	return result;
}
