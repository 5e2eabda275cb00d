/* SPDX-License-Identifier: MIT */
/*
 * The short way of a launch: in mode `keep`, before the first move, of a program that captures nothing at the time. It is
 * counted, and given to the driver. A program whose steps are the processor's makes hundreds of launches in each, and
 * whatever it does between two of them makes the processor forget the way; so there is little of it.
 */
#pragma once

#include "failover/carry.h"
#include "failover/graph.h"

bool mpsd_work_has_failed(CUresult result);

/*
 * Whether it may go so. Then it is begun, and the thread's calls are the first copy's until mpsd_plain_is_over(). Where it
 * is begun and a move has come, the long way finds that (mpsd_thread.works).
 */
static inline bool mpsd_plain_begin(CUstream stream)
{
	struct mpsd_work_counts *counts = &mpsd_work_counts;
	uint64_t only;

	only = atomic_load_explicit(&counts->only, memory_order_relaxed);
	if (mpsd_capturing() || stream == CU_STREAM_PER_THREAD || (only != mpsd_work_key(stream) && only != MPSD_SEVERAL_STREAMS) ||
	    mpsd_is_forbidden() || mpsd_thread.noted_in)
		return false;
	if (atomic_load_explicit(&mpsd_moves, memory_order_relaxed))
		return false;
	atomic_fetch_add(&counts->begun, 1);
	if (__builtin_expect(atomic_load(&mpsd_moves) != 0, 0)) {
		mpsd_thread.works = true;
		return false;
	}
	mpsd_thread.tables = mpsd_first_tables;
	return true;
}

/* With what the driver said; false: it is to be given again, by the long way. */
static inline bool mpsd_plain_is_over(CUresult result)
{
	mpsd_thread.tables = NULL;
	if (__builtin_expect(result != CUDA_SUCCESS, 0))
		return mpsd_work_has_failed(result);
	atomic_fetch_add(&mpsd_work_counts.given, 1);
	return true;
}
