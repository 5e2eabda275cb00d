// SPDX-License-Identifier: MIT
/* Before a planned move: until what the program has submitted has ended. */
#include "clock.h"
#include "failover/carry.h"
#include "failover/graph.h"
#include "failover/made.h"
#include "failover/move.h"

#define MOST_REST_MS 2000

/*
 * What is left to be done in the copy in use: SUCCESS for nothing, NOT_READY, or what its loss says. With the lock
 * of made.h.
 */
static CUresult look_for_work(void)
{
	for (struct mpsd_made *made = mpsd_made_oldest(); made; made = made->newer) {
		struct mpsd_made *context = mpsd_made_context(made->device);
		CUstream stream = made->kind == MPSD_MADE_STREAM ? made->native : CU_STREAM_LEGACY;
		CUresult result;

		if ((made->kind != MPSD_MADE_STREAM && made->kind != MPSD_MADE_CONTEXT) || !context)
			continue;
		result = real_cuCtxPushCurrent_v2(context->native);
		if (result == CUDA_SUCCESS) {
			result = real_cuStreamQuery(stream);
			real_cuCtxPopCurrent_v2(&(CUcontext){ NULL });
		}
		if (result != CUDA_SUCCESS)
			return result;
	}
	return CUDA_SUCCESS;
}

CUresult mpsd_come_to_rest(void)
{
	CUresult result = CUDA_ERROR_NOT_READY;

	for (int ms = 0; ms < MOST_REST_MS && result == CUDA_ERROR_NOT_READY; ms++) {
		bool rests;

		mpsd_exact_give_left();
		/* A look at streams would end a capture. */
		rests = mpsd_work_rests() && !mpsd_capturing();
		mpsd_made_lock();
		result = mpsd_capturing() ? CUDA_ERROR_NOT_READY : look_for_work();
		mpsd_made_unlock();
		if (result == CUDA_SUCCESS)
			result = rests ? mpsd_exact_prove() : CUDA_ERROR_NOT_READY;
		if (result == CUDA_ERROR_NOT_READY)
			mpsd_pause(1);
	}
	if (result == CUDA_SUCCESS) {
		mpsd_work_ended();
		mpsd_exact_rested();
	}
	return result;
}
