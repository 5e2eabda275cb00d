// SPDX-License-Identifier: MIT
#include "capture.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "failover/carry.h"
#include "memory.h"
#include "proxy.h"

#define PROBE_BYTES 512

#define ELSEWHERE (-1)	/* in a context that is no primary one */

struct capturing {
	struct capturing *next;
	CUstream stream;
	CUdevice home;		/* of the primary context that it ends with */
};

/* Of each copy of the driver: a call that a move overtakes has been made in two of them. */
static struct captures {
	struct capturing *first;	/* under the lock */
	atomic_int count;
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
	return atomic_load(&captures_here()->count) > 0;
}

/* Under the lock. */
static void take_out(struct captures *here, struct capturing **link)
{
	struct capturing *gone = *link;

	*link = gone->next;
	free(gone);
	atomic_fetch_sub(&here->count, 1);
}

/* Under the lock. The place of its row, or the end of the list. */
static struct capturing **row_of(struct captures *here, CUstream stream)
{
	struct capturing **link = &here->first;

	while (*link && (*link)->stream != stream)
		link = &(*link)->next;
	return link;
}

void mpsd_capture_copy(uint64_t moves)
{
	struct captures *here = &captures[mpsd_copy_index(moves)];

	pthread_mutex_lock(&lock);
	while (here->first)
		take_out(here, &here->first);
	pthread_mutex_unlock(&lock);
}

void mpsd_capture_context_ended(CUdevice device)
{
	struct captures *here = captures_here();
	struct capturing **link = &here->first;

	pthread_mutex_lock(&lock);
	while (*link)
		if ((*link)->home == device)
			take_out(here, link);
		else
			link = &(*link)->next;
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

bool mpsd_capture_has_put_off(void)
{
	return atomic_load(&some) && !mpsd_capture_active();
}

bool mpsd_capture_take(CUdeviceptr *base)
{
	bool is;

	if (!mpsd_capture_has_put_off())
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

/* Asked before the capture, during which the driver may refuse it. */
static struct capturing *new_row(CUstream stream, bool per_thread)
{
	struct capturing *row = malloc(sizeof(*row));
	CUcontext context;

	if (!row)
		return NULL;
	row->stream = !stream && per_thread ? CU_STREAM_PER_THREAD : stream;
	if (real_cuStreamGetCtx(row->stream, &context) != CUDA_SUCCESS || !mpsd_memory_is_primary(context, &row->home))
		row->home = ELSEWHERE;
	return row;
}

/* A row of the same handle is of a stream that ended in another way, or of another thread's default one. */
static CUresult begun(CUresult result, struct capturing *row)
{
	struct captures *here = captures_here();

	if (result != CUDA_SUCCESS || !row) {
		free(row);
		return result;
	}
	pthread_mutex_lock(&lock);
	if (row->stream != CU_STREAM_PER_THREAD && *row_of(here, row->stream))
		take_out(here, row_of(here, row->stream));
	row->next = here->first;
	here->first = row;
	atomic_fetch_add(&here->count, 1);
	pthread_mutex_unlock(&lock);
	return result;
}

/* Of one that was not seen to begin there is no row. */
static void ended(CUstream stream)
{
	struct captures *here = captures_here();
	struct capturing **link;

	pthread_mutex_lock(&lock);
	link = row_of(here, stream);
	if (*link)
		take_out(here, link);
	pthread_mutex_unlock(&lock);
}

/* The first version: of the mode that is global. */
CUresult wrap_cuStreamBeginCapture(CUstream hStream)
{
	struct capturing *row = new_row(hStream, false);

	return begun(real_cuStreamBeginCapture(hStream), row);
}

CUresult wrap_cuStreamBeginCapture_ptsz(CUstream hStream)
{
	struct capturing *row = new_row(hStream, true);

	return begun(real_cuStreamBeginCapture_ptsz(hStream), row);
}

CUresult wrap_cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)
{
	struct capturing *row = new_row(hStream, false);

	return begun(real_cuStreamBeginCapture_v2(hStream, mode), row);
}

CUresult wrap_cuStreamBeginCapture_v2_ptsz(CUstream hStream, CUstreamCaptureMode mode)
{
	struct capturing *row = new_row(hStream, true);

	return begun(real_cuStreamBeginCapture_v2_ptsz(hStream, mode), row);
}

CUresult wrap_cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
					  const CUgraphEdgeData *dependencyData, size_t numDependencies,
					  CUstreamCaptureMode mode)
{
	struct capturing *row = new_row(hStream, false);

	return begun(real_cuStreamBeginCaptureToGraph(hStream, hGraph, dependencies, dependencyData,
						      numDependencies, mode), row);
}

CUresult wrap_cuStreamBeginCaptureToGraph_ptsz(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
					       const CUgraphEdgeData *dependencyData, size_t numDependencies,
					       CUstreamCaptureMode mode)
{
	struct capturing *row = new_row(hStream, true);

	return begun(real_cuStreamBeginCaptureToGraph_ptsz(hStream, hGraph, dependencies, dependencyData,
							   numDependencies, mode), row);
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
		ended(!stream && per_thread ? CU_STREAM_PER_THREAD : stream);
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
		ended(hStream);
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
