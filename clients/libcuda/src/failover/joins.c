// SPDX-License-Identifier: MIT
/* Which streams are in captures, and joining one. */
#include <pthread.h>

#include "clock.h"
#include "exact/state.h"
#include "failover/graph.h"
#include "failover/nodes.h"

/* *id 0: the stream is not captured. In a lost context the driver answers with the loss, whatever is captured. */
CUresult mpsd_capture_ask(CUstream native, cuuint64_t *id)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	void *const *real = mpsd_tables()->real;
	CUresult result = CUDA_ERROR_NOT_FOUND;

	*id = 0;
	if (real[MPSD_cuStreamGetCaptureInfo_v3])
		result = real_cuStreamGetCaptureInfo_v3(native, &status, id, NULL, NULL, NULL, NULL);
	else if (real[MPSD_cuStreamGetCaptureInfo_v2])
		result = real_cuStreamGetCaptureInfo_v2(native, &status, id, NULL, NULL, NULL);
	if (result != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
		*id = 0;
	return result;
}

cuuint64_t mpsd_capture_of(CUstream native)
{
	cuuint64_t id;

	mpsd_capture_ask(native, &id);
	return id;
}

CUstreamCaptureStatus mpsd_capture_status(CUstream native)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;

	return real_cuStreamIsCapturing(native, &status) == CUDA_SUCCESS ? status : CU_STREAM_CAPTURE_STATUS_NONE;
}

/* The legacy stream is where one that blocks with it is: what is given to it would end that capture. */
bool mpsd_is_native_in_capture(CUstream native)
{
	cuuint64_t id;

	return mpsd_capture_ask(native, &id) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || id;
}

CUresult mpsd_capture_joined(CUstream native)
{
	cuuint64_t id;
	CUresult result = mpsd_capture_ask(native, &id);

	return mpsd_is_loss(result) ? result : id ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

/*
 * Of who makes a stream join a capture, and of who gives one a mark; one for each copy, for the driver may keep a thread in
 * one whose context is lost. Where it keeps one for long otherwise that may wait for the other one: it is not waited for.
 */
#define JOINS 8
#define JOIN_MS 100
static pthread_mutex_t joins[JOINS] = {
	PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER,
	PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER,
};

static pthread_mutex_t *joins_of(void)
{
	return &joins[mpsd_tables()->moves / 2 % JOINS];
}

bool mpsd_joins_take(void)
{
	struct timespec until = mpsd_in(JOIN_MS);

	return !pthread_mutex_timedlock(joins_of(), &until);
}

bool mpsd_captures_hold(CUstream native, bool *held)
{
	*held = mpsd_joins_take();
	if (!mpsd_is_native_in_capture(native))
		return true;
	if (*held)
		mpsd_captures_let();
	return false;
}

void mpsd_captures_let(void)
{
	pthread_mutex_unlock(joins_of());
}

void mpsd_joins_child(void)
{
	for (unsigned int i = 0; i < JOINS; i++)
		joins[i] = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

bool mpsd_is_in_capture(CUstream stream)
{
	return mpsd_capture_of(mpsd_native(stream)) != 0;
}

bool mpsd_is_in_capture_outside(CUstream stream)
{
	uint64_t moves = mpsd_carry_enter();
	bool is = mpsd_is_in_capture(stream);

	mpsd_carry_leave(moves);
	return is;
}

/* The program's calls. Each asks first, and may have nothing to be told in. */

CUresult make_cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus)
{
	return mpsd_capture_tell(inner_cuStreamIsCapturing(mpsd_native(hStream), captureStatus), hStream, captureStatus,
				 NULL);
}

CUresult make_cuStreamGetCaptureInfo_v2(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out,
					CUgraph *graph_out, const CUgraphNode **dependencies_out,
					size_t *numDependencies_out)
{
	CUresult result = inner_cuStreamGetCaptureInfo_v2(mpsd_native(hStream), captureStatus_out, id_out, graph_out,
							  dependencies_out, numDependencies_out);

	return mpsd_capture_tell(result, hStream, captureStatus_out, id_out);
}

CUresult make_cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out,
					CUgraph *graph_out, const CUgraphNode **dependencies_out,
					const CUgraphEdgeData **edgeData_out, size_t *numDependencies_out)
{
	CUresult result = inner_cuStreamGetCaptureInfo_v3(mpsd_native(hStream), captureStatus_out, id_out, graph_out,
							  dependencies_out, edgeData_out, numDependencies_out);

	return mpsd_capture_tell(result, hStream, captureStatus_out, id_out);
}

CUgraphNode mpsd_capture_last(CUstream native)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	const CUgraphEdgeData *edges;
	const CUgraphNode *nodes = NULL;
	CUresult result = CUDA_ERROR_NOT_FOUND;
	size_t count = 0;

	if (mpsd_tables()->real[MPSD_cuStreamGetCaptureInfo_v3])
		result = real_cuStreamGetCaptureInfo_v3(native, &status, NULL, NULL, &nodes, &edges, &count);
	else if (mpsd_tables()->real[MPSD_cuStreamGetCaptureInfo_v2])
		result = real_cuStreamGetCaptureInfo_v2(native, &status, NULL, NULL, &nodes, &count);
	return result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE && count == 1 ? nodes[0] : NULL;
}
