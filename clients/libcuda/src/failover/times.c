// SPDX-License-Identifier: MIT
/*
 * Times of events, for programs that ask for them after a move: an event that was reached in another copy of the
 * driver was never recorded in this one. The time between two is then the host's: from when the first was recorded
 * until the program knew that the second was reached. It is no less than what the GPU took.
 */
#include "clock.h"
#include "exact/exact.h"
#include "failover/graph.h"
#include "failover/made.h"

static uint64_t word(const uint64_t *from)
{
	return __atomic_load_n(from, __ATOMIC_RELAXED);
}

static void set(uint64_t *to, uint64_t value)
{
	__atomic_store_n(to, value, __ATOMIC_RELAXED);
}

void mpsd_event_recorded(CUevent event, CUstream stream, uint64_t moves)
{
	struct mpsd_made *made;

	if (mpsd_capturing() && mpsd_is_in_capture_outside(stream))
		return;
	made = mpsd_made_look(event);
	if (made) {
		set(&made->times.moves, moves);
		set(&made->times.reached, 0);
		set(&made->times.recorded, mpsd_now_ns());
	}
	mpsd_made_looked();
}

void mpsd_event_reached(CUevent event)
{
	struct mpsd_made *made = mpsd_made_look(event);

	if (made && !word(&made->times.reached))
		set(&made->times.reached, mpsd_now_ns());
	mpsd_made_looked();
}

/* False: it was never recorded, or has no times. */
static bool times_of(CUevent event, struct mpsd_moments *times)
{
	struct mpsd_made *made = mpsd_made_look(event);
	bool is = made && made->kind == MPSD_MADE_EVENT && !(made->flags & CU_EVENT_DISABLE_TIMING) &&
		  word(&made->times.recorded);

	if (is)
		*times = (struct mpsd_moments){ word(&made->times.moves), word(&made->times.recorded),
					      word(&made->times.reached) };
	mpsd_made_looked();
	return is;
}

static float between(const struct mpsd_moments *first, const struct mpsd_moments *last)
{
	uint64_t reached = last->reached ? last->reached : mpsd_now_ns();

	return (float)(reached - first->recorded) * 1e-6f;
}

/* The driver has refused: because one of them was recorded elsewhere? */
static CUresult by_host(float *milliseconds, CUevent start, CUevent end)
{
	uint64_t moves = mpsd_tables()->moves;
	struct mpsd_moments from, to;
	CUresult result;

	if (!milliseconds || !times_of(start, &from) || !times_of(end, &to) ||
	    (from.moves == moves && to.moves == moves))
		return CUDA_ERROR_INVALID_HANDLE;
	/* One that was not recorded in this copy counts as reached. */
	result = inner_cuEventQuery(mpsd_native(start));
	if (result == CUDA_SUCCESS)
		result = inner_cuEventQuery(mpsd_native(end));
	if (result != CUDA_SUCCESS)
		return result;
	*milliseconds = to.recorded >= from.recorded ? between(&from, &to) : -between(&to, &from);
	return CUDA_SUCCESS;
}

/* Who is told that it was reached may rely on it, as after a wait. */
static CUresult prove(CUevent event)
{
	struct mpsd_proof proof;
	CUresult result = mpsd_exact_mark(&proof, MPSD_WAIT_EVENT, event);

	return result == CUDA_SUCCESS ? mpsd_exact_after(&proof, MPSD_WAIT_EVENT) : result;
}

#define ELAPSED(function)									\
	CUresult make_##function(float *pMilliseconds, CUevent hStart, CUevent hEnd)		\
	{											\
		CUresult result = inner_##function(pMilliseconds, mpsd_native(hStart),		\
						   mpsd_native(hEnd));				\
												\
		if (result == CUDA_ERROR_INVALID_HANDLE && mpsd_tables()->moves)		\
			result = by_host(pMilliseconds, hStart, hEnd);				\
		if (result == CUDA_SUCCESS && mpsd_exact())						\
			result = prove(hStart);								\
		return result == CUDA_SUCCESS && mpsd_exact() ? prove(hEnd) : result;			\
	}

ELAPSED(cuEventElapsedTime)
#ifdef MPSD_cuEventElapsedTime_v2
ELAPSED(cuEventElapsedTime_v2)
#endif
