// SPDX-License-Identifier: MIT
/* Graphs in a copy that they were not made in: captured again, or put together, when they are first needed there. */
#include <stdlib.h>

#include "exact/state.h"
#include "failover/cast.h"
#include "failover/nodes.h"

/* None of the program's own, for its events must not change; but for one that is a node. */
static CUresult cast_event(struct mpsd_cast *cast, const struct mpsd_op *op, CUevent *event)
{
	if (!mpsd_op_is_event_node(op) || mpsd_cast_is_gone(op->event.event))
		return mpsd_cast_event(cast, op->event.event, event);
	*event = mpsd_native(op->event.event);
	return CUDA_SUCCESS;
}

static CUresult capture_again(const struct mpsd_graph *graph, struct mpsd_cast *cast, CUgraphNode *natives)
{
	CUresult result = CUDA_SUCCESS;

	for (unsigned int i = 0; i < graph->count && result == CUDA_SUCCESS; i++) {
		const struct mpsd_op *op = graph->nodes[i].op;
		CUstream stream = NULL;
		CUevent event = NULL;

		result = mpsd_cast_stream(cast, op->stream, &stream);
		if (result == CUDA_SUCCESS && (op->kind == MPSD_OP_RECORD || op->kind == MPSD_OP_WAIT))
			result = cast_event(cast, op, &event);
		if (result == CUDA_SUCCESS)
			result = mpsd_cast_joined(op, stream);
		/* Of a graph its parts: what it was launched as may be nowhere in this copy yet. */
		if (result == CUDA_SUCCESS && op->kind == MPSD_OP_GRAPH)
			result = mpsd_op_capture_parts(op, stream);
		else if (result == CUDA_SUCCESS)
			result = mpsd_op_issue_on(op, stream, event);
		if (natives && graph->nodes[i].native && op->kind != MPSD_OP_GRAPH)
			natives[i] = mpsd_capture_last(stream);
	}
	return result;
}

static CUresult capture(const struct mpsd_graph *graph, CUgraph *native, CUgraphNode *natives)
{
	struct mpsd_cast cast = { 0 };
	CUstream origin;
	CUresult result, ended;

	result = mpsd_cast_stream(&cast, graph->origin, &origin);
	if (result == CUDA_SUCCESS)
		result = real_cuStreamBeginCapture_v2(origin, CU_STREAM_CAPTURE_MODE_RELAXED);
	if (result == CUDA_SUCCESS) {
		result = capture_again(graph, &cast, natives);
		ended = real_cuStreamEndCapture(origin, native);
		if (result == CUDA_SUCCESS)
			result = ended;
	}
	mpsd_cast_end(&cast);
	return result;
}

/* `child`: what it was put together with, which the node has a copy of. */
static CUresult put_node(const struct mpsd_node *node, CUgraph graph, const CUgraphNode *natives, CUgraph child,
			 CUgraphNode *native)
{
	CUgraphNode *after = malloc((node->count + 1) * sizeof(*after));
	struct mpsd_node_place place = { .graph = graph, .after = after, .child = child };
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;

	for (unsigned int i = 0; after && i < node->count; i++)
		after[i] = natives[node->after[i]];
	if (after)
		result = mpsd_node_give(node, &place);
	free(after);
	*native = place.node;
	return result;
}

static CUresult put_together(const struct mpsd_graph *graph, CUgraph *native, CUgraphNode *natives)
{
	unsigned int *made;
	const unsigned int *order = mpsd_graph_order(graph, &made);
	CUresult result = graph->is_unordered && !order ? CUDA_ERROR_OUT_OF_MEMORY : real_cuGraphCreate(native, 0);

	for (unsigned int i = 0; i < graph->count && result == CUDA_SUCCESS; i++) {
		unsigned int number = order ? order[i] : i;
		const struct mpsd_node *node = &graph->nodes[number];
		CUgraph child = NULL;

		if (node->child)
			result = mpsd_graph_make(node->child, &child, NULL);
		if (result == CUDA_SUCCESS)
			result = put_node(node, *native, natives, child, &natives[number]);
		if (child)
			real_cuGraphDestroy(child);
	}
	free(made);
	return result;
}

CUresult mpsd_graph_make(const struct mpsd_graph *graph, CUgraph *native, CUgraphNode *natives)
{
	CUgraphNode *own = NULL;
	CUresult result;

	*native = NULL;
	if (!graph->is_built) {
		result = capture(graph, native, natives);
	} else {
		own = natives ? NULL : calloc(graph->count + 1, sizeof(*own));
		result = natives || own ? put_together(graph, native, natives ? natives : own) : CUDA_ERROR_OUT_OF_MEMORY;
	}
	free(own);
	if (result != CUDA_SUCCESS && *native)
		real_cuGraphDestroy(*native);
	return result;
}

/* cuda.h: a stream to upload into, which only the call that says so has. */
#define UPLOAD CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD

CUresult mpsd_exec_make(const struct mpsd_graph *graph, unsigned int flags, CUgraphExec *exec, struct mpsd_put *put)
{
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;

	*put = (struct mpsd_put){ NULL, calloc(graph->count + 1, sizeof(*put->nodes)), graph->descent };
	if (put->nodes)
		result = mpsd_graph_make(graph, &put->graph, put->nodes);
	if (result == CUDA_SUCCESS) {
		result = real_cuGraphInstantiateWithFlags(exec, put->graph, flags & ~(unsigned int)UPLOAD);
		if (result != CUDA_SUCCESS)
			real_cuGraphDestroy(put->graph);
	}
	if (result != CUDA_SUCCESS)
		free(put->nodes);
	return result;
}

static CUresult instantiate(struct mpsd_made *made, void **native)
{
	struct mpsd_put put;
	CUresult result = mpsd_exec_make(made->graph, made->flags, (CUgraphExec *)native, &put);

	if (result == CUDA_SUCCESS)
		made->put = put;
	return result;
}

/* The program's own graph, whose nodes it has names for. */
static CUresult make_graph(struct mpsd_made *made, void **native)
{
	struct mpsd_graph *graph = made->graph;
	CUgraphNode *natives = calloc(graph->count + 1, sizeof(*natives));
	CUresult result = natives ? mpsd_graph_make(graph, (CUgraph *)native, natives) : CUDA_ERROR_OUT_OF_MEMORY;

	for (unsigned int i = 0; i < graph->count && result == CUDA_SUCCESS; i++) {
		struct mpsd_made *node = mpsd_made_find(graph->nodes[i].name);

		graph->nodes[i].native = natives[i];
		if (node)
			mpsd_made_native(node, natives[i]);
	}
	free(natives);
	return result;
}

static CUresult make(struct mpsd_made *made, void **native)
{
	if (!made->graph)
		return CUDA_SUCCESS;
	return made->kind == MPSD_MADE_EXEC ? instantiate(made, native) : make_graph(made, native);
}

CUresult mpsd_graph_native(CUgraph name, CUgraph *native)
{
	return mpsd_made_late(name, (void **)native, make);
}

CUresult mpsd_exec_native(CUgraphExec name, CUgraphExec *native)
{
	return mpsd_made_late(name, (void **)native, make);
}
