// SPDX-License-Identifier: MIT
/*
 * Executable graphs: made, launched, changed. In the copy in which one was made the driver changes it; in another it was
 * put together from a graph that is there no more, and takes over what it is to be from another such graph.
 */
#include "exact/state.h"
#include "failover/line.h"
#include "failover/nodes.h"

CUresult mpsd_graph_note(CUresult result, enum mpsd_made_kind kind, void **handle, struct mpsd_graph *graph,
				unsigned int flags, uint64_t moves)
{
	struct mpsd_made record = { .kind = kind, .native = *handle, .device = 0, .flags = flags, .graph = graph };

	if (result == CUDA_SUCCESS && mpsd_made_add(&record, moves)) {
		*handle = record.name;
		return result;
	}
	mpsd_graph_let_go(graph);
	return result == CUDA_SUCCESS ? MPSD_AGAIN : result;
}

static CUresult note_exec(CUresult result, CUgraphExec *exec, struct mpsd_graph *graph, uint64_t flags, uint64_t moves)
{
	if (graph)
		return mpsd_graph_note(result, MPSD_MADE_EXEC, (void **)exec, graph, (unsigned int)flags, moves);
	mpsd_line_opaque("a graph that came by a way that is not followed");
	return result;
}

CUresult make_cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags)
{
	uint64_t moves = mpsd_tables()->moves;
	CUgraph native;
	CUresult result = mpsd_graph_native(hGraph, &native);

	if (result == CUDA_SUCCESS)
		result = inner_cuGraphInstantiateWithFlags(phGraphExec, native, flags);
	return note_exec(result, phGraphExec, mpsd_made_graph(hGraph), flags, moves);
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
	return note_exec(result, phGraphExec, mpsd_made_graph(hGraph), given.flags, moves);
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
	if (made && is)
		mpsd_made_regraph(made, graph);
	mpsd_made_unlock();
	if (!made || !is)
		mpsd_graph_let_go(graph);
	return is ? CUDA_SUCCESS : MPSD_AGAIN;
}

CUresult make_cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo)
{
	struct mpsd_graph *graph;
	CUgraphExec exec;
	CUgraph native;
	CUresult result = mpsd_exec_native(hGraphExec, &exec);

	if (result == CUDA_SUCCESS)
		result = mpsd_graph_native(hGraph, &native);
	if (result == CUDA_SUCCESS)
		result = inner_cuGraphExecUpdate_v2(exec, native, resultInfo);
	if (resultInfo && mpsd_tables()->moves) {
		resultInfo->errorNode = mpsd_name(resultInfo->errorNode);
		resultInfo->errorFromNode = mpsd_name(resultInfo->errorFromNode);
	}
	if (result != CUDA_SUCCESS)
		return mpsd_is_left() ? MPSD_AGAIN : result;
	graph = mpsd_made_graph(hGraph);
	if (graph)
		return note_change(hGraphExec, graph);
	mpsd_line_opaque("a graph that came by a way that is not followed");
	return result;
}

static bool is_of_this_copy(CUgraphExec name)
{
	const struct mpsd_made *made = mpsd_made_look(name);
	bool is = made && made->since == mpsd_tables()->moves;

	mpsd_made_looked();
	return is;
}

/* In the copy in which it was made. */
static CUresult change_here(CUgraphExec exec, CUgraphNode name, const struct mpsd_node *node, CUgraph child)
{
	struct mpsd_node_place place = { .exec = exec, .child = child };
	CUgraph graph;
	CUresult result = mpsd_node_native(name, &place.node, &graph);

	return result == CUDA_SUCCESS ? mpsd_node_give(node, &place) : result;
}

/* In another. */
static CUresult change_there(CUgraphExec exec, const struct mpsd_graph *graph, unsigned int number,
			     const struct mpsd_node *node)
{
	struct mpsd_graph *changed = mpsd_graph_with(graph, number, node);
	CUgraphExecUpdateResultInfo info;
	CUgraph native;
	CUresult result = changed ? mpsd_graph_make(changed, &native, NULL) : CUDA_ERROR_OUT_OF_MEMORY;

	if (result == CUDA_SUCCESS) {
		result = inner_cuGraphExecUpdate_v2(exec, native, &info);
		real_cuGraphDestroy(native);
	}
	mpsd_graph_let_go(changed);
	return result;
}

CUresult mpsd_exec_change(CUgraphExec name, CUgraphNode node_name, const struct mpsd_node *node, CUgraph child)
{
	struct mpsd_graph *graph = mpsd_made_graph(name);
	unsigned int number = graph ? mpsd_graph_number(graph, node_name, mpsd_node_hint(node_name)) : 0;
	bool is_known = graph && number < graph->count;
	CUgraphExec exec;
	CUresult result = is_known ? mpsd_exec_native(name, &exec) : CUDA_ERROR_NOT_FOUND;

	if (result == CUDA_SUCCESS)
		result = is_of_this_copy(name) ? change_here(exec, node_name, node, child)
					       : change_there(exec, graph, number, node);
	mpsd_graph_let_go(graph);
	if (result == CUDA_SUCCESS)
		return mpsd_node_note(name, number, node);
	return is_known && mpsd_is_left() ? MPSD_AGAIN : result;
}
