// SPDX-License-Identifier: MIT
/*
 * Executable graphs: made, launched, changed. In the copy in which one was made the driver changes it; in another it was
 * put together from a graph that is there no more, and takes over what it is to be from another such graph.
 */
#include <stdlib.h>

#include "exact/state.h"
#include "failover/ahead.h"
#include "failover/embedded.h"
#include "failover/line.h"
#include "failover/nodes.h"

#define EMBEDDED UINT32_MAX

CUresult mpsd_graph_note(CUresult result, enum mpsd_made_kind kind, void **handle, struct mpsd_graph *graph,
			 unsigned int flags, uint64_t moves)
{
	struct mpsd_made record = { .kind = kind, .native = result == CUDA_SUCCESS ? *handle : NULL,
				    .device = mpsd_current_device(), .flags = flags, .graph = graph };

	if (result == CUDA_SUCCESS && mpsd_made_add(&record, moves)) {
		*handle = record.name;
		return result;
	}
	mpsd_graph_let_go(graph);
	return result == CUDA_SUCCESS ? MPSD_AGAIN : result;
}

static CUresult note_exec(CUresult result, CUgraphExec *exec, struct mpsd_graph *graph, uint64_t flags, uint64_t moves)
{
	/* Kernels have its handle, and what they launch nobody sees. */
	if (result == CUDA_SUCCESS && flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)
		mpsd_line_opaque("a graph with device launch");
	/* One that a kernel finds in memory would be that of another copy. */
	if (result == CUDA_SUCCESS && graph && !mpsd_embedded_are_told(graph))
		mpsd_line_opaque("a handle of a conditional node that no kernel's parameters have");
	if (graph)
		return mpsd_graph_note(result, MPSD_MADE_EXEC, (void **)exec, graph, (unsigned int)flags, moves);
	result = mpsd_line_made(result, "a graph from an untracked API call");
	return mpsd_is_left() ? MPSD_AGAIN : result;
}

CUresult make_cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags)
{
	uint64_t moves = mpsd_tables()->moves;
	CUgraph native;
	CUresult result = mpsd_graph_native(hGraph, &native);

	if (result == CUDA_SUCCESS)
		result = inner_cuGraphInstantiateWithFlags(phGraphExec, native, flags);
	return note_exec(result, phGraphExec, mpsd_embedded_snapshot(hGraph), flags, moves);
}

CUresult make_cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph,
					   CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)
{
	uint64_t moves = mpsd_tables()->moves;
	CUDA_GRAPH_INSTANTIATE_PARAMS given;
	CUgraph native;
	CUresult result = mpsd_graph_native(hGraph, &native);

	if (result != CUDA_SUCCESS || !instantiateParams)
		return result != CUDA_SUCCESS ? result
					      : inner_cuGraphInstantiateWithParams(phGraphExec, native, NULL);
	given = *instantiateParams;
	given.hUploadStream = mpsd_native(given.hUploadStream);
	result = inner_cuGraphInstantiateWithParams(phGraphExec, native, &given);
	instantiateParams->result_out = given.result_out;
	instantiateParams->hErrNode_out = mpsd_name(given.hErrNode_out);
	return note_exec(result, phGraphExec, mpsd_embedded_snapshot(hGraph), given.flags, moves);
}

CUresult make_cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream)
{
	CUgraphExec native;
	CUresult result = mpsd_exec_native(hGraphExec, &native);

	return result == CUDA_SUCCESS ? inner_cuGraphLaunch(native, mpsd_native(hStream)) : result;
}

CUresult make_cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream)
{
	CUgraphExec native;
	CUresult result = mpsd_exec_native(hGraphExec, &native);

	return result == CUDA_SUCCESS ? inner_cuGraphUpload(native, mpsd_native(hStream)) : result;
}

/* Changed */

/* What it is from now on; takes the reference. AGAIN: the copy was left. */
static CUresult note_change(CUgraphExec name, struct mpsd_graph *graph)
{
	struct mpsd_made *made;
	bool is;

	mpsd_made_lock();
	made = mpsd_made_find(name);
	is = !mpsd_is_left();
	if (made && is) {
		mpsd_made_regraph(made, graph);
		mpsd_ahead_changed(made);
	}
	mpsd_made_unlock();
	if (!made || !is)
		mpsd_graph_let_go(graph);
	return is ? CUDA_SUCCESS : MPSD_AGAIN;
}

static bool is_like(const struct mpsd_node *one, const struct mpsd_node *other)
{
	if (!one->op != !other->op || !one->child != !other->child || one->count != other->count ||
	    !one->bodies != !other->bodies)
		return false;
	for (unsigned int i = 0; one->bodies && i < one->embedded->size; i++)
		if (i == other->embedded->size || !mpsd_graph_is_like(one->bodies[i], other->bodies[i]))
			return false;
	return (!one->op || one->op->kind == other->op->kind) &&
	       (!one->child || mpsd_graph_is_like(one->child, other->child));
}

bool mpsd_graph_is_like(const struct mpsd_graph *one, const struct mpsd_graph *other)
{
	unsigned int i = 0;

	if (one->count != other->count)
		return false;
	while (i < one->count && is_like(&one->nodes[i], &other->nodes[i]))
		i++;
	return i == one->count;
}

/* It is not there in this copy yet, where it may name what has gone since: it is made as what it becomes. */
static bool becomes_later(CUgraphExec name, const struct mpsd_graph *graph)
{
	struct mpsd_graph *now;
	bool is;

	if (mpsd_native(name) || mpsd_is_left())
		return false;
	now = mpsd_made_graph(name);
	is = now && graph && mpsd_graph_is_like(now, graph);
	mpsd_graph_let_go(now);
	return is;
}

static CUresult update(CUgraphExec name, CUgraph graph, CUgraphExecUpdateResultInfo *info)
{
	CUgraphExec exec;
	CUgraph native;
	CUresult result = mpsd_exec_native(name, &exec);

	if (result == CUDA_SUCCESS)
		result = mpsd_graph_native(graph, &native);
	if (result == CUDA_SUCCESS)
		result = inner_cuGraphExecUpdate_v2(exec, native, info);
	if (info && mpsd_tables()->moves) {
		info->errorNode = mpsd_name(info->errorNode);
		info->errorFromNode = mpsd_name(info->errorFromNode);
	}
	return result != CUDA_SUCCESS && mpsd_is_left() ? MPSD_AGAIN : result;
}

CUresult make_cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo)
{
	struct mpsd_graph *graph = mpsd_embedded_snapshot(hGraph);
	CUresult result = CUDA_SUCCESS;

	if (resultInfo && becomes_later(hGraphExec, graph))
		*resultInfo = (CUgraphExecUpdateResultInfo){ .result = CU_GRAPH_EXEC_UPDATE_SUCCESS };
	else
		result = update(hGraphExec, hGraph, resultInfo);
	if (result == CUDA_SUCCESS && graph)
		return note_change(hGraphExec, graph);
	mpsd_graph_let_go(graph);
	result = mpsd_line_made(result, "a graph from an untracked API call");
	return mpsd_is_left() ? MPSD_AGAIN : result;
}

/*
 * What the node is called by which this copy changes it, and handles of conditional nodes there. NULL: it is not there, or no
 * memory.
 */
static CUgraphNode node_here(CUgraphExec exec, CUgraphNode name, unsigned int number, struct mpsd_pairs *conditions)
{
	CUgraphNode node = NULL;
	struct mpsd_made *made;
	uint64_t native;

	mpsd_made_lock();
	made = mpsd_is_left() ? NULL : mpsd_made_find(exec);
	/* Where it was made by the program it is the program's graph whose nodes it knows. */
	if (made && made->put.nodes && number == EMBEDDED)
		node = mpsd_pairs_find(&made->put.embedded, (uintptr_t)name, &native) ? (CUgraphNode)(uintptr_t)native : NULL;
	else if (made && made->put.nodes)
		node = made->graph->descent == made->put.descent ? made->put.nodes[number] : NULL;
	else if (made && made->since == mpsd_tables()->moves)
		node = mpsd_native(name);
	if (node && made->put.nodes && !mpsd_pairs_copy(&made->put.conditions, conditions))
		node = NULL;
	mpsd_made_unlock();
	return node;
}

static CUresult change(CUgraphExec exec, CUgraphExec name, CUgraphNode node_name, unsigned int number,
		       const struct mpsd_node *what, CUgraph child)
{
	struct mpsd_pairs conditions = { 0, 0, NULL };
	struct mpsd_node_place place = { .exec = exec, .child = child };
	CUresult result = CUDA_ERROR_NOT_FOUND;

	place.node = node_here(name, node_name, number, &conditions);
	place.conditions = conditions.count ? &conditions : NULL;
	if (place.node)
		result = mpsd_node_give(what, &place);
	free(conditions.each);
	return result;
}

/* Its number in the graph; EMBEDDED: it is in one that is embedded there; graph->count: it is not known. */
static unsigned int number_of(const struct mpsd_graph *graph, CUgraphNode name, const struct mpsd_node *what)
{
	unsigned int number = mpsd_graph_number(graph, name);

	if (number < graph->count)
		return graph->is_built || what->op ? number : graph->count;
	return mpsd_embedded_find(graph, name) ? EMBEDDED : graph->count;
}

CUresult mpsd_exec_change(CUgraphExec name, CUgraphNode node_name, const struct mpsd_node *node, CUgraph child)
{
	struct mpsd_graph *graph = mpsd_made_graph(name);
	unsigned int number = graph ? number_of(graph, node_name, node) : 0;
	bool is_known = graph && number != graph->count;
	CUgraphExec exec = mpsd_native(name);
	CUresult result = is_known ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;

	mpsd_graph_let_go(graph);
	/* One that is not there yet is made as what it becomes. */
	if (result == CUDA_SUCCESS && exec)
		result = change(exec, name, node_name, number, node, child);
	if (result == CUDA_SUCCESS && number == EMBEDDED)
		return mpsd_node_note_embedded(name, node_name, node);
	if (result == CUDA_SUCCESS)
		return mpsd_node_note(name, number, node);
	return is_known && mpsd_is_left() ? MPSD_AGAIN : result;
}

CUresult mpsd_exec_launch_once(const struct mpsd_graph *graph, CUstream stream)
{
	struct mpsd_put put;
	CUgraphExec exec;
	CUresult result = mpsd_exec_make(graph, 0, &exec, &put);

	if (result != CUDA_SUCCESS)
		return result;
	result = inner_cuGraphLaunch(exec, stream);
	/* The driver goes on with what has been launched. */
	real_cuGraphExecDestroy(exec);
	real_cuGraphDestroy(put.graph);
	mpsd_put_forget(&put);
	return result;
}

/* NULL: it was made by the program. */
static CUgraph put_from(CUgraphExec name)
{
	const struct mpsd_made *made;
	CUgraph put;

	mpsd_made_lock();
	made = mpsd_is_left() ? NULL : mpsd_made_find(name);
	put = made ? made->put.graph : NULL;
	mpsd_made_unlock();
	return put;
}

/* What it was put together from goes with it. */
CUresult end_cuGraphExecDestroy(CUgraphExec hGraphExec)
{
	uint64_t moves = mpsd_tables()->moves;
	CUgraphExec native = mpsd_native(hGraphExec);
	CUgraph put = put_from(hGraphExec);
	CUresult result = CUDA_SUCCESS;

	if (!mpsd_made_end(hGraphExec, moves))
		return MPSD_AGAIN;
	if (native || !hGraphExec)
		result = inner_cuGraphExecDestroy(native);
	if (put && result == CUDA_SUCCESS && !mpsd_is_left())
		real_cuGraphDestroy(put);
	return mpsd_made_ended(result, moves);
}
