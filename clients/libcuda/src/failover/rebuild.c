// SPDX-License-Identifier: MIT
/* Graphs in a copy that they were not captured in: captured again, when they are first needed there. */
#include <stdlib.h>

#include "exact/state.h"
#include "failover/graph.h"

#define MOST 64			/* streams or events in one capture */

/* Stand-ins for the program's: its own streams may be gone, and its events must not change. */
struct cast {
	const void *names[MOST];
	void *natives[MOST];
	unsigned int count;
};

static CUresult make_stream(void **native)
{
	return real_cuStreamCreate((CUstream *)native, CU_STREAM_NON_BLOCKING);
}

static CUresult make_event(void **native)
{
	return real_cuEventCreate((CUevent *)native, CU_EVENT_DISABLE_TIMING);
}

static CUresult find(struct cast *cast, const void *name, CUresult (*make_one)(void **native), void **native)
{
	unsigned int i = 0;
	CUresult result;

	while (i < cast->count && cast->names[i] != name)
		i++;
	if (i == MOST)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (i == cast->count) {
		result = make_one(&cast->natives[i]);
		if (result != CUDA_SUCCESS)
			return result;
		cast->names[i] = name;
		cast->count++;
	}
	*native = cast->natives[i];
	return CUDA_SUCCESS;
}

static CUresult capture_again(const struct mpsd_graph *graph, struct cast *streams, struct cast *events)
{
	CUresult result = CUDA_SUCCESS;

	for (const struct mpsd_op *op = mpsd_graph_first(graph); op && result == CUDA_SUCCESS; op = op->next) {
		void *stream = NULL, *event = NULL;

		result = find(streams, op->stream, make_stream, &stream);
		if (result == CUDA_SUCCESS && (op->kind == MPSD_OP_RECORD || op->kind == MPSD_OP_WAIT))
			result = find(events, op->event.event, make_event, &event);
		if (result == CUDA_SUCCESS)
			result = mpsd_op_issue_on(op, stream, event);
	}
	return result;
}

static CUresult capture(const struct mpsd_graph *graph, CUgraph *native)
{
	struct cast streams = { .count = 0 }, events = { .count = 0 };
	void *origin;
	CUresult result, ended;

	result = find(&streams, mpsd_graph_origin(graph), make_stream, &origin);
	if (result == CUDA_SUCCESS)
		result = real_cuStreamBeginCapture_v2(origin, CU_STREAM_CAPTURE_MODE_RELAXED);
	if (result == CUDA_SUCCESS) {
		result = capture_again(graph, &streams, &events);
		ended = real_cuStreamEndCapture(origin, native);
		if (result == CUDA_SUCCESS)
			result = ended;
	}
	for (unsigned int i = 0; i < streams.count; i++)
		real_cuStreamDestroy_v2(streams.natives[i]);
	for (unsigned int i = 0; i < events.count; i++)
		real_cuEventDestroy_v2(events.natives[i]);
	return result;
}

static CUresult instantiate(const struct mpsd_made *made, void **native)
{
	CUgraph graph;
	CUresult result = capture(made->graph, &graph);

	if (result != CUDA_SUCCESS)
		return result;
	result = real_cuGraphInstantiateWithFlags((CUgraphExec *)native, graph, made->flags);
	real_cuGraphDestroy(graph);
	return result;
}

/* With the lock of made.h, so that it is made once. */
static CUresult make(struct mpsd_made *made)
{
	void *native = NULL;
	CUresult result;

	if (made->kind == MPSD_MADE_EXEC)
		result = instantiate(made, &native);
	else
		result = capture(made->graph, (CUgraph *)&native);
	if (result == CUDA_SUCCESS)
		mpsd_made_native(made, native);
	return result;
}

static CUresult native_of(const void *name, void **native)
{
	CUresult result = CUDA_SUCCESS;
	struct mpsd_made *made;

	*native = mpsd_native((void *)name);
	if (*native)
		return result;
	*native = (void *)name;
	mpsd_made_lock();
	made = mpsd_made_find(name);
	if (made && mpsd_is_left())
		result = MPSD_AGAIN;
	else if (made && made->graph && !made->native)
		result = make(made);
	if (made)
		*native = made->native;
	mpsd_made_unlock();
	return result;
}

CUresult mpsd_graph_native(CUgraph name, CUgraph *native)
{
	return native_of(name, (void **)native);
}

CUresult mpsd_exec_native(CUgraphExec name, CUgraphExec *native)
{
	return native_of(name, (void **)native);
}
