// SPDX-License-Identifier: MIT
/* Executable graphs: what a graph does, in an order that fits, and which node each part is of. */
#include <stdlib.h>
#include <string.h>

#include "standin.h"

struct part {
	CUgraphNode node;	/* of the graph that was instantiated; of a graph in it all parts are one node's */
	struct operation operation;
};

struct CUgraphExec_st {
	CUgraphExec next;
	const void *sign;
	struct part *parts;
	size_t count;
};

static const char own;

static bool is_exec(const struct CUgraphExec_st *exec)
{
	must_live(exec);
	return exec && exec->sign == &own;
}

static bool append(CUgraphExec exec, CUgraphNode node, const struct operation *operation)
{
	struct part *larger = realloc(exec->parts, (exec->count + 1) * sizeof(*larger));

	if (!larger)
		return false;
	exec->parts = larger;
	exec->parts[exec->count++] = (struct part){ node, *operation };
	return true;
}

static bool is_ready(const struct CUgraphNode_st *node, CUgraphNode const *done, size_t count)
{
	for (size_t i = 0; i < node->count; i++) {
		size_t k = 0;

		while (k < count && done[k] != node->after[i])
			k++;
		if (k == count)
			return false;
	}
	return true;
}

static bool has(CUgraphNode const *done, size_t count, CUgraphNode node)
{
	while (count && done[count - 1] != node)
		count--;
	return count != 0;
}

/* What the nodes do, each after what it comes after. `whole`: the node that all of it is of; NULL: each its own. */
static CUresult flatten(CUgraphExec exec, const struct CUgraph_st *graph, CUgraphNode whole)
{
	CUgraphNode *done = calloc(graph->count + 1, sizeof(CUgraphNode));
	CUresult result = done ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	size_t count = 0, before = 1;

	while (result == CUDA_SUCCESS && count < graph->count && count != before) {
		before = count;
		for (size_t i = 0; i < graph->count && result == CUDA_SUCCESS; i++) {
			CUgraphNode node = graph->nodes[i];

			if (has(done, count, node) || !is_ready(node, done, count))
				continue;
			done[count++] = node;
			if (node->child)
				result = flatten(exec, node->child, whole ? whole : node);
			else if (node->type != CU_GRAPH_NODE_TYPE_EMPTY &&
				 !append(exec, whole ? whole : node, &node->operation))
				result = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	free(done);
	return result == CUDA_SUCCESS && count < graph->count ? CUDA_ERROR_INVALID_VALUE : result;
}

/* As graphs are (graph.c). */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUgraphExec execs;

static void free_exec(CUgraphExec exec)
{
	CUgraphExec *link = &execs;

	pthread_mutex_lock(&lock);
	while (*link != exec)
		link = &(*link)->next;
	*link = exec->next;
	pthread_mutex_unlock(&lock);
	free(exec->parts);
	is_gone(exec);
	free(exec);
}

static __attribute__((destructor)) void free_execs(void)
{
	while (execs)
		free_exec(execs);
}

static CUresult instantiate(CUgraphExec *out, const struct CUgraph_st *graph)
{
	CUgraphExec exec = calloc(1, sizeof(*exec));
	CUresult result;

	if (!exec)
		return CUDA_ERROR_OUT_OF_MEMORY;
	is_new(exec);
	exec->sign = &own;
	pthread_mutex_lock(&lock);
	exec->next = execs;
	execs = exec;
	pthread_mutex_unlock(&lock);
	result = flatten(exec, graph, NULL);
	if (result == CUDA_SUCCESS)
		*out = exec;
	else
		free_exec(exec);
	return result;
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags)
{
	if (!phGraphExec || !is_graph(hGraph) || flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)
		return CUDA_ERROR_INVALID_VALUE;
	return gate_node(instantiate(phGraphExec, hGraph));
}

API CUresult cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph,
					  CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)
{
	CUstream stream;
	CUresult result;

	if (!phGraphExec || !is_graph(hGraph) || !instantiateParams)
		return CUDA_ERROR_INVALID_VALUE;
	if (instantiateParams->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) {
		result = enter_stream(instantiateParams->hUploadStream, &stream);
		if (result != CUDA_SUCCESS)
			return result;
		leave(result);
	}
	result = instantiate(phGraphExec, hGraph);
	instantiateParams->hErrNode_out = NULL;
	instantiateParams->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS
							       : CUDA_GRAPH_INSTANTIATE_ERROR;
	return result;
}

static CUresult submit_part(CUstream stream, const struct operation *operation)
{
	bool is_event = operation->type == CU_GRAPH_NODE_TYPE_EVENT_RECORD ||
			operation->type == CU_GRAPH_NODE_TYPE_WAIT_EVENT;

	return is_event ? submit_event(stream, operation) : submit(stream, operation);
}

API CUresult cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream)
{
	CUstream stream;
	CUresult result;

	if (!is_exec(hGraphExec))
		return CUDA_ERROR_INVALID_VALUE;
	result = enter_stream(hStream, &stream);
	if (result != CUDA_SUCCESS)
		return result;
	for (size_t i = 0; i < hGraphExec->count && result == CUDA_SUCCESS; i++)
		result = submit_part(stream, &hGraphExec->parts[i].operation);
	return leave(result);
}

API CUresult cuGraphExecDestroy(CUgraphExec hGraphExec)
{
	if (!is_exec(hGraphExec))
		return CUDA_ERROR_INVALID_VALUE;
	free_exec(hGraphExec);
	return CUDA_SUCCESS;
}

/* As if its graph were that one; its nodes stay those of its own. */
API CUresult cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo)
{
	CUgraphExec like = NULL;
	bool is;

	if (!is_exec(hGraphExec) || !is_graph(hGraph) || !resultInfo)
		return CUDA_ERROR_INVALID_VALUE;
	if (instantiate(&like, hGraph) != CUDA_SUCCESS)
		return CUDA_ERROR_OUT_OF_MEMORY;
	is = like->count == hGraphExec->count;
	for (size_t i = 0; is && i < like->count; i++)
		is = like->parts[i].operation.type == hGraphExec->parts[i].operation.type;
	for (size_t i = 0; is && i < like->count; i++)
		hGraphExec->parts[i].operation = like->parts[i].operation;
	free_exec(like);
	*resultInfo = (CUgraphExecUpdateResultInfo){
		.result = is ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED,
	};
	return gate_node(is ? CUDA_SUCCESS : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
}

CUresult change_exec(CUgraphExec exec, CUgraphNode node, CUgraphNodeType type, CUresult prepared,
		     const struct operation *operation)
{
	size_t i = 0;

	if (prepared != CUDA_SUCCESS)
		return prepared;
	if (!is_exec(exec) || !is_node(node) || node->type != type)
		return CUDA_ERROR_INVALID_VALUE;
	while (i < exec->count && exec->parts[i].node != node)
		i++;
	if (i == exec->count)
		return CUDA_ERROR_INVALID_VALUE;
	exec->parts[i].operation = *operation;
	return CUDA_SUCCESS;
}

API CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec hGraphExec, CUgraphNode hNode,
					       const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	struct operation operation;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	return gate_node(leave(change_exec(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_KERNEL,
				      prepare_kernel(nodeParams, &operation), &operation)));
}

API CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMCPY3D *copyParams,
					    CUcontext ctx)
{
	struct operation operation;
	CUcontext context;
	bool wait = false;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	result = ctx == context ? prepare_box(copyParams, &operation, &wait) : CUDA_ERROR_INVALID_VALUE;
	return leave(change_exec(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_MEMCPY, result, &operation));
}

API CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
					    const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx)
{
	struct operation operation;
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	result = ctx == context
			 ? prepare_rows(memsetParams->dst, memsetParams->height > 1 ? memsetParams->pitch : 0,
					memsetParams->value, memsetParams->elementSize, memsetParams->width,
					memsetParams->height, &operation)
			 : CUDA_ERROR_INVALID_VALUE;
	return leave(change_exec(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_MEMSET, result, &operation));
}

API CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph)
{
	struct CUgraphExec_st like = { .sign = &own };
	size_t first = 0, i = 0;
	CUresult result;

	if (!is_exec(hGraphExec) || !is_node(hNode) || hNode->type != CU_GRAPH_NODE_TYPE_GRAPH || !is_graph(childGraph))
		return CUDA_ERROR_INVALID_VALUE;
	result = flatten(&like, childGraph, hNode);
	while (first < hGraphExec->count && hGraphExec->parts[first].node != hNode)
		first++;
	while (first + i < hGraphExec->count && hGraphExec->parts[first + i].node == hNode)
		i++;
	if (result == CUDA_SUCCESS && i != like.count)
		result = CUDA_ERROR_INVALID_VALUE;
	for (i = 0; result == CUDA_SUCCESS && i < like.count; i++)
		hGraphExec->parts[first + i] = like.parts[i];
	free(like.parts);
	return result;
}

API CUresult cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams)
{
	CUDA_KERNEL_NODE_PARAMS kernel;
	CUDA_MEMSET_NODE_PARAMS set;
	CUDA_HOST_NODE_PARAMS host;
	CUDA_BATCH_MEM_OP_NODE_PARAMS memory;
	CUcontext context = NULL;

	if (!nodeParams)
		return CUDA_ERROR_INVALID_VALUE;
	cuCtxGetCurrent(&context);
	switch (nodeParams->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		memcpy(&kernel, &nodeParams->kernel, sizeof(kernel));
		return cuGraphExecKernelNodeSetParams_v2(hGraphExec, hNode, &kernel);
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		return cuGraphExecMemcpyNodeSetParams(hGraphExec, hNode, &nodeParams->memcpy.copyParams, context);
	case CU_GRAPH_NODE_TYPE_MEMSET:
		memcpy(&set, &nodeParams->memset, sizeof(set));
		return cuGraphExecMemsetNodeSetParams(hGraphExec, hNode, &set, context);
	case CU_GRAPH_NODE_TYPE_GRAPH:
		return cuGraphExecChildGraphNodeSetParams(hGraphExec, hNode, nodeParams->graph.graph);
	case CU_GRAPH_NODE_TYPE_HOST:
		memcpy(&host, &nodeParams->host, sizeof(host));
		return cuGraphExecHostNodeSetParams(hGraphExec, hNode, &host);
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
		return cuGraphExecEventRecordNodeSetEvent(hGraphExec, hNode, nodeParams->eventRecord.event);
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
		return cuGraphExecEventWaitNodeSetEvent(hGraphExec, hNode, nodeParams->eventWait.event);
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
		memcpy(&memory, &nodeParams->memOp, sizeof(memory));
		return cuGraphExecBatchMemOpNodeSetParams(hGraphExec, hNode, &memory);
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}
