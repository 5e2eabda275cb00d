// SPDX-License-Identifier: MIT
/* Graphs that are made node by node, and what is asked of nodes. */
#include <stdlib.h>
#include <string.h>

#include "standin.h"

bool is_node(const struct CUgraphNode_st *node)
{
	must_live(node);
	return node && is_graph(node->graph);
}

static bool is_conditional(const struct CUgraph_st *graph)
{
	for (size_t i = 0; i < graph->count; i++)
		if (graph->nodes[i]->bodies_count)
			return true;
	return false;
}

API CUresult cuGraphCreate(CUgraph *phGraph, unsigned int flags)
{
	if (!phGraph || flags)
		return CUDA_ERROR_INVALID_VALUE;
	*phGraph = new_graph();
	return gate_node(*phGraph ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

API CUresult cuGraphDestroy(CUgraph hGraph)
{
	if (!is_graph(hGraph))
		return CUDA_ERROR_INVALID_VALUE;
	free_graph(hGraph);
	return CUDA_SUCCESS;
}

/* `data`: NULL, or that of each edge. */
static CUresult come_after(CUgraphNode node, const CUgraphNode *others, const CUgraphEdgeData *data, size_t count)
{
	CUgraphNode *larger = realloc(node->after, (node->count + count + 1) * sizeof(*larger));
	CUgraphEdgeData *kept = calloc(node->count + count + 1, sizeof(*kept));

	if (larger)
		node->after = larger;
	if (!larger || !kept) {
		free(kept);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (node->data)
		memcpy(kept, node->data, node->count * sizeof(*kept));
	if (data)
		memcpy(kept + node->count, data, count * sizeof(*kept));
	free(node->data);
	node->data = kept;
	for (size_t i = 0; i < count; i++)
		node->after[node->count++] = others[i];
	return CUDA_SUCCESS;
}

bool are_of(const struct CUgraph_st *graph, const CUgraphNode *nodes, size_t count)
{
	size_t i = 0;

	while (i < count && nodes && is_node(nodes[i]) && nodes[i]->graph == graph)
		i++;
	return i == count;
}

CUresult new_node(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUgraphNodeType type,
		  const struct operation *operation)
{
	CUresult result;

	if (!out || !is_graph(graph) || !are_of(graph, after, count))
		return CUDA_ERROR_INVALID_VALUE;
	*out = add_node(graph, type, operation);
	if (!*out)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = come_after(*out, after, NULL, count);
	if (result != CUDA_SUCCESS)
		*out = NULL;
	return result;
}

API CUresult cuGraphAddEmptyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				 size_t numDependencies)
{
	return new_node(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_EMPTY, NULL);
}

API CUresult cuGraphAddKernelNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				     size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	struct operation operation;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	result = prepare_kernel(nodeParams, &operation);
	if (result == CUDA_SUCCESS)
		result = new_node(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_KERNEL,
			     &operation);
	if (result == CUDA_SUCCESS)
		(*phGraphNode)->kernel = *nodeParams;
	return gate_node(leave(result));
}

API CUresult cuGraphAddMemcpyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				  size_t numDependencies, const CUDA_MEMCPY3D *copyParams, CUcontext ctx)
{
	struct operation operation;
	CUcontext context;
	bool wait = false;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	result = copyParams && ctx == context ? prepare_box(copyParams, &operation, &wait) : CUDA_ERROR_INVALID_VALUE;
	if (result == CUDA_SUCCESS)
		result = new_node(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_MEMCPY,
			     &operation);
	if (result == CUDA_SUCCESS)
		(*phGraphNode)->copy = *copyParams;
	return leave(result);
}

static CUresult prepare_set(const CUDA_MEMSET_NODE_PARAMS *given, struct operation *operation)
{
	return prepare_rows(given->dst, given->height > 1 ? given->pitch : 0, given->value, given->elementSize,
			    given->width, given->height, operation);
}

API CUresult cuGraphAddMemsetNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				  size_t numDependencies, const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx)
{
	struct operation operation;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	result = memsetParams && ctx == context ? prepare_set(memsetParams, &operation) : CUDA_ERROR_INVALID_VALUE;
	if (result == CUDA_SUCCESS)
		result = new_node(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_MEMSET,
			     &operation);
	if (result == CUDA_SUCCESS)
		(*phGraphNode)->set = *memsetParams;
	return leave(result);
}

static CUgraphNode node_like(CUgraph graph, const struct CUgraph_st *other, const struct CUgraphNode_st *node)
{
	for (size_t i = 0; i < other->count; i++)
		if (other->nodes[i] == node)
			return graph->nodes[i];
	return NULL;
}

static void take_over(CUgraphNode made, const struct CUgraphNode_st *node)
{
	made->kernel = node->kernel;
	made->copy = node->copy;
	made->set = node->set;
	made->original = (CUgraphNode)node;
	memcpy(made->attributes, node->attributes, sizeof(made->attributes));
}

static CUgraph copy_of(const struct CUgraph_st *other);

static CUgraph copy_into(CUgraph graph, const struct CUgraph_st *other)
{
	bool is = graph != NULL;

	for (size_t i = 0; is && i < other->count; i++) {
		const struct CUgraphNode_st *node = other->nodes[i];
		CUgraphNode made = add_node(graph, node->type, &node->operation);

		is = made != NULL;
		if (is)
			take_over(made, node);
		if (is && node->child)
			is = (made->child = copy_of(node->child)) != NULL;
	}
	for (size_t i = 0; is && i < other->count; i++) {
		for (size_t k = 0; is && k < other->nodes[i]->count; k++) {
			CUgraphNode after = node_like(graph, other, other->nodes[i]->after[k]);

			is = come_after(graph->nodes[i], &after, other->nodes[i]->data ? &other->nodes[i]->data[k] : NULL,
					1) == CUDA_SUCCESS;
		}
	}
	if (is)
		return graph;
	free_graph(graph);
	return NULL;
}

static CUgraph copy_of(const struct CUgraph_st *other)
{
	return copy_into(new_child(), other);
}

API CUresult cuGraphClone(CUgraph *phGraphClone, CUgraph originalGraph)
{
	if (!phGraphClone || !is_graph(originalGraph) || is_conditional(originalGraph))
		return CUDA_ERROR_INVALID_VALUE;
	*phGraphClone = copy_into(new_graph(), originalGraph);
	if (!*phGraphClone)
		return CUDA_ERROR_OUT_OF_MEMORY;
	(*phGraphClone)->original = originalGraph;
	return gate_node(CUDA_SUCCESS);
}

/* As documented: no error is measured. */
API CUresult cuGraphNodeFindInClone(CUgraphNode *phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph)
{
	if (!phNode || !is_node(hOriginalNode) || !is_graph(hClonedGraph) || hClonedGraph->original != hOriginalNode->graph)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < hClonedGraph->count; i++) {
		if (hClonedGraph->nodes[i]->original != hOriginalNode)
			continue;
		*phNode = hClonedGraph->nodes[i];
		return CUDA_SUCCESS;
	}
	return CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGraphDestroyNode(CUgraphNode hNode)
{
	if (!is_node(hNode))
		return CUDA_ERROR_INVALID_VALUE;
	remove_node(hNode);
	return gate_node(CUDA_SUCCESS);
}

API CUresult cuGraphAddChildGraphNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				      size_t numDependencies, CUgraph childGraph)
{
	CUgraph child;
	CUresult result;

	if (!is_graph(childGraph) || childGraph == hGraph || is_conditional(childGraph))
		return CUDA_ERROR_INVALID_VALUE;
	child = copy_of(childGraph);
	if (!child)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = new_node(phGraphNode, hGraph, dependencies, numDependencies, CU_GRAPH_NODE_TYPE_GRAPH, NULL);
	if (result == CUDA_SUCCESS)
		(*phGraphNode)->child = child;
	else
		free_graph(child);
	return gate_node(result);
}

static CUresult move_graph(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count, CUgraph child)
{
	CUresult result;

	if (!is_graph(child) || child == graph)
		return CUDA_ERROR_INVALID_VALUE;
	result = new_node(out, graph, after, count, CU_GRAPH_NODE_TYPE_GRAPH, NULL);
	if (result == CUDA_SUCCESS) {
		disown_graph(child);
		(*out)->child = child;
		(*out)->is_moved = true;
	}
	return gate_node(result);
}

API CUresult cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
			       const CUgraphEdgeData *dependencyData, size_t numDependencies,
			       CUgraphNodeParams *nodeParams)
{
	CUDA_KERNEL_NODE_PARAMS kernel;
	CUDA_MEMSET_NODE_PARAMS set;
	CUDA_HOST_NODE_PARAMS host;
	CUDA_BATCH_MEM_OP_NODE_PARAMS memory;
	CUDA_EXT_SEM_SIGNAL_NODE_PARAMS signals;
	CUcontext context = NULL;
	CUresult result;

	if (!nodeParams)
		return CUDA_ERROR_INVALID_VALUE;
	if (dependencyData) {
		if (numDependencies && (!is_graph(hGraph) || !are_of(hGraph, dependencies, numDependencies)))
			return CUDA_ERROR_INVALID_VALUE;
		result = cuGraphAddNode_v2(phGraphNode, hGraph, NULL, NULL, 0, nodeParams);
		return result == CUDA_SUCCESS ? come_after(*phGraphNode, dependencies, dependencyData, numDependencies) : result;
	}
	switch (nodeParams->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		memcpy(&kernel, &nodeParams->kernel, sizeof(kernel));
		return cuGraphAddKernelNode_v2(phGraphNode, hGraph, dependencies, numDependencies, &kernel);
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		cuCtxGetCurrent(&context);
		return cuGraphAddMemcpyNode(phGraphNode, hGraph, dependencies, numDependencies,
					    &nodeParams->memcpy.copyParams,
					    nodeParams->memcpy.copyCtx ? nodeParams->memcpy.copyCtx : context);
	case CU_GRAPH_NODE_TYPE_MEMSET:
		cuCtxGetCurrent(&context);
		memcpy(&set, &nodeParams->memset, sizeof(set));
		return cuGraphAddMemsetNode(phGraphNode, hGraph, dependencies, numDependencies, &set,
					    nodeParams->memset.ctx ? nodeParams->memset.ctx : context);
	case CU_GRAPH_NODE_TYPE_GRAPH:
		if (nodeParams->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE)
			return move_graph(phGraphNode, hGraph, dependencies, numDependencies, nodeParams->graph.graph);
		return cuGraphAddChildGraphNode(phGraphNode, hGraph, dependencies, numDependencies,
						nodeParams->graph.graph);
	case CU_GRAPH_NODE_TYPE_CONDITIONAL:
		return add_conditional(phGraphNode, hGraph, dependencies, numDependencies, &nodeParams->conditional);
	case CU_GRAPH_NODE_TYPE_EMPTY:
		return cuGraphAddEmptyNode(phGraphNode, hGraph, dependencies, numDependencies);
	case CU_GRAPH_NODE_TYPE_HOST:
		memcpy(&host, &nodeParams->host, sizeof(host));
		return cuGraphAddHostNode(phGraphNode, hGraph, dependencies, numDependencies, &host);
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
		return cuGraphAddEventRecordNode(phGraphNode, hGraph, dependencies, numDependencies,
						 nodeParams->eventRecord.event);
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
		return cuGraphAddEventWaitNode(phGraphNode, hGraph, dependencies, numDependencies,
					       nodeParams->eventWait.event);
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
		memcpy(&memory, &nodeParams->memOp, sizeof(memory));
		return cuGraphAddBatchMemOpNode(phGraphNode, hGraph, dependencies, numDependencies, &memory);
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
		memcpy(&signals, &nodeParams->extSemSignal, sizeof(signals));
		return cuGraphAddExternalSemaphoresSignalNode(phGraphNode, hGraph, dependencies, numDependencies,
							      &signals);
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

API CUresult cuGraphAddDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
				       const CUgraphEdgeData *edgeData, size_t numDependencies)
{
	CUresult result = CUDA_SUCCESS;

	if (!is_graph(hGraph) || !are_of(hGraph, from, numDependencies) || !are_of(hGraph, to, numDependencies))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < numDependencies && result == CUDA_SUCCESS; i++)
		result = come_after(to[i], &from[i], edgeData ? &edgeData[i] : NULL, 1);
	return gate_node(result);
}

static bool part(CUgraphNode node, const struct CUgraphNode_st *other)
{
	size_t i = 0;

	while (i < node->count && node->after[i] != other)
		i++;
	if (i == node->count)
		return false;
	node->count--;
	for (; i < node->count; i++) {
		node->after[i] = node->after[i + 1];
		if (node->data)
			node->data[i] = node->data[i + 1];
	}
	return true;
}

/* That an edge which is not there is refused is documented, and not measured. */
API CUresult cuGraphRemoveDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
					  const CUgraphEdgeData *edgeData, size_t numDependencies)
{
	(void)edgeData;
	if (!is_graph(hGraph) || !are_of(hGraph, from, numDependencies) || !are_of(hGraph, to, numDependencies))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < numDependencies; i++)
		if (!part(to[i], from[i]))
			return CUDA_ERROR_INVALID_VALUE;
	return gate_node(CUDA_SUCCESS);
}

/* Asked */

static CUresult tell(CUgraphNode *out, size_t *count, const CUgraphNode *nodes, size_t there)
{
	if (!count)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; out && i < *count; i++)
		out[i] = i < there ? nodes[i] : NULL;
	*count = there;
	return CUDA_SUCCESS;
}

API CUresult cuGraphGetNodes(CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes)
{
	return gate_node(is_graph(hGraph) ? tell(nodes, numNodes, hGraph->nodes, hGraph->count)
					  : CUDA_ERROR_INVALID_VALUE);
}

static bool has_data(const struct CUgraphNode_st *node)
{
	static const CUgraphEdgeData none;

	for (size_t i = 0; node->data && i < node->count; i++)
		if (memcmp(&node->data[i], &none, sizeof(none)))
			return true;
	return false;
}

/* That data is not left out is documented, and not measured. */
API CUresult cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode *dependencies, CUgraphEdgeData *edgeData,
					   size_t *numDependencies)
{
	size_t room = numDependencies ? *numDependencies : 0;

	if (!is_node(hNode))
		return CUDA_ERROR_INVALID_VALUE;
	if (!edgeData && has_data(hNode))
		return CUDA_ERROR_LOSSY_QUERY;
	for (size_t i = 0; edgeData && i < room && i < hNode->count; i++)
		edgeData[i] = hNode->data ? hNode->data[i] : (CUgraphEdgeData){ 0 };
	return tell(dependencies, numDependencies, hNode->after, hNode->count);
}

API CUresult cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType *type)
{
	if (!is_node(hNode) || !type)
		return CUDA_ERROR_INVALID_VALUE;
	*type = hNode->type;
	return CUDA_SUCCESS;
}

API CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	if (!is_node(hNode) || !nodeParams || hNode->type != CU_GRAPH_NODE_TYPE_KERNEL || !hNode->kernel.gridDimX)
		return CUDA_ERROR_INVALID_VALUE;
	*nodeParams = hNode->kernel;
	nodeParams->kernelParams = nodeParams->extra = NULL;
	return CUDA_SUCCESS;
}

/* Changed */

CUresult change_node(CUgraphNode node, CUgraphNodeType type, CUresult prepared, const struct operation *operation)
{
	if (prepared != CUDA_SUCCESS)
		return prepared;
	if (!is_node(node) || node->type != type)
		return CUDA_ERROR_INVALID_VALUE;
	node->operation = *operation;
	return CUDA_SUCCESS;
}

API CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	struct operation operation;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	result = change_node(hNode, CU_GRAPH_NODE_TYPE_KERNEL, prepare_kernel(nodeParams, &operation), &operation);
	if (result == CUDA_SUCCESS)
		hNode->kernel = *nodeParams;
	return gate_node(leave(result));
}

API CUresult cuGraphMemcpyNodeSetParams(CUgraphNode hNode, const CUDA_MEMCPY3D *nodeParams)
{
	struct operation operation;
	CUcontext context;
	bool wait = false;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	return leave(change_node(hNode, CU_GRAPH_NODE_TYPE_MEMCPY, prepare_box(nodeParams, &operation, &wait), &operation));
}

API CUresult cuGraphMemsetNodeSetParams(CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *nodeParams)
{
	struct operation operation;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	return leave(change_node(hNode, CU_GRAPH_NODE_TYPE_MEMSET, prepare_set(nodeParams, &operation), &operation));
}
