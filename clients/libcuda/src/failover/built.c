// SPDX-License-Identifier: MIT
/* Graphs that the program makes node by node: what it adds, what comes after what, what a node becomes. */
#include <stdlib.h>
#include <string.h>

#include "exact/state.h"
#include "failover/embedded.h"
#include "failover/line.h"
#include "failover/nodes.h"

#define NOT_FOLLOWED "a graph from an untracked API call"

static uint64_t moves_now(void)
{
	return mpsd_tables()->moves;
}

unsigned int mpsd_node_number(CUgraphNode name, uint64_t descent)
{
	const struct mpsd_made *made = mpsd_made_look(name);
	unsigned int number = UINT32_MAX;

	if (made && made->kind == MPSD_MADE_NODE && made->of->graph && (!descent || made->of->graph->descent == descent))
		number = (unsigned int)made->size;
	mpsd_made_looked();
	return number;
}

/* NULL: it is none that is known. */
CUgraph mpsd_node_graph(CUgraphNode name)
{
	const struct mpsd_made *made = mpsd_made_look(name);
	CUgraph graph = made && made->kind == MPSD_MADE_NODE ? made->of->name : NULL;

	mpsd_made_looked();
	return graph;
}

CUresult mpsd_node_native(CUgraphNode name, CUgraphNode *native, CUgraph *graph)
{
	CUgraph there;
	CUresult result = CUDA_SUCCESS;

	*graph = mpsd_node_graph(name);
	if (*graph)
		result = mpsd_graph_native(*graph, &there);
	else if (moves_now())
		return CUDA_ERROR_INVALID_VALUE;
	*native = mpsd_native(name);
	if (result != CUDA_SUCCESS || *native || !name)
		return result;
	return mpsd_is_left() ? MPSD_AGAIN : CUDA_ERROR_INVALID_VALUE;
}

/* A node that the program is about to know of, whose number in its graph that is. */
static CUresult note_name(CUgraph graph, unsigned int number, CUgraphNode *node, uint64_t moves)
{
	struct mpsd_made record = { .kind = MPSD_MADE_NODE, .native = *node, .of = mpsd_made_known(graph),
				    .size = number };

	if (!mpsd_made_add(&record, moves))
		return MPSD_AGAIN;
	*node = record.name;
	return CUDA_SUCCESS;
}

CUgraphNode mpsd_node_name(CUgraph graph, CUgraphNode native, unsigned int hint)
{
	CUgraphNode name = native;
	unsigned int number = 0, known = mpsd_node_number(mpsd_name(native), 0);
	struct mpsd_made *made;
	bool is, is_new;

	hint = known == UINT32_MAX ? hint : known;
	mpsd_made_lock();
	made = mpsd_made_find(graph);
	if (made && made->graph)
		number = mpsd_graph_number_native(made->graph, native, hint);
	is = made && made->graph && number < made->graph->count;
	is_new = is && !made->graph->nodes[number].name;
	if (is && !is_new)
		name = made->graph->nodes[number].name;
	mpsd_made_unlock();
	if (made && !is)
		mpsd_line_made(CUDA_SUCCESS, "a graph node from an untracked API call");
	if (!is_new || note_name(graph, number, &name, moves_now()) != CUDA_SUCCESS)
		return name;
	mpsd_made_lock();
	made = mpsd_made_find(graph);
	if (made && made->graph && number < made->graph->count)
		made->graph->nodes[number].name = name;
	mpsd_made_unlock();
	return name;
}

CUresult make_cuGraphCreate(CUgraph *phGraph, unsigned int flags)
{
	uint64_t moves = moves_now();
	struct mpsd_graph *graph = mpsd_graph_new(NULL, true);
	CUresult result = inner_cuGraphCreate(phGraph, flags);

	if (graph || result != CUDA_SUCCESS)
		return mpsd_graph_note(result, MPSD_MADE_GRAPH, (void **)phGraph, graph, 0, moves);
	return mpsd_line_made(result, "a graph for which host memory is missing");
}

/* Nodes added */

/* What it is to come after, by the program's names. *is_known: all of it. */
static CUresult find_after(const struct mpsd_addition *addition, unsigned int *numbers, CUgraphNode *natives,
			   bool *is_known)
{
	CUresult result = CUDA_SUCCESS;
	CUgraph graph;

	for (size_t i = 0; i < addition->count && result == CUDA_SUCCESS; i++) {
		numbers[i] = mpsd_node_number(addition->after[i], 0);
		*is_known = *is_known && numbers[i] != UINT32_MAX;
		result = mpsd_node_native(addition->after[i], &natives[i], &graph);
	}
	return result;
}

struct mpsd_graph *mpsd_built_own(CUgraph name)
{
	struct mpsd_made *made = mpsd_made_find(name);

	return made && made->graph && made->graph->is_built ? mpsd_graph_own(made) : NULL;
}

/* Of a graph that is not followed the program has what the driver has told. */
static CUresult note_embedded(const struct mpsd_addition *addition, const struct mpsd_node *node, CUgraphNode name,
			      const struct mpsd_node_place *place, bool is_known, uint64_t moves)
{
	if (addition->bodies)
		*addition->bodies = is_known ? node->embedded->names : place->bodies;
	return !is_known || mpsd_embedded_note(name, node->embedded, place->bodies, moves) ? CUDA_SUCCESS : MPSD_AGAIN;
}

/* It is there: the program's name for it, and what it is. Takes the node. Not known: what it comes after. */
static CUresult note_node(const struct mpsd_addition *addition, struct mpsd_node node, const struct mpsd_node_place *place,
			  bool is_known, uint64_t moves)
{
	CUgraphNode native = place->node;
	struct mpsd_graph *graph = mpsd_made_graph(addition->graph);
	CUgraphNode name = native;
	CUresult result = CUDA_SUCCESS;
	bool is = false;

	is_known = is_known && graph && graph->is_built;
	node.native = native;
	if (is_known)
		result = note_name(addition->graph, graph->count, &name, moves);
	if (node.embedded && result == CUDA_SUCCESS)
		result = note_embedded(addition, &node, name, place, is_known, moves);
	mpsd_graph_let_go(graph);
	node.name = name;
	mpsd_made_lock();
	graph = is_known && result == CUDA_SUCCESS ? mpsd_built_own(addition->graph) : NULL;
	if (graph)
		is = mpsd_graph_append(graph, node);
	mpsd_made_unlock();
	if (!graph)
		mpsd_node_let_go(&node);
	result = is ? result : mpsd_line_made(result, NOT_FOLLOWED);
	/* Not before: it may be among what it comes after, which is looked at once more where that is to be repeated. */
	if (result == CUDA_SUCCESS)
		*addition->node = name;
	return result;
}

static bool copy_edges(struct mpsd_node *node, const CUgraphEdgeData *edges)
{
	node->edges = malloc((node->count + 1) * sizeof(*edges));
	if (node->edges)
		memcpy(node->edges, edges, node->count * sizeof(*edges));
	return node->edges != NULL;
}

CUresult mpsd_node_add(const struct mpsd_addition *addition, struct mpsd_node node, CUgraph child)
{
	uint64_t moves = moves_now();
	CUgraphNode *natives = malloc((addition->count + 1) * sizeof(*natives));
	struct mpsd_node_place place = { .after = natives, .child = child };
	bool is_known = true, has_edges;
	CUresult result;

	if (!addition->node || !addition->graph || (addition->count && !addition->after)) {
		free(natives);
		mpsd_node_let_go(&node);
		return CUDA_ERROR_INVALID_VALUE;
	}
	node.after = malloc((addition->count + 1) * sizeof(*node.after));
	node.count = (unsigned int)addition->count;
	has_edges = mpsd_edges_are_plain(addition->edges, addition->count) || copy_edges(&node, addition->edges);
	result = natives && node.after && has_edges ? mpsd_graph_native(addition->graph, &place.graph)
						    : CUDA_ERROR_OUT_OF_MEMORY;
	if (result == CUDA_SUCCESS) {
		mpsd_captured_built(addition->graph);
		result = find_after(addition, node.after, natives, &is_known);
	}
	if (result == CUDA_SUCCESS)
		result = mpsd_node_give(&node, &place);
	free(natives);
	if (result == CUDA_SUCCESS)
		return note_node(addition, node, &place, is_known, moves);
	mpsd_node_let_go(&node);
	return mpsd_is_left() ? MPSD_AGAIN : result;
}

/* What it is in this copy already; one that is not there yet is made as what it becomes. */
static CUresult become_here(CUgraphNode name, const struct mpsd_node *node, CUgraph graph)
{
	struct mpsd_node_place place = { .exec = NULL };
	CUresult result;

	if (graph && !mpsd_native(graph))
		return mpsd_is_left() ? MPSD_AGAIN : CUDA_SUCCESS;
	result = mpsd_node_native(name, &place.node, &graph);
	return result == CUDA_SUCCESS ? mpsd_node_give(node, &place) : result;
}

CUresult mpsd_node_become(CUgraphNode name, struct mpsd_node node)
{
	CUgraph graph = mpsd_node_graph(name);
	CUresult result = become_here(name, &node, graph);

	if (result == CUDA_SUCCESS && graph)
		result = mpsd_node_note(graph, mpsd_node_number(name, 0), &node);
	else
		result = mpsd_line_made(result, NOT_FOLLOWED);
	mpsd_node_let_go(&node);
	return result != CUDA_SUCCESS && mpsd_is_left() ? MPSD_AGAIN : result;
}

/* Edges */

/* Under the lock. */
static bool note_edges(struct mpsd_graph *graph, const unsigned int *from, const unsigned int *to,
		       const CUgraphEdgeData *edges, size_t count, bool removes)
{
	bool is = graph != NULL;

	for (size_t i = 0; i < count && is; i++) {
		const CUgraphEdgeData *edge = edges ? &edges[i] : NULL;

		is = from[i] < graph->count && to[i] < graph->count;
		if (is && removes)
			is = mpsd_graph_parts(graph, from[i], to[i], edge);
		else if (is)
			is = mpsd_graph_depends(graph, from[i], to[i], edge);
	}
	return is;
}

/* All of one size: what the driver calls them in this copy, and their numbers. */
struct ends {
	CUgraphNode *native[2];
	unsigned int *number[2];
};

static CUresult find_ends(struct ends *ends, const CUgraphNode *from, const CUgraphNode *to, size_t count)
{
	const struct mpsd_addition sides[] = { { .after = from, .count = count }, { .after = to, .count = count } };
	CUresult result = CUDA_SUCCESS;
	bool is_known = true;

	for (int i = 0; i < 2 && result == CUDA_SUCCESS; i++) {
		ends->native[i] = malloc((count + 1) * sizeof(*ends->native[i]));
		ends->number[i] = malloc((count + 1) * sizeof(*ends->number[i]));
		result = ends->native[i] && ends->number[i]
				 ? find_after(&sides[i], ends->number[i], ends->native[i], &is_known)
				 : CUDA_ERROR_OUT_OF_MEMORY;
	}
	return result;
}

CUresult mpsd_edges_add(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edges,
			size_t count)
{
	/* An older driver has the call without data alone. */
	if (!edges && !mpsd_tables()->real[MPSD_cuGraphAddDependencies_v2])
		return inner_cuGraphAddDependencies(graph, from, to, count);
	return inner_cuGraphAddDependencies_v2(graph, from, to, edges, count);
}

static CUresult remove_edges(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edges,
			     size_t count)
{
	if (!edges && !mpsd_tables()->real[MPSD_cuGraphRemoveDependencies_v2])
		return inner_cuGraphRemoveDependencies(graph, from, to, count);
	return inner_cuGraphRemoveDependencies_v2(graph, from, to, edges, count);
}

static CUresult change_edges(CUgraph name, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edges,
			     size_t count, bool removes)
{
	struct ends ends = { .number = { NULL } };
	CUgraph native;
	CUresult result;
	bool is = true;

	if (!name || (count && (!from || !to)))
		return CUDA_ERROR_INVALID_VALUE;
	edges = mpsd_edges_are_plain(edges, count) ? NULL : edges;
	result = mpsd_graph_native(name, &native);
	if (result == CUDA_SUCCESS) {
		mpsd_captured_built(name);
		result = find_ends(&ends, from, to, count);
	}
	if (result == CUDA_SUCCESS)
		result = (removes ? remove_edges : mpsd_edges_add)(native, ends.native[0], ends.native[1], edges, count);
	mpsd_made_lock();
	if (mpsd_is_left())
		result = MPSD_AGAIN;
	if (result == CUDA_SUCCESS)
		is = note_edges(mpsd_built_own(name), ends.number[0], ends.number[1], edges, count, removes);
	mpsd_made_unlock();
	if (!is)
		result = mpsd_line_made(result, NOT_FOLLOWED);
	for (int i = 0; i < 2; i++) {
		free(ends.native[i]);
		free(ends.number[i]);
	}
	return result;
}

CUresult make_cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
				     size_t numDependencies)
{
	return change_edges(hGraph, from, to, NULL, numDependencies, false);
}

CUresult make_cuGraphAddDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
					const CUgraphEdgeData *edgeData, size_t numDependencies)
{
	return change_edges(hGraph, from, to, edgeData, numDependencies, false);
}

CUresult make_cuGraphRemoveDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
					size_t numDependencies)
{
	return change_edges(hGraph, from, to, NULL, numDependencies, true);
}

CUresult make_cuGraphRemoveDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
					   const CUgraphEdgeData *edgeData, size_t numDependencies)
{
	return change_edges(hGraph, from, to, edgeData, numDependencies, true);
}

/* cuda.h: all 0 is what an edge without data is. */
bool mpsd_edges_are_plain(const CUgraphEdgeData *data, size_t count)
{
	const CUgraphEdgeData plain = { 0 };
	bool is = true;

	for (size_t i = 0; data && i < count; i++)
		is = is && !memcmp(&data[i], &plain, sizeof(plain));
	return is;
}
