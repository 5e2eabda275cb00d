// SPDX-License-Identifier: MIT
/*
 * What another lane saves may be what this one is about to write: the GPU waits for the word of that lane, which says how far
 * it has come. An event would have to be recorded with each save, for others that mostly are not there.
 */
#include "exact/undo.h"

struct awaited {
	struct mpsd_lane *lane;
	uint64_t number;
};

/* With the lock: of other lanes, what is saved and not proven to be there. */
static unsigned int list_awaited(const struct mpsd_lane *lane, struct awaited *list)
{
	unsigned int count = 0;

	for (unsigned int i = 0; i < mpsd_lanes_used; i++) {
		struct mpsd_lane *other = &mpsd_lanes[i];

		if (other != lane && other->saved > mpsd_lane_look(other))
			list[count++] = (struct awaited){ other, other->saved };
	}
	return count;
}

static bool is_marked(const struct awaited *awaited)
{
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	is = mpsd_is_left() || awaited->lane->marked >= awaited->number;
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

/* The GPU waits for the word of that lane; for a mark that the driver has refused it would wait for good. */
static CUresult wait_for(const struct mpsd_lane *lane, const struct awaited *awaited)
{
	CUresult result = is_marked(awaited) ? CUDA_SUCCESS : mpsd_lane_mark(awaited->lane);

	if (result != CUDA_SUCCESS)
		return result;
	if (!is_marked(awaited)) {
		mpsd_epoch_unsure("a snapshot with unknown completion");
		return CUDA_SUCCESS;
	}
	result = real_cuStreamWaitValue32_v2(mpsd_native(lane->stream), (CUdeviceptr)mpsd_lane_word(awaited->lane),
					     (uint32_t)awaited->number, CU_STREAM_WAIT_VALUE_GEQ);
	/* A GPU that does not: nothing comes before the saves but other saves. */
	if (result == CUDA_ERROR_NOT_SUPPORTED)
		result = mpsd_lane_wait(awaited->lane, awaited->number);
	return result;
}

CUresult mpsd_undo_come_behind(struct mpsd_lane *lane)
{
	struct awaited list[MPSD_LANES];
	CUresult result = CUDA_SUCCESS;
	unsigned int count;
	uint64_t all;
	bool left;

	if (mpsd_undo_is_behind(lane))
		return CUDA_SUCCESS;
	mpsd_word_take(&mpsd_exact_lock);
	/* Another copy's numbers nobody writes here. */
	left = mpsd_is_left();
	all = mpsd_undo_batches;
	count = list_awaited(lane, list);
	mpsd_word_give(&mpsd_exact_lock);
	if (left)
		return MPSD_AGAIN;
	for (unsigned int i = 0; i < count && result == CUDA_SUCCESS; i++)
		result = wait_for(lane, &list[i]);
	mpsd_word_take(&mpsd_exact_lock);
	if (result == CUDA_SUCCESS && !mpsd_is_left())
		__atomic_store_n(&lane->after_saves, all, __ATOMIC_RELAXED);
	mpsd_word_give(&mpsd_exact_lock);
	return result;
}
