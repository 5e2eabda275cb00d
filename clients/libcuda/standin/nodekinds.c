// SPDX-License-Identifier: MIT
/*
 * Nodes that record an event or wait for one, call a function of the host, do memory operations, allocate and free memory,
 * signal semaphores. What their calls refuse is as documented, and not measured.
 */
#include <string.h>

#include "standin.h"

/* `prepare` fills `operation`, with the lock. */
#define ADD(kind, prepare)										\
	struct operation operation;									\
	CUcontext context;										\
	CUresult result = enter(&context);								\
													\
	if (result != CUDA_SUCCESS)									\
		return result;										\
	result = prepare;										\
	if (result == CUDA_SUCCESS)									\
		result = new_node(phGraphNode, hGraph, dependencies, numDependencies, kind, &operation);	\
	return gate_node(leave(result))

#define CHANGE_NODE(kind, prepare)									\
	struct operation operation;									\
	CUcontext context;										\
	CUresult result = enter(&context);								\
													\
	if (result != CUDA_SUCCESS)									\
		return result;										\
	result = prepare;										\
	return gate_node(leave(change_node(hNode, kind, result, &operation)))

#define CHANGE_EXEC(kind, prepare)									\
	struct operation operation;									\
	CUcontext context;										\
	CUresult result = enter(&context);								\
													\
	if (result != CUDA_SUCCESS)									\
		return result;										\
	result = prepare;										\
	return gate_node(leave(change_exec(hGraphExec, hNode, kind, result, &operation)))

#define RECORD CU_GRAPH_NODE_TYPE_EVENT_RECORD
#define WAIT CU_GRAPH_NODE_TYPE_WAIT_EVENT

static bool is_of(const struct CUgraphNode_st *node, CUgraphNodeType type)
{
	return is_node(node) && node->type == type;
}

/* Events */

API CUresult cuGraphAddEventRecordNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				       size_t numDependencies, CUevent event)
{
	ADD(RECORD, prepare_event(event, RECORD, &operation));
}

API CUresult cuGraphAddEventWaitNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				     size_t numDependencies, CUevent event)
{
	ADD(WAIT, prepare_event(event, WAIT, &operation));
}

API CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode hNode, CUevent event)
{
	CHANGE_NODE(RECORD, prepare_event(event, RECORD, &operation));
}

API CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode hNode, CUevent event)
{
	CHANGE_NODE(WAIT, prepare_event(event, WAIT, &operation));
}

API CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event)
{
	CHANGE_EXEC(RECORD, prepare_event(event, RECORD, &operation));
}

API CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event)
{
	CHANGE_EXEC(WAIT, prepare_event(event, WAIT, &operation));
}

API CUresult cuGraphEventRecordNodeGetEvent(CUgraphNode hNode, CUevent *event_out)
{
	if (!is_of(hNode, RECORD) || !event_out)
		return CUDA_ERROR_INVALID_VALUE;
	*event_out = hNode->operation.event.event;
	return CUDA_SUCCESS;
}

API CUresult cuGraphEventWaitNodeGetEvent(CUgraphNode hNode, CUevent *event_out)
{
	if (!is_of(hNode, WAIT) || !event_out)
		return CUDA_ERROR_INVALID_VALUE;
	*event_out = hNode->operation.event.event;
	return CUDA_SUCCESS;
}

/* Functions of the host */

API CUresult cuGraphAddHostNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				size_t numDependencies, const CUDA_HOST_NODE_PARAMS *nodeParams)
{
	ADD(CU_GRAPH_NODE_TYPE_HOST, prepare_host(nodeParams, &operation));
}

API CUresult cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams)
{
	CHANGE_NODE(CU_GRAPH_NODE_TYPE_HOST, prepare_host(nodeParams, &operation));
}

API CUresult cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
					  const CUDA_HOST_NODE_PARAMS *nodeParams)
{
	CHANGE_EXEC(CU_GRAPH_NODE_TYPE_HOST, prepare_host(nodeParams, &operation));
}

API CUresult cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams)
{
	if (!is_of(hNode, CU_GRAPH_NODE_TYPE_HOST) || !nodeParams)
		return CUDA_ERROR_INVALID_VALUE;
	*nodeParams = (CUDA_HOST_NODE_PARAMS){ hNode->operation.host.function, hNode->operation.host.data };
	return CUDA_SUCCESS;
}

/* Memory operations */

API CUresult cuGraphAddBatchMemOpNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				      size_t numDependencies, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)
{
	ADD(CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, prepare_memops(nodeParams, &operation));
}

API CUresult cuGraphBatchMemOpNodeSetParams(CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)
{
	CHANGE_NODE(CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, prepare_memops(nodeParams, &operation));
}

API CUresult cuGraphExecBatchMemOpNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
						const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)
{
	CHANGE_EXEC(CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, prepare_memops(nodeParams, &operation));
}

/* Memory: there as long as the context is, from when the node is added. */

static CUresult prepare_memory(CUDA_MEM_ALLOC_NODE_PARAMS *given, struct operation *operation)
{
	uintptr_t address;
	CUresult result;

	*operation = (struct operation){ .type = CU_GRAPH_NODE_TYPE_MEM_ALLOC };
	if (!given || !given->bytesize)
		return CUDA_ERROR_INVALID_VALUE;
	result = device_alloc(&address, given->bytesize);
	given->dptr = address;
	return result;
}

API CUresult cuGraphAddMemAllocNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				    size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams)
{
	ADD(CU_GRAPH_NODE_TYPE_MEM_ALLOC, prepare_memory(nodeParams, &operation));
}

API CUresult cuGraphAddMemFreeNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				   size_t numDependencies, CUdeviceptr dptr)
{
	ADD(CU_GRAPH_NODE_TYPE_MEM_FREE,
	    (operation = (struct operation){ .type = CU_GRAPH_NODE_TYPE_MEM_FREE },
	     dptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE));
}

/* Semaphores: there is none, so that the node has nothing to do. */

API CUresult cuGraphAddExternalSemaphoresSignalNode(CUgraphNode *phGraphNode, CUgraph hGraph,
						    const CUgraphNode *dependencies, size_t numDependencies,
						    const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS *nodeParams)
{
	ADD(CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL,
	    (operation = (struct operation){ .type = CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL },
	     nodeParams && !nodeParams->numExtSems ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE));
}
