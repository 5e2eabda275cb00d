// SPDX-License-Identifier: MIT
/*
 * Stream capture: a sequence begins in one stream, and others join it by waiting for events that were recorded in it; each
 * goes on behind the nodes that it has come to.
 */
#include <stdlib.h>
#include <string.h>

#include "standin.h"

struct sequence {
	struct sequence *next;
	CUcontext context;
	CUstream origin;
	CUgraph graph;
	cuuint64_t id;			/* from 1 */
	CUstreamCaptureMode mode;
	pthread_t thread;		/* that began it */
	bool spoiled;
	bool is_into;			/* its graph is the program's own */
	size_t first;			/* the graph's nodes before it */
};

static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static struct sequence *sequences;
static cuuint64_t last_id;

static struct sequence *sequence_of(cuuint64_t id)
{
	struct sequence *sequence = sequences;

	while (sequence && sequence->id != id)
		sequence = sequence->next;
	return sequence;
}

/* Places */

static bool is_at(const struct place *place, CUgraphNode node)
{
	for (size_t i = 0; i < place->count; i++)
		if (place->nodes[i] == node)
			return true;
	return false;
}

static bool come_to(struct place *place, CUgraphNode node)
{
	CUgraphNode *larger;

	if (is_at(place, node))
		return true;
	larger = realloc(place->nodes, (place->count + 1) * sizeof(*larger));
	if (!larger)
		return false;
	larger[place->count++] = node;
	place->nodes = larger;
	return true;
}

static bool come_to_all(struct place *place, const struct place *others)
{
	for (size_t i = 0; i < others->count; i++)
		if (!come_to(place, others->nodes[i]))
			return false;
	return true;
}

void leave_place(struct place *place)
{
	free(place->nodes);
	*place = (struct place){ NULL, 0 };
}

/* Sequences */

static void part(CUstream stream)
{
	stream->capture = NULL;
	leave_place(&stream->place);
}

/* Its graph is its own no more. */
static void end(struct sequence *ended)
{
	struct sequence **link = &sequences;

	for (CUstream stream = ended->context->streams; stream; stream = stream->next)
		if (stream->capture == ended)
			part(stream);
	while (*link != ended)
		link = &(*link)->next;
	*link = ended->next;
	free(ended);
}

static void drop_graph(const struct sequence *sequence)
{
	if (!sequence->is_into)
		free_graph(sequence->graph);
}

void drop_capture(CUstream stream)
{
	struct sequence *sequence = stream->capture;

	if (sequence && sequence->origin == stream) {
		drop_graph(sequence);
		end(sequence);
	}
	part(stream);
}

bool is_spoiled(const struct CUstream_st *stream)
{
	return stream->capture && stream->capture->spoiled;
}

CUresult spoil(CUstream stream, CUresult result)
{
	stream->capture->spoiled = true;
	return result;
}

CUresult capture(CUstream stream, const struct operation *operation)
{
	CUgraphNode node;

	if (is_spoiled(stream))
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	node = add_node(stream->capture->graph, operation->type, operation);
	if (!node)
		return CUDA_ERROR_OUT_OF_MEMORY;
	node->capture = stream->capture->id;
	node->after = stream->place.nodes;
	node->count = stream->place.count;
	stream->place = (struct place){ NULL, 0 };
	return come_to(&stream->place, node) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult capture_record(CUstream stream, struct captured *captured)
{
	if (is_spoiled(stream))
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	leave_place(&captured->place);
	captured->id = 0;
	if (!stream->capture)
		return CUDA_SUCCESS;
	captured->id = stream->capture->id;
	return come_to_all(&captured->place, &stream->place) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult capture_wait(CUstream stream, const struct captured *captured)
{
	struct sequence *sequence = captured->id ? sequence_of(captured->id) : NULL;

	if (is_spoiled(stream))
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	if (!captured->id)
		return spoil(stream, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
	if (!sequence)
		return stream->capture ? spoil(stream, CUDA_ERROR_CAPTURED_EVENT) : CUDA_ERROR_CAPTURED_EVENT;
	if (sequence->spoiled)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	if (stream == stream->context->legacy) {
		sequence->spoiled = true;
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	if (stream->capture && stream->capture != sequence) {
		sequence->spoiled = true;
		return spoil(stream, CUDA_ERROR_STREAM_CAPTURE_MERGE);
	}
	stream->capture = sequence;
	return come_to_all(&stream->place, &captured->place) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* As documented for cuThreadExchangeStreamCaptureMode. */
static bool is_unsafe(const struct sequence *sequence)
{
	if (thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && sequence->mode == CU_STREAM_CAPTURE_MODE_GLOBAL)
		return true;
	return thread_mode != CU_STREAM_CAPTURE_MODE_RELAXED && sequence->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
	       pthread_equal(sequence->thread, pthread_self());
}

CUresult refuse_in_capture(CUcontext context, bool any)
{
	CUresult result = CUDA_SUCCESS;

	for (struct sequence *sequence = sequences; sequence; sequence = sequence->next) {
		if (sequence->context != context || !(any || is_unsafe(sequence)))
			continue;
		sequence->spoiled = true;
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

/* `into`: NULL, or a graph of the program's, where it goes on behind the origin's place. */
static CUresult begin(CUstream origin, CUgraph into, CUstreamCaptureMode mode)
{
	struct sequence *sequence = calloc(1, sizeof(*sequence));
	CUgraph graph = into ? into : new_graph();

	if (!sequence || !graph) {
		free(sequence);
		if (!into)
			free_graph(graph);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*sequence = (struct sequence){
		.is_into = into != NULL,
		.first = graph->count,
		.next = sequences,
		.context = origin->context,
		.origin = origin,
		.graph = graph,
		.id = ++last_id,
		.mode = mode,
		.thread = pthread_self(),
	};
	sequences = origin->capture = sequence;
	return CUDA_SUCCESS;
}

/* With the lock, which it gives back. */
static CUresult begin_in(CUstream stream, CUgraph into, const struct place *after, CUstreamCaptureMode mode)
{
	CUresult result;

	if (stream == stream->context->legacy)
		return leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	if (stream->capture)
		return leave(CUDA_ERROR_ILLEGAL_STATE);
	result = begin(stream, into, mode);
	if (result == CUDA_SUCCESS && !come_to_all(&stream->place, after))
		result = CUDA_ERROR_OUT_OF_MEMORY;
	leave(result);
	gate_keep(GATE_BEGIN_CAPTURE);
	return result;
}

API CUresult cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)
{
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	return result == CUDA_SUCCESS ? begin_in(stream, NULL, &(struct place){ NULL, 0 }, mode) : result;
}

/* The errors are as documented, and not measured. */
API CUresult cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
					 const CUgraphEdgeData *dependencyData, size_t numDependencies,
					 CUstreamCaptureMode mode)
{
	const struct place after = { (CUgraphNode *)dependencies, numDependencies };
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	(void)dependencyData;
	if (result != CUDA_SUCCESS)
		return result;
	if (!is_graph(hGraph) || !are_of(hGraph, dependencies, numDependencies))
		return leave(CUDA_ERROR_INVALID_VALUE);
	return begin_in(stream, hGraph, &after, mode);
}

#undef cuStreamBeginCapture
API CUresult cuStreamBeginCapture(CUstream hStream);
API CUresult cuStreamBeginCapture(CUstream hStream)
{
	return cuStreamBeginCapture_v2(hStream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

static bool is_captured_in(const struct sequence *sequence, const struct CUgraphNode_st *node)
{
	return node->capture == sequence->id;
}

/* All that was captured comes before where the origin is. */
static CUresult is_joined(const struct sequence *sequence)
{
	const struct CUgraph_st *graph = sequence->graph;
	size_t captured = 0, reached = 0;
	struct place before = { NULL, 0 };
	bool is = come_to_all(&before, &sequence->origin->place);

	for (size_t i = 0; is && i < before.count; i++)
		is = come_to_all(&before, &(struct place){ before.nodes[i]->after, before.nodes[i]->count });
	for (size_t i = sequence->first; i < graph->count; i++)
		captured += is_captured_in(sequence, graph->nodes[i]);
	for (size_t i = 0; i < before.count; i++)
		reached += is_captured_in(sequence, before.nodes[i]);
	is = is && reached == captured;
	leave_place(&before);
	return is ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
}

static CUresult end_capture(CUstream stream, CUgraph *graph)
{
	struct sequence *sequence = stream->capture;
	CUresult result;

	if (!graph || !sequence)
		return graph ? CUDA_ERROR_ILLEGAL_STATE : CUDA_ERROR_INVALID_VALUE;
	if (sequence->origin != stream)
		return spoil(stream, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
	result = sequence->spoiled ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : is_joined(sequence);
	*graph = result == CUDA_SUCCESS ? sequence->graph : NULL;
	if (result != CUDA_SUCCESS)
		drop_graph(sequence);
	end(sequence);
	return result;
}

API CUresult cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	result = leave(end_capture(stream, phGraph));
	gate_keep(GATE_END_CAPTURE);
	return result;
}

/* As documented: what is not active has a status, and no other valid data. */
static CUstreamCaptureStatus capture_status(CUstream stream)
{
	if (!stream->capture)
		return CU_STREAM_CAPTURE_STATUS_NONE;
	return is_spoiled(stream) ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
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
		*graph_out = stream->capture ? stream->capture->graph : NULL;
	if (dependencies_out)
		*dependencies_out = stream->place.nodes;
	if (edgeData_out)
		*edgeData_out = NULL;
	if (numDependencies_out)
		*numDependencies_out = stream->place.count;
	leave(CUDA_SUCCESS);
	gate_keep(GATE_CAPTURE_INFO);
	return CUDA_SUCCESS;
}
