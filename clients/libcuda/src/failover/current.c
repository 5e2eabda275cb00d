// SPDX-License-Identifier: MIT
/* The contexts of the program's threads. */
#include "failover/made.h"
#include "failover/move.h"
#include "windows.h"

/* Since the first move its context is what it set through this library; before, the first copy knows. */
static _Thread_local CUcontext thread_context;

void mpsd_move_thread(bool is_first)
{
	__typeof__(&cuCtxGetCurrent) get = (__typeof__(get))mpsd_first_tables->real[MPSD_cuCtxGetCurrent];

	if (is_first && get(&thread_context) != CUDA_SUCCESS)
		thread_context = NULL;
	real_cuCtxSetCurrent(mpsd_native(thread_context));
}

static CUresult note_context(CUresult result)
{
	CUcontext current, name;

	if (result != CUDA_SUCCESS || !mpsd_tables()->moves || real_cuCtxGetCurrent(&current) != CUDA_SUCCESS)
		return result;
	name = mpsd_name(current);
	/* That of a copy that was left may have been none by then, and has no name any more. */
	if (mpsd_is_left())
		return MPSD_AGAIN;
	thread_context = name;
	return result;
}

CUresult make_cuCtxSetCurrent(CUcontext ctx)
{
	CUcontext before = NULL;

	/* Some set it before whatever they do. */
	if (mpsd_thread.is_in_context && (real_cuCtxGetCurrent(&before) != CUDA_SUCCESS || before != mpsd_native(ctx)))
		mpsd_thread.is_in_context = false;
	return note_context(inner_cuCtxSetCurrent(mpsd_native(ctx)));
}

CUresult make_cuCtxPushCurrent_v2(CUcontext ctx)
{
	mpsd_thread.is_in_context = false;
	return note_context(inner_cuCtxPushCurrent_v2(mpsd_native(ctx)));
}

CUresult make_cuCtxPopCurrent_v2(CUcontext *pctx)
{
	CUresult result = inner_cuCtxPopCurrent_v2(pctx);
	CUcontext name = result == CUDA_SUCCESS && pctx ? mpsd_name(*pctx) : NULL;

	mpsd_thread.is_in_context = false;
	/* Last, for it is what is popped once more in the next copy. */
	result = note_context(result);
	if (result == CUDA_SUCCESS && pctx)
		*pctx = name;
	return result;
}

struct mpsd_made *mpsd_made_first_context(void)
{
	struct mpsd_made *context = NULL;

	for (int device = 0; !context && device < DEVICES; device++)
		context = mpsd_made_context(device);
	return context;
}

CUresult mpsd_enter_context(void)
{
	struct mpsd_made *context;
	CUresult result;

	mpsd_made_lock();
	context = mpsd_made_first_context();
	result = context ? real_cuCtxSetCurrent(context->native) : CUDA_ERROR_INVALID_CONTEXT;
	mpsd_made_unlock();
	return result;
}
