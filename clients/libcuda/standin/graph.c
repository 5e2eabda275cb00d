// SPDX-License-Identifier: MIT
/*
 * Stream capture, as far as one stream goes, and graphs: what was submitted to the capturing stream, or made node by node
 * (nodes.c), is submitted again by a launch, one operation after the other.
 */
#include <stdlib.h>
#include <string.h>

#include "standin.h"

static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static const char own;

bool is_graph(const struct CUgraph_st *graph)
{
	must_live(graph);
	return graph && graph->sign == &own;
}

/* No context's: they are there until somebody ends them, or this library goes. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUgraph graphs;

CUgraph new_child(void)
{
	CUgraph graph = calloc(1, sizeof(*graph));

	is_new(graph);
	if (graph)
		graph->sign = &own;
	return graph;
}

CUgraph new_graph(void)
{
	CUgraph graph = new_child();

	if (!graph)
		return NULL;
	pthread_mutex_lock(&lock);
	graph->next = graphs;
	graphs = graph;
	pthread_mutex_unlock(&lock);
	return graph;
}

static void strike(CUgraph graph)
{
	CUgraph *link = &graphs;

	pthread_mutex_lock(&lock);
	while (*link && *link != graph)
		link = &(*link)->next;
	if (*link)
		*link = graph->next;
	pthread_mutex_unlock(&lock);
}

void free_graph(CUgraph graph)
{
	for (size_t i = 0; graph && i < graph->count; i++) {
		free_graph(graph->nodes[i]->child);
		free(graph->nodes[i]->after);
		is_gone(graph->nodes[i]);
		free(graph->nodes[i]);
	}
	if (!graph)
		return;
	strike(graph);
	free(graph->nodes);
	is_gone(graph);
	free(graph);
}

static __attribute__((destructor)) void free_graphs(void)
{
	while (graphs)
		free_graph(graphs);
}

CUgraphNode add_node(CUgraph graph, CUgraphNodeType type, const struct operation *operation)
{
	CUgraphNode *larger = realloc(graph->nodes, (graph->count + 1) * sizeof(*larger));
	CUgraphNode node = calloc(1, sizeof(*node));

	if (larger)
		graph->nodes = larger;
	if (!larger || !node) {
		free(node);
		return NULL;
	}
	is_new(node);
	node->graph = graph;
	node->type = type;
	if (operation)
		node->operation = *operation;
	return graph->nodes[graph->count++] = node;
}

/* The nodes of a capture come one after the other. */
CUresult capture(struct CUgraph_st *graph, const struct operation *operation)
{
	CUgraphNode last = graph->count ? graph->nodes[graph->count - 1] : NULL;
	CUgraphNode node = add_node(graph, operation->type, operation);

	if (!node)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (last) {
		node->after = malloc(sizeof(last));
		if (!node->after)
			return CUDA_ERROR_OUT_OF_MEMORY;
		node->after[node->count++] = last;
	}
	return CUDA_SUCCESS;
}

static cuuint64_t captures;

void drop_capture(CUstream stream)
{
	free_graph(stream->capture);
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
	stream->capture = new_graph();
	if (stream->capture)
		stream->capture->id = ++captures;
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

/* As documented: what is not active has a status, and no other valid data. */
static CUstreamCaptureStatus capture_status(CUstream stream)
{
	if (!stream->capture)
		return CU_STREAM_CAPTURE_STATUS_NONE;
	return stream->spoiled ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

API CUresult cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus)
{
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (!captureStatus)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*captureStatus = capture_status(stream);
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
	size_t count;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (stream == stream->context->legacy && is_any_captured(stream))
		return leave(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
	*captureStatus_out = capture_status(stream);
	if (*captureStatus_out == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
		return leave(CUDA_SUCCESS);
	if (id_out)
		*id_out = stream->capture ? stream->capture->id : 0;
	if (graph_out)
		*graph_out = stream->capture;
	count = stream->capture ? stream->capture->count : 0;
	if (dependencies_out)
		*dependencies_out = count ? &stream->capture->nodes[count - 1] : NULL;
	if (edgeData_out)
		*edgeData_out = NULL;
	if (numDependencies_out)
		*numDependencies_out = count ? 1 : 0;
	leave(CUDA_SUCCESS);
	gate_keep(GATE_CAPTURE_INFO);
	return CUDA_SUCCESS;
}
