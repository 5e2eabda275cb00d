// SPDX-License-Identifier: MIT
/*
 * What was captured, as nodes that come after one another. A graph that the program changes by hand, or that had nodes
 * before, cannot be captured again as it was: the driver says what each captured node comes after.
 */
#include <stdlib.h>
#include <string.h>

#include "exact/params.h"
#include "exact/state.h"
#include "failover/line.h"
#include "failover/embedded.h"
#include "failover/nodes.h"

#define NOT_FOLLOWED "a captured graph that was changed in a way that is not tracked"

static CUcontext current_context(void)
{
	CUcontext context = NULL;

	return real_cuCtxGetCurrent(&context) == CUDA_SUCCESS ? mpsd_name(context) : NULL;
}

/* A captured copy of one run of bytes, as one that a node can be. */
static struct mpsd_op *copy_of(const struct mpsd_op *op)
{
	CUDA_MEMCPY3D given = { .WidthInBytes = op->copy.size, .Height = 1, .Depth = 1 };

	/* A program with such a copy is said to stay, which must not be said with the lock. */
	if (mpsd_is_variable(op->copy.from) || mpsd_is_variable(op->copy.to))
		return NULL;
	given.srcMemoryType = op->copy.is_from_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
	given.dstMemoryType = op->copy.is_for_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
	given.srcHost = (const void *)op->copy.from;
	given.srcDevice = op->copy.from;
	given.dstHost = (void *)op->copy.to;
	given.dstDevice = op->copy.to;
	return mpsd_rows_of_node(&given);
}

/* What the driver took over from the stream of a captured kernel. */
static struct mpsd_op *launch_of(struct mpsd_op *op, CUgraphNode native)
{
	static const CUkernelNodeAttrID of_streams[] = {
		CU_LAUNCH_ATTRIBUTE_PRIORITY, CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW, CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN,
	};
	static const CUkernelNodeAttrValue none;

	mpsd_op_share(op);
	for (unsigned int i = 0; op && i < sizeof(of_streams) / sizeof(*of_streams); i++) {
		CUkernelNodeAttrValue value = none;
		struct mpsd_op *with;

		if (!mpsd_tables()->real[MPSD_cuGraphKernelNodeGetAttribute] ||
		    real_cuGraphKernelNodeGetAttribute(native, of_streams[i], &value) != CUDA_SUCCESS ||
		    !memcmp(&value, &none, sizeof(value)))
			continue;
		with = mpsd_params_with(op, of_streams[i], &value);
		mpsd_op_free(op);
		op = with;
	}
	return op;
}

/* What it is. False: no memory, or it is nothing that a node can be. */
static bool become(struct mpsd_node *node, const struct mpsd_node *captured)
{
	struct mpsd_op *op = captured->op;

	if (op && op->kind == MPSD_OP_GRAPH) {
		node->child = mpsd_graph_hold(op->graph.graph);
		return true;
	}
	if (op && op->kind == MPSD_OP_COPY && !op->copy.rows)
		node->op = copy_of(op);
	else if (op && op->kind == MPSD_OP_LAUNCH)
		node->op = launch_of(op, captured->native);
	else if (op)
		mpsd_op_share(node->op = op);
	return node->op != NULL;
}

/* An edge that a stream's order or an event makes is no node. */
static bool is_edge(const struct mpsd_op *op)
{
	return (op->kind == MPSD_OP_RECORD || op->kind == MPSD_OP_WAIT) && !mpsd_op_is_event_node(op);
}

#define FIRST_ROOM 16

struct before {
	CUgraphNode *nodes;
	CUgraphEdgeData *edges;
	size_t count;
};

static bool have_room(struct before *before, size_t room)
{
	free(before->nodes);
	free(before->edges);
	before->nodes = calloc(room, sizeof(*before->nodes));
	before->edges = calloc(room, sizeof(*before->edges));
	before->count = room;
	return before->nodes && before->edges;
}

/* cuda.h: how many there are is told to who asks for their data, too, and nothing tells that there are more. */
static CUresult ask_before(CUgraphNode native, struct before *before)
{
	CUresult result = CUDA_ERROR_NOT_SUPPORTED;

	for (size_t room = FIRST_ROOM; mpsd_tables()->real[MPSD_cuGraphNodeGetDependencies_v2]; room *= 2) {
		if (!have_room(before, room))
			return CUDA_ERROR_OUT_OF_MEMORY;
		result = real_cuGraphNodeGetDependencies_v2(native, before->nodes, before->edges, &before->count);
		if (result != CUDA_SUCCESS || before->count < room)
			return result;
	}
	return result;
}

/* Their numbers, into the node; it takes what is known of the edges. False: one of them is none that is known. */
static bool come_after(struct mpsd_node *node, const struct mpsd_graph *graph, struct before *before)
{
	node->after = malloc((before->count + 1) * sizeof(*node->after));
	for (size_t i = 0; node->after && i < before->count; i++) {
		unsigned int number = mpsd_graph_number_native(graph, before->nodes[i], graph->count - 1);

		if (number == graph->count)
			return false;
		node->after[node->count++] = number;
	}
	if (mpsd_edges_are_plain(before->edges, before->count))
		return node->after != NULL;
	node->edges = before->edges;
	before->edges = NULL;
	return node->after != NULL;
}

static bool append(struct mpsd_graph *graph, const struct mpsd_node *captured, CUcontext context)
{
	struct mpsd_node node = { .name = captured->name, .native = captured->native, .context = context };
	struct before before = { .count = 0 };
	bool is = captured->native && become(&node, captured);

	is = is && ask_before(captured->native, &before) == CUDA_SUCCESS && come_after(&node, graph, &before);
	free(before.nodes);
	free(before.edges);
	if (is)
		return mpsd_graph_append(graph, node);
	mpsd_node_let_go(&node);
	return false;
}

static bool append_all(struct mpsd_graph *graph, const struct mpsd_graph *captured)
{
	CUcontext context = current_context();
	bool is = true;

	for (unsigned int i = 0; i < captured->count && is; i++)
		is = is_edge(captured->nodes[i].op) || append(graph, &captured->nodes[i], context);
	return is;
}

void mpsd_captured_number(const struct mpsd_graph *graph)
{
	for (unsigned int i = 0; i < graph->count; i++) {
		struct mpsd_made *node = graph->nodes[i].name ? mpsd_made_find(graph->nodes[i].name) : NULL;

		if (node && node->kind == MPSD_MADE_NODE)
			node->size = i;
	}
}

/* Under the lock. NULL: it is not known what they are. */
static struct mpsd_graph *nodes_of(const struct mpsd_graph *captured)
{
	struct mpsd_graph *graph = mpsd_graph_new(NULL, true);

	if (graph && append_all(graph, captured))
		return graph;
	mpsd_graph_let_go(graph);
	return NULL;
}

/* Under the lock: of one that was captured. False: it is not known, and left as it is. */
static bool build(struct mpsd_made *made)
{
	struct mpsd_graph *graph = made->graph && !made->graph->is_built && made->native ? nodes_of(made->graph) : NULL;

	if (!graph)
		return made->graph && made->graph->is_built;
	mpsd_made_regraph(made, graph);
	mpsd_captured_number(graph);
	return true;
}

void mpsd_captured_built(CUgraph name)
{
	struct mpsd_made *made;
	bool is = true;

	mpsd_made_lock();
	made = mpsd_is_left() ? NULL : mpsd_made_find(name);
	if (made && made->kind == MPSD_MADE_GRAPH && made->graph)
		is = build(made);
	mpsd_made_unlock();
	if (!is)
		mpsd_line_made(CUDA_SUCCESS, NOT_FOLLOWED);
}

/* Under the lock. What there was is told from what was captured by the nodes before it. */
static bool take(struct mpsd_made *made, struct mpsd_graph *captured)
{
	struct mpsd_graph *graph;

	/* With handles of conditional nodes its nodes are wanted: kernels have those among their parameters. */
	if (made->graph && !made->graph->count && !made->graph->conditions_count &&
	    !atomic_load(&mpsd_embedded_conditions)) {
		mpsd_made_regraph(made, mpsd_graph_hold(captured));
		return true;
	}
	graph = build(made) ? mpsd_graph_own(made) : NULL;
	return graph && append_all(graph, captured);
}

CUresult mpsd_captured_into(CUresult result, CUgraph name, struct mpsd_graph *captured)
{
	struct mpsd_made *made;
	bool is = false, is_left;

	mpsd_made_lock();
	is_left = mpsd_is_left();
	made = is_left ? NULL : mpsd_made_find(name);
	if (made && made->kind == MPSD_MADE_GRAPH && result == CUDA_SUCCESS)
		is = take(made, captured);
	/* What the driver leaves in the graph of a capture that failed is not known. */
	if (made && made->kind == MPSD_MADE_GRAPH && !is && captured->count)
		mpsd_made_regraph(made, NULL);
	mpsd_made_unlock();
	if (is_left)
		return MPSD_AGAIN;
	return is ? result : mpsd_line_made(result, NOT_FOLLOWED);
}
