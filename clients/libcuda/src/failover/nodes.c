// SPDX-License-Identifier: MIT
#include "failover/nodes.h"

#include <stdlib.h>
#include <string.h>

#include "exact/state.h"
#include "failover/line.h"

#define FIRST_ROOM 8

struct mpsd_graph *mpsd_graph_new(CUstream origin, bool is_built)
{
	struct mpsd_graph *graph = calloc(1, sizeof(*graph));

	if (!graph)
		return NULL;
	graph->references = 1;
	graph->origin = origin;
	graph->is_built = is_built;
	return graph;
}

struct mpsd_graph *mpsd_graph_hold(struct mpsd_graph *graph)
{
	atomic_fetch_add(&graph->references, 1);
	return graph;
}

void mpsd_node_let_go(const struct mpsd_node *node)
{
	if (node->op)
		mpsd_op_free(node->op);
	mpsd_graph_let_go(node->child);
	free(node->after);
}

void mpsd_graph_let_go(struct mpsd_graph *graph)
{
	if (!graph || atomic_fetch_sub(&graph->references, 1) > 1)
		return;
	for (unsigned int i = 0; i < graph->count; i++)
		mpsd_node_let_go(&graph->nodes[i]);
	free(graph->nodes);
	free(graph->order);
	free(graph);
}

static void share(const struct mpsd_node *node)
{
	if (node->op)
		mpsd_op_share(node->op);
	if (node->child)
		mpsd_graph_hold(node->child);
}

static bool is_placed(const struct mpsd_node *node, const bool *placed)
{
	unsigned int i = 0;

	while (i < node->count && placed[node->after[i]])
		i++;
	return i == node->count;
}

/* A graph with a circle the driver does not instantiate. */
static bool sort(struct mpsd_graph *graph)
{
	bool *placed = calloc(graph->count, sizeof(*placed));
	unsigned int *order = calloc(graph->count, sizeof(*order)), done = 0, before;

	do {
		before = done;
		for (unsigned int i = 0; placed && order && i < graph->count; i++) {
			if (placed[i] || !is_placed(&graph->nodes[i], placed))
				continue;
			placed[i] = true;
			order[done++] = i;
		}
	} while (done > before);
	for (unsigned int i = 0; placed && order && i < graph->count; i++)
		if (!placed[i])
			order[done++] = i;
	free(placed);
	free(graph->order);
	graph->order = order;
	return placed && order;
}

static bool has_host(const struct mpsd_node *node)
{
	return (node->child && node->child->has_host) ||
	       (node->op && node->op->kind == MPSD_OP_COPY && node->op->copy.way != MPSD_COPY_WITHIN);
}

bool mpsd_graph_append(struct mpsd_graph *graph, struct mpsd_node node)
{
	unsigned int room = graph->room ? 2 * graph->room : FIRST_ROOM;
	struct mpsd_node *larger;

	if (graph->count == graph->room) {
		larger = realloc(graph->nodes, room * sizeof(*larger));
		if (!larger) {
			mpsd_node_let_go(&node);
			return false;
		}
		graph->nodes = larger;
		graph->room = room;
	}
	graph->nodes[graph->count++] = node;
	graph->has_host = graph->has_host || has_host(&node);
	return !graph->order || sort(graph);
}

bool mpsd_graph_depends(struct mpsd_graph *graph, unsigned int from, unsigned int to)
{
	struct mpsd_node *node = &graph->nodes[to];
	unsigned int *larger = realloc(node->after, (node->count + 1) * sizeof(*larger));

	if (!larger)
		return false;
	node->after = larger;
	node->after[node->count++] = from;
	return (from < to && !graph->order) || sort(graph);
}

/* It shares what the other is. */
static void become(struct mpsd_graph *graph, unsigned int number, const struct mpsd_node *other)
{
	struct mpsd_node *node = &graph->nodes[number];
	struct mpsd_node before = *node;

	node->op = other->op;
	node->child = other->child;
	node->context = other->context;
	share(node);
	graph->has_host = graph->has_host || has_host(node);
	before.after = NULL;
	mpsd_node_let_go(&before);
}

unsigned int mpsd_graph_number(const struct mpsd_graph *graph, CUgraphNode name, unsigned int hint)
{
	unsigned int i = 0;

	/* Of a copy that was made before the program knew of it. */
	if (hint < graph->count && (graph->nodes[hint].name == name || !graph->nodes[hint].name))
		return hint;
	while (i < graph->count && graph->nodes[i].name != name)
		i++;
	return i;
}

unsigned int mpsd_graph_number_native(const struct mpsd_graph *graph, CUgraphNode native, unsigned int hint)
{
	unsigned int i = 0;

	if (hint < graph->count && graph->nodes[hint].native == native)
		return hint;
	while (i < graph->count && graph->nodes[i].native != native)
		i++;
	return i;
}

/* What it is it shares. */
static bool copy_node(struct mpsd_node node, struct mpsd_graph *to)
{
	unsigned int *after = node.after;

	node.after = NULL;
	if (after) {
		node.after = malloc(node.count * sizeof(*after));
		if (!node.after)
			return false;
		memcpy(node.after, after, node.count * sizeof(*after));
	}
	share(&node);
	return mpsd_graph_append(to, node);
}

static struct mpsd_graph *copy(const struct mpsd_graph *graph)
{
	struct mpsd_graph *made = mpsd_graph_new(graph->origin, graph->is_built);
	bool is = made != NULL;

	for (unsigned int i = 0; is && i < graph->count; i++)
		is = copy_node(graph->nodes[i], made);
	if (is && graph->order)
		is = sort(made);
	if (is)
		return made;
	mpsd_graph_let_go(made);
	return NULL;
}

struct mpsd_graph *mpsd_graph_own(struct mpsd_made *made)
{
	struct mpsd_graph *mine = made->graph;

	if (!mine || atomic_load(&mine->references) == 1)
		return mine;
	mine = copy(made->graph);
	if (mine)
		mpsd_made_regraph(made, mine);
	return mine;
}

struct mpsd_graph *mpsd_graph_with(const struct mpsd_graph *graph, unsigned int number, const struct mpsd_node *node)
{
	struct mpsd_graph *made = copy(graph);

	if (!made)
		return NULL;
	become(made, number, node);
	return made;
}

CUresult mpsd_node_note(const void *name, unsigned int number, const struct mpsd_node *node)
{
	struct mpsd_graph *graph = NULL;
	struct mpsd_made *made;
	bool is;

	mpsd_made_lock();
	is = !mpsd_is_left();
	made = is ? mpsd_made_find(name) : NULL;
	if (made)
		graph = mpsd_graph_own(made);
	if (graph && number < graph->count)
		become(graph, number, node);
	mpsd_made_unlock();
	if (made && !graph)
		mpsd_line_opaque("a graph that there is no memory for");
	return is ? CUDA_SUCCESS : MPSD_AGAIN;
}

CUresult mpsd_graph_each(const struct mpsd_graph *graph, CUresult (*call)(const struct mpsd_op *op, void *with), void *with)
{
	CUresult result = CUDA_SUCCESS;

	for (unsigned int i = 0; i < graph->count && result == CUDA_SUCCESS; i++) {
		const struct mpsd_node *node = &graph->nodes[graph->order ? graph->order[i] : i];

		if (node->op)
			result = call(node->op, with);
		else if (node->child)
			result = mpsd_graph_each(node->child, call, with);
	}
	return result;
}

bool mpsd_graph_has_host(const struct mpsd_graph *graph)
{
	return graph->has_host;
}
