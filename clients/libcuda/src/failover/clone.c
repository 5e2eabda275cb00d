// SPDX-License-Identifier: MIT
/* Graphs that are copies of others, and nodes that go. */
#include "exact/state.h"
#include "failover/embedded.h"
#include "failover/line.h"
#include "failover/nodes.h"

/* The copy's nodes are called otherwise by the driver, and by nothing by the program yet. False: it is not known how. */
static bool find_natives(struct mpsd_graph *copy, const struct mpsd_graph *graph, CUgraph native)
{
	bool is = true;

	for (unsigned int i = 0; i < copy->count && is; i++) {
		struct mpsd_node *node = &copy->nodes[i];

		node->name = node->native = NULL;
		if (graph->nodes[i].native)
			is = real_cuGraphNodeFindInClone(&node->native, graph->nodes[i].native, native) == CUDA_SUCCESS;
	}
	return is;
}

CUresult make_cuGraphClone(CUgraph *phGraphClone, CUgraph originalGraph)
{
	uint64_t moves = mpsd_tables()->moves;
	struct mpsd_graph *graph, *copy;
	CUgraph native;
	CUresult result = mpsd_graph_native(originalGraph, &native);

	if (result == CUDA_SUCCESS)
		result = inner_cuGraphClone(phGraphClone, native);
	if (result != CUDA_SUCCESS)
		return mpsd_is_left() ? MPSD_AGAIN : result;
	/* What is embedded in the copy the program has no names for. */
	graph = mpsd_embedded_snapshot(originalGraph);
	copy = graph ? mpsd_graph_clone(graph) : NULL;
	if (copy && !find_natives(copy, graph, *phGraphClone)) {
		mpsd_graph_let_go(copy);
		copy = NULL;
	}
	mpsd_graph_let_go(graph);
	if (copy)
		return mpsd_graph_note(result, MPSD_MADE_GRAPH, (void **)phGraphClone, copy, 0, moves);
	result = mpsd_line_made(result, "a copy of a graph that is not tracked");
	return mpsd_is_left() ? MPSD_AGAIN : result;
}

/* After a move the copy is no copy to the driver: nodes of the two have the same numbers, as long as both are as they were. */
static CUresult find_by_number(CUgraphNode *node, CUgraphNode original, CUgraph clone)
{
	struct mpsd_graph *graph = mpsd_made_graph(clone), *of = mpsd_made_graph(mpsd_node_graph(original));
	unsigned int number = of ? mpsd_node_number(original, 0) : UINT32_MAX;
	bool is = graph && of && graph->copied == of->descent && number < graph->count && number < graph->copied_count;
	CUgraphNode native = is ? graph->nodes[number].native : NULL;

	mpsd_graph_let_go(graph);
	mpsd_graph_let_go(of);
	if (!native)
		return mpsd_is_left() ? MPSD_AGAIN : CUDA_ERROR_INVALID_VALUE;
	*node = mpsd_node_name(clone, native, number);
	return mpsd_answered(CUDA_SUCCESS);
}

CUresult make_cuGraphNodeFindInClone(CUgraphNode *phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph)
{
	CUgraphNode node;
	CUgraph clone, graph;
	CUresult result = mpsd_graph_native(hClonedGraph, &clone);

	if (result == CUDA_SUCCESS)
		result = mpsd_node_native(hOriginalNode, &node, &graph);
	if (result == CUDA_SUCCESS && phNode && mpsd_tables()->moves)
		return find_by_number(phNode, hOriginalNode, hClonedGraph);
	if (result == CUDA_SUCCESS)
		result = inner_cuGraphNodeFindInClone(phNode, node, clone);
	if (result == CUDA_SUCCESS)
		*phNode = mpsd_node_name(hClonedGraph, *phNode, 0);
	return mpsd_answered(result);
}

/* Under the lock: of the record of a graph. False: it is not known so. */
static bool strike(CUgraph name, unsigned int number)
{
	struct mpsd_graph *graph = mpsd_built_own(name);

	if (!graph || number >= graph->count)
		return false;
	mpsd_graph_strike(graph, number);
	mpsd_captured_number(graph);
	return true;
}

CUresult end_cuGraphDestroyNode(CUgraphNode hNode)
{
	uint64_t moves = mpsd_tables()->moves;
	unsigned int number;
	CUgraphNode native;
	CUgraph graph;
	CUresult result = mpsd_node_native(hNode, &native, &graph);
	bool is;

	if (result != CUDA_SUCCESS)
		return result;
	if (graph)
		mpsd_captured_built(graph);
	number = mpsd_node_number(hNode, 0);
	if (!mpsd_made_end(hNode, moves))
		return MPSD_AGAIN;
	result = inner_cuGraphDestroyNode(native);
	if (mpsd_is_left() || result != CUDA_SUCCESS)
		return mpsd_made_ended(result, moves);
	mpsd_made_lock();
	is = graph && strike(graph, number);
	mpsd_made_unlock();
	if (!is)
		mpsd_line_made(result, "a graph from an untracked API call");
	return mpsd_made_ended(result, moves);
}
