// SPDX-License-Identifier: MIT
/*
 * What a context needs for its work the driver's library takes when that is first given, and more of it the more of it is
 * under way: pinned pages for what is copied from pageable memory, room for what is submitted. In a move all that was in
 * flight is given at once, and then the resource manager may be at a fault for 0.15 s, and give nothing. So it is given
 * something before, as much as comes to be under way, and the driver keeps what it has taken.
 */
#include "failover/rehearsal.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "clock.h"
#include "failover/made.h"
#include "physical.h"

#define OPERATIONS 640		/* under way at once; the driver keeps who is a thousand ahead */
#define LARGE ((size_t)1 << 20)
#define SMALL ((size_t)4 << 10)
#define HELD_MS 100
#define END_MS 200

/* In the stream: what is given meanwhile is under way. */
static void CUDA_CB hold(void *held)
{
	for (int ms = 0; ms < HELD_MS && atomic_load((atomic_bool *)held); ms++)
		mpsd_pause(1);
}

static CUresult give_one(unsigned int number, CUdeviceptr room, const void *bytes)
{
	switch (number % 4) {
	case 0:
		return other_cuMemcpyHtoDAsync_v2(room, bytes, SMALL, CU_STREAM_LEGACY);
	case 1:
		return other_cuMemcpyDtoDAsync_v2(room, room + LARGE, SMALL, CU_STREAM_LEGACY);
	default:
		return other_cuMemsetD32Async(room, number, 1, CU_STREAM_LEGACY);
	}
}

static void give_all(CUdeviceptr room, const void *bytes)
{
	static atomic_bool held;	/* for ever: the function may come late */
	CUresult result = other_cuMemcpyHtoDAsync_v2(room, bytes, LARGE, CU_STREAM_LEGACY);

	if (result == CUDA_SUCCESS)
		result = other_cuMemcpyDtoDAsync_v2(room, room + LARGE, LARGE, CU_STREAM_LEGACY);
	atomic_store(&held, true);
	if (result == CUDA_SUCCESS)
		result = other_cuLaunchHostFunc(CU_STREAM_LEGACY, hold, &held);
	for (unsigned int i = 0; i < OPERATIONS && result == CUDA_SUCCESS; i++)
		result = give_one(i, room, bytes);
	atomic_store(&held, false);
}

static bool comes_to_its_end(void)
{
	CUresult result = CUDA_ERROR_NOT_READY;

	for (int ms = 0; ms < END_MS && result == CUDA_ERROR_NOT_READY; ms++) {
		result = other_cuStreamQuery(CU_STREAM_LEGACY);
		if (result == CUDA_ERROR_NOT_READY)
			mpsd_pause(1);
	}
	return result == CUDA_SUCCESS;
}

/* What goes wrong takes time in a move, and nothing else: but a context that is lost is found out by who uses it next. */
static void rehearse_in(CUcontext context)
{
	void *bytes = calloc(1, LARGE);
	CUdeviceptr room;

	if (bytes && other_cuCtxSetCurrent(context) == CUDA_SUCCESS &&
	    other_cuMemAlloc_v2(&room, 2 * LARGE) == CUDA_SUCCESS) {
		give_all(room, bytes);
		/* Otherwise it goes with the context. */
		if (comes_to_its_end())
			other_cuMemFree_v2(room);
		else
			bytes = NULL;
	}
	free(bytes);
}

void mpsd_rehearse(void)
{
	CUcontext contexts[MPSD_DEVICES];
	unsigned int count = 0;

	mpsd_made_lock();
	for (struct mpsd_made *made = mpsd_made_oldest(); made && count < MPSD_DEVICES; made = made->newer)
		if (made->kind == MPSD_MADE_CONTEXT && made->is_twin)
			contexts[count++] = made->twin;
	mpsd_made_unlock();
	for (unsigned int i = 0; i < count; i++)
		rehearse_in(contexts[i]);
}
