// SPDX-License-Identifier: MIT
/*
 * Whether work may have been in flight when a context was lost. Each piece of work is counted before it is
 * given to the driver; a wait for all, or for the one stream that all of it went into, proves that what was
 * counted before the wait has ended. A fail-over that keeps memory alone tells the program once, in the
 * first wait after it, where work may be missing or half done.
 */
#include "failover/carry.h"

#define SEVERAL UINT64_MAX

static atomic_uint_least64_t given, ended;
static atomic_uint_least64_t only;	/* 1 + the stream; 0: none yet */
static atomic_bool lost;

uint64_t mpsd_work_count(void)
{
	return atomic_load(&given);
}

static uint64_t key(CUstream stream)
{
	return (uint64_t)(uintptr_t)(stream == CU_STREAM_LEGACY ? NULL : stream) + 1;
}

static void more(uint64_t stream)
{
	uint64_t none = 0;

	if (!atomic_compare_exchange_strong(&only, &none, stream) && none != stream)
		atomic_store(&only, SEVERAL);
}

void mpsd_work(CUstream stream)
{
	if (atomic_load_explicit(&only, memory_order_relaxed) != key(stream))
		more(key(stream));
	atomic_fetch_add(&given, 1);
}

static void proven(uint64_t work)
{
	uint64_t before = atomic_load(&ended);

	while (before < work && !atomic_compare_exchange_weak(&ended, &before, work))
		;
}

void mpsd_waited_for_all(CUresult result, uint64_t moves, uint64_t work)
{
	if (result == CUDA_SUCCESS && moves == atomic_load(&mpsd_moves))
		proven(work);
}

void mpsd_waited(CUresult result, uint64_t moves, CUstream stream, uint64_t work)
{
	if (atomic_load(&only) == key(stream))
		mpsd_waited_for_all(result, moves, work);
}

void mpsd_work_ended(void)
{
	proven(atomic_load(&given));
}

bool mpsd_work_lost(void)
{
	bool is = atomic_load(&given) != atomic_load(&ended);

	if (is)
		atomic_store(&lost, true);
	return is;
}

CUresult mpsd_work_told(CUresult result)
{
	if (result != CUDA_SUCCESS || !atomic_load_explicit(&lost, memory_order_relaxed) ||
	    !atomic_exchange(&lost, false))
		return result;
	return CUDA_ERROR_LAUNCH_FAILED;
}
