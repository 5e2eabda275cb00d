// SPDX-License-Identifier: MIT
/*
 * Stream capture and graphs, as far as one stream goes: a graph is the list of operations that were
 * submitted to the capturing stream, and a launch submits them again.
 */
#include <stdlib.h>
#include <string.h>

#include "standin.h"

struct CUgraphExec_st {
	struct CUgraph_st graph;
};

static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static const char own;

static bool is_graph(const struct CUgraph_st *graph)
{
	must_live(graph);
	return graph && graph->sign == &own;
}

CUresult capture(struct CUgraph_st *graph, const struct operation *operation)
{
	struct operation *larger = realloc(graph->nodes, (graph->count + 1) * sizeof(*larger));

	if (!larger)
		return CUDA_ERROR_OUT_OF_MEMORY;
	graph->nodes = larger;
	graph->nodes[graph->count++] = *operation;
	return CUDA_SUCCESS;
}

void drop_capture(CUstream stream)
{
	if (stream->capture)
		free(stream->capture->nodes);
	free(stream->capture);
	stream->capture = NULL;
}

/* As documented for cuThreadExchangeStreamCaptureMode. */
static bool is_unsafe(CUstream stream)
{
	if (thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && stream->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL)
		return true;
	return thread_mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
	       stream->capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
	       pthread_equal(stream->capturer, pthread_self());
}

CUresult refuse_in_capture(CUcontext context, bool any)
{
	CUresult result = CUDA_SUCCESS;

	for (CUstream stream = context->streams; stream; stream = stream->next) {
		if (stream->destroyed || !stream->capture || !(any || is_unsafe(stream)))
			continue;
		stream->spoiled = true;
		result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	return result;
}

API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
	CUstreamCaptureMode old = thread_mode;

	if (!mode)
		return CUDA_ERROR_INVALID_VALUE;
	thread_mode = *mode;
	*mode = old;
	return CUDA_SUCCESS;
}

API CUresult cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)
{
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (stream == stream->context->legacy)
		return leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	if (stream->capture)
		return leave(CUDA_ERROR_ILLEGAL_STATE);
	stream->capture = calloc(1, sizeof(*stream->capture));
	is_new(stream->capture);
	if (stream->capture)
		stream->capture->sign = &own;
	stream->capture_mode = mode;
	stream->capturer = pthread_self();
	stream->spoiled = false;
	result = leave(stream->capture ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
	gate_keep(GATE_BEGIN_CAPTURE);
	return result;
}

#undef cuStreamBeginCapture
API CUresult cuStreamBeginCapture(CUstream hStream);
API CUresult cuStreamBeginCapture(CUstream hStream)
{
	return cuStreamBeginCapture_v2(hStream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

API CUresult cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (!phGraph || !stream->capture)
		return leave(phGraph ? CUDA_ERROR_ILLEGAL_STATE : CUDA_ERROR_INVALID_VALUE);
	*phGraph = stream->spoiled ? NULL : stream->capture;
	if (stream->spoiled)
		drop_capture(stream);
	stream->capture = NULL;
	result = leave(stream->spoiled ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS);
	gate_keep(GATE_END_CAPTURE);
	return result;
}

API CUresult cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus)
{
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (!captureStatus)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*captureStatus = stream->capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
	return leave(CUDA_SUCCESS);
}

/* That blocks with the legacy one. */
static bool is_any_captured(CUstream legacy)
{
	for (CUstream stream = legacy->context->streams; stream; stream = stream->next)
		if (!stream->destroyed && stream->capture && !(stream->flags & CU_STREAM_NON_BLOCKING))
			return true;
	return false;
}

API CUresult cuStreamGetCaptureInfo_v3(CUstream hStream, CUstreamCaptureStatus *captureStatus_out,
				       cuuint64_t *id_out, CUgraph *graph_out, const CUgraphNode **dependencies_out,
				       const CUgraphEdgeData **edgeData_out, size_t *numDependencies_out)
{
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (stream == stream->context->legacy && is_any_captured(stream))
		return leave(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
	*captureStatus_out = stream->capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
	if (id_out)
		*id_out = 1;
	if (graph_out)
		*graph_out = stream->capture;
	if (dependencies_out)
		*dependencies_out = NULL;
	if (edgeData_out)
		*edgeData_out = NULL;
	if (numDependencies_out)
		*numDependencies_out = 0;
	leave(CUDA_SUCCESS);
	gate_keep(GATE_CAPTURE_INFO);
	return CUDA_SUCCESS;
}

/* Nodes have no handles of their own beyond their place in the list. */
API CUresult cuGraphGetNodes(CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes)
{
	if (!is_graph(hGraph) || !numNodes)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; nodes && i < *numNodes; i++)
		nodes[i] = i < hGraph->count ? (CUgraphNode)&hGraph->nodes[i] : NULL;
	*numNodes = hGraph->count;
	return CUDA_SUCCESS;
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags)
{
	struct CUgraphExec_st *made;

	(void)flags;
	if (!phGraphExec || !is_graph(hGraph))
		return CUDA_ERROR_INVALID_VALUE;
	made = calloc(1, sizeof(*made));
	if (!made)
		return CUDA_ERROR_OUT_OF_MEMORY;
	is_new(made);
	made->graph.sign = &own;
	for (size_t i = 0; i < hGraph->count; i++) {
		if (capture(&made->graph, &hGraph->nodes[i]) != CUDA_SUCCESS) {
			free(made->graph.nodes);
			free(made);
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	*phGraphExec = made;
	return CUDA_SUCCESS;
}

API CUresult cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream)
{
	CUstream stream;
	CUresult result;

	if (!hGraphExec || !is_graph(&hGraphExec->graph))
		return CUDA_ERROR_INVALID_VALUE;
	result = enter_stream(hStream, &stream);
	if (result != CUDA_SUCCESS)
		return result;
	for (size_t i = 0; i < hGraphExec->graph.count && result == CUDA_SUCCESS; i++)
		result = submit(stream, &hGraphExec->graph.nodes[i]);
	return leave(result);
}

API CUresult cuGraphExecDestroy(CUgraphExec hGraphExec)
{
	if (!hGraphExec || !is_graph(&hGraphExec->graph))
		return CUDA_ERROR_INVALID_VALUE;
	free(hGraphExec->graph.nodes);
	is_gone(hGraphExec);
	free(hGraphExec);
	return CUDA_SUCCESS;
}

API CUresult cuGraphDestroy(CUgraph hGraph)
{
	if (!is_graph(hGraph))
		return CUDA_ERROR_INVALID_VALUE;
	free(hGraph->nodes);
	is_gone(hGraph);
	free(hGraph);
	return CUDA_SUCCESS;
}
