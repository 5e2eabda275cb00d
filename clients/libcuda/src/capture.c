// SPDX-License-Identifier: MIT
#include "capture.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "failover/carry.h"
#include "memory.h"
#include "proxy.h"

#define PROBE_BYTES 512

/* Of each copy of the driver: a call that a move overtakes has been made in two of them. */
static atomic_int captures[MPSD_COPIES_KNOWN];

/* Of the copy of this call. */
static atomic_int *captures_here(void)
{
	return &captures[mpsd_copy_index(mpsd_tables()->moves)];
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUdeviceptr *later;
static size_t count, room;
static atomic_bool some;

bool mpsd_capture_active(void)
{
	return atomic_load(captures_here()) > 0;
}

void mpsd_capture_copy(uint64_t moves)
{
	atomic_store(&captures[mpsd_copy_index(moves)], 0);
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

static CUresult begun(CUresult result)
{
	if (result == CUDA_SUCCESS)
		atomic_fetch_add(captures_here(), 1);
	return result;
}

CUresult wrap_cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)
{
	return begun(real_cuStreamBeginCapture_v2(hStream, mode));
}

CUresult wrap_cuStreamBeginCapture_v2_ptsz(CUstream hStream, CUstreamCaptureMode mode)
{
	return begun(real_cuStreamBeginCapture_v2_ptsz(hStream, mode));
}

CUresult wrap_cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
					  const CUgraphEdgeData *dependencyData, size_t numDependencies,
					  CUstreamCaptureMode mode)
{
	return begun(real_cuStreamBeginCaptureToGraph(hStream, hGraph, dependencies, dependencyData,
						      numDependencies, mode));
}

CUresult wrap_cuStreamBeginCaptureToGraph_ptsz(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
					       const CUgraphEdgeData *dependencyData, size_t numDependencies,
					       CUstreamCaptureMode mode)
{
	return begun(real_cuStreamBeginCaptureToGraph_ptsz(hStream, hGraph, dependencies, dependencyData,
							   numDependencies, mode));
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
		atomic_fetch_sub(captures_here(), 1);
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
	CUresult result = real_cuStreamDestroy_v2(hStream);

	if (was && result == CUDA_SUCCESS)
		atomic_fetch_sub(captures_here(), 1);
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
