// SPDX-License-Identifier: MIT
#include "capture.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "failover/carry.h"
#include "memory.h"
#include "physical.h"
#include "proxy.h"

#define PROBE_BYTES 512

#define ELSEWHERE MPSD_DEVICES	/* in a context that is no primary one */

/* Of each copy of the driver: a call that a move overtakes has been made in two of them. */
static struct captures {
	atomic_int all;
	int of[MPSD_DEVICES + 1];	/* by the primary context's device; under the lock */
} captures[MPSD_COPIES_KNOWN];

/* Of the copy of this call. */
static struct captures *captures_here(void)
{
	return &captures[mpsd_copy_index(mpsd_tables()->moves)];
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUdeviceptr *later;
static size_t count, room;
static atomic_bool some;

bool mpsd_capture_active(void)
{
	return atomic_load(&captures_here()->all) > 0;
}

/* Under the lock. */
static void forget_captures(struct captures *here, int home)
{
	atomic_fetch_sub(&here->all, here->of[home]);
	here->of[home] = 0;
}

void mpsd_capture_copy(uint64_t moves)
{
	pthread_mutex_lock(&lock);
	for (int home = 0; home <= ELSEWHERE; home++)
		forget_captures(&captures[mpsd_copy_index(moves)], home);
	pthread_mutex_unlock(&lock);
}

void mpsd_capture_context_ended(CUdevice device)
{
	pthread_mutex_lock(&lock);
	forget_captures(captures_here(), device);
	pthread_mutex_unlock(&lock);
}

CUresult mpsd_capture_probe(void)
{
	CUdeviceptr own;
	CUresult result = real_cuMemAlloc_v2(&own, PROBE_BYTES);

	return result == CUDA_SUCCESS ? real_cuMemFree_v2(own) : result;
}

/* Its place in the list; `count` for what is not there. */
static size_t place_of(CUdeviceptr base)
{
	size_t i = 0;

	while (i < count && later[i] != base)
		i++;
	return i;
}

static bool make_room(void)
{
	size_t wanted = room ? 2 * room : 64;
	CUdeviceptr *larger;

	if (count < room)
		return true;
	larger = realloc(later, wanted * sizeof(*larger));
	if (!larger)
		return false;
	later = larger;
	room = wanted;
	return true;
}

CUresult mpsd_capture_put_off(CUdeviceptr base)
{
	CUresult result = CUDA_SUCCESS;

	pthread_mutex_lock(&lock);
	if (place_of(base) < count)
		result = CUDA_ERROR_INVALID_VALUE;
	else if (!make_room())
		result = CUDA_ERROR_OUT_OF_MEMORY;
	else
		later[count++] = base;
	atomic_store(&some, count > 0);
	pthread_mutex_unlock(&lock);
	return result;
}

bool mpsd_capture_take(CUdeviceptr *base)
{
	bool is;

	if (!atomic_load(&some) || mpsd_capture_active())
		return false;
	pthread_mutex_lock(&lock);
	is = count > 0;
	if (is)
		*base = later[--count];
	atomic_store(&some, count > 0);
	pthread_mutex_unlock(&lock);
	return is;
}

void mpsd_capture_forget(CUdeviceptr base)
{
	size_t at;

	if (!atomic_load(&some))
		return;
	pthread_mutex_lock(&lock);
	at = place_of(base);
	if (at < count)
		later[at] = later[--count];
	atomic_store(&some, count > 0);
	pthread_mutex_unlock(&lock);
}

static int home_of(CUstream stream)
{
	CUcontext context;
	CUdevice device;

	if (real_cuStreamGetCtx(stream, &context) != CUDA_SUCCESS || !mpsd_memory_is_primary(context, &device))
		return ELSEWHERE;
	return device;
}

static CUresult begun(CUresult result, CUstream stream)
{
	struct captures *here = captures_here();
	int home;

	if (result != CUDA_SUCCESS)
		return result;
	home = home_of(stream);
	pthread_mutex_lock(&lock);
	here->of[home]++;
	atomic_fetch_add(&here->all, 1);
	pthread_mutex_unlock(&lock);
	return result;
}

/*
 * Whatever the driver says of the context during a capture, one less is under way. Never less than none: there
 * may be ways to begin one that are not known here.
 */
static void one_less(int home)
{
	struct captures *here = captures_here();

	pthread_mutex_lock(&lock);
	for (int other = 0; !here->of[home] && other <= ELSEWHERE; other++)
		home = here->of[other] ? other : home;
	if (here->of[home]) {
		here->of[home]--;
		atomic_fetch_sub(&here->all, 1);
	}
	pthread_mutex_unlock(&lock);
}

/* The first version: of the mode that is global. */
CUresult wrap_cuStreamBeginCapture(CUstream hStream)
{
	return begun(real_cuStreamBeginCapture(hStream), hStream);
}

CUresult wrap_cuStreamBeginCapture_ptsz(CUstream hStream)
{
	return begun(real_cuStreamBeginCapture_ptsz(hStream), hStream);
}

CUresult wrap_cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)
{
	return begun(real_cuStreamBeginCapture_v2(hStream, mode), hStream);
}

CUresult wrap_cuStreamBeginCapture_v2_ptsz(CUstream hStream, CUstreamCaptureMode mode)
{
	return begun(real_cuStreamBeginCapture_v2_ptsz(hStream, mode), hStream);
}

CUresult wrap_cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
					  const CUgraphEdgeData *dependencyData, size_t numDependencies,
					  CUstreamCaptureMode mode)
{
	return begun(real_cuStreamBeginCaptureToGraph(hStream, hGraph, dependencies, dependencyData,
						      numDependencies, mode), hStream);
}

CUresult wrap_cuStreamBeginCaptureToGraph_ptsz(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
					       const CUgraphEdgeData *dependencyData, size_t numDependencies,
					       CUstreamCaptureMode mode)
{
	return begun(real_cuStreamBeginCaptureToGraph_ptsz(hStream, hGraph, dependencies, dependencyData,
							   numDependencies, mode), hStream);
}

static bool is_capturing(CUstream stream, bool per_thread)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult result = per_thread ? real_cuStreamIsCapturing_ptsz(stream, &status)
				     : real_cuStreamIsCapturing(stream, &status);

	return result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* A capture that was spoiled ends too; one that another thread should have ended goes on. */
static void end(CUstream stream, bool per_thread, bool was)
{
	if (was && !is_capturing(stream, per_thread))
		one_less(home_of(stream));
}

CUresult wrap_cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
	bool was = is_capturing(hStream, false);
	CUresult result = real_cuStreamEndCapture(hStream, phGraph);

	end(hStream, false, was);
	return result;
}

CUresult wrap_cuStreamEndCapture_ptsz(CUstream hStream, CUgraph *phGraph)
{
	bool was = is_capturing(hStream, true);
	CUresult result = real_cuStreamEndCapture_ptsz(hStream, phGraph);

	end(hStream, true, was);
	return result;
}

CUresult wrap_cuStreamDestroy_v2(CUstream hStream)
{
	bool was = mpsd_capture_active() && is_capturing(hStream, false);
	int home = was ? home_of(hStream) : ELSEWHERE;
	CUresult result = real_cuStreamDestroy_v2(hStream);

	if (was && result == CUDA_SUCCESS)
		one_less(home);
	return result;
}

/* The driver frees what cuMemAlloc gave in stream order too; here it is freed after a wait. */
static bool is_ours(CUdeviceptr address, CUstream stream, bool per_thread)
{
	return mpsd_memory_is_in_window(address) && !is_capturing(stream, per_thread);
}

CUresult wrap_cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)
{
	return is_ours(dptr, hStream, false) ? wrap_cuMemFree_v2(dptr) : real_cuMemFreeAsync(dptr, hStream);
}

CUresult wrap_cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream hStream)
{
	return is_ours(dptr, hStream, true) ? wrap_cuMemFree_v2(dptr) : real_cuMemFreeAsync_ptsz(dptr, hStream);
}
