// SPDX-License-Identifier: MIT
/*
 * Waits that do not sit in the driver: a copy whose context is lost lets nobody out before it knows that itself,
 * which may be long after the program could go on elsewhere. So work is asked for until it has ended, and the
 * driver's own wait comes then. Where no move can come, and where the program has asked for waits that do not
 * spin, that is all.
 */
#include <sched.h>

#include "exact/state.h"
#include "failover/line.h"
#include "failover/made.h"
#include "memory.h"

#define SPINS 2000

static bool may_poll(void)
{
	unsigned int flags;

	return mpsd_line_ready() && inner_cuCtxGetFlags(&flags) == CUDA_SUCCESS && !(flags & CU_CTX_SCHED_BLOCKING_SYNC);
}

/* Another look? `moves` is that of the first one. */
static bool goes_on(CUresult result, uint64_t moves, unsigned int *looks)
{
	if (result != CUDA_ERROR_NOT_READY || atomic_load(&mpsd_moves) != moves)
		return false;
	if (++*looks > SPINS)
		sched_yield();
	return true;
}

/* Whether the driver's own wait comes next; otherwise what to answer. */
static bool ended(CUresult *result, uint64_t moves)
{
	if (atomic_load(&mpsd_moves) != moves)
		*result = MPSD_AGAIN;
	/* What else is wrong is for that wait to say, but for a loss, in which it may take long. */
	return *result != MPSD_AGAIN && !mpsd_is_loss(*result);
}

static CUresult poll_stream(CUstream native, uint64_t moves)
{
	unsigned int looks = 0;
	CUresult result;

	do
		result = inner_cuStreamQuery(native);
	while (goes_on(result, moves, &looks));
	return result;
}

CUresult poll_cuStreamSynchronize(CUstream hStream)
{
	uint64_t moves = mpsd_tables()->moves;
	CUresult result = CUDA_SUCCESS;

	/* What was waited for without the driver has ended: to ask it first would be once too often. */
	if (!mpsd_exact_has_ended(hStream) && may_poll())
		result = poll_stream(mpsd_native(hStream), moves);
	return ended(&result, moves) ? inner_cuStreamSynchronize(mpsd_native(hStream)) : result;
}

CUresult poll_cuEventSynchronize(CUevent hEvent)
{
	uint64_t moves = mpsd_tables()->moves;
	CUresult result = CUDA_SUCCESS;
	unsigned int looks = 0;

	if (may_poll()) {
		do
			result = inner_cuEventQuery(mpsd_native(hEvent));
		while (goes_on(result, moves, &looks));
	}
	return ended(&result, moves) ? inner_cuEventSynchronize(mpsd_native(hEvent)) : result;
}

/* The name of the stream that was made after `before` (NULL: the first) on this device; NULL: there is none. */
static CUstream next_stream(CUstream before, CUdevice device)
{
	struct mpsd_made *made;
	bool passed = !before;
	CUstream found = NULL;

	mpsd_made_lock();
	for (made = mpsd_made_oldest(); made && !found; made = made->newer) {
		if (made->kind != MPSD_MADE_STREAM || made->device != device)
			continue;
		if (passed)
			found = made->name;
		passed |= made->name == before;
	}
	mpsd_made_unlock();
	return found;
}

CUresult mpsd_poll_ask(CUstream name)
{
	struct mpsd_asked asked;
	CUresult result;

	if (!mpsd_ask_begin(&asked, name))
		return CUDA_ERROR_NOT_FOUND;
	result = inner_cuStreamQuery(asked.native);
	mpsd_ask_end(&asked);
	return result;
}

static CUresult poll_each(CUdevice device, uint64_t moves)
{
	CUresult result = CUDA_SUCCESS;
	CUstream stream = NULL;

	while (result == CUDA_SUCCESS && (stream = next_stream(stream, device))) {
		unsigned int looks = 0;

		do
			result = mpsd_poll_ask(stream);
		while (goes_on(result, moves, &looks));
	}
	return result;
}

/* A stream that another thread makes or ends meanwhile is left to the driver's own wait. */
CUresult poll_cuCtxSynchronize(void)
{
	uint64_t moves = mpsd_tables()->moves;
	CUresult result = CUDA_SUCCESS;
	CUdevice device;

	if (may_poll() && inner_cuCtxGetDevice(&device) == CUDA_SUCCESS) {
		result = poll_stream(CU_STREAM_LEGACY, moves);
		if (result == CUDA_SUCCESS)
			result = poll_each(device, moves);
	}
	return ended(&result, moves) ? inner_cuCtxSynchronize() : result;
}

#ifdef MPSD_cuCtxSynchronize_v2
CUresult poll_cuCtxSynchronize_v2(CUcontext ctx)
{
	CUcontext context = mpsd_native(ctx);
	CUresult result;

	if (!ctx)
		return inner_cuCtxSynchronize_v2(ctx);
	/* What a move has overtaken has another name there. */
	if (!context)
		return MPSD_AGAIN;
	result = inner_cuCtxPushCurrent_v2(context);
	if (result != CUDA_SUCCESS)
		return result;
	result = poll_cuCtxSynchronize();
	inner_cuCtxPopCurrent_v2(&context);
	return result;
}
#endif

/* It waits for what is in the legacy stream before it copies. */
CUresult poll_cuMemcpyDtoH_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount)
{
	uint64_t moves = mpsd_tables()->moves;
	CUresult result = CUDA_SUCCESS;

	if (mpsd_exact() && ByteCount && mpsd_is_device((CUdeviceptr)dstHost))
		return mpsd_copy_within((CUdeviceptr)dstHost, srcDevice, ByteCount);
	if (mpsd_exact() && mpsd_line_ready() && ByteCount && dstHost)
		return mpsd_bounds_refuse(srcDevice, ByteCount) ? CUDA_ERROR_INVALID_VALUE
								: mpsd_stage_out(dstHost, srcDevice, ByteCount,
										 CU_STREAM_LEGACY);
	if (may_poll())
		result = poll_stream(CU_STREAM_LEGACY, moves);
	return ended(&result, moves) ? inner_cuMemcpyDtoH_v2(dstHost, mpsd_address(srcDevice), ByteCount) : result;
}
