// SPDX-License-Identifier: MIT
/* What the program asks of graphs and nodes: the driver answers, and handles in the answer become the program's names. */
#include "exact/state.h"
#include "failover/nodes.h"

/* `nodes` as the driver answered, if it was asked for them. */
static CUresult name_all(CUresult result, CUgraph graph, CUgraphNode *nodes, const size_t *count)
{
	for (size_t i = 0; result == CUDA_SUCCESS && graph && nodes && i < *count; i++)
		if (nodes[i])
			nodes[i] = mpsd_node_name(graph, nodes[i], (unsigned int)i);
	return mpsd_answered(result);
}

CUresult make_cuGraphGetNodes(CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes)
{
	CUgraph native;
	CUresult result = mpsd_graph_native(hGraph, &native);

	if (result == CUDA_SUCCESS)
		result = inner_cuGraphGetNodes(native, nodes, numNodes);
	return name_all(result, hGraph, nodes, numNodes);
}

CUresult make_cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode *rootNodes, size_t *numRootNodes)
{
	CUgraph native;
	CUresult result = mpsd_graph_native(hGraph, &native);

	if (result == CUDA_SUCCESS)
		result = inner_cuGraphGetRootNodes(native, rootNodes, numRootNodes);
	return name_all(result, hGraph, rootNodes, numRootNodes);
}

#define EDGES(call)								\
	CUgraph native;								\
	CUresult result = mpsd_graph_native(hGraph, &native);			\
										\
	if (result == CUDA_SUCCESS)						\
		result = call;							\
	result = name_all(result, hGraph, from, numEdges);			\
	return name_all(result, hGraph, to, numEdges)

CUresult make_cuGraphGetEdges(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, size_t *numEdges)
{
	EDGES(inner_cuGraphGetEdges(native, from, to, numEdges));
}

CUresult make_cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edgeData,
				 size_t *numEdges)
{
	EDGES(inner_cuGraphGetEdges_v2(native, from, to, edgeData, numEdges));
}

#define NEIGHBOURS(call, nodes, count)						\
	CUgraphNode native;							\
	CUgraph graph;								\
	CUresult result = mpsd_node_native(hNode, &native, &graph);		\
										\
	if (result == CUDA_SUCCESS)						\
		result = call;							\
	return name_all(result, graph, nodes, count)

CUresult make_cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode *dependencies, size_t *numDependencies)
{
	NEIGHBOURS(inner_cuGraphNodeGetDependencies(native, dependencies, numDependencies), dependencies,
		   numDependencies);
}

CUresult make_cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode *dependencies, CUgraphEdgeData *edgeData,
					    size_t *numDependencies)
{
	NEIGHBOURS(inner_cuGraphNodeGetDependencies_v2(native, dependencies, edgeData, numDependencies), dependencies,
		   numDependencies);
}

CUresult make_cuGraphNodeGetDependentNodes(CUgraphNode hNode, CUgraphNode *dependentNodes, size_t *numDependentNodes)
{
	NEIGHBOURS(inner_cuGraphNodeGetDependentNodes(native, dependentNodes, numDependentNodes), dependentNodes,
		   numDependentNodes);
}

CUresult make_cuGraphNodeGetDependentNodes_v2(CUgraphNode hNode, CUgraphNode *dependentNodes,
					      CUgraphEdgeData *edgeData, size_t *numDependentNodes)
{
	NEIGHBOURS(inner_cuGraphNodeGetDependentNodes_v2(native, dependentNodes, edgeData, numDependentNodes),
		   dependentNodes, numDependentNodes);
}

#define NODE(call)								\
	CUgraphNode native;							\
	CUgraph graph;								\
	CUresult result = mpsd_node_native(hNode, &native, &graph);		\
										\
	if (result == CUDA_SUCCESS)						\
		result = mpsd_answered(call)

CUresult make_cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType *type)
{
	NODE(inner_cuGraphNodeGetType(native, type));
	return result;
}

/* In another copy the driver may answer with a function that the program has no name for. */
static void find_function(CUgraph name, CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *params)
{
	struct mpsd_graph *graph = mpsd_made_graph(name);
	unsigned int number = graph ? mpsd_graph_number(graph, node) : 0;
	const struct mpsd_op *op = graph && number < graph->count ? graph->nodes[number].op : NULL;
	CUfunction function = op && op->kind == MPSD_OP_LAUNCH ? op->launch.function : NULL;
	bool is_kernel = mpsd_made_is(function, MPSD_MADE_KERNEL);

	params->func = is_kernel ? NULL : function;
	params->kern = is_kernel ? (CUkernel)function : NULL;
	mpsd_graph_let_go(graph);
}

CUresult make_cuGraphKernelNodeGetParams_v2(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	NODE(inner_cuGraphKernelNodeGetParams_v2(native, nodeParams));
	if (result != CUDA_SUCCESS)
		return result;
	nodeParams->ctx = mpsd_name(nodeParams->ctx);
	if (mpsd_tables()->moves)
		find_function(graph, hNode, nodeParams);
	return mpsd_answered(result);
}

CUresult make_cuGraphMemcpyNodeGetParams(CUgraphNode hNode, CUDA_MEMCPY3D *nodeParams)
{
	NODE(inner_cuGraphMemcpyNodeGetParams(native, nodeParams));
	return result;
}

CUresult make_cuGraphMemsetNodeGetParams(CUgraphNode hNode, CUDA_MEMSET_NODE_PARAMS *nodeParams)
{
	NODE(inner_cuGraphMemsetNodeGetParams(native, nodeParams));
	return result;
}

CUresult make_cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams)
{
	NODE(inner_cuGraphHostNodeGetParams(native, nodeParams));
	if (result == CUDA_SUCCESS)
		mpsd_hostnode_name(nodeParams);
	return result;
}

CUresult make_cuGraphBatchMemOpNodeGetParams(CUgraphNode hNode, CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams_out)
{
	NODE(inner_cuGraphBatchMemOpNodeGetParams(native, nodeParams_out));
	if (result == CUDA_SUCCESS)
		nodeParams_out->ctx = mpsd_name(nodeParams_out->ctx);
	return mpsd_answered(result);
}

CUresult make_cuGraphEventRecordNodeGetEvent(CUgraphNode hNode, CUevent *event_out)
{
	NODE(inner_cuGraphEventRecordNodeGetEvent(native, event_out));
	if (result == CUDA_SUCCESS)
		*event_out = mpsd_name(*event_out);
	return mpsd_answered(result);
}

CUresult make_cuGraphEventWaitNodeGetEvent(CUgraphNode hNode, CUevent *event_out)
{
	NODE(inner_cuGraphEventWaitNodeGetEvent(native, event_out));
	if (result == CUDA_SUCCESS)
		*event_out = mpsd_name(*event_out);
	return mpsd_answered(result);
}

CUresult make_cuGraphDebugDotPrint(CUgraph hGraph, const char *path, unsigned int flags)
{
	CUgraph native;
	CUresult result = mpsd_graph_native(hGraph, &native);

	return result == CUDA_SUCCESS ? inner_cuGraphDebugDotPrint(native, path, flags) : result;
}
