// SPDX-License-Identifier: MIT
/*
 * Waits that do not sit in the driver: a copy whose context is lost lets nobody out before it knows that itself,
 * which may be long after the program could go on elsewhere. So work is asked for until it has ended, and the
 * driver's own wait comes then. Where no move can come, and where the program has asked for waits that do not
 * spin, that is all.
 */
#include <pthread.h>
#include <sched.h>

#include "exact/exact.h"
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

	if (may_poll())
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

/*
 * A stream that is asked although another thread may end it: that waits for the answer, for the driver takes what it
 * is given for a stream.
 */
struct question {
	struct question *next;
	CUstream native;
	uint64_t moves;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct question *questions;

static void begin(struct question *question)
{
	pthread_mutex_lock(&lock);
	question->next = questions;
	questions = question;
	pthread_mutex_unlock(&lock);
}

static void end(const struct question *question)
{
	struct question **link = &questions;

	pthread_mutex_lock(&lock);
	while (*link != question)
		link = &(*link)->next;
	*link = question->next;
	pthread_mutex_unlock(&lock);
}

static bool is_asked(CUstream native, uint64_t moves)
{
	bool is = false;

	pthread_mutex_lock(&lock);
	for (const struct question *question = questions; question; question = question->next)
		is |= question->native == native && question->moves == moves;
	pthread_mutex_unlock(&lock);
	return is;
}

bool mpsd_poll_ends(CUstream native, uint64_t moves)
{
	while (is_asked(native, moves) && atomic_load(&mpsd_moves) == moves)
		sched_yield();
	return atomic_load(&mpsd_moves) == moves;
}

void mpsd_poll_child(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	questions = NULL;
}

/* With the lock of made.h. The stream that was made after `before` (NULL: the first) on this device; NULL: none. */
static CUstream next_stream(CUstream before, CUdevice device)
{
	struct mpsd_made *made = mpsd_made_oldest();
	bool passed = !before;

	for (; made; made = made->newer) {
		if (made->kind != MPSD_MADE_STREAM || made->device != device)
			continue;
		if (passed)
			return made->native;
		passed = made->native == before;
	}
	return NULL;
}

/* With the lock of made.h. */
static bool is_there(CUstream native)
{
	const struct mpsd_made *made = mpsd_made_oldest();

	if (!native || native == CU_STREAM_LEGACY || native == CU_STREAM_PER_THREAD)
		return true;
	while (made && (made->kind != MPSD_MADE_STREAM || made->native != native))
		made = made->newer;
	return made != NULL;
}

CUresult mpsd_poll_ask(CUstream native, uint64_t moves)
{
	struct question question = { NULL, native, moves };
	CUresult result;
	bool is;

	mpsd_made_lock();
	is = atomic_load(&mpsd_moves) == moves && is_there(native);
	if (is)
		begin(&question);
	mpsd_made_unlock();
	if (!is)
		return CUDA_ERROR_NOT_FOUND;
	result = inner_cuStreamQuery(native);
	end(&question);
	return result;
}

static CUresult poll_each(CUdevice device, uint64_t moves)
{
	CUresult result = CUDA_SUCCESS;
	CUstream stream = NULL;

	while (result == CUDA_SUCCESS) {
		unsigned int looks = 0;

		mpsd_made_lock();
		stream = atomic_load(&mpsd_moves) == moves ? next_stream(stream, device) : NULL;
		mpsd_made_unlock();
		if (!stream)
			break;
		do
			result = mpsd_poll_ask(stream, moves);
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

CUresult poll_cuCtxSynchronize_v2(CUcontext ctx)
{
	CUcontext context = mpsd_native(ctx);
	CUresult result;

	if (!context)
		return inner_cuCtxSynchronize_v2(ctx);
	result = inner_cuCtxPushCurrent_v2(context);
	if (result != CUDA_SUCCESS)
		return result;
	result = poll_cuCtxSynchronize();
	inner_cuCtxPopCurrent_v2(&context);
	return result;
}

/* It waits for what is in the legacy stream before it copies. */
CUresult poll_cuMemcpyDtoH_v2(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount)
{
	uint64_t moves = mpsd_tables()->moves;
	CUresult result = CUDA_SUCCESS;

	if (mpsd_exact() && mpsd_line_ready() && ByteCount && dstHost)
		return mpsd_bounds_refuse(srcDevice, ByteCount) ? CUDA_ERROR_INVALID_VALUE
								: mpsd_stage_out(dstHost, srcDevice, ByteCount,
										 CU_STREAM_LEGACY);
	if (may_poll())
		result = poll_stream(CU_STREAM_LEGACY, moves);
	return ended(&result, moves) ? inner_cuMemcpyDtoH_v2(dstHost, mpsd_address(srcDevice), ByteCount) : result;
}
