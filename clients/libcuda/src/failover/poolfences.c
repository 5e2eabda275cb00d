// SPDX-License-Identifier: MIT
#include "failover/poolfences.h"

#include <stdlib.h>

#include "exact/exact.h"
#include "exact/order.h"
#include "failover/graph.h"
#include "failover/made.h"
#include "failover/pools.h"

static struct mpsd_pool_fence *unused;	/* with the lock */

static struct mpsd_pool_fence *new_one(void)
{
	struct mpsd_pool_fence *fence = calloc(1, sizeof(*fence));

	if (fence) {
		fence->shares = 1;
		fence->moves = mpsd_tables()->moves;
	}
	return fence;
}

static void end(struct mpsd_pool_fence *fence)
{
	/* That of an instance that was left ends with it. */
	if (fence->event && fence->moves == mpsd_tables()->moves)
		real_cuEventDestroy_v2(fence->event);
	free(fence->proof);
	free(fence);
}

struct mpsd_pool_fence *mpsd_poolfence_of(CUstream native)
{
	struct mpsd_pool_fence *fence = new_one();
	CUresult result;

	if (!fence)
		return NULL;
	result = real_cuEventCreate(&fence->event, CU_EVENT_DISABLE_TIMING);
	if (result != CUDA_SUCCESS)
		fence->event = NULL;
	else
		result = real_cuEventRecord(fence->event, native);
	if (result == CUDA_SUCCESS)
		return fence;
	end(fence);
	return NULL;
}

/* What is captured now does not run before the capture has ended, and an event of the proxy's is not for the graph. */
static struct mpsd_pool_fence *new_event(CUstream native)
{
	struct mpsd_pool_fence *fence;
	bool held = false;

	if (mpsd_capturing() && !mpsd_captures_hold(native, &held))
		return NULL;
	fence = mpsd_poolfence_of(native);
	if (held)
		mpsd_captures_let();
	return fence;
}

static struct mpsd_pool_fence *new_proof(CUstream stream)
{
	struct mpsd_pool_fence *fence = new_one();

	if (!fence)
		return NULL;
	fence->proof = calloc(1, sizeof(*fence->proof));
	/* The driver orders a stream that blocks behind the legacy one, and nothing in its own lane shows it. */
	if (!mpsd_made_is_apart(stream))
		stream = CU_STREAM_LEGACY;
	if (fence->proof && mpsd_exact_mark(fence->proof, MPSD_WAIT_STREAM, stream) == CUDA_SUCCESS)
		return fence;
	end(fence);
	return NULL;
}

struct mpsd_pool_fence *mpsd_poolfence_new(CUstream stream)
{
	struct mpsd_pool_fence *fence;
	struct mpsd_asked asked;

	if (mpsd_exact())
		return new_proof(stream);
	/* Another thread may end the stream meanwhile. */
	if (!mpsd_relay_flush() || !mpsd_ask_begin(&asked, stream))
		return NULL;
	fence = new_event(asked.native);
	mpsd_ask_end(&asked);
	return fence;
}

/* What a driver instance that was left was given has ended, or was replayed before anything else. */
bool mpsd_poolfence_look(struct mpsd_pool_fence *fence)
{
	bool is;

	if (fence->moves != mpsd_tables()->moves)
		is = fence->moves < mpsd_tables()->moves;
	else if (fence->proof)
		is = mpsd_exact_is_reached(fence->proof);
	else
		is = fence->event && real_cuEventQuery(fence->event) == CUDA_SUCCESS;
	mpsd_pools_lock();
	fence->is_reached |= is;
	is = fence->is_reached;
	mpsd_pools_unlock();
	return is;
}

void mpsd_poolfence_lose(struct mpsd_pool_fence *fence)
{
	fence->event = NULL;
	fence->is_reached = true;
}

struct mpsd_pool_fence *mpsd_poolfence_share(struct mpsd_pool_fence *fence)
{
	fence->shares++;
	return fence;
}

void mpsd_poolfence_leave(struct mpsd_pool_fence *fence)
{
	if (--fence->shares)
		return;
	fence->next = unused;
	unused = fence;
}

void mpsd_poolfences_sweep(void)
{
	struct mpsd_pool_fence *fence, *next;

	mpsd_pools_lock();
	fence = unused;
	unused = NULL;
	mpsd_pools_unlock();
	for (; fence; fence = next) {
		next = fence->next;
		end(fence);
	}
}
