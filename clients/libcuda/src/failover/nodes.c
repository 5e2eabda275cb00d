// SPDX-License-Identifier: MIT
#include "failover/nodes.h"

#include <stdlib.h>
#include <string.h>

#include "exact/state.h"
#include "failover/ahead.h"
#include "failover/embedded.h"
#include "failover/line.h"

#define FIRST_ROOM 8

static uint64_t new_descent(void)
{
	static atomic_uint_least64_t descents;

	return atomic_fetch_add(&descents, 1) + 1;
}

struct mpsd_graph *mpsd_graph_new(CUstream origin, bool is_built)
{
	struct mpsd_graph *graph = calloc(1, sizeof(*graph));

	if (!graph)
		return NULL;
	graph->references = 1;
	graph->origin = origin;
	graph->is_built = is_built;
	graph->descent = new_descent();
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
	free(node->edges);
	for (unsigned int i = 0; node->bodies && i < node->embedded->size; i++)
		mpsd_graph_let_go(node->bodies[i]);
	free(node->bodies);
	mpsd_embedded_let_go(node->embedded);
}

void mpsd_graph_let_go(struct mpsd_graph *graph)
{
	if (!graph || atomic_fetch_sub(&graph->references, 1) > 1)
		return;
	for (unsigned int i = 0; i < graph->count; i++)
		mpsd_node_let_go(&graph->nodes[i]);
	free(graph->nodes);
	free(graph->conditions);
	free(graph);
}

static void share(const struct mpsd_node *node)
{
	if (node->op)
		mpsd_op_share(node->op);
	if (node->child)
		mpsd_graph_hold(node->child);
}

/* The nodes that come after each: `next` of the first is that of `first`, and so on; UINT32_MAX ends it. */
struct edges {
	unsigned int *first, *next, *to;
};

static unsigned int count_edges(const struct mpsd_graph *graph)
{
	unsigned int count = 0;

	for (unsigned int i = 0; i < graph->count; i++)
		count += graph->nodes[i].count;
	return count;
}

static void find_edges(const struct mpsd_graph *graph, const struct edges *edges)
{
	unsigned int edge = 0;

	for (unsigned int i = 0; i < graph->count; i++)
		edges->first[i] = UINT32_MAX;
	for (unsigned int i = 0; i < graph->count; i++) {
		for (unsigned int k = 0; k < graph->nodes[i].count; k++, edge++) {
			edges->to[edge] = i;
			edges->next[edge] = edges->first[graph->nodes[i].after[k]];
			edges->first[graph->nodes[i].after[k]] = edge;
		}
	}
}

/* Who waits for nobody, and then who waits for nobody else. A graph with a circle the driver does not instantiate. */
static void sort(const struct mpsd_graph *graph, const struct edges *edges, unsigned int *waits, unsigned int *order)
{
	unsigned int done = 0;

	for (unsigned int i = 0; i < graph->count; i++) {
		waits[i] = graph->nodes[i].count;
		if (!waits[i])
			order[done++] = i;
	}
	for (unsigned int i = 0; i < done; i++)
		for (unsigned int edge = edges->first[order[i]]; edge != UINT32_MAX; edge = edges->next[edge])
			if (!--waits[edges->to[edge]])
				order[done++] = edges->to[edge];
	for (unsigned int i = 0; i < graph->count; i++)
		if (waits[i])
			order[done++] = i;
}

const unsigned int *mpsd_graph_order(const struct mpsd_graph *graph, unsigned int **made)
{
	unsigned int count = graph->is_unordered ? count_edges(graph) : 0, *room;
	struct edges edges;

	*made = NULL;
	if (!graph->is_unordered)
		return NULL;
	room = calloc(3 * (size_t)graph->count + 2 * (size_t)count, sizeof(*room));
	/* Without memory what depends on others may come before them: nothing is done then. */
	if (!room)
		return NULL;
	edges = (struct edges){ room + 2 * (size_t)graph->count, room + 3 * (size_t)graph->count,
				room + 3 * (size_t)graph->count + count };
	find_edges(graph, &edges);
	*made = room;
	sort(graph, &edges, room + graph->count, room);
	return room;
}

static bool has_host(const struct mpsd_node *node)
{
	const struct mpsd_op *op = node->op;

	return (node->child && node->child->has_host) ||
	       (op && op->kind == MPSD_OP_COPY && op->copy.way != MPSD_COPY_WITHIN) ||
	       (op && op->kind == MPSD_OP_SET && op->set.is_outside);
}

static bool is_special(const struct mpsd_node *node)
{
	const struct mpsd_op *op = node->op;

	if (op && op->kind == MPSD_OP_GRAPH)
		return op->graph.graph && op->graph.graph->is_special;
	return (node->child && node->child->is_special) || (op && op->kind == MPSD_OP_MEMORY) ||
	       (op && mpsd_op_is_event_node(op));
}

void mpsd_graph_has(struct mpsd_graph *graph, const struct mpsd_graph *other)
{
	graph->has_host = graph->has_host || other->has_host;
	graph->is_special = graph->is_special || other->is_special;
	graph->is_conditional = graph->is_conditional || other->is_conditional;
}

bool mpsd_graph_add_condition(struct mpsd_graph *graph, const struct mpsd_condition *condition)
{
	struct mpsd_condition *larger = realloc(graph->conditions, (graph->conditions_count + 1) * sizeof(*larger));

	if (!larger)
		return false;
	graph->conditions = larger;
	graph->conditions[graph->conditions_count++] = *condition;
	return true;
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
	graph->is_special = graph->is_special || is_special(&node);
	graph->has_embedded = graph->has_embedded || node.embedded;
	graph->is_conditional = graph->is_conditional || (node.embedded && !node.embedded->is_moved);
	for (unsigned int i = 0; node.bodies && i < node.embedded->size; i++)
		mpsd_graph_has(graph, node.bodies[i]);
	return true;
}

static const CUgraphEdgeData plain;

/* There is a place for the data of one more edge. False: no memory. */
static bool have_edges(struct mpsd_node *node)
{
	CUgraphEdgeData *larger = realloc(node->edges, (node->count + 1) * sizeof(*larger));

	if (!larger)
		return false;
	for (unsigned int i = 0; !node->edges && i < node->count; i++)
		larger[i] = plain;
	node->edges = larger;
	return true;
}

bool mpsd_graph_depends(struct mpsd_graph *graph, unsigned int from, unsigned int to, const CUgraphEdgeData *edge)
{
	struct mpsd_node *node = &graph->nodes[to];
	bool is_plain = mpsd_edges_are_plain(edge, 1);
	unsigned int *larger = realloc(node->after, (node->count + 1) * sizeof(*larger));

	if (!larger)
		return false;
	node->after = larger;
	if ((!is_plain || node->edges) && !have_edges(node))
		return false;
	if (node->edges)
		node->edges[node->count] = is_plain ? plain : *edge;
	node->after[node->count++] = from;
	graph->is_unordered = graph->is_unordered || from >= to;
	return true;
}

static void drop_edge(struct mpsd_node *node, unsigned int edge)
{
	node->count--;
	for (unsigned int i = edge; i < node->count; i++) {
		node->after[i] = node->after[i + 1];
		if (node->edges)
			node->edges[i] = node->edges[i + 1];
	}
}

bool mpsd_graph_parts(struct mpsd_graph *graph, unsigned int from, unsigned int to, const CUgraphEdgeData *edge)
{
	struct mpsd_node *node = &graph->nodes[to];

	for (unsigned int i = 0; i < node->count; i++) {
		if (node->after[i] != from || memcmp(node->edges ? &node->edges[i] : &plain, edge ? edge : &plain, sizeof(plain)))
			continue;
		drop_edge(node, i);
		return true;
	}
	return false;
}

/* Numbers above that of a node that went are one less. */
static void forget_number(struct mpsd_node *node, unsigned int number)
{
	for (unsigned int i = 0; i < node->count;) {
		if (node->after[i] == number) {
			drop_edge(node, i);
			continue;
		}
		node->after[i] -= node->after[i] > number;
		i++;
	}
}

void mpsd_graph_strike(struct mpsd_graph *graph, unsigned int number)
{
	mpsd_node_let_go(&graph->nodes[number]);
	graph->count--;
	for (unsigned int i = number; i < graph->count; i++)
		graph->nodes[i] = graph->nodes[i + 1];
	for (unsigned int i = 0; i < graph->count; i++)
		forget_number(&graph->nodes[i], number);
	graph->descent = new_descent();
	graph->copied = 0;
}

/* It shares what the other is. Of a graph that is embedded in it the node is told nothing. */
void mpsd_graph_become(struct mpsd_graph *graph, unsigned int number, const struct mpsd_node *other)
{
	struct mpsd_node *node = &graph->nodes[number];
	struct mpsd_node before = *node;

	node->op = other->op;
	node->child = other->child;
	node->context = other->context;
	share(node);
	graph->has_host = graph->has_host || has_host(node);
	graph->is_special = graph->is_special || is_special(node);
	before.after = NULL;
	before.edges = NULL;
	before.embedded = NULL;
	before.bodies = NULL;
	mpsd_node_let_go(&before);
}

unsigned int mpsd_graph_number(const struct mpsd_graph *graph, CUgraphNode name)
{
	unsigned int i = mpsd_node_number(name, graph->descent);

	if (i < graph->count)
		return i;
	for (i = 0; i < graph->count && graph->nodes[i].name != name; i++)
		;
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

static bool share_bodies(struct mpsd_node *node)
{
	struct mpsd_graph **bodies = calloc(node->embedded->size, sizeof(*bodies));

	for (unsigned int i = 0; bodies && i < node->embedded->size; i++)
		bodies[i] = mpsd_graph_hold(node->bodies[i]);
	node->bodies = bodies;
	return bodies != NULL;
}

/* What it is it shares. */
static bool copy_node(struct mpsd_node node, struct mpsd_graph *to)
{
	const unsigned int *after = node.after;
	const CUgraphEdgeData *edges = node.edges;

	node.after = after ? malloc((node.count + 1) * sizeof(*after)) : NULL;
	node.edges = edges ? malloc((node.count + 1) * sizeof(*edges)) : NULL;
	if (!node.after != !after || !node.edges != !edges) {
		free(node.after);
		free(node.edges);
		return false;
	}
	if (after)
		memcpy(node.after, after, node.count * sizeof(*after));
	if (edges)
		memcpy(node.edges, edges, node.count * sizeof(*edges));
	if (node.bodies && !share_bodies(&node)) {
		free(node.after);
		free(node.edges);
		return false;
	}
	if (node.embedded)
		mpsd_embedded_hold(node.embedded);
	share(&node);
	return mpsd_graph_append(to, node);
}

struct mpsd_graph *mpsd_graph_copy(const struct mpsd_graph *graph)
{
	struct mpsd_graph *made = mpsd_graph_new(graph->origin, graph->is_built);
	bool is = made != NULL;

	for (unsigned int i = 0; is && i < graph->count; i++)
		is = copy_node(graph->nodes[i], made);
	for (unsigned int i = 0; is && i < graph->conditions_count; i++)
		is = mpsd_graph_add_condition(made, &graph->conditions[i]);
	if (is) {
		made->descent = graph->descent;
		made->copied = graph->copied;
		made->copied_count = graph->copied_count;
		made->is_unordered = graph->is_unordered;
		return made;
	}
	mpsd_graph_let_go(made);
	return NULL;
}

struct mpsd_graph *mpsd_graph_clone(const struct mpsd_graph *graph)
{
	struct mpsd_graph *made = mpsd_graph_copy(graph);

	if (made) {
		made->descent = new_descent();
		made->copied = graph->descent;
		made->copied_count = graph->count;
	}
	return made;
}

struct mpsd_graph *mpsd_graph_own(struct mpsd_made *made)
{
	struct mpsd_graph *mine = made->graph;

	if (!mine || atomic_load(&mine->references) == 1)
		return mine;
	mine = mpsd_graph_copy(made->graph);
	if (mine)
		mpsd_made_regraph(made, mine);
	return mine;
}

struct mpsd_graph *mpsd_graph_with(const struct mpsd_graph *graph, unsigned int number, const struct mpsd_node *node)
{
	struct mpsd_graph *made = mpsd_graph_copy(graph);

	if (!made)
		return NULL;
	mpsd_graph_become(made, number, node);
	return made;
}

/* `node_name` NULL: that number. */
static CUresult note(const void *name, unsigned int number, CUgraphNode node_name, const struct mpsd_node *node)
{
	struct mpsd_graph *graph = NULL;
	struct mpsd_made *made;
	bool is;

	mpsd_made_lock();
	is = !mpsd_is_left();
	made = is ? mpsd_made_find(name) : NULL;
	if (made)
		graph = mpsd_graph_own(made);
	if (graph && node_name && !mpsd_embedded_become(graph, node_name, node))
		graph = NULL;
	else if (graph && !node_name && number < graph->count)
		mpsd_graph_become(graph, number, node);
	if (made)
		mpsd_ahead_changed(made);
	mpsd_made_unlock();
	if (made && !graph)
		return mpsd_line_made(CUDA_SUCCESS, "a graph for which host memory is missing");
	return is ? CUDA_SUCCESS : MPSD_AGAIN;
}

CUresult mpsd_node_note(const void *name, unsigned int number, const struct mpsd_node *node)
{
	return note(name, number, NULL, node);
}

CUresult mpsd_node_note_embedded(const void *name, CUgraphNode node_name, const struct mpsd_node *node)
{
	return note(name, 0, node_name, node);
}

CUresult mpsd_graph_each(const struct mpsd_graph *graph, CUresult (*call)(const struct mpsd_op *op, void *with), void *with)
{
	unsigned int *made;
	const unsigned int *order = mpsd_graph_order(graph, &made);
	CUresult result = graph->is_unordered && !order ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;

	for (unsigned int i = 0; i < graph->count && result == CUDA_SUCCESS; i++) {
		const struct mpsd_node *node = &graph->nodes[order ? order[i] : i];

		if (node->op)
			result = call(node->op, with);
		else if (node->child)
			result = mpsd_graph_each(node->child, call, with);
		for (unsigned int k = 0; node->bodies && k < node->embedded->size && result == CUDA_SUCCESS; k++)
			result = mpsd_graph_each(node->bodies[k], call, with);
	}
	free(made);
	return result;
}

void mpsd_graph_each_special(const struct mpsd_graph *graph, CUresult (*call)(const struct mpsd_op *op, void *with))
{
	for (unsigned int i = 0; graph->is_special && i < graph->count; i++) {
		const struct mpsd_node *node = &graph->nodes[i];

		if (node->op && node->op->kind == MPSD_OP_GRAPH)
			mpsd_graph_each_special(node->op->graph.graph, call);
		else if (node->op)
			call(node->op, NULL);
		else if (node->child)
			mpsd_graph_each_special(node->child, call);
		for (unsigned int k = 0; node->bodies && k < node->embedded->size; k++)
			mpsd_graph_each_special(node->bodies[k], call);
	}
}

bool mpsd_graph_is_conditional(const struct mpsd_graph *graph)
{
	return graph->is_conditional;
}

bool mpsd_graph_has_host(const struct mpsd_graph *graph)
{
	return graph->has_host;
}
