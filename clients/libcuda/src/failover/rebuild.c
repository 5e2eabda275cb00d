// SPDX-License-Identifier: MIT
/* Graphs in a copy that they were not made in: captured again, or put together, when they are first needed there. */
#include <stdlib.h>

#include "exact/state.h"
#include "failover/cast.h"
#include "failover/embedded.h"
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

/* `native`: a graph that it is captured into; NULL there: a new one. */
static CUresult capture(const struct mpsd_graph *graph, CUgraph *native, CUgraphNode *natives)
{
	struct mpsd_cast cast = { 0 };
	CUgraph into = *native;
	CUstream origin;
	CUresult result, ended;

	result = mpsd_cast_stream(&cast, graph->origin, &origin);
	if (result == CUDA_SUCCESS && into)
		result = real_cuStreamBeginCaptureToGraph(origin, into, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_RELAXED);
	else if (result == CUDA_SUCCESS)
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

static CUresult fill(const struct mpsd_graph *graph, CUgraph native, CUgraphNode *natives, struct mpsd_put *put);

/* Handles of its conditional nodes. */
static CUresult put_conditions(const struct mpsd_graph *graph, CUgraph native, struct mpsd_put *put)
{
	CUresult result = CUDA_SUCCESS;

	for (unsigned int i = 0; i < graph->conditions_count && result == CUDA_SUCCESS; i++) {
		const struct mpsd_condition *one = &graph->conditions[i];
		struct mpsd_made *made = put ? NULL : mpsd_made_find((void *)(uintptr_t)one->name);
		CUgraphConditionalHandle handle = 0;

		result = real_cuGraphConditionalHandleCreate(&handle, native, mpsd_native(one->context), one->value,
							     one->flags);
		if (result == CUDA_SUCCESS && made)
			mpsd_made_native(made, (void *)(uintptr_t)handle);
		if (result == CUDA_SUCCESS && put && !mpsd_pairs_add(&put->conditions, one->name, handle))
			result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	return result;
}

/* What nodes of a graph are called from now on: to the program, or in a graph that it does not change. */
static bool tell_natives(struct mpsd_graph *graph, const CUgraphNode *natives, struct mpsd_put *put)
{
	bool is = true;

	for (unsigned int i = 0; i < graph->count && is; i++) {
		CUgraphNode name = graph->nodes[i].name;
		struct mpsd_made *node = put ? NULL : mpsd_made_find(name);

		if (put && name)
			is = mpsd_pairs_add(&put->embedded, (uintptr_t)name, (uintptr_t)natives[i]);
		if (!put)
			graph->nodes[i].native = natives[i];
		if (node)
			mpsd_made_native(node, natives[i]);
	}
	return is;
}

/* What a graph of the node is: in a snapshot; or, under the lock of made.h, to the program. */
static struct mpsd_graph *body_of(const struct mpsd_node *node, unsigned int number, struct mpsd_made **made)
{
	*made = node->bodies ? NULL : mpsd_made_find(node->embedded->names[number]);
	if (node->bodies)
		return node->bodies[number];
	return *made ? (*made)->graph : NULL;
}

static CUresult fill_body(const struct mpsd_node *node, unsigned int number, CUgraph native, struct mpsd_put *put)
{
	struct mpsd_made *made;
	struct mpsd_graph *graph = body_of(node, number, &made);
	CUgraphNode *natives = graph ? calloc(graph->count + 1, sizeof(*natives)) : NULL;
	CUresult result = natives ? fill(graph, native, natives, put) : CUDA_ERROR_OUT_OF_MEMORY;

	if (result == CUDA_SUCCESS && !tell_natives(graph, natives, put))
		result = CUDA_ERROR_OUT_OF_MEMORY;
	if (result == CUDA_SUCCESS && made)
		mpsd_made_native(made, native);
	free(natives);
	return result;
}

/* `child`: what it was put together with: the node has a copy of it, or takes it. */
static CUresult put_node(const struct mpsd_node *node, CUgraph graph, CUgraphNode *natives, unsigned int number, CUgraph child,
			 struct mpsd_put *put)
{
	CUgraphNode *after = malloc((node->count + 1) * sizeof(*after));
	struct mpsd_node_place place = { .graph = graph, .after = after, .child = child,
					 .conditions = put ? &put->conditions : NULL };
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;

	for (unsigned int i = 0; after && i < node->count; i++)
		after[i] = natives[node->after[i]];
	if (after)
		result = mpsd_node_give(node, &place);
	free(after);
	natives[number] = place.node;
	for (unsigned int i = 0; place.bodies && i < node->embedded->size && result == CUDA_SUCCESS; i++)
		result = fill_body(node, i, place.bodies[i], put);
	return result;
}

static CUresult make_child(const struct mpsd_node *node, CUgraph *child, struct mpsd_put *put)
{
	struct mpsd_put scratch = { 0 };
	CUresult result;

	/* The node copies it, so no name of the program's leads into it. */
	if (node->child) {
		result = mpsd_graph_make(node->child, child, NULL, &scratch);
		mpsd_put_forget(&scratch);
		return result;
	}
	if (!node->embedded || !node->embedded->is_moved)
		return CUDA_SUCCESS;
	result = real_cuGraphCreate(child, 0);
	return result == CUDA_SUCCESS ? fill_body(node, 0, *child, put) : result;
}

static CUresult put_nodes(const struct mpsd_graph *graph, CUgraph native, CUgraphNode *natives, struct mpsd_put *put)
{
	unsigned int *made;
	const unsigned int *order = mpsd_graph_order(graph, &made);
	CUresult result = graph->is_unordered && !order ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;

	for (unsigned int i = 0; i < graph->count && result == CUDA_SUCCESS; i++) {
		unsigned int number = order ? order[i] : i;
		const struct mpsd_node *node = &graph->nodes[number];
		CUgraph child = NULL;

		result = make_child(node, &child, put);
		if (result == CUDA_SUCCESS)
			result = put_node(node, native, natives, number, child, put);
		if (child && (node->child || result != CUDA_SUCCESS))
			real_cuGraphDestroy(child);
	}
	free(made);
	return result;
}

static CUresult fill(const struct mpsd_graph *graph, CUgraph native, CUgraphNode *natives, struct mpsd_put *put)
{
	CUresult result;

	if (!graph->is_built)
		return capture(graph, &native, natives);
	result = put_conditions(graph, native, put);
	return result == CUDA_SUCCESS ? put_nodes(graph, native, natives, put) : result;
}

CUresult mpsd_graph_make(const struct mpsd_graph *graph, CUgraph *native, CUgraphNode *natives, struct mpsd_put *put)
{
	CUgraphNode *own = natives ? NULL : calloc(graph->count + 1, sizeof(*own));
	CUresult result = natives || own ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;

	*native = NULL;
	if (result == CUDA_SUCCESS && graph->is_built)
		result = real_cuGraphCreate(native, 0);
	if (result == CUDA_SUCCESS && graph->is_built)
		result = fill(graph, *native, natives ? natives : own, put);
	else if (result == CUDA_SUCCESS)
		result = capture(graph, native, natives);
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

	*put = (struct mpsd_put){ .nodes = calloc(graph->count + 1, sizeof(*put->nodes)), .descent = graph->descent };
	if (put->nodes)
		result = mpsd_graph_make(graph, &put->graph, put->nodes, put);
	if (result == CUDA_SUCCESS) {
		result = real_cuGraphInstantiateWithFlags(exec, put->graph, flags & ~(unsigned int)UPLOAD);
		if (result != CUDA_SUCCESS)
			real_cuGraphDestroy(put->graph);
	}
	if (result != CUDA_SUCCESS)
		mpsd_put_forget(put);
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
	CUresult result = natives ? mpsd_graph_make(graph, (CUgraph *)native, natives, NULL) : CUDA_ERROR_OUT_OF_MEMORY;

	if (result == CUDA_SUCCESS)
		tell_natives(graph, natives, NULL);
	free(natives);
	return result;
}

/* A graph that is a node's is made with the graph of that. */
static struct mpsd_made *root_of(struct mpsd_made *made)
{
	struct mpsd_made *root = made;

	for (; made; made = made->of)
		if (made->kind == MPSD_MADE_GRAPH)
			root = made;
	return root;
}

static CUresult make(struct mpsd_made *made, void **native)
{
	struct mpsd_made *root = made->kind == MPSD_MADE_GRAPH ? root_of(made) : made;
	CUresult result = CUDA_SUCCESS;

	if (!root->graph)
		return CUDA_SUCCESS;
	if (made->kind == MPSD_MADE_EXEC)
		return instantiate(made, native);
	if (!root->native)
		result = make_graph(root, native);
	if (root == made || result != CUDA_SUCCESS)
		return result;
	mpsd_made_native(root, *native);
	*native = made->native;
	return CUDA_SUCCESS;
}

CUresult mpsd_graph_native(CUgraph name, CUgraph *native)
{
	return mpsd_made_late(name, (void **)native, make);
}

CUresult mpsd_exec_native(CUgraphExec name, CUgraphExec *native)
{
	return mpsd_made_late(name, (void **)native, make);
}
